"""OpenAI's Files and Batch APIs: files of requests, and the batches that answer them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from openai.types import Batch, BatchRequestCounts, FileObject
from starlette.requests import ClientDisconnect

from trencadis.engine import InvalidRequest
from trencadis.server.api.batches import (
    MAX_LISTED_BATCHES,
    MAX_LISTED_FILES,
    BatchRequest,
    page,
)
from trencadis.server.api.error_responses import error_responses
from trencadis.server.batches import file_store
from trencadis.server.batches.batch_line import lines_of
from trencadis.server.batches.batch_runner import ENDPOINTS, MAX_LINES, BatchRunner
from trencadis.server.batches.file_store import BatchStore
from trencadis.server.errors import ApiError, ClientDisconnectedError
from trencadis.server.http.api_keys import key_owner
from trencadis.server.http.json_body import Checked
from trencadis.server.http.multipart import FormReader
from trencadis.server.routes.context import ServingContext

logger = logging.getLogger("trencadis.server")

WINDOW_S = 86_400
"""The completion window: 24h."""

SLOWEST_UPLOAD = 65_536
"""An upload has a second for each of so many bytes, besides ``body_timeout``."""

_MAX_FIELD_BYTES = 4_096
_MAX_NAME = 255


def files_router(context: ServingContext, store: BatchStore) -> APIRouter:
    """The routes to files."""
    router = APIRouter(tags=["batches"])
    errors = error_responses(400, 401, 404)

    @router.post("/v1/files", response_model=None, responses=errors)
    async def upload_file(request: Request) -> dict[str, Any]:
        """Keep a file of requests (JSON lines), for a batch."""
        context.check_accepting()
        owner = key_owner(request.scope)
        with store.upload(owner) as file_id, _disk_errors():
            path = store.path(file_id)
            filename = await _receive(request, path, context.settings.body_timeout)
            stop = threading.Event()
            try:
                work = partial(_check_lines, path, context.settings.max_body_size, stop)
                await asyncio.to_thread(work)
            finally:  # a thread goes on after its request has been cancelled
                stop.set()
            file = FileObject(
                id=file_id,
                bytes=path.stat().st_size,
                created_at=int(store.clock()),
                filename=filename,
                object="file",
                purpose="batch",
                status="processed",
            )
            await store.keep_file(owner, file)
        return file.model_dump(mode="json")

    @router.get("/v1/files", response_model=None, responses=errors)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = Query(MAX_LISTED_FILES, ge=1, le=MAX_LISTED_FILES),
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """The files of this API key."""
        owner = key_owner(request.scope)
        files = [
            stored.file
            for stored in store.files.values()
            if stored.owner == owner and purpose in (None, stored.file.purpose)
        ]
        return page(files if order == "asc" else files[::-1], after, limit)

    @router.get("/v1/files/{file_id}", response_model=None, responses=errors)
    async def retrieve_file(file_id: str, request: Request) -> dict[str, Any]:
        """What is known of a file."""
        return store.file_of(key_owner(request.scope), file_id).model_dump(mode="json")

    @router.get("/v1/files/{file_id}/content", response_model=None, responses=errors)
    async def file_content(file_id: str, request: Request) -> FileResponse:
        """The content of a file."""
        file = store.file_of(key_owner(request.scope), file_id)
        return FileResponse(store.path(file.id), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}", response_model=None, responses=errors)
    async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
        """Remove a file, unless a batch uses it."""
        with _disk_errors():
            await store.remove_file(key_owner(request.scope), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def batches_router(context: ServingContext, runner: BatchRunner) -> APIRouter:
    """The routes to batches."""
    store = runner.store
    router = APIRouter(tags=["batches"])
    bodies = APIRouter(tags=["batches"], route_class=context.bodies.route_class)
    errors = error_responses(400, 401, 404)

    @bodies.post("/v1/batches", response_model=None, responses=errors)
    async def create_batch(body: Checked[BatchRequest], request: Request) -> dict[str, Any]:
        """Answer the requests of a file."""
        context.check_accepting()
        owner = key_owner(request.scope)
        if body.endpoint not in ENDPOINTS:
            listed = ", ".join(ENDPOINTS)
            raise InvalidRequest(f"endpoint must be one of {listed}", "endpoint")
        if body.output_expires_after is not None:
            raise InvalidRequest(
                "files do not expire: leave output_expires_after out", "output_expires_after"
            )
        file = store.file_of(owner, body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"the purpose of the input must be batch, got {file.purpose}", "input_file_id"
            )
        now = int(store.clock())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            completion_window=body.completion_window,
            created_at=now,
            endpoint=body.endpoint,
            expires_at=now + WINDOW_S,
            input_file_id=file.id,
            metadata=body.metadata,
            object="batch",
            request_counts=BatchRequestCounts(completed=0, failed=0, total=0),
            status="validating",
        )
        with _disk_errors():
            stored = await store.add_batch(owner, batch)
        runner.add(batch.id)
        return stored.batch.model_dump(mode="json")

    @router.get("/v1/batches", response_model=None, responses=errors)
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=MAX_LISTED_BATCHES),
    ) -> dict[str, Any]:
        """The batches of this API key, newest first."""
        owner = key_owner(request.scope)
        batches = [each.batch for each in store.batches.values() if each.owner == owner]
        return page(batches[::-1], after, limit)

    @router.get("/v1/batches/{batch_id}", response_model=None, responses=errors)
    async def retrieve_batch(batch_id: str, request: Request) -> dict[str, Any]:
        """The state of a batch."""
        return store.batch_of(key_owner(request.scope), batch_id).batch.model_dump(mode="json")

    @router.post("/v1/batches/{batch_id}/cancel", response_model=None, responses=errors)
    async def cancel_batch(batch_id: str, request: Request) -> dict[str, Any]:
        """End a batch; what has been answered is in its files."""
        batch = store.batch_of(key_owner(request.scope), batch_id).batch
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise ApiError(
                409,
                f"Cannot cancel a batch with status '{batch.status}'.",
                code="batch_not_cancellable",
            )
        if batch.status != "cancelling":
            now = int(store.clock())
            batch = store.set_batch(batch_id, status="cancelling", cancelling_at=now).batch
            runner.stop(batch_id)
            with _disk_errors():
                await store.save_batch(batch_id)
        return batch.model_dump(mode="json")

    router.include_router(bodies)
    return router


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Answer 507 where the disk does not take what is written."""
    try:
        yield
    except OSError as error:
        logger.warning("A file or batch cannot be stored: %s", error)
        raise ApiError(
            507,
            f"the server cannot store it ({error.strerror}): delete files, or try again later",
            code="storage_unavailable",
        ) from None


async def _receive(request: Request, path: Path, timeout: float) -> str:
    """Write the file of a form to ``path`` as it arrives; returns the name that it was given."""
    fields: dict[str, bytes] = {}
    filename: str | None = None
    part, is_file, num_bytes = "", False, 0
    form = FormReader(request.headers.get("content-type", ""))
    with path.open("xb") as target:
        async for chunk in _chunks(request, timeout):
            for found in form.feed(chunk):
                if isinstance(found, tuple):
                    part, is_file = found[0], found[0] == "file"
                    if part in fields:
                        raise InvalidRequest(f"the form has {part[:100]!r} twice", part[:100])
                    fields[part] = b""
                    filename = found[1] if is_file else filename
                elif is_file:
                    num_bytes += len(found)
                    if num_bytes > file_store.MAX_FILE_BYTES:
                        raise _too_large()
                    await asyncio.to_thread(target.write, found)
                else:
                    fields[part] += found
                    if len(fields[part]) > _MAX_FIELD_BYTES:
                        raise InvalidRequest(f"{part[:100]!r} is too long", part[:100])
        await asyncio.to_thread(_flush, target)
    if not form.is_complete:
        raise InvalidRequest("the form ends before its last boundary", "file")
    _check_fields(fields, filename)
    return "".join(c for c in filename or "" if c.isprintable())[:_MAX_NAME]


def _check_fields(fields: dict[str, bytes], filename: str | None) -> None:
    for name in ("purpose", "file"):
        if name not in fields:
            code = "missing_required_parameter"
            raise ApiError(400, f"the form has no field {name}", param=name, code=code)
    if filename is None:
        raise InvalidRequest("file must be a file with a name", "file")
    purpose = fields["purpose"].decode("utf-8", "replace")
    if purpose != "batch":
        raise InvalidRequest(f"purpose must be batch, got {purpose[:100]!r}", "purpose")
    for name in fields:
        if name not in ("purpose", "file"):
            raise InvalidRequest(f"{name[:100]!r} is not supported: leave it out", name[:100])


async def _chunks(request: Request, timeout: float) -> AsyncIterator[bytes]:
    """The body. Raises 408 where it is slower than `SLOWEST_UPLOAD`, 413 where it is too long."""
    began, received = time.monotonic(), 0
    stream = request.stream()
    while True:
        left = began + timeout + received / SLOWEST_UPLOAD - time.monotonic()
        try:
            chunk = await asyncio.wait_for(anext(stream), max(0.0, left))
        except StopAsyncIteration:
            return
        except ClientDisconnect:
            raise ClientDisconnectedError from None
        except asyncio.TimeoutError:
            message = "the file does not arrive fast enough"
            raise ApiError(408, message, code="request_timeout") from None
        received += len(chunk)
        if received > file_store.MAX_FILE_BYTES + 65_536:
            raise _too_large()
        yield chunk


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the file is larger than {file_store.MAX_FILE_BYTES} bytes: divide it",
        param="file",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_lines(path: Path, max_line: int, stop: threading.Event) -> None:
    """Raise `InvalidRequest` for what cannot be lines of JSON; a batch checks each of them."""
    num_lines = 0
    with path.open("rb") as file:
        for number, line in lines_of(file, max_line, stop):
            num_lines += 1
            if num_lines > MAX_LINES:
                raise InvalidRequest(f"the file has more than {MAX_LINES} lines", "file")
            if line is None:
                raise InvalidRequest(f"line {number} has more than {max_line} bytes", "file")
            text = line.strip()
            if not (text.startswith(b"{") and text.endswith(b"}")) or b"\0" in text:
                raise InvalidRequest(f"line {number} is not a JSON object", "file")
    if not num_lines:
        raise InvalidRequest("the file has no lines", "file")
