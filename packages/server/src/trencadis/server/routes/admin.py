"""``POST /v1/admin/batch``: an operator's order to the engine (seed 003), under an admin key."""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

import attrs
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from trencadis.engine import BatchControl
from trencadis.server.api.attrs_fields import derived_field
from trencadis.server.routes.context import ServingContext


def _batch_control_request() -> type[BaseModel]:
    """`BatchControl` as a request body: the same fields, types, ranges and defaults.

    Unknown fields are an error, so that an operator does not take a misspelt order for obeyed.
    """
    types = get_type_hints(BatchControl)
    fields: dict[str, Any] = {}
    for attribute in attrs.fields(BatchControl):
        choices = getattr(attribute.validator, "accepted", None)
        annotation = types[attribute.name] if choices is None else Literal[choices]
        fields[attribute.name] = (annotation, derived_field(attribute, attribute.default))
    config = ConfigDict(strict=True, extra="forbid")
    return create_model("BatchControlRequest", __config__=config, **fields)


BatchControlRequest = _batch_control_request()


def admin_router(context: ServingContext) -> APIRouter:
    """The routes for operators. `BearerAuth` checks the admin key."""
    router = APIRouter(tags=["admin"])
    body = {"application/json": {"schema": BatchControlRequest.model_json_schema()}}

    @router.post("/v1/admin/batch", openapi_extra={"requestBody": {"content": body}})
    async def control_batch(request: Request) -> dict[str, Any]:
        """Change how many sequences may run, preempt some, or set the target temperature.

        The response comes after the order took effect, at the start of the engine's next step.
        """
        # Not a FastAPI parameter, which needs a Content-Type: seed 003's call sends none. The
        # admin key keeps web pages out.
        order = _parse(await request.body())
        return attrs.asdict(await context.engine.control(order))

    return router


def _parse(body: bytes) -> BatchControl:
    try:
        request = BatchControlRequest.model_validate_json(body)
    except ValidationError as error:
        errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise RequestValidationError(errors) from error
    return BatchControl(**request.model_dump())
