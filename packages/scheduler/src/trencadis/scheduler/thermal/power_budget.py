"""A cap that keeps all devices together within a power budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.power_model import PRIOR_W, PowerModel
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, first_victims, victim_order
from trencadis.scheduler.validators import integer, number, one_of


@attrs.define(eq=False)
class PowerBudgetPolicy(SchedulerThermalPolicy):
    """Runs as many sequences as the power budget allows.

    The watts per sequence are estimated from the measured power. The cap falls at once. It rises
    only after the dwell time and only by the hysteresis or more, so that noise in the measurement
    does not change it. The metadata of each setting has its ``help`` text. Raises `ConfigError`.
    """

    budget_w: float = attrs.field(
        validator=number(0, exclusive_low=True),
        metadata={"help": "Power budget of all devices together, in watts."},
    )
    prior_w: float = attrs.field(
        default=PRIOR_W,
        validator=number(0, exclusive_low=True),
        metadata={"help": "Watts per sequence that are assumed before the first measurements."},
    )
    dwell_s: float = attrs.field(
        default=5.0,
        validator=number(0),
        metadata={"help": "Minimum time between a change of the cap and a rise, in seconds."},
    )
    hysteresis: float = attrs.field(
        default=0.05,
        validator=number(0, 1),
        metadata={"help": "Minimum rise of the cap, as a share of max_num_seqs, 0 to 1."},
    )
    min_seqs: int = attrs.field(
        default=1,
        validator=integer(1),
        metadata={"help": "Minimum of the cap, in sequences."},
    )
    victims: str = attrs.field(
        default="cheapest",
        validator=one_of(*VICTIM_ORDERS),
        metadata={"help": f"Order of the victims: {', '.join(VICTIM_ORDERS)}."},
    )
    _power_model: PowerModel = attrs.field(
        init=False, default=attrs.Factory(lambda self: PowerModel(self.prior_w), takes_self=True)
    )
    _power_w: float | None = attrs.field(init=False, default=None)
    _measured: tuple[float, int] | None = attrs.field(init=False, default=None)
    """The last new power reading in watts, and the running sequences at that time."""
    _cap: int | None = attrs.field(init=False, default=None)
    _changed_at_s: float = attrs.field(init=False, default=-math.inf)

    def on_power_reading(self, watts: float) -> None:
        self._power_w = watts

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self._observe(scheduler.num_running_seqs)
        most = scheduler.scheduler_config.max_num_seqs
        target = max(min(self.min_seqs, most), min(most, self._num_affordable()))
        cap = most if self._cap is None else min(self._cap, most)
        min_rise = max(1, math.ceil(self.hysteresis * most))
        has_dwelled = scheduler.now_s - self._changed_at_s >= self.dwell_s
        may_rise = has_dwelled and (target >= cap + min_rise or target == most > cap)
        if target < cap or may_rise:
            self._changed_at_s = scheduler.now_s
            cap = target
        self._cap = cap
        return cap

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        return first_victims(victim_order(self.victims), running, num_to_evict)

    def _observe(self, num_running: int) -> None:
        """Pass a new power reading to the model. A value that repeats is not new."""
        watts = self._power_w
        if watts is None or (self._measured is not None and self._measured[0] == watts):
            return
        self._measured = (watts, num_running)
        self._power_model.observe(watts, num_running)

    def _num_affordable(self) -> int:
        """Sequences within the budget, extrapolated from the last reading.

        The estimate is bounded from below, because it may rest on few measurements.
        """
        per_sequence_w = max(self._power_model.per_sequence_w, self.prior_w / 4)
        if self._measured is None:
            return int(self.budget_w / per_sequence_w)
        power_w, num_running = self._measured
        return num_running + math.floor((self.budget_w - power_w) / per_sequence_w)
