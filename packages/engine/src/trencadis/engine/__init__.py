"""LLM engine: devices, model runner, sampler, engine core, asynchronous front, offline batches.

The names that need more than settings and values are imported on first use: a server's front never
waits for PyTorch, and the ``--help`` of a command waits for neither scheduler nor front.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trencadis.engine.api.outputs import (
    STEP_TOKENS,
    CompletionDelta,
    EngineStats,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    RequestStatus,
    ThermalStats,
    TierStats,
    TokenLogprob,
)
from trencadis.engine.api.requests import (
    MAX_CACHE_SALT,
    EngineRequest,
    GenerateRequest,
    PoolingRequest,
    RequestFields,
)
from trencadis.engine.api.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from trencadis.engine.api.scoring import PairPrompt, Scoring
from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.errors import (
    AdapterError,
    BucketMiss,
    CompileError,
    ConfigError,
    DeviceError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineSleeping,
    EngineUnresponsive,
    InvalidRequest,
    ModelError,
    ModelNotActiveError,
    ProcessUnresponsive,
    RankError,
    RequestFailed,
    SlowConversation,
    SwitchFailedError,
    SwitchInProgressError,
    UnknownModelError,
)
from trencadis.engine.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from trencadis.engine.api.inspection import AdapterInfo, EngineInspection, GridUsage
    from trencadis.engine.core.compile_cache import (
        CompileCacheReport,
        check_compile_cache,
        fill_compile_cache,
    )
    from trencadis.engine.core.core_process import LogSettings
    from trencadis.engine.core.engine_core import EngineCore
    from trencadis.engine.devices import Device, Graph
    from trencadis.engine.fair_thread import FairThread
    from trencadis.engine.front.async_engine import AsyncEngine
    from trencadis.engine.front.llm import LLM, Completion, Generation
    from trencadis.engine.front.multi_model_config import (
        ModelEntry,
        MultiModelConfig,
        read_multi_model_config,
    )
    from trencadis.engine.front.multi_model_engine import MultiModelEngine, SwitchReport
    from trencadis.engine.front.pooled_results import Embedding, Score
    from trencadis.engine.front.tokenizer import Tokenizer
    from trencadis.engine.ipc.messages import NewToken
    from trencadis.engine.models.default_model import default_model
    from trencadis.scheduler import BatchControl, BatchControlResult

    __version__: str

_LOADED_ON_USE = {
    "AsyncEngine": ".front.async_engine",
    "BatchControl": "trencadis.scheduler",
    "BatchControlResult": "trencadis.scheduler",
    "CompileCacheReport": ".core.compile_cache",
    "Completion": ".front.llm",
    "Device": ".devices",
    "Embedding": ".front.pooled_results",
    "EngineCore": ".core.engine_core",
    "AdapterInfo": ".api.inspection",
    "EngineInspection": ".api.inspection",
    "FairThread": ".fair_thread",
    "Generation": ".front.llm",
    "Graph": ".devices",
    "GridUsage": ".api.inspection",
    "LLM": ".front.llm",
    "LogSettings": ".core.core_process",
    "ModelEntry": ".front.multi_model_config",
    "MultiModelConfig": ".front.multi_model_config",
    "MultiModelEngine": ".front.multi_model_engine",
    "NewToken": ".ipc.messages",
    "Score": ".front.pooled_results",
    "SwitchReport": ".front.multi_model_engine",
    "Tokenizer": ".front.tokenizer",
    "check_compile_cache": ".core.compile_cache",
    "default_model": ".models.default_model",
    "read_multi_model_config": ".front.multi_model_config",
    "fill_compile_cache": ".core.compile_cache",
}

__all__ = [
    "LLM",
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORDS",
    "MAX_BIASES",
    "MAX_CACHE_SALT",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_STOP_TOKEN_IDS",
    "STEP_TOKENS",
    "AdapterError",
    "AdapterInfo",
    "AsyncEngine",
    "BatchControl",
    "BatchControlResult",
    "BucketMiss",
    "CompileCacheReport",
    "CompileError",
    "Completion",
    "CompletionDelta",
    "ConfigError",
    "Device",
    "DeviceError",
    "Embedding",
    "EngineConfig",
    "EngineCore",
    "EngineDead",
    "EngineError",
    "EngineInspection",
    "EngineOverloaded",
    "EngineRequest",
    "EngineRestarting",
    "EngineSleeping",
    "EngineStats",
    "EngineUnresponsive",
    "FairThread",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "Graph",
    "GridUsage",
    "InvalidRequest",
    "LogSettings",
    "ModelEntry",
    "ModelError",
    "ModelNotActiveError",
    "MultiModelConfig",
    "MultiModelEngine",
    "NewToken",
    "PairPrompt",
    "PoolingRequest",
    "PositionLogprobs",
    "ProcessUnresponsive",
    "PromptLogprobs",
    "RankError",
    "RequestFailed",
    "RequestFields",
    "RequestStatus",
    "SamplingParams",
    "Score",
    "Scoring",
    "SlowConversation",
    "StructuredOutput",
    "SwitchFailedError",
    "SwitchInProgressError",
    "SwitchReport",
    "TextPrompts",
    "ThermalStats",
    "TierStats",
    "TokenLogprob",
    "Tokenizer",
    "UnknownModelError",
    "check_compile_cache",
    "default_model",
    "fill_compile_cache",
    "read_multi_model_config",
]

if not TYPE_CHECKING:  # a type checker that sees it accepts every misspelt name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("trencadis-engine")
        if name not in _LOADED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LOADED_ON_USE[name], __name__), name)
