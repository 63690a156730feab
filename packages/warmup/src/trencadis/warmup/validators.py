"""Validators of settings and arguments. An error names the value and what is accepted.

A validator of a setting is a frozen value with public bounds, so that other layers derive their
bounds from it: ``attrs.fields(WarmupConfig).graph_prompt_ratio.validator.high``. The functions
check plain arguments. All raise `ConfigError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import ConfigError
from trencadis.warmup.runtime import Phase

MAX_BYTES = (1 << 63) - 1
"""Most bytes of a memory: what a signed 64-bit integer holds."""

T = TypeVar("T")


@attrs.frozen
class IntegerValidator:
    """Accepts integers from ``low`` to ``high``. A bool is not an integer."""

    low: int
    high: int

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        require_integer(attribute.name, value, self.low, self.high)


@attrs.frozen
class NumberValidator:
    """Accepts numbers from ``low`` to ``high``. NaN and a bool are not numbers."""

    low: float
    high: float

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            raise ConfigError(
                f"{attribute.name} must be a number from {self.low:g} to {self.high:g}, "
                f"got {value!r}"
            )


@attrs.frozen
class ChoiceValidator:
    """Accepts the values in ``accepted``."""

    accepted: tuple[str, ...]

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or value not in self.accepted:
            raise ConfigError(
                f"{attribute.name} must be one of {', '.join(self.accepted)}, got {value!r}"
            )


@attrs.frozen
class FiniteValidator:
    """Accepts finite numbers."""

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_finite(value):
            raise ConfigError(f"{attribute.name} must be a finite number, got {value!r}")


@attrs.frozen
class InstanceValidator:
    """Accepts instances of ``kind``."""

    kind: type

    def __call__(self, _: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        require_instance(attribute.name, value, self.kind)


def integer(low: int, high: int = MAX_BYTES) -> IntegerValidator:
    """Accepts integers from ``low`` to ``high``."""
    return IntegerValidator(low, high)


def number(low: float, high: float) -> NumberValidator:
    """Accepts numbers from ``low`` to ``high``."""
    return NumberValidator(low, high)


def finite() -> FiniteValidator:
    """Accepts finite numbers."""
    return FiniteValidator()


def one_of(*accepted: str) -> ChoiceValidator:
    """Accepts these values only."""
    return ChoiceValidator(accepted)


def instance_of(kind: type) -> InstanceValidator:
    """Accepts instances of ``kind``."""
    return InstanceValidator(kind)


def require_integer(name: str, value: object, low: int, high: int = MAX_BYTES) -> None:
    """Reject anything but an integer from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
    if value > high:
        raise ConfigError(f"{name} must be an integer of at most {high}, got {value!r}")


def require_instance(name: str, value: object, kind: type) -> None:
    """Reject anything but an instance of ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")


def require_callable(name: str, value: object) -> None:
    """Reject what cannot be called."""
    if not callable(value):
        raise ConfigError(f"{name} must be callable, got {value!r}: pass a function")


def require_methods(name: str, value: object, methods: Iterable[str]) -> None:
    """Reject an object that lacks one of these methods."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise ConfigError(
            f"{name} of type {type(value).__name__} has no {', '.join(missing)}: implement "
            "these methods"
        )


def is_finite(value: Any) -> bool:
    """Whether ``value`` is a number that a float can hold, and no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_tuple(name: str, values: Iterable[T], kind: type[T]) -> tuple[T, ...]:
    """The values as a tuple. Rejects anything but instances of ``kind``."""
    message = f"{name} must be several of type {kind.__name__}, got {values!r}"
    # A bucket can be indexed, so `tuple` would try to iterate over it.
    if not isinstance(values, Iterable):
        raise ConfigError(message)
    try:
        found = tuple(values)
    except (TypeError, OverflowError) as error:
        raise ConfigError(message) from error
    for value in found:
        require_instance(name, value, kind)
    return found


def as_buckets(name: str, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets of a phase, which have the same axes."""
    found = as_tuple(name, buckets, Bucket)
    axes = list(dict.fromkeys(bucket.axes for bucket in found))
    if len(axes) > 1:
        raise ConfigError(
            f"{name} have the axes {axes[0]} and {axes[1]}: pass the buckets of one grid"
        )
    return found


def require_replays(replays: Mapping[Bucket, float]) -> None:
    """Reject anything but a finite number of at least 0 for each bucket."""
    require_instance("replays", replays, Mapping)
    for bucket, count in replays.items():
        require_instance("a bucket of replays", bucket, Bucket)
        if not is_finite(count) or count < 0:
            raise ConfigError(
                f"replays of {bucket} must be a finite number of at least 0, got {count!r}: "
                "use expected_replays"
            )


def require_phase_replays(replays: Mapping[Phase, Mapping[Bucket, float]] | None) -> None:
    """Reject anything but None or the replays of each phase."""
    if replays is None:
        return
    require_instance("replays", replays, Mapping)
    for phase, expected in replays.items():
        require_instance("a key of replays", phase, Phase)
        require_replays(expected)
