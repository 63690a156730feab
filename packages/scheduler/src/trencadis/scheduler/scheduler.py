"""Who runs in the next step: continuous batching with chunked prefill over a paged KV cache.

`Scheduler` ties its parts together: `Ledger` owns the queues, `GroupMemory` the blocks,
`Admission` says who starts, `Preemptor` and `RunningCap` who has to go, `Progress` what a step has
brought. It knows neither models nor devices: `Scheduler.schedule` returns a decision, whoever
executes it reports the outcome to `Scheduler.update`. The two are called in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future

from trencadis.kvcache import BlockManager, Defragmenter, Direction
from trencadis.scheduler.admission import Admission
from trencadis.scheduler.batch import StepBuilder
from trencadis.scheduler.beams import Candidate
from trencadis.scheduler.cap import RunningCap
from trencadis.scheduler.clock import SteadyClock
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.control import BatchControl, BatchControlResult, ControlQueue
from trencadis.scheduler.errors import (
    DuplicateRequest,
    QueueFull,
    SchedulerError,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.group import Sequence, SequenceStatus
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.memory import GroupMemory
from trencadis.scheduler.output import SchedulerOutput, SequenceUpdate
from trencadis.scheduler.preemption import PreemptionCosts, Preemptor, QueueTime, StepTiming
from trencadis.scheduler.progress import Progress, Sampled
from trencadis.scheduler.request import FinishReason, Request
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.urgency import Urgency


class Scheduler:
    """Decides step by step which sequences run, and remembers where each of them is.

    Running groups are never passed over for new ones of their priority, and when blocks run out
    the group whose turn is last gives way, so that the first always progresses and every admitted
    request finishes. ``thermal`` caps the running sequences by temperature or power;
    ``defragmenter`` must be one of ``blocks``. ``clock`` gives seconds and may be any clock; one
    that steps back is taken to stand still. Not safe to share between threads, but for `control`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        thermal: ThermalGuard | None = None,
        defragmenter: Defragmenter | None = None,
        costs: PreemptionCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = costs or PreemptionCosts()
        self._config = config
        self._blocks = blocks
        self._defragmenter = defragmenter
        self._time = SteadyClock(clock)
        self._now = 0.0
        self._ledger = Ledger(config, blocks.config.block_size)
        self._memory = GroupMemory(blocks)
        self._queue_time = QueueTime()
        self._preemptor = Preemptor(self._ledger, self._memory, self.costs, self._queue_time)
        self._admission = Admission(config, self._ledger, self._memory)
        self._urgency = Urgency(self._ledger, self._memory, self._preemptor, self._admission)
        self._cap = RunningCap(config, self._ledger, self._preemptor, thermal)
        self._progress = Progress(self._ledger, self._memory, blocks, config.max_model_len)
        self._orders = ControlQueue()
        self._to_evict: list[str] = []
        self._to_finish: set[int] = set()
        self._step = 0
        self._in_flight: SchedulerOutput | None = None

    # What can be asked. Running is counted in sequences, waiting and swapped in requests.

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in force; control events change ``max_num_seqs``."""
        return self._cap.config

    @property
    def now_s(self) -> float:
        """The time of the current step: seconds since the scheduler was made."""
        return self._now

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._ledger.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that run; a group in its prompt counts the seats that it will need."""
        return self._ledger.running_seats

    @property
    def num_swapped(self) -> int:
        """Requests that were evicted and have not come back yet."""
        return len(self._ledger.swapped) + len(self._ledger.arriving)

    @property
    def num_preemptions(self) -> int:
        """Evictions since the start."""
        return self._preemptor.num_swaps + self._preemptor.num_recomputes

    @property
    def num_recomputes(self) -> int:
        """Of the evictions, those that gave the cache up instead of copying it to the host."""
        return self._preemptor.num_recomputes

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: compute, move blocks, or answer an order."""
        return bool(self._ledger.groups or self._orders)

    # What can be asked for.

    def add(self, request: Request) -> Sequence:
        """Queue a request and return its first sequence, to be read but not changed.

        Its ``group`` has the others. Raises `DuplicateRequest`, `QueueFull`, or `UnservableRequest`
        for a prompt that is empty or leaves no room for one token under ``max_model_len``, and
        for a request that an empty cache, or ``max_num_seqs``, could not serve to its end.
        """
        self._check_servable(request)
        group = self._ledger.open(request)
        self._memory.hash_prompt(group)
        return group.live[0]

    def abort(self, request_id: str) -> bool:
        """End a request in any state and free its blocks; False when there is none such.

        Between ``schedule()`` and ``update()`` it is allowed too: the token on its way is dropped.
        """
        group = self._ledger.groups.get(request_id)
        if group is None:
            return False
        self._memory.drop(group)
        self._ledger.cancel(group)
        self._admission.forget(group)
        return True

    def finish(self, seq_id: int) -> bool:
        """End one sample whose client has enough of it; the others of its group go on.

        It leaves, as FINISHED by a stop, at the top of the first step in which its group runs and
        has branched: until then others need its blocks, and it may get tokens that nobody wants.
        A group none of whose samples is wanted any more is aborted at once. False where there is
        no such sequence, and for a beam, which is not an output before its search has ended.
        """
        one = self._ledger.sequences.get(seq_id)
        if one is None or one.group.beams is not None:
            return False
        self._to_finish.add(seq_id)
        if all(other.seq_id in self._to_finish for other in one.group.live):
            self.abort(one.request_id)
        return True

    def abort_and_swap(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Evict these requests at the top of the next step, with the tokens they have by then.

        Returns those that are running; others have nothing to evict. As after ``force_evict``, the
        batch keeps the smaller size for ``evict_hold_s`` seconds.
        """
        groups = self._ledger.groups
        known = [one for one in dict.fromkeys(request_ids) if one in groups]
        running = [one for one in known if groups[one].status is SequenceStatus.RUNNING]
        self._to_evict.extend(running)
        return tuple(running)

    def control(self, order: BatchControl) -> Future[BatchControlResult]:
        """Queue an order from any thread; it is carried out whole at the top of the next step.

        The future raises `ControlError` or `ConfigError` for an order that cannot be obeyed.
        """
        return self._orders.put(order)

    # The step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        Raises `StepOrderError` when the previous step was not given to ``update()``.
        """
        if self._in_flight is not None:
            raise StepOrderError(
                f"step {self._step} is still executing: call update() before schedule()"
            )
        step = self._begin()
        self._end_finished()
        self._obey_orders(step)
        self._keep_cap(step)
        self._make_way(step)
        self._reserve(step)
        self._defragment()
        self._continue_decodes(step)
        self._continue_prompts(step)
        self._admission.resume(step)
        self._admission.admit(step)
        self._in_flight = step.build(self._memory.moves)
        return self._in_flight

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[int, int],
        *,
        logprobs: Mapping[int, float] | None = None,
        candidates: Mapping[int, Items[Candidate]] | None = None,
        timing: StepTiming | None = None,
    ) -> tuple[SequenceUpdate, ...]:
        """Learn what a step computed.

        ``sampled`` maps to its next token each id in ``sample_ids`` of each scheduled sequence that
        is no beam; ``logprobs`` the same ids to the token's log-probability, needed where
        ``best_of`` is above ``n``. ``candidates`` maps each beam with ``samples`` to its
        ``num_candidates`` most probable tokens. Requests that were aborted meanwhile may be
        missing. ``timing`` is what the step's parts took, for the choice between swapping and
        recomputing. Raises `StepOrderError` for a step other than the last one scheduled.
        """
        if output is not self._in_flight:
            raise StepOrderError(f"update() got step {output.step}, expected step {self._step}")
        self._in_flight = None
        if timing is not None:
            self.costs.learn(output, timing)
        before = self._progress.ended
        updates = self._progress.learn(output, Sampled(sampled, logprobs or {}, candidates or {}))
        self._learn_ends(before)
        return tuple(updates)

    # The phases of schedule(), in their order.

    def _begin(self) -> StepBuilder:
        """Time goes on, and swaps that were deferred with it."""
        self._step += 1
        self._now = self._time.now()
        self._memory.begin_step(self._now)
        config = self._config
        step = StepBuilder(
            self._step,
            self._now,
            config.max_num_batched_tokens,
            config.max_chunk_tokens,
            self._blocks,
        )
        self._admission.land(step)
        return step

    def _end_finished(self) -> None:
        """Samples that nobody wants any more leave, those of them that can."""
        before = self._progress.ended
        for seq_id in tuple(self._to_finish):
            one = self._ledger.sequences.get(seq_id)
            if one is None:
                self._to_finish.remove(seq_id)
            elif one.group.status is SequenceStatus.RUNNING and not one.group.unforked:
                self._to_finish.remove(seq_id)
                self._progress.end(one, FinishReason.STOP)
        self._learn_ends(before)

    def _obey_orders(self, step: StepBuilder) -> None:
        """What operators have asked for since the last step."""
        groups = [self._ledger.groups.get(request_id) for request_id in self._to_evict]
        self._to_evict.clear()
        running = [one for one in groups if one and one.status is SequenceStatus.RUNNING]
        self._cap.evict(list(dict.fromkeys(running)), step)
        while (taken := self._orders.take()) is not None:
            order, future = taken
            try:
                result = self._cap.obey(order, step)
            except SchedulerError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _keep_cap(self, step: StepBuilder) -> None:
        """No more run than the device, the operator and the settings allow."""
        self._cap.read(self)
        step.cap = self._cap.value(self._now)
        self._cap.enforce(step)

    def _make_way(self, step: StepBuilder) -> None:
        """Urgent requests take seats from others, if that is worth it."""
        if self._config.policy == "priority":
            self._urgency.make_way(step)

    def _reserve(self, step: StepBuilder) -> None:
        """Slots for the newest tokens of every running group; the last gives way to the first."""
        ledger, memory = self._ledger, self._memory
        ample = memory.num_free >= 2 * ledger.running_seats
        for group in tuple(ledger.running):
            if group.status is not SequenceStatus.RUNNING:
                continue
            if ample and len(group.active) == 1:
                memory.grow(group)
            elif self._preemptor.make_room(group, step):
                memory.grow(group)
                ample = memory.num_free >= 2 * ledger.running_seats

    def _defragment(self) -> None:
        """Move blocks down, once the running groups have theirs."""
        plan = self._defragmenter.defragment() if self._defragmenter is not None else None
        if plan is not None:
            self._memory.moves.add(Direction.WITHIN, plan.copies)

    def _continue_decodes(self, step: StepBuilder) -> None:
        """One token for every running sequence that has its context computed."""
        for group in self._ledger.running:
            step.place_decodes(group)

    def _continue_prompts(self, step: StepBuilder) -> None:
        """The next chunk of every running sequence that is still in its prompt."""
        for group in self._ledger.running:
            if step.token_budget == 0:
                return
            step.place_chunks(group)

    def _learn_ends(self, before: int) -> None:
        """How fast seats come free, from those that were given back since ``before`` of them."""
        if self._progress.ended > before:
            self._queue_time.released(self._progress.ended - before, self._now)

    def _check_servable(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        config = self._config
        if request.request_id in self._ledger.groups:
            raise DuplicateRequest(f"request id {request.request_id!r} is already being served")
        if self.num_waiting >= config.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting, the bound max_waiting is reached: "
                "try again later"
            )
        if length == 0:
            raise UnservableRequest("the prompt is empty: give at least one token")
        if length >= config.max_model_len:
            raise UnservableRequest(
                f"the prompt has {length} tokens, max_model_len is {config.max_model_len} "
                "and one is needed for the output: shorten the prompt or raise max_model_len"
            )
        if request.width > config.max_num_seqs:
            raise UnservableRequest(
                f"the request runs {request.width} sequences at once, max_num_seqs is "
                f"{config.max_num_seqs}: lower n, best_of or the beam width"
            )
        needed = self._memory.most_blocks(request, config)
        there = self._blocks.pool.num_usable_blocks
        if needed > there:
            raise UnservableRequest(
                f"{length} prompt tokens and {request.width} × {request.max_tokens} more could "
                f"need {needed} blocks, which do not fit in the KV cache of {there}: shorten the "
                "prompt, lower max_tokens, n or the beam width, or add blocks"
            )
