"""Responses that are stored: the routes to them, and those that are made in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from fastapi import APIRouter, Query, Request, Response
from starlette.types import Message

from trencadis.engine import EngineOverloaded, InvalidRequest
from trencadis.server.api.error_responses import error_responses
from trencadis.server.api.input_items import MAX_LISTED, ResponseItemList, input_items, page
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.responses import (
    CLIENT_FIELDS,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
)
from trencadis.server.api.translation import client_fields
from trencadis.server.errors import ApiError, as_api_error
from trencadis.server.generation.prompts import Prompt
from trencadis.server.generation.response_store import ResponseStore, Run, StoredResponse
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.api_keys import key_name
from trencadis.server.request_ids import REQUEST_ID, fits_path, given_request_id
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import ResponseWriter, respond_to_chat

logger = logging.getLogger("trencadis.server")

MAX_BACKGROUND = 64
"""Most responses that are made in the background; half of it for one API key."""

Keep: TypeAlias = Callable[[ResponseObject], bool]
"""Stores a response that has ended. Returns whether it is kept."""

NewBackgroundWriter: TypeAlias = Callable[
    [Keep, ServedModel, Any, Sequence[Prompt], "str | None"], ResponseWriter
]
"""Makes the writer of a response that is stored."""


@attrs.frozen
class Keeping:
    """Stores the response of one request. ``conversation``: the items of its input, as JSON.

    ``run``: what makes the response in the background.
    """

    store: ResponseStore
    owner: str
    conversation: bytes
    run: Run | None = None

    def stored(self, response: ResponseObject) -> StoredResponse:
        """What is stored of a response with its present status."""
        # without log-probabilities, which are much longer than the texts
        dumped = {"content": {"__all__": {"logprobs"}}}
        items = [item.model_dump(exclude=dumped) for item in response.output]
        output = json.dumps(items, separators=(",", ":")).encode()
        joint = b"," if len(self.conversation) > 2 and len(output) > 2 else b""
        conversation = self.conversation[:-1] + joint + output[1:]
        content = response.model_dump_json().encode()
        return StoredResponse(
            self.owner, response.id, response.status, content, conversation, self.run
        )

    def keep(self, response: ResponseObject) -> bool:
        """Store a response that is made at once. Returns whether it is kept."""
        return self.store.put(self.stored(response))

    def update(self, response: ResponseObject, head: ResponseObject) -> None:
        """Store what the run has made, unless its response has ended otherwise.

        Where that is too large, ``head`` becomes its end, with an error.
        """
        if self.store.update(self.stored(response)):
            return
        error = ResponseError(
            code="response_too_large",
            message=f"the response is {response.status}, and too large to be stored: the server "
            "may be given more with --responses-store-size",
        )
        failed = head.model_copy(update={"status": "failed", "error": error})
        self.store.update(attrs.evolve(self.stored(failed), conversation=b"[]"))


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
    new_writer: NewBackgroundWriter,
    keeping: Keeping,
) -> Response:
    """Answer with ``head``, the response while it is queued, and go on without the client.

    Raises 409 for the id of a response that is still made, `InvalidRequest` for what is too large
    to be stored, and `EngineOverloaded`.
    """
    context.check_accepting()
    context.check_name(chat.model)
    context.check_runner(chat.model, wants_embeddings=False)
    run = Run()
    keeping = attrs.evolve(keeping, run=run)
    queued = keeping.stored(head)
    _check_place(keeping.store, queued)
    if not keeping.store.put(queued):
        raise EngineOverloaded(
            f"{len(keeping.store.unfinished)} responses are made in the background, and have all "
            "bytes that there are for them: try again later"
        )
    work = _run(context, _detached(request, head), chat, head, new_writer, keeping)
    run.task = asyncio.create_task(work)
    headers = {REQUEST_ID: head.id}
    return Response(head.model_dump_json(), media_type="application/json", headers=headers)


def _check_place(store: ResponseStore, queued: StoredResponse) -> None:
    unfinished, owner = store.unfinished, queued.owner
    if any((each.owner, each.response_id) == (owner, queued.response_id) for each in unfinished):
        raise ApiError(
            409,
            f"the response {queued.response_id!r} is still made: give another X-Request-Id",
            code="response_in_progress",
        )
    limit = MAX_BACKGROUND // 2 if owner else MAX_BACKGROUND
    if len(unfinished) >= MAX_BACKGROUND or store.num_unfinished(owner) >= limit:
        raise EngineOverloaded(
            f"{len(unfinished)} responses are made in the background: try again later"
        )
    if queued.num_bytes > store.unfinished_share(owner):
        raise InvalidRequest(
            f"the response has {queued.num_bytes} bytes before it is made, and is too large to be "
            "stored: leave background out, or give the server more with --responses-store-size",
            "background",
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
    new_writer: NewBackgroundWriter,
    keeping: Keeping,
) -> None:
    """Make a response; its writer hands it over at its end. An error is kept as its end."""

    def keep(response: ResponseObject) -> bool:
        keeping.update(response, head)
        return True

    def writer(*args: Any) -> ResponseWriter:
        keep(head.model_copy(update={"status": "in_progress"}))
        return new_writer(keep, *args)

    try:
        with client_fields(CLIENT_FIELDS):
            work = respond_to_chat(context, request, chat, writer)
            await asyncio.wait_for(work, context.settings.responses_store_ttl)
    except asyncio.CancelledError:
        keep(head.model_copy(update={"status": "cancelled"}))
        raise
    except Exception as error:
        limit_s = context.settings.responses_store_ttl
        api_error = as_api_error(error)
        if isinstance(error, asyncio.TimeoutError):
            api_error = ApiError(
                504,
                f"the response was not ready after {limit_s:g} s, as long as it would be stored "
                "(responses_store_ttl)",
                code="response_timeout",
            )
        if api_error.code == "internal_error":
            logger.error("The response %s in the background failed", head.id, exc_info=error)
        failure = ResponseError(code=api_error.code or "server_error", message=api_error.message)
        keep(head.model_copy(update={"status": "failed", "error": failure}))


def new_response_id(request: Request) -> str:
    """The id of a response in the background, which the client may name."""
    name = given_request_id(request.headers)
    return f"resp_{name if name and fits_path(name) else uuid.uuid4().hex}"


async def end_background(store: ResponseStore) -> None:
    """Cancel what is made in the background, because the server stops."""
    runs = [response.run for response in store.unfinished if response.run is not None]
    for run in runs:
        run.cancel()
    tasks = [run.task for run in runs if run.task is not None]
    await asyncio.gather(*tasks, return_exceptions=True)


def stored_responses_router(context: ServingContext) -> APIRouter:
    """The routes to stored responses."""
    router = APIRouter(tags=["responses"])
    errors = error_responses(400, 401, 404)
    described: dict[int | str, dict[str, Any]] = {200: {"model": ResponseObject}, **errors}

    def own(request: Request, response_id: str) -> StoredResponse:
        return found(context.responses, key_name(request.scope), response_id)

    @router.get("/v1/responses/{response_id}", response_model=None, responses=described)
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """A stored response, or its state while it is made."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("a stored response is not streamed: leave stream out", "stream")
        return Response(own(request, response_id).content, media_type="application/json")

    @router.get("/v1/responses/{response_id}/input_items", responses=errors)
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=MAX_LISTED),
        order: Literal["asc", "desc"] = "desc",
    ) -> ResponseItemList:
        """What a stored response answers, with the conversation that it continues."""
        response = own(request, response_id)
        num_output = len(json.loads(response.content)["output"])
        items = input_items(response_id, response.conversation, num_output)
        return page(items, after=after, limit=limit, order=order)

    @router.delete("/v1/responses/{response_id}", responses=errors)
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a stored response; one that is being made ends."""
        response = own(request, response_id)
        if context.responses is not None:
            context.responses.remove(response.owner, response_id)
        if response.run is not None:
            response.run.cancel()
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", response_model=None, responses=described)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a response that is made in the background."""
        response = own(request, response_id)
        run = response.run
        if response.is_unfinished and run is not None and context.responses is not None:
            ended = ResponseObject.model_validate_json(response.content)
            content = ended.model_copy(update={"status": "cancelled"}).model_dump_json().encode()
            response = attrs.evolve(response, status="cancelled", content=content)
            context.responses.update(response)
            run.cancel()
        elif response.status != "cancelled":
            raise InvalidRequest(
                "Cannot cancel a synchronous response."
                if not json.loads(response.content)["background"]
                else f"the response {response_id!r} has ended: it is {response.status}",
                "response_id",
            )
        return Response(response.content, media_type="application/json")

    return router
