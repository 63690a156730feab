"""LLM engine: devices, model runner, sampler, engine core, asynchronous front, offline batches.

The names that need PyTorch are loaded when they are first used: a server's front starts its core
process at once and never waits for them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trencadis.engine.config import EngineConfig
from trencadis.engine.core.core_process import LogSettings
from trencadis.engine.errors import (
    ConfigError,
    DeviceError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    ModelError,
)
from trencadis.engine.front.async_engine import AsyncEngine
from trencadis.engine.models.default_model import default_model
from trencadis.engine.outputs import (
    CompletionDelta,
    EngineStats,
    FinishReason,
    PositionLogprobs,
    ThermalStats,
    TokenLogprob,
)
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BatchControl, BatchControlResult

if TYPE_CHECKING:
    from trencadis.engine.core.engine_core import EngineCore
    from trencadis.engine.front.llm import LLM, Completion, Generation
    from trencadis.engine.front.tokenizer import Tokenizer

    __version__: str

_LOADED_ON_USE = {
    "EngineCore": "core.engine_core",
    "LLM": "front.llm",
    "Completion": "front.llm",
    "Generation": "front.llm",
    "Tokenizer": "front.tokenizer",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BatchControl",
    "BatchControlResult",
    "Completion",
    "CompletionDelta",
    "ConfigError",
    "DeviceError",
    "EngineConfig",
    "EngineCore",
    "EngineDead",
    "EngineError",
    "EngineOverloaded",
    "EngineStats",
    "FinishReason",
    "Generation",
    "InvalidRequest",
    "LogSettings",
    "ModelError",
    "PositionLogprobs",
    "SamplingParams",
    "ThermalStats",
    "TokenLogprob",
    "Tokenizer",
    "default_model",
]

if not TYPE_CHECKING:  # a type checker that sees it accepts every misspelt name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("trencadis-engine")
        if name not in _LOADED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_LOADED_ON_USE[name]}"), name)
