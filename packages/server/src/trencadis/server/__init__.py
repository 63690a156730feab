"""An OpenAI-compatible HTTP server for an engine.

`create_app` makes an ASGI app for an engine of the caller. `serve` and the command
``engine-serve`` (or ``python -m trencadis.server``) start an engine and serve it. Names are
imported on first use, so that ``engine-serve --help`` imports neither FastAPI nor PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.server.app import create_app
    from trencadis.server.engine_protocol import (
        AdapterEngine,
        DescribedTokenizer,
        EmbeddingEngine,
        InspectableEngine,
        PairTokenizer,
        PromptingEngine,
        ScoringEngine,
        ServingEngine,
        ServingTokenizer,
        SleepingEngine,
        SwitchingEngine,
    )
    from trencadis.server.launch import LaunchError, serve
    from trencadis.server.settings import ServerSettings

    __version__: str

__all__ = [
    "AdapterEngine",
    "DescribedTokenizer",
    "EmbeddingEngine",
    "InspectableEngine",
    "LaunchError",
    "PairTokenizer",
    "PromptingEngine",
    "ScoringEngine",
    "ServerSettings",
    "ServingEngine",
    "ServingTokenizer",
    "SleepingEngine",
    "SwitchingEngine",
    "__version__",
    "create_app",
    "serve",
]

_MODULES = {
    "AdapterEngine": "engine_protocol",
    "DescribedTokenizer": "engine_protocol",
    "EmbeddingEngine": "engine_protocol",
    "InspectableEngine": "engine_protocol",
    "LaunchError": "launch",
    "PairTokenizer": "engine_protocol",
    "PromptingEngine": "engine_protocol",
    "ScoringEngine": "engine_protocol",
    "ServerSettings": "settings",
    "ServingEngine": "engine_protocol",
    "ServingTokenizer": "engine_protocol",
    "SleepingEngine": "engine_protocol",
    "SwitchingEngine": "engine_protocol",
    "create_app": "app",
    "serve": "launch",
}

if not TYPE_CHECKING:  # a type checker that sees it accepts every misspelt name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("trencadis-server")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
