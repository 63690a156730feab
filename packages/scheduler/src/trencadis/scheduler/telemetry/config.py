"""Settings of a reader: plausibility checks, staleness limits and the fail-safe temperature."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.kvcache.validators import Validator, plain_number
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.validators import POSITIVE, integer, is_integer, setting


def _are_devices(value: Any) -> bool:
    is_tuple = isinstance(value, tuple) and len(value) > 0
    return (
        is_tuple
        and all(is_integer(device) and device >= 0 for device in value)
        and len(set(value)) == len(value)
    )


def _tuple(value: Any) -> Any:
    try:
        return tuple(map(plain_number, value))
    except TypeError:
        return value  # None, or what the validator rejects


@attrs.frozen(kw_only=True)
class ReaderConfig:
    """When a reading is plausible, and how long it is valid.

    Fail-safe: a device without an accepted reading is STALE after ``stale_after_s`` and FAILED
    after ``failed_after_s``. While it is stale, its last temperature is held and the cap may not
    rise. A heat sink takes tens of seconds to warm up, so a lost sample must not cost a request.
    Once the device has failed, it counts as ``assumed_hot_c``. The default is the highest target
    that seed 003 allows, so that every policy throttles.

    Plausibility: a temperature is rejected if it is not above 0 (some exporters report 0 for "not
    supported") or above ``max_c`` (accelerators shut down near 100). A jump of more than
    ``max_jump_c`` plus ``max_slew_c_per_s`` for each second since the last accepted reading needs
    ``confirmations`` readings in a row that agree. A sensor is frozen if temperature and power
    repeat for ``frozen_after_s``; or for ``frozen_coarse_after_s`` if both are whole numbers or the
    power is unknown, because the readings of an idle device may then repeat.

    The metadata of each field has its ``help`` text. Raises `ConfigError`.
    """

    period_s: float = setting(1.0, POSITIVE, "Time between two readings, in seconds.")
    stale_after_s: float = setting(
        5.0, POSITIVE, "Age of the last accepted reading that makes a device STALE, in seconds."
    )
    failed_after_s: float = setting(
        30.0, POSITIVE, "Age of the last accepted reading that makes a device FAILED, in seconds."
    )
    assumed_hot_c: float = setting(
        95.0, POSITIVE, "Fail-safe temperature of a FAILED device, in degrees C."
    )
    max_c: float = setting(125.0, POSITIVE, "Highest plausible temperature, in degrees C.")
    max_jump_c: float = setting(
        25.0, POSITIVE, "Largest plausible jump between two readings, in degrees C."
    )
    max_slew_c_per_s: float = setting(
        10.0, POSITIVE, "Largest plausible rate of change, in degrees C per second."
    )
    confirmations: int = setting(
        3, integer(1), "Number of readings in a row that confirm a larger jump."
    )
    frozen_after_s: float = setting(
        120.0, POSITIVE, "Time after which a repeated reading is rejected as frozen, in seconds."
    )
    frozen_coarse_after_s: float = setting(
        900.0, POSITIVE, "The same for a sensor that reports whole numbers, in seconds."
    )
    devices: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_tuple,
        validator=Validator(
            "distinct device indices of at least 0",
            _are_devices,
            optional=True,
            remedy="leave it out to read every device of the source",
            error=ConfigError,
        ),
        metadata={
            "help": "Indices of the devices that count, for a node shared with others; None: every "
            "device of the source."
        },
    )

    def __attrs_post_init__(self) -> None:
        _check_ascending(self, "period_s", "stale_after_s", "readings would be stale at once")
        _check_ascending(self, "stale_after_s", "failed_after_s", "a device is stale, then failed")
        _check_ascending(self, "frozen_after_s", "frozen_coarse_after_s", "coarse readings repeat")
        _check_ascending(self, "assumed_hot_c", "max_c", "the fail-safe temperature is plausible")


def _check_ascending(config: ReaderConfig, low: str, high: str, reason: str) -> None:
    low_value, high_value = getattr(config, low), getattr(config, high)
    if low_value >= high_value:
        raise ConfigError(
            f"{low} {low_value} must be below {high} {high_value} ({reason}): "
            f"raise {high} or lower {low}"
        )
