"""Paths that have a rule of their own."""

from __future__ import annotations

from starlette.types import Scope

ADMIN_PATH = "/v1/admin"
"""The paths that need an admin key."""

LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""vLLM's paths, which need an admin key here."""

DASHBOARD_PATH = "/dashboard"
"""The page for administrators, and below it what the page loads."""

DASHBOARD_EVENTS_PATH = f"{DASHBOARD_PATH}/events"
"""The content of the page, which needs an admin key if there are any."""

_CLIENT_PATHS = (
    *("/v1", "/v2", "/rerank", "/score", "/pooling", "/invocations"),
    *("/tokenize", "/detokenize", "/tokenizer_info"),
    *("/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
)
"""The paths of clients: all that reach a model, and what else is under ``/v1``."""

_PROBES = ("/health", "/ping", "/ready", "/live", "/metrics")
"""Paths for monitoring, which need no key and are answered while others are not."""

MESSAGES_PATH = "/v1/messages"
"""The paths of the Anthropic API, whose errors have its form."""


FILES_PATH = "/v1/files"
"""Where files are uploaded."""

_BACKGROUND_PATHS = ("/v1/responses", "/v1/batches")


def is_cancel(scope: Scope) -> bool:
    """Whether a request ends a response that is made in the background, or a batch."""
    is_background = any(is_under(scope, path) for path in _BACKGROUND_PATHS)
    return is_background and path_of(scope).endswith("/cancel")


def is_upload(scope: Scope) -> bool:
    """Whether a request uploads a file, which its route reads as it arrives."""
    return scope["method"] == "POST" and path_of(scope) == FILES_PATH


def is_under(scope: Scope, prefix: str) -> bool:
    """Whether the path of a request is ``prefix`` or below it."""
    path = path_of(scope)
    return path == prefix or path.startswith(f"{prefix}/")


def is_of_clients(scope: Scope) -> bool:
    """Whether a request is for one of the paths of clients, which need an API key."""
    return any(is_under(scope, path) for path in _CLIENT_PATHS)


def is_probe(scope: Scope) -> bool:
    """Whether a request is for one of the paths for monitoring."""
    return any(is_under(scope, path) for path in _PROBES)


def path_of(scope: Scope) -> str:
    """The path of a request within this app, which may be mounted under another path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    # As the router: below /v, the path /v1 is itself, and not the rest of it.
    is_below = bool(root) and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] if is_below else path
