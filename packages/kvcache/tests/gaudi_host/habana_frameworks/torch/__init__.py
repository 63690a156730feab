"""What the plugin's defragmentation calls of Intel's bridge."""

from __future__ import annotations

import types
from typing import Any

core = types.SimpleNamespace(mark_step=lambda: None)
wrapped: list[Any] = []


def _wrap(module: Any, *, disable_tensor_cache: bool) -> Any:
    assert disable_tensor_cache
    wrapped.append(module)
    return module


hpu = types.SimpleNamespace(wrap_in_hpu_graph=_wrap)
