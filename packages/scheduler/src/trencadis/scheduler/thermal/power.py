"""A cap that keeps the devices within a power budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.victims import first_victims, victim_order
from trencadis.scheduler.thermal.watts import PRIOR_W, WattsModel


class PowerBudgetPolicy(SchedulerThermalPolicy):
    """Lets as many sequences run as ``budget_w`` watts of all devices together pay for.

    Watts per sequence are learned from the measured power, starting at ``prior_w``. The cap falls
    at once and rises after ``dwell_s`` seconds without a change, and only when there is room for
    ``slack`` of the batch more, so that noise in the measurement moves nobody. Raises
    `ConfigError`.
    """

    def __init__(
        self,
        budget_w: float,
        prior_w: float = PRIOR_W,
        dwell_s: float = 5.0,
        slack: float = 0.05,
        min_seqs: int = 1,
        victims: str = "cheapest",
    ) -> None:
        for name, value in (("budget_w", budget_w), ("prior_w", prior_w), ("min_seqs", min_seqs)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        self.watts = WattsModel(prior_w)
        self._budget_w = budget_w
        self._dwell_s = dwell_s
        self._slack = slack
        self._min_seqs = min_seqs
        self._order = victim_order(victims)
        self._prior_w = prior_w
        self._newest_w: float | None = None
        self._anchor: tuple[float, int] | None = None
        self._cap: int | None = None
        self._changed_at_s = -math.inf

    def on_power_reading(self, watts: float) -> None:
        self._newest_w = watts

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self._take_in(scheduler.num_running_seqs)
        most = scheduler.scheduler_config.max_num_seqs
        wanted = max(min(self._min_seqs, most), min(most, self._affordable()))
        cap = most if self._cap is None else min(self._cap, most)
        room = max(1, math.ceil(self._slack * most))
        settled = scheduler.now_s - self._changed_at_s >= self._dwell_s
        if wanted < cap or (settled and (wanted >= cap + room or wanted == most > cap)):
            self._changed_at_s = scheduler.now_s
            cap = wanted
        self._cap = cap
        return cap

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        return first_victims(self._order, running, num_to_evict)

    def _take_in(self, num_running: int) -> None:
        """A sensor is read less often than steps are made: a value that repeats is not new."""
        watts = self._newest_w
        if watts is None or (self._anchor is not None and self._anchor[0] == watts):
            return
        self._anchor = (watts, num_running)
        self.watts.learn(watts, num_running)

    def _affordable(self) -> int:
        """From what was drawn by so many, rather than from the fit alone: it may be young."""
        per_sequence_w = max(self.watts.per_sequence_w, self._prior_w / 4)
        if self._anchor is None:
            return int(self._budget_w / per_sequence_w)
        drawn_w, ran = self._anchor
        return ran + math.floor((self._budget_w - drawn_w) / per_sequence_w)
