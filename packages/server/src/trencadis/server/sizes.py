"""Sizes in bytes as people write them: ``2GiB``, ``512M``, ``1048576``."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes of a size. ``KiB`` and ``K`` are 1024 bytes, ``KB`` is 1000, and so on up to T.

    Raises `ValueError`, which says what is accepted.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size: write bytes, or a unit as in 512MiB or 2GiB")
    number, unit, binary = match.groups()
    decimal = text.rstrip().lower().endswith("b") and not binary
    size = float(number) * (1000 if decimal else 1024) ** _POWERS[unit.lower()]
    if size < 1:
        raise ValueError(f"{text!r} is less than a byte")
    return int(size)
