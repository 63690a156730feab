"""Limits prefill first and decode sequences second: prefill is the phase that draws the power."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.thermal.phase_power import PhasePowerModel
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.proportional import MAX_TARGET_C, PROPORTIONAL_BAND_C
from trencadis.scheduler.thermal.readings import is_power, is_temperature
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, first_victims, victim_order
from trencadis.scheduler.validators import integer, number, one_of

WINDOW_S = 1.0
"""Seconds over which the load is averaged; the limits change at most once in each. Sensors are read
once a second (`ReaderConfig.period_s`)."""

MAX_CUT = 4.0
"""A cut leaves at least a quarter of the prefill limit, and of the sequences three quarters."""

_MAX_RISE = 2.0
"""A rise at most doubles a limit."""

_RAISE_SHARE = 0.5
"""A rise uses this share of the slack: the device takes longer than the dwell time to warm up."""

_DEADBAND = 0.03
"""An excess or slack of less than this share of the highest power changes nothing."""


@attrs.frozen
class _Load:
    """The means of a window: prefill tokens per s, running sequences, seconds of a step."""

    prefill_tokens_per_s: float
    num_running: float
    step_s: float


@attrs.define(eq=False)
class TwoPhaseThermalPolicy(SchedulerThermalPolicy):
    """Sheds watts where they cost least: prefill tokens, then decode sequences, then swaps.

    Prefill is bound by compute and draws up to the power limit of a device; decode is bound by
    memory and draws less than half of it (137 to 300 of 700 W on an H200: Ma et al., "The Illusion
    of Power Capping in LLM Decode", arXiv 2605.11999). Fewer decode sequences hardly cool it, but
    each costs a request its tokens.

    Watts to shed, in each window of a second: those above ``budget_w``, and those above what the
    temperature allows. At ``target_temp_c`` that is the highest power that was measured, and
    `PROPORTIONAL_BAND_C` degrees C above only the power without load. `PhasePowerModel` learns what
    a prefill token and a sequence cost; where no power is measured, its estimates stand for it.

    The order of cuts, one in each window:

    1. the prefill limit falls, by what the estimate says, to a quarter at most, and in all to
       ``min_prefill_tokens``;
    2. no new sequence starts: the cap is what runs now, and follows while sequences finish;
    3. after ``dwell_s`` of that, sequences are preempted, at most a quarter of them in a window.

    The guard: while a request has waited for its first token longer than ``max_ttft_s``, and steps
    take less than ``max_itl_s``, step 1 is left out. The prefill tokens that are left then go to
    the prompts that have started. Longer steps are shortened by fewer prefill tokens, whatever
    waits.

    The way back is the reverse: sequences first, then prefill. A rise uses half of the slack,
    at most doubles a limit, and comes ``dwell_s`` after the last change. A cut after a rise waits
    as long. So the limits reverse their direction at most once in ``dwell_s``. Neither is ever
    below 1, and an admitted prompt always finishes.

    Values that are no temperature or power are ignored. The metadata of each setting has its
    ``help`` text. Raises `ConfigError`.
    """

    target_temp_c: float = attrs.field(
        default=82.0,
        validator=number(0, MAX_TARGET_C, exclusive_low=True),
        metadata={"help": "Target temperature of the hottest device, in degrees C."},
    )
    budget_w: float | None = attrs.field(
        default=None,
        validator=number(0, exclusive_low=True, optional=True),
        metadata={"help": "Power budget of all devices together, in watts; None: no budget."},
    )
    max_ttft_s: float = attrs.field(
        default=10.0,
        validator=number(0),
        metadata={
            "help": "Wait for a first token, in seconds, above which sequences are cut instead of "
            "prefill."
        },
    )
    max_itl_s: float = attrs.field(
        default=0.2,
        validator=number(0),
        metadata={"help": "Duration of a step, in seconds, above which prefill is cut first."},
    )
    dwell_s: float = attrs.field(
        default=5.0,
        validator=number(0, exclusive_low=True),
        metadata={
            "help": "Minimum time between a change of a limit and a rise, and between a rise and a "
            "cut, in seconds."
        },
    )
    min_prefill_tokens: int = attrs.field(
        default=64,
        validator=integer(1),
        metadata={"help": "Minimum of the prefill limit, in tokens of a step."},
    )
    min_seqs: int = attrs.field(
        default=1,
        validator=integer(1),
        metadata={"help": "Minimum of the cap, in sequences."},
    )
    victims: str = attrs.field(
        default="lru",
        validator=one_of(*VICTIM_ORDERS),
        metadata={"help": f"Order of the victims: {', '.join(VICTIM_ORDERS)}."},
    )
    _model: PhasePowerModel = attrs.field(init=False, factory=PhasePowerModel)
    _temp_c: float | None = attrs.field(init=False, default=None)
    _reading_w: float | None = attrs.field(init=False, default=None)
    _measured_w: float | None = attrs.field(init=False, default=None)
    """The reading that was last given to the model: a value that repeats is no new measurement."""
    _highest_w: float = attrs.field(init=False, default=0.0)
    """The highest power that was believed."""
    _prefill_limit: int | None = attrs.field(init=False, default=None)
    _cap: int | None = attrs.field(init=False, default=None)
    """None: neither limits anything."""
    _held_at_s: float | None = attrs.field(init=False, default=None)
    """Since when no new sequence starts; None while some may."""
    _changed_at_s: float = attrs.field(init=False, default=-math.inf)
    _last_was_rise: bool = attrs.field(init=False, default=False)
    # The window of the load.
    _since_s: float | None = attrs.field(init=False, default=None)
    _last_s: float = attrs.field(init=False, default=0.0)
    _tokens_before: int = attrs.field(init=False, default=0)
    _num_steps: int = attrs.field(init=False, default=0)
    _sequence_seconds: float = attrs.field(init=False, default=0.0)

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        del gpu_idx  # always the hottest device
        if is_temperature(temp_c):
            self._temp_c = float(temp_c)

    def on_power_reading(self, watts: float) -> None:
        if is_power(watts):
            self._reading_w = float(watts)

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        load = self._measure_load(scheduler)
        if load is not None:
            self._decide(load, scheduler)
        most = scheduler.scheduler_config.max_num_seqs
        return most if self._cap is None else min(self._cap, most)

    def get_max_prefill_tokens(self, scheduler: SchedulerView) -> int | None:
        return self._prefill_limit

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        return first_victims(victim_order(self.victims), running, num_to_evict)

    def retarget(self, target_temp_c: float) -> bool:
        """Set the target temperature. Raises `ConfigError`, as the constructor does."""
        self.target_temp_c = target_temp_c
        return True

    def _measure_load(self, scheduler: SchedulerView) -> _Load | None:
        """Count a step; the load of the window that ends with it, if one does."""
        now_s = scheduler.now_s
        if self._since_s is None:
            self._begin_window(scheduler)
            return None
        elapsed_s = now_s - self._last_s
        if elapsed_s > 0:  # an order asks a second time in the same step
            self._num_steps += 1
            self._sequence_seconds += elapsed_s * scheduler.num_running_seqs
            self._last_s = now_s
        seconds = now_s - self._since_s
        if seconds < WINDOW_S:
            return None
        load = _Load(
            max(0, scheduler.num_prefill_tokens - self._tokens_before) / seconds,
            self._sequence_seconds / seconds,
            seconds / self._num_steps,
        )
        self._begin_window(scheduler)
        return load

    def _begin_window(self, scheduler: SchedulerView) -> None:
        self._since_s = self._last_s = scheduler.now_s
        self._tokens_before = scheduler.num_prefill_tokens
        self._num_steps = 0
        self._sequence_seconds = 0.0

    def _decide(self, load: _Load, scheduler: SchedulerView) -> None:
        watts = self._believed_watts(load)
        self._highest_w = max(self._highest_w, watts)
        excess_w = watts - self._allowed_w()
        deadband_w = _DEADBAND * self._highest_w
        has_dwelled = scheduler.now_s - self._changed_at_s >= self.dwell_s
        if excess_w > deadband_w:
            if has_dwelled or not self._last_was_rise:
                self._cut(excess_w, load, scheduler)
        else:
            self._held_at_s = None
            if excess_w < -deadband_w and has_dwelled:
                self._raise(-_RAISE_SHARE * excess_w, load, scheduler)

    def _believed_watts(self, load: _Load) -> float:
        """The power of the window: measured, if the reading is new, otherwise estimated."""
        running, rate = load.num_running, load.prefill_tokens_per_s
        reading_w = self._reading_w
        if reading_w is None or reading_w == self._measured_w:
            return self._model.predict(rate, running)
        self._measured_w = reading_w
        believed_w = self._model.observe(reading_w, rate, running)
        return self._model.predict(rate, running) if believed_w is None else believed_w

    def _allowed_w(self) -> float:
        """The watts that the budget and the temperature allow; infinite if nothing limits them."""
        allowed_w = math.inf if self.budget_w is None else self.budget_w
        if self._temp_c is None:
            return allowed_w
        base_w = min(self._model.base_w, self._highest_w)
        share = (self._temp_c - self.target_temp_c) / PROPORTIONAL_BAND_C
        return min(allowed_w, self._highest_w - share * (self._highest_w - base_w))

    def _cut(self, excess_w: float, load: _Load, scheduler: SchedulerView) -> None:
        """Lower the first limit of the order that is not at its minimum and not guarded."""
        most = scheduler.scheduler_config.max_num_batched_tokens
        limit = most if self._prefill_limit is None else self._prefill_limit
        is_guarded = load.step_s < self.max_itl_s and scheduler.longest_wait_s > self.max_ttft_s
        if limit > self.min_prefill_tokens and not is_guarded:
            self._cut_prefill(excess_w, load, limit, scheduler.now_s)
        else:
            self._cut_sequences(excess_w, scheduler)

    def _cut_prefill(self, excess_w: float, load: _Load, limit: int, now_s: float) -> None:
        used = min(limit, load.prefill_tokens_per_s * load.step_s)
        left = used - excess_w * load.step_s / max(self._model.prefill_j, 1e-9)
        target = max(self.min_prefill_tokens, limit / MAX_CUT, min(left, limit - 1))
        self._change(int(target), self._cap, now_s, is_rise=False)

    def _cut_sequences(self, excess_w: float, scheduler: SchedulerView) -> None:
        now_s, num_running = scheduler.now_s, scheduler.num_running_seqs
        most = scheduler.scheduler_config.max_num_seqs
        cap = most if self._cap is None else min(self._cap, most)
        target = min(cap, num_running)
        if self._held_at_s is None:
            self._held_at_s = now_s
        elif now_s - self._held_at_s >= self.dwell_s:
            num_excess = math.ceil(min(excess_w / max(self._model.sequence_w, 1e-9), num_running))
            target = min(cap, num_running - min(num_excess, math.ceil(num_running / MAX_CUT)))
        target = max(min(self.min_seqs, most), target)
        if target < cap:
            self._change(self._prefill_limit, target, now_s, is_rise=False)

    def _raise(self, slack_w: float, load: _Load, scheduler: SchedulerView) -> None:
        """Raise the cap; where that limits nothing, the prefill limit."""
        config, now_s = scheduler.scheduler_config, scheduler.now_s
        if self._cap is not None:
            affordable = min(slack_w / max(self._model.sequence_w, 1e-9), self._cap)
            cap = self._cap + max(1, int(affordable * (_MAX_RISE - 1)))
            self._change(
                self._prefill_limit,
                cap if cap < config.max_num_seqs else None,
                now_s,
                is_rise=True,
            )
        elif self._prefill_limit is not None:
            limit = self._prefill_limit
            more = min(slack_w / max(self._model.prefill_j, 1e-9), config.max_num_batched_tokens)
            target = (load.prefill_tokens_per_s + more) * load.step_s
            target = max(limit + 1, min(target, limit * _MAX_RISE))
            is_limit = target < config.max_num_batched_tokens
            self._change(int(target) if is_limit else None, None, now_s, is_rise=True)

    def _change(
        self, prefill_limit: int | None, cap: int | None, now_s: float, *, is_rise: bool
    ) -> None:
        self._prefill_limit, self._cap = prefill_limit, cap
        self._changed_at_s, self._last_was_rise = now_s, is_rise
