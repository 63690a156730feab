"""Text files: another encoding is an error with its line, and a file is replaced in one step."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.validators import instance_of


def check_path(path: object) -> None:
    """Raise `BucketingError` unless `path` can name a file."""
    instance_of(str, os.PathLike).checked("path", path)
    try:
        encoded = os.fsencode(path)  # type: ignore[arg-type]
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise BucketingError(f"path {shown(path)} cannot name a file: give one that can")


_MAX_LINE = 1 << 20
"""Most characters of a line: a bucket file or a trace has some hundred."""


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        BucketingError: a file that is not UTF-8, with the line; a pipe or a device.
        OSError: the file cannot be read.
    """
    check_path(path)
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise BucketingError(
            f"{path} is not a regular file, and reading it may never end: name another"
        )
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise undecodable(path) from None


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a UTF-8 file or pipe with their ends, one at a time, without a byte order mark.

    Raises:
        BucketingError: a file that is not UTF-8, with the line; a line that does not end.
        OSError: the file cannot be read.
    """
    check_path(path)
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE + 1)
                if len(line) > _MAX_LINE:
                    raise BucketingError(
                        f"{path}, line {number} has more than {_MAX_LINE} characters: name a text "
                        "file"
                    )
                if not line:
                    return
                yield line
    except UnicodeDecodeError:
        raise undecodable(path) from None


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file that others see as it was before, or complete.

    A link is followed. A file that is there keeps its permissions.

    Raises:
        OSError: the file cannot be written; it stays as it was.
    """
    check_path(path)
    target = Path(os.path.realpath(path))
    # Not one name for all: two processes would write into the same file.
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(text)
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def undecodable(path: str | os.PathLike[str]) -> BucketingError:
    """The error for a file that is not UTF-8; it names the first line that is not."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            # What cannot be decoded becomes a surrogate, which UTF-8 text cannot contain.
            bad = re.search("[\udc80-\udcff]", line.decode("utf-8", "surrogateescape"))
            if bad:
                return BucketingError(
                    f"{path}, line {number} is not UTF-8 text (byte 0x{ord(bad[0]) - 0xDC00:02x}): "
                    "save the file as UTF-8"
                )
    return BucketingError(f"{path} changed while it was read: read it again")
