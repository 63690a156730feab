"""Taking a running group off the device: by copying its cache to the host or by giving it up.

Which of the two is the cheaper is decided from what copies and prompt tokens have taken so far;
those measurements come in from whoever carries steps out.
"""

from __future__ import annotations

import math

import attrs

from trencadis.kvcache import Direction
from trencadis.scheduler.batch import StepBuilder
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.memory import GroupMemory
from trencadis.scheduler.output import SchedulerOutput

_WEIGHT = 0.2
"""Of the newest measurement in a running mean."""


@attrs.frozen(kw_only=True)
class StepTiming:
    """Measured seconds of the parts of one step; None for a part that was not measured."""

    prompts_s: float | None = None
    swap_out_s: float | None = None
    swap_in_s: float | None = None


@attrs.define(kw_only=True)
class PreemptionCosts:
    """Seconds per block swapped and per prompt token computed, learned from `StepTiming`.

    The priors for swaps are those of seed 003, section 5; that for a token is a model of 8 billion
    parameters at 400e12 operations per second.
    """

    swap_out_s_per_block: float = 40e-6
    swap_in_s_per_block: float = 50e-6
    prefill_s_per_token: float = 40e-6

    def learn(self, output: SchedulerOutput, timing: StepTiming) -> None:
        """Take in what a step took."""
        moved = dict.fromkeys(Direction, 0)
        for direction, copies in output.moves:
            moved[direction] += len(copies)
        tokens = sum(len(chunk.token_ids) for chunk in output.prompts)
        self.swap_out_s_per_block = _mean(
            self.swap_out_s_per_block, timing.swap_out_s, moved[Direction.OUT]
        )
        self.swap_in_s_per_block = _mean(
            self.swap_in_s_per_block, timing.swap_in_s, moved[Direction.IN]
        )
        self.prefill_s_per_token = _mean(self.prefill_s_per_token, timing.prompts_s, tokens)

    def swap_s(self, group: SequenceGroup) -> float:
        """Seconds to copy a running group out and in again."""
        per_block = self.swap_out_s_per_block + self.swap_in_s_per_block
        return group.get_num_kv_blocks() * per_block

    def recompute_s(self, group: SequenceGroup) -> float:
        """Seconds to compute again what a running group has computed; its prompt only once."""
        prompt = len(group.request.prompt_token_ids)
        computed = [one.num_computed for one in group.active]
        shared = min(prompt, *computed) if len(computed) > 1 else 0
        return (sum(computed) - shared * (len(computed) - 1)) * self.prefill_s_per_token

    def return_s(self, group: SequenceGroup, *, swapped: bool) -> float:
        """Seconds that a group needs to come back: its swap-in latency, or its recomputation."""
        if swapped:
            return group.get_num_kv_blocks() * self.swap_in_s_per_block
        return self.recompute_s(group)


def _mean(known: float, seconds: float | None, count: int) -> float:
    if seconds is None or not count or not (0 <= seconds < math.inf):
        return known
    return known + _WEIGHT * (seconds / count - known)


class QueueTime:
    """How long a new request will wait for a seat: the mean interval between seats given back."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._interval_s: float | None = None

    def released(self, seats: int, now: float) -> None:
        """So many sequences have ended at ``now``."""
        interval = (now - self._since_s) / seats
        known = interval if self._interval_s is None else self._interval_s
        self._interval_s = known + _WEIGHT * (interval - known)
        self._since_s = now

    def estimate(self, now: float) -> float:
        """Seconds; never below the time since a seat was last given back."""
        return max(now - self._since_s, self._interval_s or 0.0)


class Preemptor:
    """Evicts groups. ``num_swaps`` and ``num_recomputes`` count since the start."""

    def __init__(
        self, ledger: Ledger, memory: GroupMemory, costs: PreemptionCosts, queue_time: QueueTime
    ) -> None:
        self.num_swaps = 0
        self.num_recomputes = 0
        self._ledger = ledger
        self._memory = memory
        self._costs = costs
        self._queue_time = queue_time

    def evict(self, group: SequenceGroup, step: StepBuilder) -> None:
        """RUNNING to SWAPPED, by the cheaper way there is."""
        step.preempted.extend(one.seq_id for one in group.active)
        self._ledger.suspend(group)
        if self._by_swap(group):
            self._memory.swap_out(group, step.now)
            self.num_swaps += 1
        else:
            self._memory.drop(group)
            self.num_recomputes += 1

    def make_room(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Evict from the last turn up until a running group can grow; False if it cannot yet.

        Blocks of a swap that is still under way are waited for rather than taken from one more
        group, and so is an arriving group, once there is nobody else to give way.
        """
        memory, ledger = self._memory, self._ledger
        while (needed := memory.missing(group)) > memory.num_free:
            last = ledger.running.last()
            if needed <= memory.num_free + memory.leaving or (last is group and ledger.arriving):
                return False
            self.evict(last, step)
            if last is group:
                return False
        return True

    def is_worth_it(self, group: SequenceGroup, now: float) -> bool:
        """Swap or wait: whether a new request would wait longer than the victim takes to return.

        Otherwise evicting makes the slowest requests slower to save the middle ones time (seed
        003, 4.1.2), and admissions are held until a seat comes free.
        """
        back_s = self._costs.return_s(group, swapped=self._by_swap(group))
        return self._queue_time.estimate(now) > back_s

    def _by_swap(self, group: SequenceGroup) -> bool:
        """Copying is possible, and not slower than computing again."""
        cheaper = self._costs.swap_s(group) <= self._costs.recompute_s(group)
        return cheaper and self._memory.can_swap_out(group)
