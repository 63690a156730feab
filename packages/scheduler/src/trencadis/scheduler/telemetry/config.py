"""How a reader judges its sensors: one frozen value, checked when it is made."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError


def _above_zero(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    if not ok:
        raise ConfigError(f"{attribute.name} must be a number above 0, got {value!r}")


def _at_least_one(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{attribute.name} must be a positive integer, got {value!r}")


def _device_indices(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    ok = all(isinstance(device, int) and device >= 0 for device in value)
    if not ok or not value or len(set(value)) != len(value):
        raise ConfigError(
            f"{attribute.name} must be device indices from 0, each once, got {value!r}: "
            "leave it out to watch every device that the source shows"
        )


def _tuple(value: Any) -> Any:
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class ReaderConfig:
    """When a reading is believed, and for how long. Seconds and degrees C throughout.

    ``period_s``: between readings. ``devices``: the indices that count (None: all that the source
    ever shows; on a node shared with others, name your own).

    Fail-safe. A device without a believable reading is STALE after ``stale_after_s`` and FAILED
    after ``failed_after_s``. While it is stale its last temperature is held and no cap may rise: a
    heat sink takes tens of seconds to warm, so a lost scrape must cost no user a request. Once it
    has failed it counts as ``assumed_hot_c`` hot, since a blind engine must not be the one that
    cooks its device; 95 is the highest ``target_temp_c`` that seed 003 lets anyone ask for, so
    every policy sees a device at or above its target.

    Belief. ``max_c``: no accelerator works above it (they shut down near 100), nor at 0 or below,
    which is what some exporters say for "not supported". A jump of more than ``max_jump_c`` plus
    ``max_slew_c_per_s`` for each second since the last believed reading is believed only when
    ``confirmations`` readings in a row agree. A sensor that repeats the same temperature and power
    for ``frozen_after_s`` is frozen; where both are whole numbers, or the power is unknown, an
    idle device does that honestly and ``frozen_coarse_after_s`` holds instead.

    Raises `ConfigError`.
    """

    period_s: float = attrs.field(default=1.0, validator=_above_zero)
    stale_after_s: float = attrs.field(default=5.0, validator=_above_zero)
    failed_after_s: float = attrs.field(default=30.0, validator=_above_zero)
    assumed_hot_c: float = attrs.field(default=95.0, validator=_above_zero)
    max_c: float = attrs.field(default=125.0, validator=_above_zero)
    max_jump_c: float = attrs.field(default=25.0, validator=_above_zero)
    max_slew_c_per_s: float = attrs.field(default=10.0, validator=_above_zero)
    confirmations: int = attrs.field(default=3, validator=_at_least_one)
    frozen_after_s: float = attrs.field(default=120.0, validator=_above_zero)
    frozen_coarse_after_s: float = attrs.field(default=900.0, validator=_above_zero)
    devices: tuple[int, ...] | None = attrs.field(
        default=None, converter=_tuple, validator=attrs.validators.optional(_device_indices)
    )

    def __attrs_post_init__(self) -> None:
        _ascending(self, "period_s", "stale_after_s", "a reading would be stale before the next")
        _ascending(
            self, "stale_after_s", "failed_after_s", "a sensor is stale before it has failed"
        )
        _ascending(self, "frozen_after_s", "frozen_coarse_after_s", "coarse sensors repeat longer")
        _ascending(self, "assumed_hot_c", "max_c", "the assumed temperature must be a possible one")


def _ascending(config: ReaderConfig, low: str, high: str, why: str) -> None:
    small, large = getattr(config, low), getattr(config, high)
    if small >= large:
        raise ConfigError(
            f"{low} {small} must be below {high} {large}, since {why}: raise {high} or lower {low}"
        )
