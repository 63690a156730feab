"""Responses that are stored: the routes to them, and those that are made in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any

import attrs
from fastapi import APIRouter, Request, Response
from starlette.types import Message

from trencadis.engine import EngineOverloaded, InvalidRequest
from trencadis.server.api.error_responses import error_responses
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.responses import (
    CLIENT_FIELDS,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
)
from trencadis.server.api.translation import client_fields
from trencadis.server.errors import ApiError, as_api_error
from trencadis.server.generation.response_store import ResponseStore, StoredResponse
from trencadis.server.http.api_keys import key_name
from trencadis.server.http.auth import key_digest
from trencadis.server.request_ids import REQUEST_ID, given_request_id
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import NewWriter, respond_to_chat
from trencadis.server.settings import ServerSettings

logger = logging.getLogger("trencadis.server")

MAX_BACKGROUND = 64
"""Most responses that are made in the background; half of it for one API key."""


def owner_of(request: Request, settings: ServerSettings) -> str:
    """Whose stored responses a request may use: those of its API key; "" without keys."""
    has_keys = bool(settings.api_keys) or settings.api_key_file is not None
    return key_digest(request.headers) if has_keys else ""


@attrs.frozen
class Keeping:
    """Stores the response of one request. ``conversation``: the items of its input, as JSON."""

    store: ResponseStore
    owner: str
    conversation: bytes

    def keep(self, response: ResponseObject, run: asyncio.Task[None] | None = None) -> None:
        """Store the response with its present status. ``run``: what goes on to make it."""
        items = [item.model_dump() for item in response.output]
        output = json.dumps(items, separators=(",", ":")).encode()
        joint = b"," if len(self.conversation) > 2 and len(output) > 2 else b""
        conversation = self.conversation[:-1] + joint + output[1:]
        content = response.model_dump_json().encode()
        kept = StoredResponse(self.owner, response.id, response.status, content, conversation, run)
        self.store.put(kept)


def found(store: ResponseStore | None, owner: str, response_id: str) -> StoredResponse:
    """A stored response of this owner. Raises 404, also for one of another owner."""
    response = None if store is None else store.get(owner, response_id)
    if response is None:
        raise ApiError(
            404,
            f"Response with id {response_id!r} not found. Responses are stored for a time, where "
            "the server has VLLM_ENABLE_RESPONSES_API_STORE=1",
            code="response_not_found",
        )
    return response


def continued(store: ResponseStore | None, owner: str, body: ResponsesRequest) -> bytes:
    """The conversation that a request continues; b"" for none.

    Raises 404, and `InvalidRequest` for a response that has no answer.
    """
    if body.previous_response_id is None:
        return b""
    previous = found(store, owner, body.previous_response_id)
    if previous.status not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"the response {previous.response_id!r} is {previous.status}: continue one that has "
            "an answer",
            "previous_response_id",
        )
    return previous.conversation


async def respond_in_background(
    context: ServingContext,
    request: Request,
    chat: ChatCompletionRequest,
    head: ResponseObject,
    new_writer: NewWriter,
    keeping: Keeping,
) -> Response:
    """Answer with ``head``, the response while it is queued, and go on without the client.

    Raises `EngineOverloaded`, and 429 for a key with too many.
    """
    context.check_accepting()
    context.check_name(chat.model)
    context.check_runner(chat.model, wants_embeddings=False)
    _check_place(context, request, keeping)
    work = _run(context, _detached(request, head), chat, head, new_writer, keeping)
    keeping.keep(head, asyncio.create_task(work))
    headers = {REQUEST_ID: head.id}
    return Response(head.model_dump_json(), media_type="application/json", headers=headers)


def _check_place(context: ServingContext, request: Request, keeping: Keeping) -> None:
    unfinished = keeping.store.unfinished
    own = sum(each.owner == keeping.owner for each in unfinished)
    most, name = context.settings.max_requests_per_key, key_name(request.scope)
    if name and most is not None and own >= most:
        context.metrics.count_refused(name)
        raise ApiError(
            429,
            f"{most} responses of this API key are made in the background: wait until one has "
            "ended",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(context.settings.retry_after)},
        )
    limit = MAX_BACKGROUND // 2 if keeping.owner else MAX_BACKGROUND
    if len(unfinished) >= MAX_BACKGROUND or own >= limit:
        raise EngineOverloaded(
            f"{len(unfinished)} responses are made in the background: try again later"
        )


def _detached(request: Request, head: ResponseObject) -> Request:
    """The request of a client that does not wait, by the name of its response."""
    name = head.id.removeprefix("resp_").encode()
    others = [pair for pair in request.scope["headers"] if pair[0] != REQUEST_ID.lower().encode()]
    headers = [*others, (REQUEST_ID.lower().encode(), name)]
    return Request({**request.scope, "headers": headers}, _nothing)


async def _nothing() -> Message:
    """Waits until it is cancelled: no client disconnects."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _run(
    context: ServingContext,
    request: Request,
    chat: ChatCompletionRequest,
    head: ResponseObject,
    new_writer: NewWriter,
    keeping: Keeping,
) -> None:
    """Make a response; the writer keeps it. An error is kept as its end."""

    def writer(*args: Any) -> Any:
        progress = head.model_copy(update={"status": "in_progress"})
        keeping.keep(progress, asyncio.current_task())
        return new_writer(*args)

    try:
        with client_fields(CLIENT_FIELDS):
            work = respond_to_chat(context, request, chat, writer)
            await asyncio.wait_for(work, context.settings.responses_store_ttl)
    except Exception as error:
        api_error = as_api_error(error)
        if api_error.code == "internal_error":
            logger.error("The response %s in the background failed", head.id, exc_info=error)
        failure = ResponseError(code=api_error.code or "server_error", message=api_error.message)
        keeping.keep(head.model_copy(update={"status": "failed", "error": failure}))


def new_response_id(request: Request) -> str:
    """The id of a response in the background, which the client may name."""
    return f"resp_{given_request_id(request.headers) or uuid.uuid4().hex}"


async def end_background(store: ResponseStore) -> None:
    """Cancel what is made in the background, because the server stops."""
    runs = [response.run for response in store.unfinished if response.run is not None]
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)


def stored_responses_router(context: ServingContext) -> APIRouter:
    """The routes to stored responses."""
    router = APIRouter(tags=["responses"])
    errors = error_responses(400, 401, 404)
    described: dict[int | str, dict[str, Any]] = {200: {"model": ResponseObject}, **errors}

    def own(request: Request, response_id: str) -> StoredResponse:
        return found(context.responses, owner_of(request, context.settings), response_id)

    @router.get("/v1/responses/{response_id}", response_model=None, responses=described)
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """A stored response, or its state while it is made."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("a stored response is not streamed: leave stream out", "stream")
        return Response(own(request, response_id).content, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses=errors)
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a stored response; one that is being made ends."""
        response = own(request, response_id)
        if response.run is not None:
            response.run.cancel()
        if context.responses is not None:
            context.responses.remove(response.owner, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", response_model=None, responses=described)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a response that is made in the background."""
        response = own(request, response_id)
        if response.is_unfinished and response.run is not None and context.responses is not None:
            response.run.cancel()
            ended = ResponseObject.model_validate_json(response.content)
            content = ended.model_copy(update={"status": "cancelled"}).model_dump_json().encode()
            response = attrs.evolve(response, status="cancelled", content=content, run=None)
            context.responses.put(response)
        elif response.status != "cancelled":
            raise InvalidRequest(
                "Cannot cancel a synchronous response."
                if not json.loads(response.content)["background"]
                else f"the response {response_id!r} has ended: it is {response.status}",
                "response_id",
            )
        return Response(response.content, media_type="application/json")

    return router
