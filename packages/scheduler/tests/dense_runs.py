"""Thousands of short random runs of a scheduler with tiny parameters, and the laws they must keep.

    python packages/scheduler/tests/dense_runs.py --runs 200000 --jobs 2
    python packages/scheduler/tests/dense_runs.py --first 4711 --runs 1     # repeats a run

Tiny caches, few sequences and small token budgets make every shortage frequent. Every choice of a
run follows from its seed, which is printed with the parameters when a law is broken. The laws:

- ``schedule()`` and ``update()`` raise nothing, and no request fails.
- No step exceeds the token budget, the chunk length or the running limit.
- Every token is the one that the request gets alone.
- No group is bypassed more often than ``max_bypasses``, and of the later requests at most
  ``(k + 1) * max_bypasses`` start while a group waits that k unfinished older groups precede.
- A group that is preempted has computed a token since it last started. After a preempted group has
  returned, each sequence can fill a block before blocks run out again, unless other groups start.
- Once no requests and orders arrive, all groups finish within `max_steps_left` steps. While
  requests of high priority arrive without end, each of the others finishes within a bound as well.
- A quarter of the models keep states: that of a sequence has taken in its own tokens alone, once.
- In the end no block, no slot of a state and no entry of a table is left.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).parent))

from harness import (
    STOP,
    Memory,
    Runner,
    logprob_of,
    next_token,
    num_scheduled_tokens,
    top_tokens,
)

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
    StateSlots,
    StateSnapshots,
)
from trencadis.scheduler import (
    BatchControl,
    BeamSearch,
    FinishReason,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.beams import BeamSearchState
from trencadis.scheduler.thermal import VICTIM_ORDERS

SOAK_RUNS = 200_000
PROGRESS_RUNS = 10_000
"""A line of progress appears after so many runs."""

ORDERED_STEPS = 30
"""Steps in which orders come while requests arrive without end."""

LOW_PRIORITY = 2
"""The priority of the requests that must finish although requests of priority 0 always wait."""

Result = tuple[tuple[int, ...], FinishReason]


class BrokenLaw(AssertionError):
    """A run broke a law; the message has the seed, the step and the parameters."""


@attrs.frozen(kw_only=True)
class Parameters:
    """What a run is made of. ``copies_per_step``: the bandwidth limit of swaps, None for none.

    ``endless``: requests of high priority arrive until those of low priority have finished. The
    ``*_rate`` fields are probabilities per step: of an abort, a sample that the caller finishes, an
    order to preempt, a control request, a step whose forward pass fails, a device whose content is
    lost; ``wait_rate`` is that of waiting for the results of a step although the next one could be
    scheduled before them.
    """

    block_size: int
    num_blocks: int
    num_host_blocks: int
    watermark: float
    prefix_caching: bool
    copies_per_step: int | None
    defrag_threshold: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int | None
    max_mixed_prefill_tokens: int | None
    max_model_len: int
    policy: str
    lookahead: int
    max_bypasses: int
    prefill_s_per_token: float
    step_s: float
    num_requests: int
    arrival_rate: float
    endless: bool
    groups: bool
    vocabulary: int
    abort_rate: float
    finish_rate: float
    preempt_rate: float
    control_rate: float
    discard_rate: float
    loss_rate: float
    max_steps_in_flight: int
    wait_rate: float
    keeps_states: bool
    num_snapshots: int

    @classmethod
    def draw(cls, rng: random.Random) -> Parameters:
        block_size = rng.choice((1, 1, 2, 2, 4, 4, 16))
        max_model_len = rng.randint(3, 28)
        # From hardly enough for the longest request to enough for several of them.
        longest = math.ceil(max_model_len / block_size)
        num_blocks = 1 + longest + rng.randint(0, rng.choice((2, longest // 2 + 2, longest + 2)))
        max_num_seqs = rng.choice((1, 2, 3, 3, 4, 4))
        endless = rng.random() < 0.25
        has_orders = rng.random() < 0.3
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=rng.choice((0, 0, rng.randint(1, 8), 100, 100)),
            watermark=rng.choice((0.0, 0.0, 0.01, 0.15)),
            prefix_caching=rng.random() < 0.5,
            copies_per_step=rng.choice((None, None, None, 1, 2, 3)),
            defrag_threshold=rng.choice((None, None, 0, 2)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 0, 1, 3, 8, 40)),
            max_chunk_tokens=rng.choice((None, None, 1, 2, 5)),
            max_mixed_prefill_tokens=rng.choice((None, None, 1, 3)),
            max_model_len=max_model_len,
            policy=rng.choice(("fcfs", "priority", "priority")),
            lookahead=rng.choice((1, 2, 8)),
            max_bypasses=rng.choice((0, 1, 2, 3, 5)),
            prefill_s_per_token=rng.choice((0.0, 1.0, 1.0)),
            step_s=rng.choice((0.0, 1e-5, 0.02, 0.02)),
            num_requests=rng.randint(1, 3) if endless else rng.randint(2, 9),
            arrival_rate=rng.choice((1.0, 0.7, 0.3)),
            endless=endless,
            groups=rng.random() < 0.5,
            vocabulary=rng.choice((4, 17)),
            abort_rate=rng.choice((0.0, 0.0, 0.05)),
            finish_rate=rng.choice((0.0, 0.0, 0.1)),
            preempt_rate=rng.choice((0.05, 0.3)) if has_orders else 0.0,
            control_rate=rng.choice((0.0, 0.1)) if has_orders else 0.0,
            discard_rate=rng.choice((0.0, 0.1)) if has_orders else 0.0,
            loss_rate=rng.choice((0.0, 0.0, 0.03)) if has_orders else 0.0,
            max_steps_in_flight=rng.choice((1, 2, 2)),
            wait_rate=rng.choice((0.0, 0.0, 0.2)),
            keeps_states=rng.random() < 0.25,
            num_snapshots=rng.choice((0, 1, 2, 6)),
        )

    @property
    def hold_s(self) -> float:
        return 2 * self.step_s

    @property
    def has_orders(self) -> bool:
        return any((self.preempt_rate, self.control_rate, self.discard_rate, self.loss_rate))

    def make_request(self, name: str, priority: int, rng: random.Random) -> Request:
        """A request, which the cache may be too small for."""
        length = rng.choice((1, 3, self.max_model_len // 2, self.max_model_len - 1))
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, max(1, length)))]
        fields: dict[str, object] = {}
        if self.groups and self.max_num_seqs > 1:
            width = rng.randint(1, self.max_num_seqs)
            kept = rng.randint(1, width)
            fields = rng.choice(
                (
                    {},
                    {"n": width},
                    {"n": kept, "best_of": width},
                    {
                        "n": kept,
                        "beam_search": BeamSearch(
                            width=width,
                            length_penalty=rng.choice((0.0, 1.0)),
                            early_stopping=rng.choice((True, False, "never")),
                        ),
                    },
                )
            )
        return Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            max_tokens=rng.choice((1, rng.randint(2, 12), 30, 30, 30)),
            min_tokens=rng.choice((0, 0, 2)),
            stop_token_ids=frozenset(rng.choice(((), (), (), (STOP,)))),
            priority=priority,
            prompt_token_cost=(1.0, 1.0, 1.5, 40.0)[len(prompt) % 4],
            **fields,
        )


def results_alone(request: Request, given: Parameters) -> list[Result]:
    """The results of a request by definition: of all its samples in order, or of its best beams."""
    if request.beam_search is not None:
        return _hypotheses(request, request.beam_search, given.max_model_len)
    return [_sample(request, i, given) for i in range(request.num_seqs)]


def _sample(request: Request, sample: int, given: Parameters) -> Result:
    tokens = list(request.prompt_token_ids)
    while True:
        tokens.append(next_token(tokens, sample, given.vocabulary))
        num_output = len(tokens) - request.num_prompt_tokens
        output = tuple(tokens[request.num_prompt_tokens :])
        if tokens[-1] in request.stop_token_ids and num_output >= request.min_tokens:
            return output, FinishReason.STOP
        if num_output >= request.max_tokens or len(tokens) >= given.max_model_len:
            return output, FinishReason.LENGTH


def _hypotheses(request: Request, search: BeamSearch, max_model_len: int) -> list[Result]:
    max_output = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
    state = BeamSearchState(request, search, max_output)
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while beams:
        continuations = state.advance(
            [output for output, _ in beams],
            [logprob for _, logprob in beams],
            [
                top_tokens((*request.prompt_token_ids, *output), state.candidates_per_beam)
                for output, _ in beams
            ],
        )
        beams = [
            ((*beams[chosen.beam][0], chosen.token_id), chosen.cumulative_logprob)
            for chosen in continuations
        ]
    found = state.hypotheses[: request.n]
    return [(hypothesis.output_token_ids, hypothesis.finish_reason) for hypothesis in found]


@attrs.define
class Watch:
    """What the laws need to know about an unfinished group.

    - ``max_passes``, ``num_passes``: later requests that may start, and did, while it waited.
    - ``has_computed``: whether it has computed a token since it last started.
    - ``cut``: output tokens of the samples that the caller finished, at that time.
    """

    group: SequenceGroup
    max_passes: int
    num_passes: int = 0
    has_computed: bool = False
    cut: dict[int, int] = attrs.field(factory=dict)


class DenseRun:
    """One run. `execute` raises `BrokenLaw`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.parameters = given = Parameters.draw(rng)
        governor = None
        if given.copies_per_step is not None and given.step_s:
            rate = given.copies_per_step / given.step_s
            governor = BandwidthGovernor(1, rate, 1.01 * given.step_s)
        self.is_limited = governor is not None
        snapshots = None
        if given.keeps_states and given.num_snapshots:
            snapshots = StateSnapshots(1 + given.max_num_seqs, given.num_snapshots)
        caches = not given.keeps_states or snapshots is not None
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=given.num_blocks,
                block_size=given.block_size,
                num_host_blocks=given.num_host_blocks,
                watermark=given.watermark,
                enable_prefix_caching=given.prefix_caching and caches,
            ),
            governor=governor,
            snapshots=snapshots,
        )
        self.state_slots = None
        if given.keeps_states:
            num_host_slots = min(given.num_host_blocks, 2)  # so that the host may lack these alone
            self.state_slots = StateSlots(1 + given.max_num_seqs, num_host_slots)
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=given.max_num_seqs,
                max_num_batched_tokens=given.max_num_batched_tokens,
                max_chunk_tokens=given.max_chunk_tokens,
                max_mixed_prefill_tokens=given.max_mixed_prefill_tokens,
                max_model_len=given.max_model_len,
                policy=given.policy,
                lookahead=given.lookahead,
                max_bypasses=given.max_bypasses,
                force_evict_hold_s=given.hold_s,
                max_steps_in_flight=given.max_steps_in_flight,
            ),
            self.blocks,
            defragmenter=None
            if given.defrag_threshold is None
            else Defragmenter(self.blocks, DefragConfig(threshold=given.defrag_threshold)),
            costs=PreemptionCosts(prefill_s_per_token=given.prefill_s_per_token),
            state_slots=self.state_slots,
            clock=lambda: self.now,
        )
        self.runner = Runner(self.scheduler, Memory(given.block_size), vocabulary=given.vocabulary)
        self.watches: dict[str, Watch] = {}
        self.num_added = 0
        self.num_steps = 0
        self.last_limit = given.max_num_seqs
        self.last_admission = self.last_return = 0
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0

    def execute(self) -> None:
        try:
            self._run_under_pressure()
            self._run_to_the_end()
            self._check_nothing_is_left()
        except Exception as error:
            raise BrokenLaw(
                f"seed {self.seed}, step {self.num_steps}: {type(error).__name__}: {error}\n"
                f"{self.parameters}\n"
                f"repeat it: python packages/scheduler/tests/dense_runs.py --first {self.seed} "
                "--runs 1"
            ) from error

    # The phases of a run.

    def _run_under_pressure(self) -> None:
        if self.parameters.endless:
            self._run_with_endless_arrivals()
            return
        while self.num_added < self.parameters.num_requests:
            if self.rng.random() < self.parameters.arrival_rate:
                self._add(self.rng.randint(0, LOW_PRIORITY))
            else:
                self._interfere()
                self._step()

    def _run_with_endless_arrivals(self) -> None:
        """Requests of low priority finish although requests of priority 0 never stop."""
        given = self.parameters
        names = [self._add(LOW_PRIORITY) for _ in range(given.num_requests)]
        while self.rng.random() < 0.5:
            self._step()
        longest = max_steps_alone(given.max_model_len, given.max_model_len, given.max_num_seqs)
        bound = (given.max_bypasses + 2) * (len(names) + 1) * longest * self._slowdown()
        bound += ORDERED_STEPS
        first = self.num_steps
        while any(name in self.watches for name in names):
            while self.scheduler.num_waiting < 2:
                self._add(0)
            num_steps = self.num_steps - first
            self._interfere(orders=num_steps < ORDERED_STEPS)
            if num_steps == ORDERED_STEPS:
                self._lift_limits()
            self._step(orders=num_steps < ORDERED_STEPS)
            assert num_steps < bound, f"a request of low priority is unfinished after {bound} steps"

    def _run_to_the_end(self) -> None:
        """Once nothing arrives any more, all groups finish within a bound."""
        self._lift_limits()
        bound = max_steps_left(watch.group for watch in self.watches.values()) * self._slowdown()
        first = self.num_steps
        while self.watches:
            if self.rng.random() < 0.3:
                self._interfere(orders=False)
            self._step(orders=False)
            num_steps = self.num_steps - first
            assert num_steps <= bound, f"{[*self.watches]} are unfinished after {bound} steps"
            self.slowest = num_steps / bound

    def _check_nothing_is_left(self) -> None:
        # After a step that carries out an order, the next one carries out none.
        for _ in range(2):
            self._step(orders=False)
        while self.runner.in_flight:
            self._finish_oldest()
        scheduler, blocks, given = self.scheduler, self.blocks, self.parameters
        assert not scheduler.has_work
        assert scheduler.num_running_seqs == scheduler.num_waiting == scheduler.num_swapped == 0
        assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks
        assert blocks.host_pool.num_free_blocks == blocks.config.num_host_blocks
        if self.state_slots is not None:
            assert self.state_slots.num_free == given.max_num_seqs
            snapshots = blocks.snapshots
            assert snapshots is None or not snapshots._reserved
            assert snapshots is None or len(snapshots) + len(snapshots._free) == given.num_snapshots
            assert self.state_slots.can_swap_out(range(self.state_slots.num_host_slots))
        assert not scheduler._states.sequences
        assert not scheduler._admission._num_free_at_refusal
        assert not scheduler._admission._pending_prefixes.digests
        assert not scheduler._to_finish

    def _lift_limits(self) -> None:
        self.scheduler.control(BatchControl(max_num_seqs=self.parameters.max_num_seqs))
        self.now += self.parameters.hold_s

    def _slowdown(self) -> int:
        """A limited bandwidth makes swaps of the complete cache out and in take so many steps."""
        return 1 + self.parameters.num_blocks if self.is_limited else 1

    # What callers do.

    def _add(self, priority: int) -> str:
        """Add a request; one that is rejected changes nothing, and a smaller one follows."""
        self.num_added += 1
        name = f"r{self.num_added}"
        while True:
            request = self.parameters.make_request(name, priority, self.rng)
            try:
                group = self.runner.add(request)
            except UnservableRequest:
                self.counts["refused"] += 1
                assert name not in self.watches
                continue
            num_older = len(self.watches)
            max_passes = (num_older + 1) * self.parameters.max_bypasses
            self.watches[name] = Watch(group, max_passes)
            self.counts["requests"] += 1
            return name

    def _interfere(self, *, orders: bool = True) -> None:
        """Abort, finish, preempt and control as the rates say."""
        given, rng = self.parameters, self.rng
        if self.watches and rng.random() < given.abort_rate:
            self._abort(rng.choice([*self.watches]))
        if self.watches and rng.random() < given.finish_rate:
            self._finish_sample(self.watches[rng.choice([*self.watches])])
        if not orders:
            return
        if self.watches and rng.random() < given.preempt_rate:
            self.scheduler.abort_and_swap([rng.choice([*self.watches])])
        if rng.random() < given.control_rate:
            self.scheduler.control(
                BatchControl(
                    max_num_seqs=rng.choice((None, rng.randint(1, given.max_num_seqs))),
                    force_evict=rng.choice((None, 1, 2)),
                    policy=rng.choice([*VICTIM_ORDERS]),
                    dry_run=rng.random() < 0.2,
                )
            )

    def _abort(self, name: str) -> None:
        watch = self.watches.pop(name)
        assert self.scheduler.abort(name)
        self._check_partial(watch.group.unfinished_seqs, watch)
        assert watch.group.finish_reason is FinishReason.ABORT
        self.counts["aborts"] += 1

    def _lose_content(self) -> None:
        """The device loses the content of its blocks after ``schedule()``."""
        for name in self.scheduler.abort_admitted():
            watch = self.watches.pop(name)
            self._check_partial(watch.group.unfinished_seqs, watch)
        self.runner.memory.device.clear()
        self.runner.memory.states.clear()
        self.runner.in_flight.clear()
        self.counts["losses"] += 1

    def _finish_sample(self, watch: Watch) -> None:
        group = watch.group
        sample = self.rng.choice(group.unfinished_seqs)
        if group.beam_state is not None:
            assert not self.scheduler.finish(sample.seq_id)
            return
        watch.cut[sample.seq_id] = sample.num_output_tokens
        assert self.scheduler.finish(sample.seq_id)
        self.counts["finishes"] += 1
        if group.finish_reason is FinishReason.ABORT:
            self._check_partial(group.unfinished_seqs, watch)
            del self.watches[group.request_id]

    # Steps and their laws.

    def _step(self, *, orders: bool = True) -> None:
        """A step, which may fail on the device where ``orders`` may come."""
        self.num_steps += 1
        self.now += self.parameters.step_s
        while self.runner.in_flight and (
            self.scheduler.reason_to_wait is not None
            or self.rng.random() < self.parameters.wait_rate
        ):
            self._finish_oldest()
        self.runner.check_slots()
        before = {name: watch.group.status for name, watch in self.watches.items()}
        swapping_in = self._swapping_in()
        output = self.scheduler.schedule()
        assert not output.failed
        self._check_limits(output)
        self._check_passes(output, before, swapping_in | self._swapping_in())
        self._check_preemptions(output, before)
        self._check_returns(output, before)
        if self.state_slots is not None and self.parameters.discard_rate:
            with contextlib.suppress(StepOrderError):
                self.scheduler.discard_step()
                raise AssertionError("a step that has advanced states was discarded")
        discard_rate = 0.0 if self.state_slots else self.parameters.discard_rate
        if orders and self.rng.random() < discard_rate:
            self.runner.memory.carry_out(output)
            self.scheduler.discard_step()
            self.runner.in_flight.clear()
            self.counts["discards"] += 1
        elif orders and self.rng.random() < self.parameters.loss_rate:
            self._lose_content()
        else:
            self.counts["steps ahead"] += bool(self.runner.in_flight)
            self.runner.launch(output)
            if len(self.runner.in_flight) == self.parameters.max_steps_in_flight:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        self.runner.finish_oldest()
        for name, watch in [*self.watches.items()]:
            if watch.group.finish_reason is not None:
                del self.watches[name]
                self._check_finished(watch)

    def _swapping_in(self) -> set[str]:
        return {group.request_id for group in self.scheduler._states.swapping_in}

    def _check_limits(self, output: SchedulerOutput) -> None:
        given, scheduler = self.parameters, self.scheduler
        assert num_scheduled_tokens(output) <= given.max_num_batched_tokens
        chunk = given.max_chunk_tokens or given.max_num_batched_tokens
        assert all(2 <= len(scheduled.token_ids) <= chunk for scheduled in output.prompts)
        assert all(len(scheduled.token_ids) == 1 for scheduled in output.decodes)
        for scheduled in (*output.prompts, *output.decodes):
            request = scheduler._states.sequences[scheduled.seq_id].request
            length = min(request.num_prompt_tokens + request.max_tokens, given.max_model_len)
            # The last token of an answer is not computed.
            assert scheduled.start + len(scheduled.token_ids) < length
        # The running limit holds within two steps: that of this step or that of the last one.
        assert scheduler.num_running_seqs <= max(output.max_running_seqs, self.last_limit)
        self.last_limit = output.max_running_seqs
        self.counts["steps"] += 1
        self.counts["tokens"] += num_scheduled_tokens(output)
        self.counts["copies"] += sum(len(copies) for _, copies in output.moves)

    def _check_passes(
        self, output: SchedulerOutput, before: dict[str, SequenceStatus], swapping_in: set[str]
    ) -> None:
        """No group that could run is bypassed too often."""
        running = SequenceStatus.RUNNING
        started = [
            watch.group.arrival
            for name, watch in self.watches.items()
            if before[name] is SequenceStatus.WAITING and watch.group.status is running
        ]
        for name, watch in self.watches.items():
            group = watch.group
            assert group.num_bypasses <= self.parameters.max_bypasses, (
                f"{name} was bypassed {group.num_bypasses} times"
            )
            has_waited = before[name] is not running and group.status is not running
            if has_waited and name not in swapping_in and group.num_seqs <= output.max_running_seqs:
                watch.num_passes += sum(arrival > group.arrival for arrival in started)
                assert watch.num_passes <= watch.max_passes, (
                    f"{watch.num_passes} later requests started while {name} waited"
                )

    def _check_preemptions(
        self, output: SchedulerOutput, before: dict[str, SequenceStatus]
    ) -> None:
        """Without orders and deferred copies, no group is preempted before it computes a token."""
        is_exempt = self.is_limited or self.parameters.has_orders
        scheduled = {item.seq_id for item in (*output.prompts, *output.decodes)}
        for name, watch in self.watches.items():
            group = watch.group
            was_running = before[name] is SequenceStatus.RUNNING
            if group.status is not SequenceStatus.RUNNING:
                if was_running:
                    self.counts["preemptions"] += 1
                    assert is_exempt or watch.has_computed, f"{name} ran for no token"
                continue
            if not was_running:
                watch.has_computed = False
            if any(sequence.seq_id in scheduled for sequence in group.allocated_seqs):
                watch.has_computed = True

    def _check_returns(self, output: SchedulerOutput, before: dict[str, SequenceStatus]) -> None:
        """A return leaves a block for each sequence: the next shortage is a block away.

        Checked where every preemption is one for want of blocks, and no sequences share one.
        """
        given = self.parameters
        if given.policy == "priority" or given.groups or self.is_limited or given.has_orders:
            return
        if output.preempted_seq_ids and self.last_return > self.last_admission:
            num_steps = self.num_steps - self.last_return
            assert num_steps >= given.block_size, f"blocks ran out {num_steps} steps after a return"
        for name, watch in self.watches.items():
            if watch.group.status is SequenceStatus.RUNNING:
                if before[name] is SequenceStatus.WAITING:
                    self.last_admission = self.num_steps
                elif before[name] is not SequenceStatus.RUNNING:
                    self.last_return = self.num_steps

    # Tokens.

    def _check_finished(self, watch: Watch) -> None:
        group = watch.group
        assert group.status is SequenceStatus.FINISHED
        if watch.cut:
            self._check_partial(group.finished_seqs, watch)
            return
        request = group.request
        expected = results_alone(request, self.parameters)
        if request.beam_search is None and request.num_seqs > request.n:
            expected = _best(expected, request.n)
        found = [(tuple(result.output_token_ids), result.finish_reason) for result in group.results]
        assert found == expected, f"{request.request_id} got {found}, alone it gets {expected}"

    def _check_partial(self, sequences: Iterable[Sequence], watch: Watch) -> None:
        """Samples that were cut, or aborted, have the first tokens of what they get alone."""
        request = watch.group.request
        if request.beam_search is not None:
            return
        expected = results_alone(request, self.parameters)
        for sequence in sequences:
            tokens, reason = expected[self.runner.sample_of[sequence.seq_id]]
            found = tuple(sequence.output_token_ids)
            assert found == tokens[: len(found)], f"{request.request_id} got {found}, not {tokens}"
            if sequence.seq_id in watch.cut:
                # It may have got more tokens until its group had forked.
                assert len(found) >= watch.cut[sequence.seq_id]
            elif sequence.finish_reason is not FinishReason.ABORT:
                assert (found, sequence.finish_reason) == (tokens, reason)


def _best(results: list[Result], n: int) -> list[Result]:
    """The n results with the highest mean log-probability, as the harness gives them."""
    return sorted(
        results,
        key=lambda result: sum(logprob_of(token) for token in result[0]) / len(result[0]),
        reverse=True,
    )[:n]


def max_steps_alone(num_prompt_tokens: int, max_output: int, num_seqs: int) -> int:
    """Steps of a group that runs alone, with one token a step, and is recomputed once."""
    return num_prompt_tokens + (num_seqs + 1) * max_output + 2


def max_steps_left(groups: Iterable[SequenceGroup]) -> int:
    """Steps in which all these groups finish, once nothing arrives: as if one after another."""
    return 1 + sum(
        max_steps_alone(
            group.request.num_prompt_tokens, group.request.max_tokens, group.request.num_seqs
        )
        for group in groups
    )


@attrs.define
class Report:
    """What many runs did: counts, the runs that broke a law, and how close any came to a bound."""

    counts: Counter[str] = attrs.field(factory=Counter)
    failures: list[str] = attrs.field(factory=list)
    slowest: float = 0.0
    slowest_seed: int = 0

    def add(self, other: Report) -> None:
        self.counts += other.counts
        self.failures += other.failures
        if other.slowest > self.slowest:
            self.slowest, self.slowest_seed = other.slowest, other.slowest_seed


def run_all(seeds: Iterable[int]) -> Report:
    """Execute the runs of these seeds."""
    report = Report()
    for seed in seeds:
        run = DenseRun(seed)
        try:
            run.execute()
        except BrokenLaw as error:
            report.failures.append(str(error))
        report.counts += run.counts
        report.counts["runs"] += 1
        report.counts["runs with preemptions"] += run.counts["preemptions"] > 0
        if run.slowest > report.slowest:
            report.slowest, report.slowest_seed = run.slowest, seed
    return report


def run_in_processes(first: int, num_runs: int, jobs: int) -> Report:
    """Execute the runs of the seeds from ``first`` in several processes."""
    size = 500
    ranges = [
        range(start, min(start + size, first + num_runs))
        for start in range(first, first + num_runs, size)
    ]
    report = Report()
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(run_all, ranges):
            report.add(part)
            if report.counts["runs"] % PROGRESS_RUNS < size:
                print(f"{report.counts['runs']:,} runs, {len(report.failures)} failed", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--runs", type=int, default=SOAK_RUNS, help="number of runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    start = time.perf_counter()
    report = run_in_processes(options.first, options.runs, options.jobs)
    print(f"{time.perf_counter() - start:.1f} s:", dict(report.counts))
    print(
        f"closest to a bound: {report.slowest:.0%} of the steps that it allows, "
        f"seed {report.slowest_seed}"
    )
    for failure in report.failures[:5]:
        print(failure)
    print(f"{len(report.failures)} failed")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
