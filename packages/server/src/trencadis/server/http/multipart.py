"""Reads a body of ``multipart/form-data`` as it arrives (RFC 7578), in memory of one chunk.

starlette needs another package for it, which writes to temporary files that no limit of ours knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message

from trencadis.server.errors import ApiError

MAX_HEADER_BYTES = 8_192
"""Most bytes of the headers of a part."""

MAX_PARTS = 16


class FormReader:
    """Splits a body into parts: a new part is ``(name, filename)``, its content is bytes.

    ``filename`` is None for a field. Raises `ApiError` with 400 for what is not such a body.
    """

    def __init__(self, content_type: str) -> None:
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_param("boundary")
        if message.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise ApiError(
                415, "the Content-Type header must be multipart/form-data with a boundary"
            )
        if not 1 <= len(boundary) <= 200 or not boundary.isascii():
            raise _broken("its boundary must have 1 to 200 ASCII characters")
        self._mark = b"\r\n--" + boundary.encode()
        self._rest = b"\r\n"  # the first boundary has no line before it
        self._is_content = False
        self._num_parts = 0
        self._is_before_first = True
        self.is_complete = False

    def feed(self, chunk: bytes) -> Iterator[tuple[str, str | None] | bytes]:
        """What a further chunk of the body has. What follows the last boundary is ignored."""
        if self.is_complete:
            return
        self._rest += chunk
        while True:
            if self._is_content or self._is_before_first:
                at = self._rest.find(self._mark)
                if at < 0:
                    kept = len(self._mark) - 1
                    content, self._rest = self._rest[:-kept], self._rest[-kept:]
                    if content and self._is_content:
                        yield content
                    return
                # A mark needs what follows it, too.
                if len(self._rest) < at + len(self._mark) + 2:
                    return
                if at and self._is_content:
                    yield self._rest[:at]
                self._rest = self._rest[at + len(self._mark) :]
                self._is_content = self._is_before_first = False
                if self._rest.startswith(b"--"):
                    self.is_complete = True
                    self._rest = b""
                    return
            at = self._rest.find(b"\r\n\r\n")
            # Up to three bytes may be the beginning of what ends them.
            num_bytes = at if at >= 0 else len(self._rest) - 3
            if num_bytes > MAX_HEADER_BYTES:
                raise _broken(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes")
            if at < 0:
                return
            headers, self._rest = self._rest[:at], self._rest[at + 4 :]
            self._is_content = True
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise _broken(f"it has more than {MAX_PARTS} parts")
            yield _disposition(headers)


_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def _disposition(headers: bytes) -> tuple[str, str | None]:
    """The name and the file name in the headers of a part, as browsers and clients write them."""
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        if line.lower().startswith("content-disposition:"):
            found = {name.lower(): value for name, value in _PARAMETER.findall(line)}
            if "name" in found:
                return found["name"], found.get("filename")
    raise _broken("a part has no name")


def _broken(why: str) -> ApiError:
    message = f"the body is not multipart/form-data: {why}"
    return ApiError(400, message, code="invalid_value")
