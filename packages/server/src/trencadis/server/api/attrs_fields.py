"""Request fields whose range and description are those of an attrs field of the engine."""

from __future__ import annotations

from typing import Any

import attrs
from pydantic import Field


def derived_field(attribute: attrs.Attribute[Any], default: Any, least: int | None = None) -> Any:
    """A pydantic field with the range and the description of ``attribute``.

    The engine's validators have the range as ``low``, ``high`` and ``exclusive_low``; a validator
    without them sets no range. ``least`` replaces ``low``. The description is
    ``metadata["help"]``.
    """
    check = attribute.validator
    low = "gt" if getattr(check, "exclusive_low", False) else "ge"
    bounds: dict[str, Any] = {
        low: getattr(check, "low", None) if least is None else least,
        "le": getattr(check, "high", None),
    }
    return Field(default=default, description=attribute.metadata["help"], **bounds)
