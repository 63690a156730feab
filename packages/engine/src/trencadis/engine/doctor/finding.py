"""What a check has found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs


class Status(str, enum.Enum):
    """``DIFFERS``: it works, with another result than expected. ``ABSENT``: it cannot be here."""

    OK = "ok"
    DIFFERS = "differs"
    FAILED = "failed"
    ABSENT = "not on this device"


@attrs.frozen
class Finding:
    """The result of a check. ``values`` are plain, for JSON; bytes and seconds by their names."""

    status: Status
    detail: str = ""
    remedy: str = ""
    values: Mapping[str, Any] = attrs.field(factory=dict)
    seconds: float = 0.0


def absent(detail: str, **values: Any) -> Finding:
    """A finding of what cannot be checked here, with the reason."""
    return Finding(Status.ABSENT, detail, values=values)
