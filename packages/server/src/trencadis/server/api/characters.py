"""Text of requests that UTF-8 can encode."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

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
