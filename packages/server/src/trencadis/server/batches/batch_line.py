"""A line of a batch file: a request, and its answer by the app of the server.

The files are those of OpenAI's Batch API (https://platform.openai.com/docs/guides/batch): one JSON
object in each line, which names a route of the server and has the body of its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import attrs
from starlette.types import ASGIApp, Message, Scope

from trencadis.engine import InvalidRequest
from trencadis.server.http.json_decoder import decoded

logger = logging.getLogger("trencadis.server")

_LONG_LINE = 16_384
"""Above these bytes a line is decoded with pauses, in which the event loop runs."""


@attrs.frozen
class BatchLine:
    """A request: where it goes, and its body."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BatchLineError(ValueError):
    """A line is not a request. ``code`` and ``param`` are those of OpenAI's validation.

    ``custom_id``: None where it has none.
    """

    def __init__(
        self,
        message: str,
        custom_id: str | None = None,
        code: str = "invalid_json_line",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.code = code
        self.param = param


def lines_of(
    file: BinaryIO, max_line: int, stop: threading.Event | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers from 1 on, until ``stop`` is set.

    None for a line of more than ``max_line`` bytes, of which no more is kept.
    """
    number = 0
    while not (stop is not None and stop.is_set()) and (line := file.readline(max_line + 1)):
        number += 1
        if len(line) <= max_line:
            if line.strip():
                yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(max_line)
        yield number, None


def parsed(line: bytes | None, urls: Sequence[str], max_line: int) -> BatchLine:
    """The request in a line, for one of ``urls``. Raises `BatchLineError`."""
    if line is None:
        raise BatchLineError(f"the line is longer than {max_line} bytes: send less")
    try:
        if len(line) <= _LONG_LINE:
            fields = json.loads(line)
        else:
            fields = decoded(line, lambda: time.sleep(0.001))
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise BatchLineError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BatchLineError("the line is not a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str):
        raise BatchLineError(
            "custom_id must be a text, which the answer repeats",
            code="missing_required_parameter",
            param="custom_id",
        )
    if fields.get("method") != "POST":
        method = str(fields.get("method"))[:200]
        raise BatchLineError(
            f"method must be POST, got {method!r}", custom_id, "invalid_method", "method"
        )
    if fields.get("url") not in urls:
        raise BatchLineError(
            f"url must be one of {', '.join(urls)}, got {str(fields.get('url'))[:200]!r}",
            custom_id,
            "invalid_url",
            "url",
        )
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BatchLineError(
            "body must be the JSON object of a request", custom_id, "invalid_request", "body"
        )
    for field in ("stream", "background"):
        if body.get(field):
            raise BatchLineError(
                f"{field} must be false: a file has whole answers",
                custom_id,
                "invalid_request",
                f"body.{field}",
            )
    return BatchLine(custom_id, fields["url"], body)


async def answered(
    app: ASGIApp,
    line: BatchLine,
    is_retried: Callable[[int, dict[str, Any]], bool],
    retry_after: float,
) -> dict[str, Any]:
    """The line of the answer to a request, which is sent again as long as ``is_retried`` says so.

    ``is_retried`` gets the status and the body of an answer, ``retry_after`` is in seconds.
    """
    status, body = await post(app, line)
    while is_retried(status, body):
        await asyncio.sleep(retry_after)
        status, body = await post(app, line)
    return answer_of(line, status, body)


def answer_of(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The line with the answer to a request."""
    name = new_id()
    response = {"status_code": status, "request_id": body.get("id") or name, "body": body}
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": None}


def failure_of(custom_id: str | None, code: str, message: str) -> dict[str, Any]:
    """The line of a request that was not sent."""
    problem = {"code": code, "message": message}
    return {"id": new_id(), "custom_id": custom_id, "response": None, "error": problem}


def new_id() -> str:
    """The id of a line of answers."""
    return f"batch_req_{uuid.uuid4().hex}"


def error_code(body: dict[str, Any]) -> str | None:
    """The code of an answer that is an error, otherwise None."""
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


async def post(
    app: ASGIApp, line: BatchLine, of_client: Callable[[Scope], None] = lambda scope: None
) -> tuple[int, dict[str, Any]]:
    """Send a request to an app in this process; returns the status and the body of its answer.

    ``of_client`` adds to the scope what is known of the client.
    """
    content = json.dumps(line.body).encode()
    body: list[bytes] = []
    status = 500
    incoming: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

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

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    of_client(scope)
    try:
        await app(scope, receive, send)
    except Exception:  # answered with 500, and raised again for the server's log
        if not body:
            raise
        logger.exception("a request of the batch failed")
    return status, json.loads(b"".join(body))
