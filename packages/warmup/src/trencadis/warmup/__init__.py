"""Warm-up for runtimes with compiled shapes: every bucket ready before traffic arrives."""

from trencadis.warmup.errors import ConfigError, WarmupError
from trencadis.warmup.memory import MemoryPlan, format_bytes
from trencadis.warmup.report import BucketTime, WarmupReport
from trencadis.warmup.runtime import Phase, Runtime
from trencadis.warmup.session import warm_up

__all__ = [
    "BucketTime",
    "ConfigError",
    "MemoryPlan",
    "Phase",
    "Runtime",
    "WarmupError",
    "WarmupReport",
    "format_bytes",
    "warm_up",
]
