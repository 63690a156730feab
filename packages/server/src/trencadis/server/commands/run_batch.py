"""``engine-serve run-batch``: answers a file of requests, without a server.

The requests go through the app of the server in this process, so each is answered as the server
would. `trencadis.server.batches.batch_line` has the form of the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from starlette.types import ASGIApp

from trencadis.engine import AsyncEngine, EngineConfig, LogSettings
from trencadis.server.app import create_app
from trencadis.server.batches.at_once import work_at_once
from trencadis.server.batches.batch_line import (
    BatchLineError,
    answered,
    error_code,
    failure_of,
    lines_of,
    parsed,
)
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.settings import ServerSettings

MAX_LINE = 16 * 1024 * 1024
"""Most bytes of a line."""

MAX_RUNNING = 256
"""Most requests that are answered at once, whatever the engine could."""

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/score", "/rerank", "/v2/rerank"),
)
_RETRIED = ("engine_overloaded", "engine_restarting")


@attrs.define
class BatchCounts:
    """How many lines were answered, how many of them with an error.

    ``unnamed``: those without a ``custom_id``, so that nothing tells which request has the error.
    """

    answered: int = 0
    failed: int = 0
    unnamed: int = 0


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
    settings = attrs.evolve(settings, max_body_size=MAX_LINE, batch_directory=None)
    app = create_app(engine, settings)
    counts = BatchCounts()

    async def answer(numbered: tuple[int, bytes | None]) -> None:
        result = await _answer(app, numbered[1], settings.retry_after)
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()
        counts.answered += 1
        counts.unnamed += result["custom_id"] is None
        counts.failed += result["error"] is not None or result["response"]["status_code"] != 200

    async with app.router.lifespan_context(app):
        await work_at_once(lines_of(lines, MAX_LINE), answer, min(max_running, MAX_RUNNING))
    return counts


async def _answer(app: ASGIApp, line: bytes | None, retry_after: float) -> dict[str, Any]:
    try:
        request = parsed(line, URLS, MAX_LINE)
    except BatchLineError as error:
        return failure_of(error.custom_id, "invalid_line", str(error))
    return await answered(app, request, _is_retried, retry_after)


def _is_retried(status: int, body: dict[str, Any]) -> bool:
    return status == 503 and error_code(body) in _RETRIED
