"""Lists, tuples and dictionaries of arguments as a flat list, and back.

As ``torch.utils._pytree``, for the few containers that operations take, at a tenth of its time:
every operation of the stand-in goes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Spec = tuple[Any, ...] | None
"""The containers around the leaves; None is a leaf. Can be hashed."""


def flatten(value: Any) -> tuple[list[Any], Spec]:
    leaves: list[Any] = []
    return leaves, _collect(value, leaves)


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    return _rebuild(iter(leaves), spec)


def map_only(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf of this type replaced by ``change(leaf)``."""
    leaves, spec = flatten(value)
    return unflatten([change(x) if isinstance(x, kind) else x for x in leaves], spec)


def _collect(value: Any, leaves: list[Any]) -> Spec:
    if isinstance(value, (tuple, list)):
        return (type(value), *[_collect(one, leaves) for one in value])
    if isinstance(value, dict):
        inside = [_collect(one, leaves) for one in value.values()]
        return (dict, tuple(value), *inside)
    leaves.append(value)
    return None


def _rebuild(leaves: Any, spec: Spec) -> Any:
    if spec is None:
        return next(leaves)
    kind = spec[0]
    if kind is dict:
        return {k: _rebuild(leaves, one) for k, one in zip(spec[1], spec[2:], strict=True)}
    return kind([_rebuild(leaves, one) for one in spec[1:]])
