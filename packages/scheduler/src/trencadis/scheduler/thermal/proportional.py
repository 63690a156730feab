"""A proportional controller: the cap falls in proportion to the temperature above the target."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.readings import is_temperature
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, Victim, first_victims, victim_order
from trencadis.scheduler.validators import POSITIVE, integer, number, one_of, setting

MAX_TARGET_C = 95.0
"""Highest target temperature that is accepted, degrees C (seed 003, section 4)."""

MIN_HYSTERESIS_C = 2.0
"""With less, groups are evicted and resumed many times a second (seed 003, 4.1.1)."""

PROPORTIONAL_BAND_C = 8.0
"""Degrees C above the target over which the default gain removes the complete batch."""

MIN_EXCESS_C = 0.25
"""A smaller excess temperature counts as none, degrees C."""

_RAMP = 0.75
"""A step of the ramp leaves at least this share of the excess temperature."""


@attrs.define(eq=False)
class ProportionalThermalPolicy(SchedulerThermalPolicy):
    """Removes ``k_p`` sequences from the batch per degree C above the target temperature.

    - The cap falls at once when the temperature rises.
    - It rises only after the temperature has fallen by the hysteresis. It ramps up in steps: a
      step takes back at most a quarter of the excess temperature and at most the hysteresis.
    - A rise, or a fall after a rise, waits for the dwell time after the last change. A temperature
      rise by more than the hysteresis does not wait.

    The default of ``k_p`` spreads ``max_num_seqs`` over `PROPORTIONAL_BAND_C`, so that the cap is
    at ``min_seqs`` before a device with a limit of 90 degrees C reaches it. Seed 003's gain of 0.5
    would remove only six sequences between 82 and 95 degrees C.

    Values that are not a temperature (NaN, infinities) are ignored. The metadata of each setting
    has its ``help`` text. Raises `ConfigError`.
    """

    target_temp_c: float = setting(
        82.0,
        number(0, MAX_TARGET_C, exclusive_low=True),
        "Target temperature of the hottest device, in degrees C.",
    )
    k_p: float | None = setting(
        None,
        number(0, exclusive_low=True, optional=True),
        "Proportional gain, in sequences per degree C; None: max_num_seqs over "
        f"{PROPORTIONAL_BAND_C:g} degrees C.",
    )
    hysteresis_c: float = setting(
        3.0, number(MIN_HYSTERESIS_C), "Temperature drop before the cap rises, in degrees C."
    )
    dwell_s: float = setting(
        5.0,
        POSITIVE,
        "Minimum time between a change of the cap and a change in the other direction, in seconds.",
    )
    min_seqs: int = setting(1, integer(1), "Minimum of the cap, in sequences.")
    victims: str = setting(
        "lru", one_of(VICTIM_ORDERS), f"Order of the victims: {', '.join(VICTIM_ORDERS)}."
    )
    _temp_c: float = attrs.field(init=False, default=-math.inf)
    _excess_c: float = attrs.field(init=False, default=0.0)
    _changed_at_s: float = attrs.field(init=False, default=-math.inf)
    _last_change_was_cut: bool = attrs.field(init=False, default=False)

    @property
    def excess_c(self) -> float:
        """Degrees C above the target that the cap responds to; 0 while it does not throttle."""
        return self._excess_c

    @property
    def is_below_target(self) -> bool:
        """Whether nothing is limited and the hysteresis is between the device and its target."""
        is_cool = -math.inf < self._temp_c < self.target_temp_c - self.hysteresis_c
        return is_cool and self._excess_c == 0

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        del gpu_idx  # always the hottest device
        if is_temperature(temp_c):
            self._temp_c = temp_c

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self._update_excess(scheduler.now_s)
        most = scheduler.scheduler_config.max_num_seqs
        gain = most / PROPORTIONAL_BAND_C if self.k_p is None else self.k_p
        return max(min(self.min_seqs, most), most - math.ceil(self._excess_c * gain))

    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> Sequence[Victim]:
        return first_victims(victim_order(self.victims), running, num_to_evict)

    def retarget(self, target_temp_c: float) -> bool:
        """Set the target temperature. Raises `ConfigError`, as the constructor does."""
        self.target_temp_c = target_temp_c
        return True

    def _update_excess(self, now_s: float) -> None:
        error_c = self._temp_c - self.target_temp_c
        has_dwelled = now_s - self._changed_at_s >= self.dwell_s
        if error_c > self._excess_c:
            is_steep = error_c > self._excess_c + self.hysteresis_c
            if has_dwelled or self._last_change_was_cut or is_steep:
                self._change(error_c, now_s, cut=True)
        elif has_dwelled and self._excess_c > 0 and error_c < self._excess_c - self.hysteresis_c:
            # Ramp up: the sequences of one degree may heat by more than the hysteresis.
            ramp_c = max(_RAMP * self._excess_c, self._excess_c - self.hysteresis_c)
            excess_c = max(ramp_c, error_c + self.hysteresis_c)
            self._change(excess_c if excess_c > MIN_EXCESS_C else 0.0, now_s, cut=False)

    def _change(self, excess_c: float, now_s: float, *, cut: bool) -> None:
        self._excess_c = excess_c
        self._changed_at_s = now_s
        self._last_change_was_cut = cut
