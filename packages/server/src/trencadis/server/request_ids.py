"""The name that a client gives its request in the header ``X-Request-Id``."""

from __future__ import annotations

import re
from collections.abc import Mapping

REQUEST_ID = "X-Request-Id"

MAX_REQUEST_ID = 128
"""Most characters of a client's name for a request, which is in logs and traces, too."""

REQUEST_ID_PATTERN = rf"^[!-~]{{1,{MAX_REQUEST_ID}}}$"
"""Printable ASCII without spaces, since it goes into a header and into lines of logs."""

_NAME = re.compile(REQUEST_ID_PATTERN)
_PATH_SEGMENT = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@-]+")
"""What a segment of a path may have unescaped, by RFC 3986."""


def given_request_id(headers: Mapping[str, str]) -> str | None:
    """The client's name for a request; None without one, or with one that is too long to repeat.

    As a label of its own it must not make a request fail.
    """
    name = headers.get(REQUEST_ID)
    return name if name is not None and _NAME.match(name) else None


def fits_path(name: str) -> bool:
    """Whether a name may be a segment of a path, so that what it names can be asked for."""
    return _PATH_SEGMENT.fullmatch(name) is not None
