"""``engine-serve run-batch``: answers a file of requests, without a server.

The files are those of OpenAI's Batch API (https://platform.openai.com/docs/guides/batch): one JSON
object in each line, which names a route of the server and has the body of its request. The requests
go through the app of the server in this process, so each is answered as the server would.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from starlette.types import ASGIApp, Message

from trencadis.engine import AsyncEngine, EngineConfig, LogSettings
from trencadis.server.app import create_app
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.settings import ServerSettings

logger = logging.getLogger("trencadis.server")

MAX_LINE = 16 * 1024 * 1024
"""Most bytes of a line."""

MAX_RUNNING = 256
"""Most requests that are answered at once, whatever the engine could."""

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/score", "/rerank", "/v2/rerank"),
)
_RETRIED = ("engine_overloaded", "engine_restarting")


@attrs.frozen
class BatchLine:
    """A request of the input: where it goes, and the JSON of its body."""

    custom_id: str
    url: str
    body: bytes


class BatchLineError(ValueError):
    """A line of the input is not a request. ``custom_id``: None where it has none."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@attrs.define
class BatchCounts:
    """How many lines were answered, and how many of them with an error."""

    answered: int = 0
    failed: int = 0


async def run_batch(
    config: EngineConfig,
    settings: ServerSettings,
    source: Path,
    target: Path,
    log: LogSettings | None = None,
) -> BatchCounts:
    """Answer the requests of ``source`` in ``target``, in order of completion.

    A bad line gets an error line. Lines are read and written one by one, so memory does not depend
    on the length of the files. Raises `OSError` for a file, and the errors of `AsyncEngine.start`.
    """
    with source.open("rb") as lines:
        target.open("ab").close()  # that it can be written is known before the model is loaded
        engine = await AsyncEngine.start(config, log)
        try:
            with target.open("wb") as answers:
                return await answer_lines(engine, settings, lines, answers, 2 * config.max_num_seqs)
        finally:
            await engine.stop()


async def answer_lines(
    engine: ServingEngine,
    settings: ServerSettings,
    lines: BinaryIO,
    answers: BinaryIO,
    max_running: int,
) -> BatchCounts:
    """Answer the requests in ``lines``, at most ``max_running`` at once. See `run_batch`."""
    settings = attrs.evolve(settings, max_body_size=MAX_LINE)
    app = create_app(engine, settings)
    free = asyncio.Semaphore(min(max_running, MAX_RUNNING))
    counts = BatchCounts()

    async def answer(line: bytes | None) -> None:
        try:
            result = await _answer(app, line, settings.retry_after)
            answers.write(json.dumps(result).encode() + b"\n")
            answers.flush()
            counts.answered += 1
            counts.failed += result["error"] is not None or result["response"]["status_code"] != 200
        finally:
            free.release()

    async with app.router.lifespan_context(app):
        tasks: set[asyncio.Task[None]] = set()
        try:
            for line in _lines(lines):
                await free.acquire()
                _raise_failures(tasks)
                tasks.add(asyncio.create_task(answer(line)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def _raise_failures(tasks: set[asyncio.Task[None]]) -> None:
    """Forget the tasks that have ended; an error of one, such as of a full disk, is raised."""
    for task in [task for task in tasks if task.done()]:
        tasks.remove(task)
        task.result()


def _lines(lines: BinaryIO) -> Iterator[bytes | None]:
    """The lines that are not blank; None for a line that is too long, of which no more is kept."""
    while line := lines.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            if line.strip():
                yield line
            continue
        while line and not line.endswith(b"\n"):
            line = lines.readline(MAX_LINE)
        yield None


async def _answer(app: ASGIApp, line: bytes | None, retry_after: float) -> dict[str, Any]:
    result: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}"}
    try:
        request = _parse(line)
    except BatchLineError as error:
        problem = {"code": "invalid_line", "message": str(error)}
        return result | {"custom_id": error.custom_id, "response": None, "error": problem}
    status, body = await _post(app, request)
    while status == 503 and (body.get("error") or {}).get("code") in _RETRIED:
        await asyncio.sleep(retry_after)
        status, body = await _post(app, request)
    response = {"status_code": status, "request_id": body.get("id") or result["id"], "body": body}
    return result | {"custom_id": request.custom_id, "response": response, "error": None}


def _parse(line: bytes | None) -> BatchLine:
    """The request in a line. Raises `BatchLineError`."""
    if line is None:
        raise BatchLineError(f"the line is longer than {MAX_LINE} bytes: send less")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BatchLineError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BatchLineError("the line is not a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str):
        raise BatchLineError("custom_id must be a text, which the answer repeats")
    if fields.get("method") != "POST":
        raise BatchLineError(f"method must be POST, got {fields.get('method')!r}", custom_id)
    if fields.get("url") not in URLS:
        raise BatchLineError(
            f"url must be one of {', '.join(URLS)}, got {str(fields.get('url'))[:200]!r}", custom_id
        )
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BatchLineError("body must be the JSON object of a request", custom_id)
    if body.get("stream"):
        raise BatchLineError("stream must be false: a file has whole answers", custom_id)
    return BatchLine(custom_id, fields["url"], json.dumps(body).encode())


async def _post(app: ASGIApp, request: BatchLine) -> tuple[int, dict[str, Any]]:
    """Send a request to an app in this process; returns the status and the body of its answer."""
    body: list[bytes] = []
    status = 500
    incoming: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception:  # answered with 500, and raised again for the server's log
        if not body:
            raise
        logger.exception("a request of the batch failed")
    return status, json.loads(b"".join(body))
