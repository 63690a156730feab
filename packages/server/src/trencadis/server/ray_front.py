"""A deployment of Ray Serve that reads each request before Ray chooses a replica for it.

The proxies of Ray pass requests unread, so its routers by prefix and by model see neither. `Front`
reads the body, hands prompt and model to Ray's router, and returns what the replica answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Container, Iterable
from contextlib import suppress
from typing import Any

import attrs
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import JSONResponse
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_PROMPT_CHARS = 32_768
"""Characters of a prompt that are compared with earlier prompts."""

MAX_READ_BODY = 1 << 20
"""Bytes of a body that is read; decoding holds the event loop for milliseconds."""

PASSED = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
"""What a replica is told of a request; Ray's own entries cannot leave the process."""

FIRST_SURROGATE = 0xD800
"""The first code point that no text may have."""


@attrs.frozen
class ForwardedRequest:
    """A request with its body. ``prompt`` is the text by which Ray's router finds a replica."""

    scope: dict[str, Any]
    body: bytes
    prompt: str = ""


@serve.ingress()
class Front:
    """Forwards each request to the replica that Ray chooses for its prompt and its model.

    ``models``: names of models between which replicas switch. ``max_body``: bytes of a body that
    are read; of a larger one the replica is sent a byte more, which it rejects.
    """

    def __init__(self, replicas: DeploymentHandle, models: Iterable[str], max_body: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._models = frozenset(models)
        self._max_body = max_body

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Router(default=self._forward)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive, self._max_body)
        if body is None:  # the client has gone
            return
        fields = _fields(body)
        replicas = self._replicas
        if model := model_in(fields, self._models):
            replicas = replicas.options(multiplexed_model_id=model)
        request = ForwardedRequest(
            {name: scope[name] for name in PASSED if name in scope}, body, prompt_text(fields)
        )
        # Ray's router reads positional arguments, and each of them must have a prompt.
        answer = replicas.remote(request) if request.prompt else replicas.remote(request=request)
        await _send_answer(answer, receive, send, scope)


async def _send_answer(
    answer: DeploymentResponseGenerator[list[Message]], receive: Receive, send: Send, scope: Scope
) -> None:
    """Send the messages of an answer. It ends when the client goes; a replica that is lost before
    its first message is a 503, and later the end of the connection."""
    watch = asyncio.create_task(_cancel_when_gone(answer, receive))
    started = False
    try:
        async for messages in answer:
            for message in messages:
                started = True
                await send(message)
    except (RayError, BackPressureError, RayServeException) as error:
        if watch.done():
            return
        if started:
            raise
        await _unavailable(error)(scope, receive, send)
    except asyncio.CancelledError:
        if not watch.done():
            raise
    finally:
        watch.cancel()


async def _cancel_when_gone(
    answer: DeploymentResponseGenerator[list[Message]], receive: Receive
) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


def _unavailable(error: Exception) -> JSONResponse:
    content = {
        "message": f"no replica could answer: {type(error).__name__}",
        "type": "service_unavailable_error",
        "param": None,
        "code": 503,
    }
    return JSONResponse({"error": content}, 503, {"Retry-After": "1"})


async def answer_messages(
    app: FastAPI, request: ForwardedRequest
) -> AsyncGenerator[list[Message], None]:
    """What an app answers to a request, in lists of the messages that are ready at once.

    Closing the iterator is, for the app, the client that disconnects.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, messages.put)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            ended = ready[-1] is None
            if found := [message for message in ready if message is not None]:
                yield found
        await running  # for its error
    finally:
        gone.set()
        if not running.done():
            _ENDING.add(running)
            running.add_done_callback(_ENDING.discard)


_ENDING: set[asyncio.Task[None]] = set()
"""Answers whose client has gone, kept from the garbage collector until the app has ended them."""


async def _read(receive: Receive, most: int) -> bytes | None:
    """The body of a request, at most a byte above ``most``; None if the client disconnects."""
    parts, size, more = [], 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
    return b"".join(parts)[: most + 1]


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body; none of a long one, nor where the replica will reject it."""
    found = None
    if len(body) > MAX_READ_BODY:
        return {}
    with suppress(ValueError, RecursionError):
        found = json.loads(body)
    return found if isinstance(found, dict) else {}


def model_in(fields: dict[str, Any], models: Container[str]) -> str | None:
    """The model that a request names, if it is one of these."""
    model = fields.get("model")
    return model if isinstance(model, str) and model in models else None


def prompt_text(fields: dict[str, Any]) -> str:
    """The beginning of what a model reads of a request, as far as its body says it.

    A token id is a character that follows from its number.
    """
    names = ("system", "instructions", "messages", "prompt", "input")
    return "".join(_text(fields.get(name)) for name in names)[:MAX_PROMPT_CHARS]


def _text(value: Any, depth: int = 0) -> str:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # without surrogates
    if isinstance(value, dict):
        found = value.get("content", value.get("text"))
        return "" if depth > 4 else _text(found, depth + 1)
    if not isinstance(value, list) or depth > 4:
        return ""
    if all(type(each) is int for each in value):
        return "".join(chr(each % FIRST_SURROGATE) for each in value)
    return "".join(_text(each, depth + 1) for each in value)
