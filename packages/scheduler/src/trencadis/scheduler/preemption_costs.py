"""Predictions that decide preemptions: its costs, and how long a request waits without it.

They are exponentially weighted moving averages of the measurements of past steps.
"""

from __future__ import annotations

import math

import attrs

from trencadis.kvcache import Direction
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.output import SchedulerOutput
from trencadis.scheduler.validators import Validator, is_number, number

NEWEST_WEIGHT = 0.2
"""Weight of the newest measurement in a moving average."""


_SECONDS = Validator(
    "a number", is_number, optional=True, remedy="pass seconds, or None", error=ConfigError
)
_COST = number(0)


@attrs.frozen(kw_only=True)
class StepTiming:
    """Measured durations of the parts of one step, in seconds; None: not measured.

    A duration that is negative or not finite, as of a clock that stepped, does not count. Raises
    `ConfigError` for one that is not a number.
    """

    prompts_s: float | None = attrs.field(default=None, validator=_SECONDS)
    swap_out_s: float | None = attrs.field(default=None, validator=_SECONDS)
    swap_in_s: float | None = attrs.field(default=None, validator=_SECONDS)


@attrs.define(kw_only=True)
class PreemptionCosts:
    """Seconds per swapped block and per prefill token, averaged over measured steps.

    The initial values for swaps are those of seed 003, section 5. The one for prefill is that of a
    model of 8 billion parameters (16e9 operations per token) at 400e12 operations per second.
    ``blocks_per_state``: the bytes of a sequence's state, of layers that keep one, in blocks.
    Raises `ConfigError` for anything but finite numbers of at least 0.
    """

    swap_out_s_per_block: float = attrs.field(default=40e-6, validator=_COST)
    swap_in_s_per_block: float = attrs.field(default=50e-6, validator=_COST)
    prefill_s_per_token: float = attrs.field(default=40e-6, validator=_COST)
    blocks_per_state: float = attrs.field(default=0.0, validator=_COST)

    def update(self, output: SchedulerOutput, timing: StepTiming) -> None:
        """Update the averages with the durations of a step."""
        num_blocks = dict.fromkeys(Direction, 0.0)
        for direction, copies in output.moves:
            num_blocks[direction] += len(copies)
        for direction, copies in output.state_moves or ():
            num_blocks[direction] += len(copies) * self.blocks_per_state
        num_tokens = sum(len(chunk.token_ids) for chunk in output.prompts)
        self.swap_out_s_per_block = _updated(
            self.swap_out_s_per_block, timing.swap_out_s, num_blocks[Direction.OUT]
        )
        self.swap_in_s_per_block = _updated(
            self.swap_in_s_per_block, timing.swap_in_s, num_blocks[Direction.IN]
        )
        self.prefill_s_per_token = _updated(self.prefill_s_per_token, timing.prompts_s, num_tokens)

    def swap_s(self, group: SequenceGroup) -> float:
        """Seconds to swap a running group out and in again."""
        per_block = self.swap_out_s_per_block + self.swap_in_s_per_block
        return self._num_blocks(group) * per_block

    def _num_blocks(self, group: SequenceGroup) -> float:
        """The blocks of a group, and its states in blocks."""
        of_states = len(group.allocated_seqs) * self.blocks_per_state
        return group.get_num_kv_blocks() + of_states

    def recompute_s(self, group: SequenceGroup) -> float:
        """Seconds to recompute a running group; the prompt counts once."""
        num_computed = [sequence.num_computed_tokens for sequence in group.allocated_seqs]
        num_tokens = sum(num_computed)
        if len(num_computed) > 1:
            num_shared = min(group.request.num_prompt_tokens, *num_computed)
            num_tokens -= num_shared * (len(num_computed) - 1)
        return num_tokens * self.prefill_s_per_token

    def resume_s(self, group: SequenceGroup, *, swapped: bool) -> float:
        """Seconds until a group can run again: its swap-in latency, or its recomputation."""
        if swapped:
            return self._num_blocks(group) * self.swap_in_s_per_block
        return self.recompute_s(group)


class CompletionRate:
    """Averages the interval between finished sequences, in seconds."""

    def __init__(self) -> None:
        self._num_finished = 0
        self._last_finished_s = 0.0
        self._interval_s: float | None = None

    def update(self, num_finished: int, now: float) -> None:
        """Take the number of sequences that have finished since the start, at ``now`` (seconds)."""
        num_new = num_finished - self._num_finished
        if not num_new:
            return
        interval_s = (now - self._last_finished_s) / num_new
        average_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = _moving_average(average_s, interval_s)
        self._last_finished_s = now
        self._num_finished = num_finished

    def expected_wait_s(self, now: float) -> float:
        """Seconds that a new request waits until a sequence finishes.

        This is never less than the time since the last sequence finished.
        """
        return max(now - self._last_finished_s, self._interval_s or 0.0)


def _updated(average: float, seconds: float | None, count: float) -> float:
    if seconds is None or not count or not (0 <= seconds < math.inf):
        return average
    return _moving_average(average, seconds / count)


def _moving_average(average: float, measurement: float) -> float:
    """The average with one more measurement."""
    return average + NEWEST_WEIGHT * (measurement - average)
