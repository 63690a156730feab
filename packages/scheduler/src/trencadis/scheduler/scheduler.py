"""The scheduler: continuous batching with chunked prefill over a paged KV cache.

`Scheduler.schedule` decides a step and `Scheduler.update` applies its results; the two alternate,
or, with ``max_steps_in_flight`` 2, the next step is decided while the device computes one.
The scheduler knows no model and no device. `Scheduler` connects its parts:

- `GroupStates` owns the queues, `GroupBlocks` the blocks of groups.
- `AdmissionControl` checks new requests, admits and resumes groups.
- `RunningLimit` and `ControlHandler` limit how many run; `LimitEnforcement` enforces it.
- `Preemptor` preempts them, also for these.
- `StepResultProcessor` applies the results of a step.
"""

from __future__ import annotations

import math
import time
from collections import abc
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import attrs

from trencadis.kvcache import BlockManager, Defragmenter, Direction, StateSlots
from trencadis.scheduler.admission import AdmissionControl
from trencadis.scheduler.beams import Candidate
from trencadis.scheduler.clock import SteadyClock
from trencadis.scheduler.config import SchedulerConfig, SettingsInForce
from trencadis.scheduler.control import BatchControl, BatchControlResult, ControlHandler
from trencadis.scheduler.errors import (
    CannotCopy,
    ConfigError,
    InvalidResults,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.fair_share import Client
from trencadis.scheduler.group import Sequence, SequenceGroup, SequenceStatus
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupStates
from trencadis.scheduler.limit_enforcement import LimitEnforcement, RunningGroups
from trencadis.scheduler.output import SchedulerOutput, SchedulingStep, SequenceUpdate
from trencadis.scheduler.preemption import Preemptor
from trencadis.scheduler.preemption_costs import CompletionRate, PreemptionCosts, StepTiming
from trencadis.scheduler.request import FinishReason, Request
from trencadis.scheduler.running_limit import RunningLimit
from trencadis.scheduler.step_results import StepResultProcessor, StepResults
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.validators import instance_of, is_integer

if TYPE_CHECKING:
    from trencadis.kvcache import TierTransfers


class Scheduler:
    """Decides in each step which sequences run, and keeps the state of all requests.

    When blocks run out, it preempts the last running group in (priority, arrival) order, so the
    first group always advances. A request that later ones have bypassed ``max_bypasses`` times
    precedes them, so every admitted request finishes, whatever arrives (`AdmissionControl`).
    Requests of different clients start in the order of the service that these got, and a full queue
    is closed to a client that has its part of it (`ClientShares`). Once nothing arrives, the
    requests take at most as many steps together as one after another with one token a step, each
    recomputed once.

    ``thermal`` limits the running sequences by temperature or power. ``defragmenter`` must be one
    of ``blocks``. ``state_slots``: those of a model with layers that keep a state, one for each of
    ``max_num_seqs`` sequences at least; for prefix hits ``blocks`` needs `StateSnapshots`.
    ``costs`` are updated with the measured durations of steps. ``clock`` returns seconds and need
    not be monotonic: a step back counts as no time. Not thread-safe, except for `control`. What
    `schedule` calls, such as a thermal policy, may only read: other calls raise `StepOrderError`
    meanwhile. Raises `ConfigError` for an argument of another type, and `CannotCopy` if it is
    copied or pickled.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        thermal: ThermalGuard | None = None,
        defragmenter: Defragmenter | None = None,
        costs: PreemptionCosts | None = None,
        state_slots: StateSlots | None = None,
        tiers: TierTransfers | None = None,
        clock: abc.Callable[[], float] = time.monotonic,
    ) -> None:
        instance_of(SchedulerConfig).checked("config", config)
        instance_of(BlockManager).checked("blocks", blocks)
        if thermal is not None:
            instance_of(ThermalGuard).checked("thermal", thermal)
        if defragmenter is not None:
            instance_of(Defragmenter).checked("defragmenter", defragmenter)
            if defragmenter.manager is not blocks:
                raise ConfigError(
                    f"defragmenter moves the blocks of {defragmenter.manager!r}, and the scheduler "
                    f"has those of {blocks!r}: make it with Defragmenter(blocks)",
                    "defragmenter",
                )
        if costs is not None:
            instance_of(PreemptionCosts).checked("costs", costs)
        if state_slots is not None:
            instance_of(StateSlots).checked("state_slots", state_slots)
            _check_slots(state_slots, config, blocks)
        _check_tokens_ahead(config, blocks)
        self.costs = costs or PreemptionCosts()
        if tiers is not None:
            from trencadis.kvcache import TierTransfers  # noqa: PLC0415  few hosts have tiers

            instance_of(TierTransfers).checked("tiers", tiers)
        self._tiers = tiers
        self._settings = settings = SettingsInForce(config)
        self._blocks = blocks
        self._defragmenter = defragmenter
        self._clock = SteadyClock(clock)
        self._now = 0.0
        self._states = states = GroupStates(settings, blocks.config)
        self._group_blocks = group_blocks = GroupBlocks(blocks, state_slots)
        self._completion_rate = CompletionRate()
        self._admission = AdmissionControl(settings, states, group_blocks, self.costs, tiers)
        self._preemptor = Preemptor(
            states, group_blocks, self.costs, self._completion_rate, self._admission
        )
        self._running_groups = RunningGroups(states, self._preemptor)
        self._running_limit = RunningLimit(settings, self._running_groups, thermal)
        self._enforcement = LimitEnforcement(settings, states, self._preemptor, self._running_limit)
        self._control = ControlHandler(settings, self._running_groups, self._running_limit, thermal)
        self._results = StepResultProcessor(states, group_blocks, blocks, config.max_model_len)
        self._num_prefill_tokens = 0
        self._num_deferrals = 0
        """Steps in a row in which a prefill got no tokens because of its client."""
        self._to_finish: set[int] = set()
        self._step = 0
        self._lacked_blocks = False
        self._in_flight: list[SchedulerOutput] = []
        """The steps whose results are not known, the oldest first."""
        self._is_deciding = False
        """Whether `schedule` is running."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopy(
            f"a Scheduler with {len(self._states.groups)} requests cannot be copied or pickled, "
            "because both would schedule them: make one, and add the requests to it"
        )

    # State and counters.

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in force; control requests change ``max_num_seqs`` and
        ``max_prefill_tokens``."""
        return self._settings.config

    @property
    def now_s(self) -> float:
        """The time of the current step, in seconds since the scheduler was constructed."""
        return self._now

    @property
    def num_waiting(self) -> int:
        """Requests that have not been admitted."""
        return len(self._states.waiting)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._states.running)

    @property
    def num_running_seqs(self) -> int:
        """Sequences that run. A group counts all its sequences from the start of its prefill."""
        return self._states.num_running_seqs

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that ``schedule()`` has decided and that have no results."""
        return len(self._in_flight)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prefill chunks that were scheduled since the scheduler was made."""
        return self._num_prefill_tokens

    @property
    def longest_wait_s(self) -> float:
        """Seconds since the oldest request came that has no token yet; 0 without such a request.

        Of those that wait to start or are prefilled; preempted ones do not count.
        """
        states = self._states
        groups = [group for group in states.running if _has_no_token(group)]
        oldest = states.waiting.oldest(self._settings.config.max_num_seqs)
        groups += () if oldest is None else (oldest,)
        return max((self._now - group.added_at_s for group in groups), default=0.0)

    @property
    def num_swapped(self) -> int:
        """Requests whose computed blocks are on the host, or on their way back to the device."""
        states = self._states
        return len(states.resume_queue) - states.num_preempted + len(states.swapping_in)

    @property
    def num_preempted(self) -> int:
        """Requests that were preempted without a swap and wait to be recomputed."""
        return self._states.num_preempted

    @property
    def num_preemptions(self) -> int:
        """Preemptions of requests since the start."""
        return self._preemptor.num_swaps + self._preemptor.num_recomputes

    @property
    def num_recomputes(self) -> int:
        """Preemptions since the start that freed the blocks instead of swapping them out."""
        return self._preemptor.num_recomputes

    @property
    def adapters(self) -> abc.Mapping[str, int]:
        """How many requests use each adapter; see `SchedulerConfig`."""
        return dict(self._states.adapters)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do: requests to serve, control requests to answer, or
        blocks to store in tiers."""
        if self._states.groups or self._control.has_control_requests:
            return True
        return self._tiers is not None and self._tiers.can_store

    # Requests.

    def add(self, request: Request, *, is_resumed: bool = False) -> Sequence:
        """Queue a request and return its first sequence, which the caller must not change.

        The others are in its ``group``. Raises `DuplicateRequest`, `QueueFull`, or
        `UnservableRequest` for a request that could not run to its end even alone: an empty
        prompt, a prompt of ``max_model_len`` or more, more sequences than ``max_num_seqs``, or more
        blocks than the KV cache has. Nothing is queued then. ``is_resumed``: it was accepted
        before, by another scheduler, so ``max_waiting`` does not bind it.
        """
        self._require_decided("add")
        self._admission.check(request, is_resumed=is_resumed)
        prefix_keys = self._group_blocks.hash_prompt(request)
        now_s, _ = self._clock.read()
        group = self._states.add(request, now_s)
        group.prefix_keys = prefix_keys
        return group.unfinished_seqs[0]

    def check_queue(self, client: str = "", others: abc.Sequence[str] = ()) -> None:
        """Raise `QueueFull` where `add` would reject a request of ``client`` as one too many.

        ``others``: the clients of requests that the caller will add before it, one for each.
        """
        instance_of(str, error=UnservableRequest).checked("client", client)
        is_sequence = isinstance(others, abc.Sequence) and not isinstance(others, str)
        if not is_sequence or not all(isinstance(other, str) for other in others):
            raise UnservableRequest(f"others must be a list of clients, got {others!r}")
        self._admission.check_queue(client, others)

    def abort(self, request_id: str) -> bool:
        """Remove a request in any state and free its blocks; False for an unknown id.

        Between ``schedule()`` and ``update()``, the tokens of the step in flight are dropped.
        """
        self._require_decided("abort")
        group = self._states.groups.get(request_id) if isinstance(request_id, str) else None
        if group is None:
            return False
        self._admission.remove(group)
        return True

    def abort_admitted(self) -> tuple[str, ...]:
        """Abort every request that was admitted, and empty the prefix cache; returns their ids.

        For a host whose device has failed while it carried out moves: the content of the KV cache
        is unknown then. Drops the steps in flight. Waiting requests stay.
        """
        self._require_decided("abort_admitted")
        self._in_flight.clear()
        admitted = [
            request_id
            for request_id, group in self._states.groups.items()
            if group.status is not SequenceStatus.WAITING
        ]
        for request_id in admitted:
            self.abort(request_id)
        if self._tiers is not None:
            self._tiers.discard_steps()
        self._group_blocks.discard_content()
        return tuple(admitted)

    def finish(self, seq_id: int) -> bool:
        """Finish one sample early, with the reason STOP; the others of its group continue.

        It finishes at the top of the next step in which its group runs and has forked: until then
        other sequences need its blocks, and it may get more tokens. Once all samples of a group
        are to finish, the group is aborted at once. False for an unknown sequence, and for a beam,
        which is not an output before the search has ended.
        """
        self._require_decided("finish")
        sequence = self._states.sequences.get(seq_id) if is_integer(seq_id) else None
        if sequence is None or sequence.group.beam_state is not None:
            return False
        self._to_finish.add(seq_id)
        if all(sample.seq_id in self._to_finish for sample in sequence.group.unfinished_seqs):
            self.abort(sequence.request_id)
        return True

    def abort_and_swap(self, request_ids: abc.Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests at the top of the next step; they keep their tokens.

        Returns the ids of those that run; the others are ignored. As after ``force_evict``, the
        running limit stays at the remaining number of sequences for ``force_evict_hold_s`` seconds.
        Raises `ControlError` for anything but an iterable of ids.
        """
        return self._control.request_preemption(request_ids)

    def control(self, control: BatchControl) -> Future[BatchControlResult]:
        """Queue a control request, from any thread. It takes effect at the top of the next step,
        or of the one after that if the last step carried out another.

        That step starts no group, and preempts for the request alone: ``new_running`` of the
        answer is what runs when ``schedule()`` returns. With ``dry_run`` the answer, or the error,
        is that of the request, and nothing changes.

        The future raises `ControlError`, naming the field, for one that cannot be applied. Raises
        `ControlError` for anything but a `BatchControl`.
        """
        return self._control.put(control)

    # The step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        A request for which this fails with an internal error is aborted and listed in ``failed``
        of the output; all others are served. Raises `StepOrderError` for a `reason_to_wait`, if
        a step is in flight that ``update()`` or `discard_step` has not ended.

        While a step is in flight, the newest tokens of its sequences are `PENDING_TOKEN`. This step
        preempts and defragments nothing. A sequence that ends with the token of the step in flight
        is scheduled in vain: its row is dropped, and ``update()`` needs no token for it.
        """
        self._require_decided("schedule")
        reason = self.reason_to_wait
        if reason is not None:
            raise StepOrderError(
                f"step {self._step} is still in flight and the next one has to wait for it "
                f"({reason}): call update() or discard_step() before schedule()"
            )
        self._is_deciding = True
        try:
            return self._decide()
        finally:
            self._is_deciding = False

    def _require_decided(self, call: str) -> None:
        """Raise `StepOrderError` for a call that would change what `schedule` is deciding."""
        if self._is_deciding:
            raise StepOrderError(
                f"{call}() was called while schedule() decides step {self._step}: a thermal policy "
                "or a clock may only read the scheduler, and one thread at a time may call it"
            )

    def _decide(self) -> SchedulerOutput:
        self._step += 1
        self._now, _ = self._clock.read()
        if self._tiers is not None:
            # First of all copies: what they read is what the prefix cache knows now.
            self._group_blocks.moves.add(Direction.OUT, self._tiers.begin_step(self._now))
        self._group_blocks.begin_step(self._now)
        step = SchedulingStep(
            self._step,
            self._now,
            self._settings.config.max_num_batched_tokens,
            self._settings.config.max_chunk_tokens,
            self._settings.config.max_mixed_prefill_tokens,
            self._blocks,
            self._group_blocks.state_slots,
            self._group_blocks.num_groups,
            self._group_blocks.snapshots,
            is_ahead=bool(self._in_flight),
        )
        if self._states.swapping_in:
            self._admission.start_swapped_in(step)
        if self._to_finish:
            self._finish_samples()
        if step.is_ahead:
            self._results.assume(self._in_flight[-1])
        self._running_limit.ask_policy(self)
        if not step.is_ahead:
            self._running_groups.step = step
            step.carries_out_order = self._control.apply(self._now, self)
        self._enforcement.enforce(step)
        if self._settings.config.policy == "priority" and not step.carries_out_order:
            self._preemptor.preempt_for_priority(step)
        self._append_slots(step)
        if self._defragmenter is not None and not step.is_ahead:
            plan = self._defragmenter.defragment()
            if plan is not None:
                self._group_blocks.moves.add(Direction.WITHIN, plan.copies)
        self._schedule_running(step)
        self._admission.start_groups(step)
        if not self._states.num_started_seqs:
            self._enforcement.warn_if_stalled()
        self._num_prefill_tokens += sum(len(chunk.token_ids) for chunk in step.prompts)
        blocks = self._group_blocks
        state_moves = None if blocks.state_slots is None else blocks.take_state_moves()
        output = step.to_output(blocks.take_moves(), state_moves)
        self._in_flight.append(output)
        if self._tiers is not None:
            self._tiers.end_scheduling()
        self._lacked_blocks = step.lacks_blocks
        return output

    @property
    def reason_to_wait(self) -> str | None:
        """Why the next step cannot be scheduled before the results of the one in flight.

        None where it can, or no step is in flight.
        """
        if not self._in_flight:
            return None
        limit = self._settings.config.max_steps_in_flight
        if len(self._in_flight) >= limit:
            return f"max_steps_in_flight is {limit}"
        return next((reason for holds, reason in self._reasons_to_wait() if holds), None)

    def _reasons_to_wait(self) -> abc.Iterator[tuple[bool, str]]:
        """Each reason that a step in flight may have, and whether it holds."""
        yield self._in_flight[-1].is_empty, "it computes nothing"
        yield self._in_flight[-1].branches, "it has beams, or samples that fork"
        yield self._control.has_orders, "an order is to be carried out"
        yield self._lacked_blocks, "running requests lack blocks"
        yield self._enforcement.is_exceeded(self._now), "the running limit is exceeded"
        if self._defragmenter is not None:
            yield self._defragmenter.is_due(), "blocks are to be defragmented"
        if self._settings.config.policy == "priority":
            yield self._admission.has_urgent_group(), "a request of higher priority waits"

    def discard_step(self) -> None:
        """Drop the steps in flight without results: the next step computes their tokens again.

        For a host whose forward pass has failed. The moves of the steps must have been carried out;
        where they have failed, too, call `abort_admitted`. Abort the requests that must not be
        tried again. Raises `StepOrderError` if no step is in flight, and for a model with states:
        these may have advanced, and tokens that are computed again would advance them twice.
        """
        self._require_decided("discard_step")
        if not self._in_flight:
            raise StepOrderError("no step is in flight: discard_step() follows schedule()")
        if self._group_blocks.state_slots is not None:
            raise StepOrderError(
                "a step of a model with states cannot be computed again, because the states may "
                "have advanced: call abort_admitted() instead of discard_step()"
            )
        for output in self._in_flight[:-1]:
            self._results.take_back(output)
        self._in_flight.clear()
        if self._tiers is not None:
            self._tiers.discard_steps()

    def update(
        self,
        output: SchedulerOutput,
        sampled: abc.Mapping[int, int],
        *,
        logprobs: abc.Mapping[int, float] | None = None,
        candidates: abc.Mapping[int, abc.Sequence[Candidate]] | None = None,
        forced: abc.Mapping[int, abc.Sequence[int]] | None = None,
        timing: StepTiming | None = None,
    ) -> tuple[SequenceUpdate, ...]:
        """Apply the results of the step ``output``, the first one in flight.

        - ``sampled``: the next token of each id in the ``sample_ids`` of the scheduled sequences,
          except for beams.
        - ``logprobs``: their log-probabilities; required where ``best_of`` is above ``n``.
        - ``candidates``: the ``num_candidates`` most probable tokens of each beam with ``samples``.
        - ``forced``: tokens that can only follow the sampled one, as those that a grammar forces.
          They count as output, and are computed together with it. Stop tokens and ``max_tokens``
          end a sequence among them, too; the rest is dropped then. Not for scored requests
          (``best_of`` above ``n``, beams), whose tokens need log-probabilities.
        - ``timing``: measured durations, for the choice between swap and recomputation.

        Sequences of requests that were aborted since ``schedule()`` may be missing. Raises
        `StepOrderError` for a step other than the one in flight, and `InvalidResults`, naming the
        sequence, for results that are missing or invalid. Nothing has changed then, and
        ``update()`` may be called again.
        """
        self._require_decided("update")
        if not self._in_flight:
            raise StepOrderError("no step is in flight: update() follows schedule()")
        if output is not self._in_flight[0]:
            raise StepOrderError(
                f"update() got another output than that of step {self._in_flight[0].step}, the "
                "first one in flight"
            )
        results = StepResults.of(sampled, logprobs, candidates, forced)
        self._results.check(output, results)
        if timing is not None and not isinstance(timing, StepTiming):
            raise InvalidResults(f"timing must be a StepTiming or None, got {timing!r}")
        if timing is not None:
            if self._has_forced_chunks(output):
                # They are as short as decodes, and do not tell how long a token of a prompt takes.
                timing = attrs.evolve(timing, prompts_s=None)
            self.costs.update(output, timing)
        del self._in_flight[0]
        if self._tiers is not None:
            self._tiers.end_step()
        updates = self._results.apply(output, results)
        self._completion_rate.update(self._states.num_finished_seqs, self._now)
        return tuple(updates)

    def _has_forced_chunks(self, output: SchedulerOutput) -> bool:
        sequences = (self._states.sequences.get(chunk.seq_id) for chunk in output.prompts)
        return any(sequence is not None and not sequence.is_in_prefill for sequence in sequences)

    # The phases of schedule().

    def _finish_samples(self) -> None:
        """Finish the samples that `finish` has marked, where their group runs and has forked."""
        for seq_id in tuple(self._to_finish):
            sequence = self._states.sequences.get(seq_id)
            if sequence is None:
                self._to_finish.remove(seq_id)
                continue
            group = sequence.group
            if group.status is SequenceStatus.RUNNING and not group.unforked_seqs:
                self._to_finish.remove(seq_id)
                self._results.finish_sample(sequence, FinishReason.STOP)
        self._completion_rate.update(self._states.num_finished_seqs, self._now)

    def _schedule_running(self, step: SchedulingStep) -> None:
        """Schedule the decodes of running groups, then prefill chunks.

        While there are several clients, those of a client that runs several groups and more than
        its part of the running limit come last in their priority: after the chunks of other
        clients, and of the requests of these that are admitted before. Otherwise a request would
        wait until the prompts of a flood before it are computed. After ``max_bypasses`` such steps
        in a row, one has the order of arrival, so every prefill advances.
        """
        prefills = step.schedule_decodes(self._states.running)
        if not prefills:
            self._num_deferrals = 0
            return
        above_share: set[Client] = set()
        if self._num_deferrals < self._settings.config.max_bypasses:
            above_share = self._admission.clients_above_share(step)

        def order(group: SequenceGroup) -> tuple[float, bool]:
            return group.queue_key.priority, _is_deferred(group, above_share)

        prefills.sort(key=order)
        num_first = next(
            (i for i, group in enumerate(prefills) if _is_deferred(group, above_share)),
            len(prefills),
        )
        first, later = prefills[:num_first], prefills[num_first:]
        step.schedule_prefills(first)
        if later:
            self._admission.start_ahead(step, above_share, later[0].queue_key.priority)
        budget = step.prefill_budget
        step.schedule_prefills(later)
        # Not whether a group was scheduled: a sibling that decodes is, too.
        is_deferred = bool(later) and step.prefill_budget == budget
        self._num_deferrals = self._num_deferrals + 1 if is_deferred else 0

    def _append_slots(self, step: SchedulingStep) -> None:
        """Reserve slots for the newest tokens of running groups; preempt if blocks run out."""
        states, blocks = self._states, self._group_blocks
        # A sequence that lacks one slot takes one block of a group at most: a new one, or a
        # copy-on-write. One that was recomputed and then forked lacks a slot for each of its own
        # tokens.
        ample = 2 * states.num_running_seqs * blocks.num_groups
        is_ample = blocks.pool.num_free_blocks >= ample
        for group in tuple(states.running):
            if group.status is not SequenceStatus.RUNNING:
                continue
            try:
                if is_ample and blocks.lacks_at_most_one_slot(group):
                    blocks.append_slots(group)
                elif self._preemptor.free_blocks_for(group, step):
                    blocks.append_slots(group)
                    is_ample = blocks.pool.num_free_blocks >= ample
                elif blocks.appends_ahead and group.status is SequenceStatus.RUNNING:
                    step.without_blocks.append(group)
            except Exception as error:
                self._admission.fail(group, error, step)


def _check_slots(slots: StateSlots, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raises `ConfigError` where a sequence could lack a slot, or find one that is not its own."""
    if slots.num_free < config.max_num_seqs:
        raise ConfigError(
            f"state_slots has {slots.num_free} free slots for max_num_seqs {config.max_num_seqs}: "
            f"make StateSlots({config.max_num_seqs + 1}), with one more for padding",
            "state_slots",
        )
    snapshots = blocks.snapshots
    if snapshots is not None and snapshots.first_slot != slots.num_slots:
        raise ConfigError(
            f"the snapshots of blocks begin with slot {snapshots.first_slot}, and state_slots has "
            f"{slots.num_slots}: make StateSnapshots({slots.num_slots}, ...)",
            "state_slots",
        )
    if blocks.config.enable_prefix_caching and snapshots is None:
        raise ConfigError(
            "blocks has a prefix cache, and a model with states cannot begin after a prefix whose "
            "state is not kept: make it with StateSnapshots, or set enable_prefix_caching=False "
            "in its CacheConfig",
            "state_slots",
        )


def _check_tokens_ahead(config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raises `ConfigError` where a chunk could have tokens without blocks."""
    chunk = min(config.max_num_batched_tokens, config.max_chunk_tokens or math.inf)
    needed, ahead = chunk * config.max_steps_in_flight, blocks.config.tokens_ahead
    if ahead is not None and ahead < needed:
        raise ConfigError(
            f"blocks has blocks for {ahead} tokens ahead, and the steps without results compute up "
            f"to {needed} of a sequence: set tokens_ahead={needed} in its CacheConfig",
            "blocks",
        )


def _is_deferred(group: SequenceGroup, above_share: abc.Collection[Client]) -> bool:
    """Whether the prefill of a running group comes after those of clients not ``above_share``."""
    return group.client in above_share and group.queue_key.priority != -math.inf  # not overdue


def _has_no_token(group: SequenceGroup) -> bool:
    return not any(sequence.num_output_tokens for sequence in group.unfinished_seqs)
