"""Adapters of the served model are loaded and unloaded, as in vLLM, under an admin key."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from trencadis.engine import AdapterError, InvalidRequest
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.engine_protocol import AdapterEngine
from trencadis.server.errors import ApiError
from trencadis.server.http.json_body import require_json
from trencadis.server.http.paths import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from trencadis.server.routes.context import ServingContext

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What the engine reads of a directory, as PEFT names it."""


class LoadAdapterRequest(BaseModel):
    """An adapter, as PEFT saves it, and the name under which requests may ask for it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(description="Name of the adapter, as the model of requests.")
    lora_path: str = Field(description="Its directory, below one of --lora-directory.")


class UnloadAdapterRequest(BaseModel):
    """The adapter to unload."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(description="Name of the adapter.")


def adapters_router(context: ServingContext) -> APIRouter:
    """The routes for adapters. `BearerAuth` checks the admin key."""
    router = APIRouter(tags=["admin"])
    responses = error_responses(*BODY_ERRORS, 403, 404, 415, 429, 503)
    responses[200] = {"content": {"text/plain": {}}, "description": "What was done."}
    needs_json = [Depends(require_json)]

    @router.post(
        LOAD_ADAPTER_PATH, dependencies=needs_json, responses=responses, response_class=Response
    )
    async def load_lora_adapter(order: LoadAdapterRequest) -> Response:
        """Load an adapter; the answer comes when requests may name it."""
        engine, name = _adapter_engine(context), order.lora_name
        if name in context.aliases:
            raise InvalidRequest(f"{name!r} is the name of a model: choose another", "lora_name")
        directories = context.settings.lora_directories
        path = await asyncio.to_thread(_allowed, order.lora_path, directories)
        await engine.load_adapter(name, path, directories)
        return _done(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post(
        UNLOAD_ADAPTER_PATH, dependencies=needs_json, responses=responses, response_class=Response
    )
    async def unload_lora_adapter(order: UnloadAdapterRequest) -> Response:
        """Unload an adapter. Requests that were accepted go on with it; new ones are rejected."""
        engine, name = _adapter_engine(context), order.lora_name
        if name not in context.adapters:
            raise ApiError(
                404,
                f"the adapter {name!r} is not loaded",
                param="lora_name",
                code="model_not_found",
            )
        await engine.unload_adapter(name)
        return _done(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _adapter_engine(context: ServingContext) -> AdapterEngine:
    if not isinstance(context.engine, AdapterEngine):
        raise AdapterError("this engine serves no adapters")
    return context.engine


def _allowed(path: str, directories: tuple[str, ...]) -> str:
    """The path without links, if it and its files are below ``directories``. Raises 403 or 404."""
    try:
        found, below = Path(path).resolve(), [Path(each).resolve() for each in directories]
        files = [(found / name).resolve() for name in ADAPTER_FILES]
        is_allowed = all(any(map(each.is_relative_to, below)) for each in (found, *files))
    except (OSError, ValueError, RuntimeError):
        is_allowed = False
    if not is_allowed:
        raise ApiError(
            403,
            "lora_path is not below a directory of --lora-directory, from which adapters may be "
            "loaded while the server runs",
            param="lora_path",
            code="directory_not_allowed",
        )
    if not os.path.isdir(found):  # noqa: PTH112 - pathlib's raises for a name that is too long
        raise ApiError(
            404,
            f"lora_path {path[:200]!r} is not a directory: give one that PEFT has saved",
            param="lora_path",
            code="adapter_not_found",
        )
    return os.fspath(found)


def _done(message: str) -> Response:
    return Response(message, media_type="text/plain")
