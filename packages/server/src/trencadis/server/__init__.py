"""An OpenAI-compatible HTTP server: an app around a running engine, and a command for both.

`create_app` is for programs that already run an engine; ``engine-serve`` (or ``python -m
trencadis.server``) starts one and serves it. Names are imported on first use, so that
``engine-serve --help`` needs neither a web framework nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.server.app import create_app
    from trencadis.server.engine_protocol import ServingEngine, ServingTokenizer
    from trencadis.server.launch import LaunchError, serve
    from trencadis.server.settings import ServerSettings

    __version__: str

__all__ = [
    "LaunchError",
    "ServerSettings",
    "ServingEngine",
    "ServingTokenizer",
    "__version__",
    "create_app",
    "serve",
]

_HOMES = {
    "LaunchError": "launch",
    "ServerSettings": "settings",
    "ServingEngine": "engine_protocol",
    "ServingTokenizer": "engine_protocol",
    "create_app": "app",
    "serve": "launch",
}

if not TYPE_CHECKING:  # a type checker that sees it accepts every misspelt name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("trencadis-server")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
