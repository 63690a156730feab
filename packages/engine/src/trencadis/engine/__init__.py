"""LLM engine: devices, model runner, sampler, engine core, asynchronous front, offline batches.

The names that need more than settings and values are imported on first use: a server's front never
waits for PyTorch, and the ``--help`` of a command waits for neither scheduler nor front.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trencadis.engine.config import EngineConfig
from trencadis.engine.errors import (
    BucketMiss,
    ConfigError,
    DeviceError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineUnresponsive,
    InvalidRequest,
    ModelError,
    RequestFailed,
)
from trencadis.engine.outputs import (
    CompletionDelta,
    EngineStats,
    FinishReason,
    PositionLogprobs,
    RequestStatus,
    ThermalStats,
    TokenLogprob,
)
from trencadis.engine.sampling_params import SamplingParams
from trencadis.engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from trencadis.engine.core.core_process import LogSettings
    from trencadis.engine.core.engine_core import EngineCore
    from trencadis.engine.core.request_conversion import MAX_CACHE_SALT
    from trencadis.engine.devices import Device, Graph
    from trencadis.engine.front.async_engine import AsyncEngine
    from trencadis.engine.front.llm import LLM, Completion, Generation
    from trencadis.engine.front.tokenizer import Tokenizer
    from trencadis.engine.ipc.messages import NewToken
    from trencadis.engine.models.default_model import default_model
    from trencadis.scheduler import BatchControl, BatchControlResult

    __version__: str

_LOADED_ON_USE = {
    "MAX_CACHE_SALT": ".core.request_conversion",
    "AsyncEngine": ".front.async_engine",
    "BatchControl": "trencadis.scheduler",
    "BatchControlResult": "trencadis.scheduler",
    "Completion": ".front.llm",
    "Device": ".devices",
    "EngineCore": ".core.engine_core",
    "Generation": ".front.llm",
    "Graph": ".devices",
    "LLM": ".front.llm",
    "LogSettings": ".core.core_process",
    "NewToken": ".ipc.messages",
    "Tokenizer": ".front.tokenizer",
    "default_model": ".models.default_model",
}

__all__ = [
    "LLM",
    "MAX_CACHE_SALT",
    "AsyncEngine",
    "BatchControl",
    "BatchControlResult",
    "BucketMiss",
    "Completion",
    "CompletionDelta",
    "ConfigError",
    "Device",
    "DeviceError",
    "EngineConfig",
    "EngineCore",
    "EngineDead",
    "EngineError",
    "EngineOverloaded",
    "EngineRestarting",
    "EngineStats",
    "EngineUnresponsive",
    "FinishReason",
    "Generation",
    "Graph",
    "InvalidRequest",
    "LogSettings",
    "ModelError",
    "NewToken",
    "PositionLogprobs",
    "RequestFailed",
    "RequestStatus",
    "SamplingParams",
    "StructuredOutput",
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
        return getattr(importlib.import_module(_LOADED_ON_USE[name], __name__), name)
