"""Limits prefill first and decode sequences second: prefill is the phase that draws the power."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trencadis.scheduler.thermal.phase_power import PhasePowerModel, StepTimeModel
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView
from trencadis.scheduler.thermal.proportional import MAX_TARGET_C, PROPORTIONAL_BAND_C
from trencadis.scheduler.thermal.readings import is_power, is_temperature
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, Victim, first_victims, victim_order
from trencadis.scheduler.validators import POSITIVE, integer, number, one_of, setting

WINDOW_S = 1.0
"""Seconds over which the load is averaged; the limits change at most once in each. Sensors are read
once a second (`ReaderConfig.period_s`)."""

MAX_CUT = 4.0
"""A cut leaves at least a quarter of the prefill limit, and of the sequences three quarters."""

_MAX_RISE = 2.0
"""A rise at most doubles a limit."""

_RAISE_SHARE = 0.5
"""More sequences use this share of the slack: to preempt them again would cost copies."""

_DEADBAND = 0.03
"""An excess or slack of less than this share of the highest power changes no sequences."""

_MIN_PREFILL_J, _MIN_SEQUENCE_W = 1e-6, 0.05
"""The estimates count as at least this, so that what costs nothing is not cut without end."""

_MIN_CHANGE = 0.2
"""A prefill limit changes by at least this share of itself."""


@attrs.frozen
class _Load:
    """The means of a window: prefill tokens per s, running sequences, seconds of a step.

    ``step_s`` is 0 where no step is known to have followed the one before it at once.
    """

    prefill_tokens_per_s: float
    num_running: float
    step_s: float


@attrs.define(eq=False)
class TwoPhaseThermalPolicy(SchedulerThermalPolicy):
    """Lowers the power where it costs least: prefill tokens, then decode sequences, then swaps.

    Prefill is bound by compute and draws up to the power limit of a device; decode is bound by
    memory and draws less than half of it (137 to 300 of 700 W on an H200: Ma et al., "The Illusion
    of Power Capping in LLM Decode", arXiv 2605.11999). Fewer decode sequences hardly cool it, but
    each costs a request its tokens.

    Watts to save, in each window of a second: those above ``budget_w``, and those above what the
    temperature allows. At ``target_temp_c`` that is the highest power that was measured, and
    `PROPORTIONAL_BAND_C` degrees C above only the power without load. `PhasePowerModel` learns what
    a prefill token and a sequence cost; where no power is measured, its estimates stand for it.

    The order of cuts, one in each window:

    1. the prefill limit falls to the number of tokens with which steps in a row would draw what is
       allowed (`StepTimeModel`), to a quarter at most, and in all to ``min_prefill_tokens``;
    2. no new sequence starts: the cap is what runs now, and follows while sequences finish;
    3. after ``dwell_s`` of that, sequences are preempted, at most a quarter of them in a window.

    The guard: while a request has waited for its first token longer than ``max_ttft_s``, and steps
    take less than ``max_itl_s``, step 1 is left out. The prefill tokens that are left then go to
    the prompts that have started. Longer steps are shortened by fewer prefill tokens, whatever
    waits.

    The way back is the reverse: sequences first, for half of the slack, then prefill. A rise at
    most doubles a limit, and comes ``dwell_s`` after the last change. A cut after a rise waits
    as long. So the limits reverse their direction at most once in ``dwell_s``. Neither is ever
    below 1, and an admitted prompt always finishes.

    Values that are neither a temperature nor a power are ignored. The metadata of each setting has
    its ``help`` text. Raises `ConfigError`.
    """

    target_temp_c: float = setting(
        82.0,
        number(0, MAX_TARGET_C, exclusive_low=True),
        "Target temperature of the hottest device, in degrees C.",
    )
    budget_w: float | None = setting(
        None,
        number(0, exclusive_low=True, optional=True),
        "Power budget of all devices together, in watts; None: no budget.",
    )
    max_ttft_s: float = setting(
        10.0,
        number(0),
        "Wait for a first token, in seconds, above which sequences are cut instead of prefill.",
    )
    max_itl_s: float = setting(
        0.2, number(0), "Duration of a step, in seconds, above which prefill is cut first."
    )
    dwell_s: float = setting(
        5.0,
        POSITIVE,
        "Minimum time between a change of a limit and a rise, and between a rise and a "
        "cut, in seconds.",
    )
    min_prefill_tokens: int = setting(
        128,
        integer(1),
        "Minimum of the prefill limit, in tokens of a step; other limits are multiples "
        "of it, as sizes of prompt buckets are.",
    )
    min_seqs: int = setting(1, integer(1), "Minimum of the cap, in sequences.")
    victims: str = setting(
        "lru", one_of(VICTIM_ORDERS), f"Order of the victims: {', '.join(VICTIM_ORDERS)}."
    )
    _model: PhasePowerModel = attrs.field(init=False, factory=PhasePowerModel)
    _step_time: StepTimeModel = attrs.field(init=False, factory=StepTimeModel)
    _temp_c: float | None = attrs.field(init=False, default=None)
    _reading_w: float | None = attrs.field(init=False, default=None)
    _measured_w: float | None = attrs.field(init=False, default=None)
    """The reading that was last given to the model: a repeated value is not a new measurement."""
    _highest_w: float = attrs.field(init=False, default=0.0)
    """The highest power of two windows in a row: believed, and measured where there is a sensor."""
    _last_w: float = attrs.field(init=False, default=0.0)
    """The power of the last window."""
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
    _last_tokens: int = attrs.field(init=False, default=0)
    _tokens_before: int = attrs.field(init=False, default=0)
    _num_steps: int = attrs.field(init=False, default=0)
    _step_seconds: float = attrs.field(init=False, default=0.0)
    """The seconds of ``_num_steps`` steps, without the time in which nothing ran."""
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

    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> Sequence[Victim]:
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
            tokens = scheduler.num_prefill_tokens
            if scheduler.num_running_seqs:  # otherwise the engine may have been idle since
                self._step_time.observe(max(0, tokens - self._last_tokens), elapsed_s)
                self._num_steps += 1
                self._step_seconds += elapsed_s
            self._sequence_seconds += elapsed_s * scheduler.num_running_seqs
            self._last_s, self._last_tokens = now_s, tokens
        seconds = now_s - self._since_s
        if seconds < WINDOW_S:
            return None
        load = _Load(
            max(0, scheduler.num_prefill_tokens - self._tokens_before) / seconds,
            self._sequence_seconds / seconds,
            self._step_seconds / max(1, self._num_steps),
        )
        self._begin_window(scheduler)
        return load

    def _begin_window(self, scheduler: SchedulerView) -> None:
        self._since_s = self._last_s = scheduler.now_s
        self._tokens_before = self._last_tokens = scheduler.num_prefill_tokens
        self._num_steps = 0
        self._step_seconds = 0.0
        self._sequence_seconds = 0.0

    def _decide(self, load: _Load, scheduler: SchedulerView) -> None:
        watts = self._believed_watts(load)
        self._note_highest(watts)
        allowed_w = self._allowed_w()
        has_dwelled = scheduler.now_s - self._changed_at_s >= self.dwell_s
        may_cut = has_dwelled or not self._last_was_rise
        if may_cut and self._cuts_prefill(allowed_w, load, scheduler):
            return
        excess_w = watts - allowed_w
        deadband_w = _DEADBAND * self._highest_w
        if excess_w > deadband_w:
            if may_cut:
                self._cut_sequences(excess_w, scheduler)
            return
        self._held_at_s = None
        if has_dwelled and excess_w < 0:
            self._raise(-_RAISE_SHARE * excess_w, allowed_w, load, scheduler)

    def _note_highest(self, watts: float) -> None:
        if self._measured_w is not None:
            watts = min(watts, self._measured_w)
        # Two windows in a row: one wrong measurement must not lift the limits permanently.
        self._highest_w = max(self._highest_w, min(watts, self._last_w))
        self._last_w = watts

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
        share = (self._temp_c - self.target_temp_c) / PROPORTIONAL_BAND_C
        if share <= -1:
            return allowed_w
        base_w = min(self._model.base_w, self._highest_w)
        span_w = self._highest_w - base_w
        if share < 0:
            # What a light load has drawn says little about what the device may draw.
            span_w = max(span_w, base_w)
        return min(allowed_w, self._highest_w - share * span_w)

    def _affordable_prefill(self, allowed_w: float, load: _Load) -> float:
        """The most prefill tokens of a step, if every step has as many, under ``allowed_w``."""
        if allowed_w == math.inf:
            return math.inf
        left_w = allowed_w - self._model.predict(0.0, load.num_running)
        return self._step_time.tokens_of_rate(left_w / max(self._model.prefill_j, _MIN_PREFILL_J))

    def _cuts_prefill(self, allowed_w: float, load: _Load, scheduler: SchedulerView) -> bool:
        """Lower the prefill limit to what is affordable; False if it is not to be lowered."""
        most = scheduler.scheduler_config.max_num_batched_tokens
        limit = most if self._prefill_limit is None else self._prefill_limit
        lowest = min(self.min_prefill_tokens, limit)
        affordable = self._affordable_prefill(allowed_w, load)
        if affordable >= limit:
            return False
        target = max(lowest, self._rounded(max(affordable, limit / MAX_CUT)))
        is_guarded = load.step_s < self.max_itl_s and scheduler.longest_wait_s > self.max_ttft_s
        if is_guarded or limit == lowest or target > max(lowest, (1 - _MIN_CHANGE) * limit):
            return False
        self._change(target, self._cap, scheduler.now_s, is_rise=False)
        return True

    def _rounded(self, num_tokens: float) -> int:
        """The next lower multiple of ``min_prefill_tokens``."""
        return int(num_tokens) // self.min_prefill_tokens * self.min_prefill_tokens

    def _cut_sequences(self, excess_w: float, scheduler: SchedulerView) -> None:
        now_s, num_running = scheduler.now_s, scheduler.num_running_seqs
        most = scheduler.scheduler_config.max_num_seqs
        cap = most if self._cap is None else min(self._cap, most)
        target = min(cap, num_running)
        if self._held_at_s is None:
            self._held_at_s = now_s
        elif now_s - self._held_at_s >= self.dwell_s:
            num_excess = math.ceil(
                min(excess_w / max(self._model.sequence_w, _MIN_SEQUENCE_W), num_running)
            )
            target = min(cap, num_running - min(num_excess, math.ceil(num_running / MAX_CUT)))
        target = max(min(self.min_seqs, most), target)
        if target < cap:
            self._change(self._prefill_limit, target, now_s, is_rise=False)

    def _raise(
        self, slack_w: float, allowed_w: float, load: _Load, scheduler: SchedulerView
    ) -> None:
        """Raise the cap; where that limits nothing, the prefill limit."""
        config, now_s = scheduler.scheduler_config, scheduler.now_s
        if self._cap is not None:
            num_more = int(min(slack_w / max(self._model.sequence_w, _MIN_SEQUENCE_W), self._cap))
            cap = self._cap + max(1, num_more)
            new_cap = cap if cap < config.max_num_seqs else None
            self._change(self._prefill_limit, new_cap, now_s, is_rise=True)
        elif self._prefill_limit is not None:
            limit = self._prefill_limit
            affordable = min(self._affordable_prefill(allowed_w, load), _MAX_RISE * limit)
            if affordable >= config.max_num_batched_tokens:
                self._change(None, None, now_s, is_rise=True)
            elif affordable > (1 + _MIN_CHANGE) * limit:
                target = max(self._rounded(affordable), limit + self.min_prefill_tokens)
                self._change(target, None, now_s, is_rise=True)

    def _change(
        self, prefill_limit: int | None, cap: int | None, now_s: float, *, is_rise: bool
    ) -> None:
        self._prefill_limit, self._cap = prefill_limit, cap
        self._changed_at_s, self._last_was_rise = now_s, is_rise
