"""``/v1/admin``, under an admin key: an order to the engine (seed 003), state, drain."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_type_hints

import anyio
import attrs
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from trencadis.engine import BatchControl
from trencadis.server.api.attrs_fields import derived_field
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.routes.context import ServingContext

ModelT = TypeVar("ModelT", bound=BaseModel)

_POLL_SECONDS = 0.05


def _batch_control_request() -> type[BaseModel]:
    """`BatchControl` as a request body: the same fields, types, ranges and defaults.

    Unknown fields are an error, so that a misspelt field is not ignored without notice.
    """
    types = get_type_hints(BatchControl)
    fields: dict[str, Any] = {}
    for attribute in attrs.fields(BatchControl):
        choices = tuple(getattr(attribute.validator, "choices", ()))
        annotation = Literal[choices] if choices else types[attribute.name]
        fields[attribute.name] = (annotation, derived_field(attribute, attribute.default))
    config = ConfigDict(strict=True, extra="forbid")
    return create_model("BatchControlRequest", __config__=config, **fields)


BatchControlRequest = _batch_control_request()


class DrainRequest(BaseModel):
    """Whether to reject new requests, and how long to wait for running ones."""

    model_config = ConfigDict(strict=True, extra="forbid")

    drain: bool = Field(True, description="Reject new requests; false: accept them again.")
    wait_s: float = Field(
        0,
        ge=0,
        le=86_400,
        description="Seconds to wait with the answer until no request runs.",
    )


def admin_router(context: ServingContext) -> APIRouter:
    """The routes for administrators. `BearerAuth` checks the admin key."""
    router = APIRouter(tags=["admin"])
    errors = error_responses(*BODY_ERRORS, 403, 429, 503)
    body = {"application/json": {"schema": BatchControlRequest.model_json_schema()}}

    @router.post(
        "/v1/admin/batch", openapi_extra={"requestBody": {"content": body}}, responses=errors
    )
    async def control_batch(request: Request) -> dict[str, Any]:
        """Change how many sequences may run, preempt some, or set the target temperature.

        The response comes after the order took effect, at the start of the engine's next step.
        """
        # Not a FastAPI parameter, which needs a Content-Type: seed 003's call sends none. The
        # admin key keeps web pages out.
        order = _parse(BatchControlRequest, await request.body())
        result = await context.engine.control(BatchControl(**order.model_dump()))
        return attrs.asdict(result)

    @router.get("/v1/admin/state", responses=error_responses(401, 403, 429))
    async def state() -> dict[str, Any]:
        """The engine's latest statistics, and whether new requests are rejected."""
        return {
            "draining": context.drain.is_draining,
            "num_active_requests": context.metrics.num_active,
            "stats": attrs.asdict(context.engine.stats),
        }

    body = {"application/json": {"schema": DrainRequest.model_json_schema()}}

    @router.post(
        "/v1/admin/drain", openapi_extra={"requestBody": {"content": body}}, responses=errors
    )
    async def drain(request: Request) -> dict[str, Any]:
        """Reject new requests, and let the running ones finish. ``/ready`` is 503 meanwhile."""
        order = _parse(DrainRequest, await request.body() or b"{}")
        context.drain.is_draining = order.drain
        await _until_idle(context, order.wait_s if order.drain else 0.0)
        return {
            "draining": context.drain.is_draining,
            "num_active_requests": context.metrics.num_active,
        }

    return router


async def _until_idle(context: ServingContext, seconds: float) -> None:
    """Wait until no request is served, at most ``seconds``, or until requests are accepted."""
    with anyio.move_on_after(seconds):
        # Polled, because what changes is a counter.
        while context.metrics.num_active and context.drain.is_draining:  # noqa: ASYNC110
            await anyio.sleep(_POLL_SECONDS)


def _parse(model: type[ModelT], body: bytes) -> ModelT:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(errors) from error
