"""Who runs in the next step: continuous batching with chunked prefill over a paged KV cache.

The scheduler owns the queues and every sequence in them, and asks the block manager for memory.
It knows neither models nor devices: `Scheduler.schedule` returns a decision, whoever executes it
reports the sampled tokens to `Scheduler.update`. The two are called in turn.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping

import attrs

from trencadis.kvcache import Allocation, BlockCopy, BlockManager
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.errors import (
    DuplicateRequest,
    QueueFull,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.output import ScheduledSequence, SchedulerOutput, SequenceUpdate
from trencadis.scheduler.request import FinishReason, Request, Sequence, SequenceStatus


@attrs.define
class _Step:
    """A step while it is being decided."""

    token_budget: int
    prompts: list[ScheduledSequence] = attrs.field(factory=list)
    decodes: list[ScheduledSequence] = attrs.field(factory=list)
    copies: list[BlockCopy] = attrs.field(factory=list)
    preempted: list[int] = attrs.field(factory=list)


class Scheduler:
    """First come, first served, with preemption by recomputation when blocks run out.

    A running sequence is never passed over for a new one, and the one admitted last is preempted
    first, so the oldest always progresses and every admitted request finishes.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: OrderedDict[int, Sequence] = OrderedDict()
        self._by_request: dict[str, Sequence] = {}
        self._seq_ids = itertools.count()
        self._step = 0
        self._in_flight: SchedulerOutput | None = None
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> Sequence:
        """Queue a request and return its sequence, to be read but not changed.

        Raises `DuplicateRequest`, `QueueFull`, or `UnservableRequest` for a prompt that is empty
        or leaves no room for one token under ``max_model_len`` or in an empty cache.
        """
        self._check_servable(request)
        sequence = Sequence(next(self._seq_ids), request, list(request.prompt_token_ids))
        self._waiting[sequence.seq_id] = sequence
        self._by_request[request.request_id] = sequence
        return sequence

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks; False when there is none such.

        Between ``schedule()`` and ``update()`` it is allowed too: the token on its way is dropped.
        """
        sequence = self._by_request.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.ABORT)
        return True

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        Raises `StepOrderError` when the previous step was not given to ``update()``.
        """
        if self._in_flight is not None:
            raise StepOrderError(
                f"step {self._step} is still executing: call update() before schedule()"
            )
        step = _Step(self._config.max_num_batched_tokens)
        self._continue_decodes(step)
        self._continue_prompts(step)
        self._admit(step)
        self._step += 1
        self._in_flight = SchedulerOutput(
            self._step,
            tuple(step.prompts),
            tuple(step.decodes),
            tuple(step.copies),
            tuple(step.preempted),
        )
        return self._in_flight

    def update(
        self, output: SchedulerOutput, sampled: Mapping[int, int]
    ) -> tuple[SequenceUpdate, ...]:
        """Learn what a step computed: ``sampled`` maps sequence ids to their next tokens.

        Every sequence of the step whose ``samples`` is true must be there, unless it was aborted
        meanwhile. Raises `StepOrderError` for a step other than the last one scheduled.
        """
        if output is not self._in_flight:
            raise StepOrderError(f"update() got step {output.step}, expected step {self._step}")
        self._in_flight = None
        updates: list[SequenceUpdate] = []
        for scheduled in itertools.chain(output.decodes, output.prompts):
            sequence = self._running.get(scheduled.seq_id)
            if sequence is None:
                continue  # aborted while the step ran
            sequence.num_computed = scheduled.start + len(scheduled.token_ids)
            self._blocks.mark_computed(sequence.seq_id, sequence.num_computed)
            if scheduled.samples:
                updates.append(self._append(sequence, sampled[sequence.seq_id]))
        return tuple(updates)

    # The phases of schedule(), in their order.

    def _continue_decodes(self, step: _Step) -> None:
        """One token for every running sequence that has its context computed."""
        for sequence in tuple(self._running.values()):
            if sequence.status is not SequenceStatus.RUNNING or sequence.num_pending != 1:
                continue  # preempted by an earlier one, or still in its prompt
            if self._reserve(sequence, step):
                self._place(sequence, 1, step)

    def _continue_prompts(self, step: _Step) -> None:
        """The next chunk of every running sequence that is still in its prompt."""
        for sequence in self._running.values():
            if step.token_budget == 0:
                return
            if sequence.num_pending > 1:
                self._place(sequence, sequence.num_pending, step)

    def _admit(self, step: _Step) -> None:
        """Start waiting sequences, oldest first, while tokens, sequences and blocks allow."""
        while self._waiting and step.token_budget > 0 and not step.preempted:
            if len(self._running) >= self._config.max_num_seqs:
                return
            sequence = next(iter(self._waiting.values()))
            if not self._can_start(sequence):
                return
            self._start(sequence)
            self._place(sequence, sequence.num_pending, step)

    # Their parts.

    def _reserve(self, sequence: Sequence, step: _Step) -> bool:
        """Get a slot for the last token, preempting the youngest while there is none."""
        missing = len(sequence.token_ids) - sequence.num_slots
        if not missing:
            return True
        while not self._blocks.can_append(sequence.seq_id, missing):
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        step.copies.extend(self._blocks.append(sequence.seq_id, sequence.token_ids[-missing:]))
        sequence.num_slots = len(sequence.token_ids)
        return True

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        """Take the blocks of a sequence; it goes first among the waiting and is recomputed."""
        self._blocks.free(sequence.seq_id)
        sequence.num_computed = sequence.num_slots = 0
        sequence.status = SequenceStatus.WAITING
        del self._running[sequence.seq_id]
        self._waiting[sequence.seq_id] = sequence
        self._waiting.move_to_end(sequence.seq_id, last=False)
        step.preempted.append(sequence.seq_id)
        self._num_preemptions += 1

    def _can_start(self, sequence: Sequence) -> bool:
        return self._blocks.can_allocate(sequence.token_ids) is Allocation.OK

    def _start(self, sequence: Sequence) -> None:
        cached = self._blocks.allocate(sequence.seq_id, sequence.token_ids)
        if not sequence.num_output_tokens:
            sequence.num_cached_prompt_tokens = cached
        sequence.num_computed = cached
        sequence.num_slots = len(sequence.token_ids)
        sequence.status = SequenceStatus.RUNNING
        del self._waiting[sequence.seq_id]
        self._running[sequence.seq_id] = sequence

    def _place(self, sequence: Sequence, num_tokens: int, step: _Step) -> None:
        """Put the next tokens of a running sequence into the step, as many as its bounds let."""
        longest = self._config.max_chunk_tokens or num_tokens
        num_tokens = min(num_tokens, step.token_budget, longest)
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        scheduled = ScheduledSequence(
            sequence.seq_id,
            start,
            sequence.token_ids[start:end],
            self._blocks.block_table(sequence.seq_id),
            samples=end == len(sequence.token_ids),
        )
        (step.decodes if num_tokens == 1 else step.prompts).append(scheduled)
        step.token_budget -= num_tokens

    def _append(self, sequence: Sequence, token_id: int) -> SequenceUpdate:
        sequence.token_ids.append(token_id)
        reason = self._finish_reason(sequence, token_id)
        if reason is not None:
            self._finish(sequence, reason)
        return SequenceUpdate(sequence.seq_id, sequence.request_id, token_id, reason)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        request = sequence.request
        generated = sequence.num_output_tokens
        if generated >= request.min_tokens and token_id in request.stop_token_ids:
            return FinishReason.STOP
        full = len(sequence.token_ids) >= self._config.max_model_len
        if generated >= request.max_tokens or full:
            return FinishReason.LENGTH
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._blocks.free(sequence.seq_id)
            del self._running[sequence.seq_id]
        else:
            del self._waiting[sequence.seq_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        del self._by_request[sequence.request_id]

    def _check_servable(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        if request.request_id in self._by_request:
            raise DuplicateRequest(f"request id {request.request_id!r} is already being served")
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, the bound max_waiting is reached: "
                "try again later"
            )
        if length == 0:
            raise UnservableRequest("the prompt is empty: give at least one token")
        if length >= self._config.max_model_len:
            raise UnservableRequest(
                f"the prompt has {length} tokens, max_model_len is {self._config.max_model_len} "
                "and one is needed for the output: shorten the prompt or raise max_model_len"
            )
        if self._blocks.can_allocate(request.prompt_token_ids) is Allocation.NEVER:
            raise UnservableRequest(
                f"the prompt of {length} tokens does not fit in the KV cache of "
                f"{self._blocks.num_total_blocks} blocks: shorten it or add blocks"
            )
