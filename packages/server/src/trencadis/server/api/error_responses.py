"""The error responses of routes, for the API description."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


class ErrorObject(BaseModel):
    """What went wrong. ``param`` is the field that caused it, ``code`` is for a client's code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: ErrorObject


class MessagesErrorResponse(BaseModel):
    """The body of every error of ``/v1/messages``."""

    type: Literal["error"]
    error: ErrorObject


_MEANINGS = {
    400: "A field is missing, has a wrong type, is out of range or is not supported",
    401: "The key is missing or wrong",
    403: "The admin API is off",
    404: "There is no such model",
    409: "Another switch of models, or response of this id, is under way",
    408: "The body arrives too slowly",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "Too many calls; Retry-After gives the delay in seconds",
    500: "An internal error",
    503: "The engine cannot serve the request now; Retry-After, if any, gives the delay in seconds",
}

_REFERENCE = "#/components/schemas/{model}"

BODY_ERRORS = (400, 401, 408, 413)
"""Errors of every route that takes a body and a key."""


def error_responses(
    *statuses: int, model: type[BaseModel] = ErrorResponse
) -> dict[int | str, dict[str, Any]]:
    """The argument ``responses`` of routes that answer with these errors, whose body is ``model``.

    ``default`` stands for those of every path, and keeps FastAPI from adding its own form of error.
    """
    # A reference, since FastAPI would make a validator of the model for each status of each route.
    schema = {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
    content = {"content": {"application/json": schema}}
    described: dict[int | str, dict[str, Any]] = {
        status: {**content, "description": _MEANINGS[status]} for status in statuses
    }
    return described | {"default": {**content, "description": "Any other error"}}


class DescribedApp(FastAPI):
    """An app whose description has the schemas that `error_responses` refers to."""

    def openapi(self) -> dict[str, Any]:
        """The description of the app, as JSON for ``/openapi.json``."""
        is_new = self.openapi_schema is None
        description = super().openapi()
        if is_new:
            models: tuple[type[BaseModel], ...] = (ErrorResponse, MessagesErrorResponse)
            _, schemas = models_json_schema(
                [(model, "validation") for model in models], ref_template=_REFERENCE
            )
            description["components"]["schemas"].update(schemas["$defs"])
        return description
