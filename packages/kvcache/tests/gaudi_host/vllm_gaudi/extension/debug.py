"""Lines of areas that are debugged."""

from __future__ import annotations

from collections.abc import Callable

from vllm_gaudi.extension.runtime import get_config

LINES: list[str] = []


def init_debug_logger(area: str) -> Callable[[str], None] | None:
    return LINES.append if area in (get_config().VLLM_DEBUG or ()) else None
