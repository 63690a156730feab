"""The validators of `trencadis.bucketing` with the errors of this package, and those of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from trencadis.bucketing import Bucket, validators
from trencadis.bucketing.validators import Validator, is_finite
from trencadis.warmup.errors import ConfigError
from trencadis.warmup.runtime import Phase

__all__ = ["is_finite"]

integer = partial(validators.integer, error=ConfigError)
number = partial(validators.number, error=ConfigError)
boolean = partial(validators.boolean, error=ConfigError)
one_of = partial(validators.one_of, error=ConfigError)
instance_of = partial(validators.instance_of, error=ConfigError)
function = Validator("callable", callable, remedy="pass a function", error=ConfigError)

MAX_BYTES = (1 << 63) - 1
"""Most bytes of a memory: what a signed 64-bit integer holds."""


def require_methods(name: str, value: object, methods: Iterable[str]) -> None:
    """Reject an object that lacks one of these methods, and a class, which lacks an instance."""
    if isinstance(value, type):
        raise ConfigError(f"{name} is the class {value.__name__}: pass an instance of it", name)
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise ConfigError(
            f"{name} of type {type(value).__name__} has no {', '.join(missing)}: implement "
            "these methods"
        )


def as_tuple(name: str, values: Iterable[Any], item: Validator) -> tuple[Any, ...]:
    """The values, each of which ``item`` accepts, as a tuple."""
    try:
        # A bucket can be indexed, so `tuple` would try to iterate over it.
        items = tuple(values if isinstance(values, Iterable) else None)
    except (TypeError, OverflowError):
        message = f"{name} must be several values, each {item.accepted}, got {values!r}"
        raise ConfigError(message, name) from None
    return tuple(item.checked(name, value) for value in items)


def as_buckets(name: str, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets of a phase, which have the same axes."""
    of_phase = as_tuple(name, buckets, instance_of(Bucket))
    axes = list(dict.fromkeys(bucket.axes for bucket in of_phase))
    if len(axes) > 1:
        raise ConfigError(
            f"{name} have the axes {axes[0]} and {axes[1]}: pass the buckets of one grid"
        )
    return of_phase


def require_replays(replays: Mapping[Bucket, float]) -> None:
    """Reject anything but a finite number of at least 0 for each bucket."""
    expected = number(0, remedy="use expected_replays")
    for bucket, count in instance_of(Mapping).checked("replays", replays).items():
        instance_of(Bucket).checked("a bucket of replays", bucket)
        expected.checked(f"replays of {bucket}", count)


def require_phase_replays(replays: Mapping[Phase, Mapping[Bucket, float]] | None) -> None:
    """Reject anything but None or the replays of each phase."""
    if replays is None:
        return
    for phase, expected in instance_of(Mapping).checked("replays", replays).items():
        instance_of(Phase).checked("a key of replays", phase)
        require_replays(expected)
