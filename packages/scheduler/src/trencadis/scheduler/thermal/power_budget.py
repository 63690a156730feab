"""A cap that keeps all devices together within a power budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.power_model import PRIOR_W, PowerModel
from trencadis.scheduler.thermal.readings import is_power
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, Victim, first_victims, victim_order
from trencadis.scheduler.validators import POSITIVE, integer, number, one_of, setting

MAX_GROWTH = 0.5
"""A rise of the cap adds at most this share of the sequences whose power was measured."""


@attrs.define(eq=False)
class PowerBudgetPolicy(SchedulerThermalPolicy):
    """Runs as many sequences as the power budget allows.

    The cap starts at ``min_seqs`` and follows measurements, not a model of the device:

    - A reading above the budget lowers the cap at once, by the excess over the estimated watts per
      sequence, but not below a number of sequences that was within the budget. Each further
      fall in a row is at least twice as large.
    - A reading within the budget raises the cap by as many sequences as the slack allows by the
      same estimate, at least one and at most `MAX_GROWTH` of those that run. The reading must have
      changed since the cap did, so that a frozen sensor does not raise it, and the last
      change must be ``dwell_s`` ago.
    - A number of sequences that exceeded the budget is tried again after ``retry_s``. Between it
      and the number that was within the budget, the cap takes half of the distance.

    Law: let the power be a strictly increasing function of the running sequences and n the largest
    number within the budget. Whatever was measured before, the cap is at most
    ``n + max(1, ceil(n / 2))`` once a reading has been within the budget, and after at most
    ``max_num_seqs + 20`` settled readings it is n, or n + 1 for one reading every ``retry_s``. A
    reading is settled ``dwell_s`` after the last change: longer than the delay of the sensor.

    Values that are not a power (`is_power`: NaN, infinities, 0, negative) are ignored; without a
    reading the cap does not change. The metadata of each setting has its ``help`` text. Raises
    `ConfigError`.
    """

    budget_w: float = attrs.field(
        validator=POSITIVE,
        metadata={"help": "Power budget of all devices together, in watts."},
    )
    prior_w: float = setting(
        PRIOR_W, POSITIVE, "Watts per sequence that are assumed before the first measurements."
    )
    dwell_s: float = setting(
        5.0,
        number(0),
        "Minimum time between a change of the cap and a rise, in seconds; longer than "
        "the delay of the power sensor.",
    )
    retry_s: float = setting(
        60.0,
        number(0),
        "Time before a number of sequences that exceeded the budget is tried again, in seconds.",
    )
    min_seqs: int = setting(1, integer(1), "Minimum of the cap, and its first value, in sequences.")
    victims: str = setting(
        "cheapest", one_of(VICTIM_ORDERS), f"Order of the victims: {', '.join(VICTIM_ORDERS)}."
    )
    _power_model: PowerModel = attrs.field(init=False)
    _cap: int = attrs.field(init=False)
    _changed_at_s: float = attrs.field(init=False, default=-math.inf)
    _reading_w: float | None = attrs.field(init=False, default=None)
    """The reading of this step; None without one."""
    _measured: tuple[float, int] | None = attrs.field(init=False, default=None)
    """The last new reading in watts, and the running sequences at that time."""
    _is_measured: bool = attrs.field(init=False, default=False)
    """Whether the reading has changed since the cap did."""
    _fell: bool = attrs.field(init=False, default=False)
    """Whether the last change was a fall."""
    _num_cut: int = attrs.field(init=False, default=0)
    """Sequences that the last fall should remove; 0 after a reading within the budget."""
    _num_probes: int = attrs.field(init=False, default=1)
    """Sequences that the next rise adds even if the estimate allows fewer."""
    _within: int = attrs.field(init=False, default=0)
    """The largest number of sequences that was measured within the budget."""
    _exceeding: int | None = attrs.field(init=False, default=None)
    """The smallest number that was measured above the budget; None if `retry_s` have passed."""
    _exceeded_at_s: float = attrs.field(init=False, default=-math.inf)

    def __attrs_post_init__(self) -> None:
        self._power_model = PowerModel(self.prior_w)
        self._cap = self.min_seqs

    def on_power_reading(self, watts: float) -> None:
        self._reading_w = watts if is_power(watts) else None

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        most = scheduler.scheduler_config.max_num_seqs
        if self._reading_w is not None:
            self._take_reading(self._reading_w, scheduler, most)
            self._reading_w = None
        return min(self._cap, most)

    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> Sequence[Victim]:
        return first_victims(victim_order(self.victims), running, num_to_evict)

    def _take_reading(self, watts: float, scheduler: SchedulerView, most: int) -> None:
        """Change the cap by a reading, unless it may have been measured before the last change."""
        now_s = scheduler.now_s
        if self._measured is None or watts != self._measured[0]:
            self._measured = (watts, scheduler.num_running_seqs)
            self._is_measured = True
            self._power_model.observe(*self._measured)
        _, num_running = self._measured
        has_dwelled = now_s - self._changed_at_s >= self.dwell_s
        if watts > self.budget_w and (self._is_measured or has_dwelled):
            if has_dwelled or not self._fell:
                self._note_excess(num_running, now_s)
            self._lower(watts, num_running, now_s)
        elif watts <= self.budget_w and self._is_measured and has_dwelled:
            self._note_slack(num_running)
            self._raise(watts, num_running, most, now_s)

    def _note_excess(self, num_running: int, now_s: float) -> None:
        self._num_probes = 1
        if self._exceeding is None or num_running <= self._exceeding:
            self._exceeding = num_running
            self._exceeded_at_s = now_s
        if self._within >= num_running:
            self._within = 0

    def _note_slack(self, num_running: int) -> None:
        self._num_cut = 0
        self._within = max(self._within, num_running)
        if self._exceeding is not None and num_running >= self._exceeding:
            self._exceeding = None

    def _lower(self, watts: float, num_running: int, now_s: float) -> None:
        num_excess = math.ceil((watts - self.budget_w) / self._sequence_w())
        self._num_cut = max(1, num_excess, 2 * self._num_cut)
        within = self._within if self._within < num_running else 0
        target = max(self.min_seqs, within, num_running - self._num_cut)
        self._change(min(self._cap, target), now_s)

    def _raise(self, watts: float, num_running: int, most: int, now_s: float) -> None:
        # A tenth of a sequence is within the error of the estimate.
        num_affordable = math.floor((self.budget_w - watts) / self._sequence_w() + 0.1)
        num_more = min(max(num_affordable, self._num_probes), math.ceil(MAX_GROWTH * num_running))
        target = min(most, num_running + max(1, num_more))
        if self._exceeding is not None:
            may_retry = now_s - self._exceeded_at_s >= self.retry_s
            half = max(1, (self._exceeding - num_running) // 2)
            target = min(target, num_running + half, self._exceeding - (not may_retry))
        if target > self._cap:
            self._num_probes = 1 if num_affordable >= self._num_probes else 2 * self._num_probes
            self._change(target, now_s)

    def _sequence_w(self) -> float:
        """Watts of one more sequence, bounded from below: it may rest on few measurements."""
        return max(self._power_model.per_sequence_w, self.prior_w / 4)

    def _change(self, cap: int, now_s: float) -> None:
        if cap != self._cap:
            self._fell = cap < self._cap
            self._cap = cap
            self._changed_at_s = now_s
            self._is_measured = False
