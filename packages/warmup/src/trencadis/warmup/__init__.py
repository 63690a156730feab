"""Warm-up for runtimes with compiled shapes: every bucket ready before traffic arrives."""

from typing import TYPE_CHECKING

from trencadis.warmup.background import BackgroundWarmup, Progress
from trencadis.warmup.capture import GraphCapture
from trencadis.warmup.config import WarmupConfig
from trencadis.warmup.errors import ConfigError, InvalidAnswer, WarmupError
from trencadis.warmup.log_lines import format_bytes
from trencadis.warmup.memory_plan import GRAPH_RESERVED_MEM, GraphBudget, MemoryPlan
from trencadis.warmup.memory_use import MemoryUse
from trencadis.warmup.progress_bar import track
from trencadis.warmup.report import (
    BucketTime,
    CaptureReport,
    GraphOutcome,
    GraphStatus,
    StageTime,
    WarmupReport,
)
from trencadis.warmup.runtime import GraphRuntime, Phase, Runtime
from trencadis.warmup.sampler import (
    SAMPLER_CONFIGS,
    DummyRequest,
    SamplerConfig,
    SamplerRuntime,
    sampler_batch_sizes,
    warm_up_sampler,
)
from trencadis.warmup.session import warm_up
from trencadis.warmup.strategies import STRATEGIES, capture_order, expected_replays

__all__ = [
    "GRAPH_RESERVED_MEM",
    "SAMPLER_CONFIGS",
    "STRATEGIES",
    "BackgroundWarmup",
    "BucketTime",
    "CaptureReport",
    "ConfigError",
    "DummyRequest",
    "GraphBudget",
    "GraphCapture",
    "GraphOutcome",
    "GraphRuntime",
    "GraphStatus",
    "InvalidAnswer",
    "MemoryPlan",
    "MemoryUse",
    "Phase",
    "Progress",
    "Runtime",
    "SamplerConfig",
    "SamplerRuntime",
    "StageTime",
    "WarmupConfig",
    "WarmupError",
    "WarmupReport",
    "capture_order",
    "expected_replays",
    "format_bytes",
    "sampler_batch_sizes",
    "track",
    "warm_up",
    "warm_up_sampler",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Looks the version up on first use: ``importlib.metadata`` takes 30 ms to import."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415

            return version("trencadis-warmup")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
