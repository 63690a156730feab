"""A cap in proportion to the temperature above a target, with a dead band against oscillation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.victims import first_victims, victim_order

MAX_TARGET_C = 95.0
"""Highest target that is accepted (seed 003, section 4)."""

MIN_HYSTERESIS_C = 2.0
"""With less, groups are evicted and resumed many times a second (seed 003, 4.1.1)."""

BAND_C = 8.0
"""Degrees above the target within which the default gain takes away the whole batch."""

LEAST_C = 0.25
"""An excess below this is none."""


class ProportionalThermalPolicy(SchedulerThermalPolicy):
    """Takes ``k_p`` sequences out of the batch per degree C above ``target_temp_c``.

    ``k_p`` None spreads ``max_num_seqs`` over `BAND_C` degrees, so that the batch is at its least,
    ``min_seqs``, before a device that is sold for 90 degrees gets there. (Seed 003's 0.5 takes
    six sequences away between 82 and 95 degrees, which no larger batch would notice.)

    The cap follows the temperature up at once. It follows it down only once it has fallen by
    ``hysteresis_c``, by a quarter or by that much at a time, and a change of direction waits
    for ``dwell_s`` seconds after the last change. A rise by more than the hysteresis does not wait.
    Raises `ConfigError`.
    """

    def __init__(
        self,
        target_temp_c: float = 82.0,
        k_p: float | None = None,
        hysteresis_c: float = 3.0,
        dwell_s: float = 5.0,
        min_seqs: int = 1,
        victims: str = "lru",
    ) -> None:
        self._target_c = _checked_target(target_temp_c)
        if hysteresis_c < MIN_HYSTERESIS_C:
            raise ConfigError(
                f"hysteresis_c must be {MIN_HYSTERESIS_C} or more, got {hysteresis_c!r}: "
                "a narrower band evicts and resumes without end"
            )
        for name, value in (("k_p", k_p), ("dwell_s", dwell_s), ("min_seqs", min_seqs)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        self._k_p = k_p
        self._hysteresis_c = hysteresis_c
        self._dwell_s = dwell_s
        self._min_seqs = min_seqs
        self._order = victim_order(victims)
        self._temp_c = -math.inf
        self._excess_c = 0.0
        self._changed_at_s = -math.inf
        self._was_cut = False

    @property
    def excess_c(self) -> float:
        """Degrees above the target that the cap answers to, 0 while it does not throttle."""
        return self._excess_c

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        del gpu_idx  # the caller gives the hottest device's
        if math.isfinite(temp_c):
            self._temp_c = temp_c

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self._follow(scheduler.now_s)
        most = scheduler.scheduler_config.max_num_seqs
        gain = most / BAND_C if self._k_p is None else self._k_p
        return max(min(self._min_seqs, most), most - math.ceil(self._excess_c * gain))

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        return first_victims(self._order, running, num_to_evict)

    def retarget(self, target_temp_c: float) -> bool:
        self._target_c = _checked_target(target_temp_c)
        return True

    def _follow(self, now_s: float) -> None:
        error_c = self._temp_c - self._target_c
        settled = now_s - self._changed_at_s >= self._dwell_s
        if error_c > self._excess_c:
            if settled or self._was_cut or error_c > self._excess_c + self._hysteresis_c:
                self._change(error_c, now_s, cut=True)
        elif settled and self._excess_c > 0 and error_c < self._excess_c - self._hysteresis_c:
            # Bit by bit: one degree may stand for more sequences than cool it by the hysteresis.
            gentle_c = max(0.75 * self._excess_c, self._excess_c - self._hysteresis_c)
            wanted_c = max(gentle_c, error_c + self._hysteresis_c)
            self._change(wanted_c if wanted_c > LEAST_C else 0.0, now_s, cut=False)

    def _change(self, excess_c: float, now_s: float, *, cut: bool) -> None:
        self._excess_c = excess_c
        self._changed_at_s = now_s
        self._was_cut = cut


def _checked_target(target_temp_c: float) -> float:
    if not 0 < target_temp_c <= MAX_TARGET_C:
        raise ConfigError(
            f"target_temp_c must be above 0 and at most {MAX_TARGET_C} degrees C, "
            f"got {target_temp_c!r}"
        )
    return target_temp_c
