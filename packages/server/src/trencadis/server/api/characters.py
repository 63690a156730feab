"""Text of requests that UTF-8 can encode, and lists of which one error is enough."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from trencadis.engine import InvalidRequest


def check_characters(text: str) -> str:
    """Return the text.

    Raises `InvalidRequest` for a lone surrogate, which JSON allows and UTF-8 does not.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("holds a lone surrogate, which is not a character") from None
    return text


Text = Annotated[str, AfterValidator(check_characters)]

T = TypeVar("T")

Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is an error: without it, a list of a million has a million."""
