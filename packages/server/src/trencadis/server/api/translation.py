"""Requests of other APIs as chat requests, and errors with the names that their clients sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from trencadis.engine import InvalidRequest
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.errors import ApiError


def chat_request(**fields: Any) -> ChatCompletionRequest:
    """A chat request with these fields; None stands for a field that is left out.

    Raises `ValidationError`, which `client_fields` makes an error of the client's.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    return ChatCompletionRequest.model_validate(given)


@contextmanager
def client_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside of the block name the fields of the client.

    ``names``: for each field of a chat request the client's field. A chat request that is invalid
    raises `InvalidRequest`.
    """

    def renamed(message: str, field: str | None) -> tuple[str, str | None]:
        chat_name = field or ""
        name = names.get(chat_name, chat_name)
        if name != chat_name:
            message = re.sub(rf"\b{re.escape(chat_name)}", name, message, count=1)
        return message, name or None

    try:
        yield
    except ValidationError as error:
        message, field = renamed(*_first_problem(error))
        raise InvalidRequest(message, field) from error
    except InvalidRequest as error:
        message, field = renamed(str(error), error.field)
        raise InvalidRequest(message, field) from error
    except ApiError as error:
        message, field = renamed(error.message, error.param)
        raise ApiError(
            error.status, message, param=field, code=error.code, headers=error.headers
        ) from error


def _first_problem(error: ValidationError) -> tuple[str, str | None]:
    """The message of a chat request that is invalid, and its field."""
    first = error.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else None
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return str(cause), cause.field or field
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return f"{field}: {reason}", field
