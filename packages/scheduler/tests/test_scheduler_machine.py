"""Random arrivals, aborts, heat and shortage: no request is lost and no token changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from typing import ClassVar

import attrs
import pytest
from harness import STOP, Memory, Runner, alone, num_scheduled_tokens, outcome
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
    Direction,
)
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    BeamSearch,
    FinishReason,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    ThermalGuard,
)
from trencadis.scheduler.thermal import VICTIM_ORDERS, ProportionalThermalPolicy

MAX_LEN = 24
SIZE = 4
RATE = 30.0
WINDOW_S = 0.2


class Thermometer:
    """A `ThermalState` that the test sets."""

    hottest_c: float | None = 20.0
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: ClassVar[Mapping[int, float]] = {}


branching = st.one_of(
    st.just({}),
    st.just({}),
    st.builds(lambda n, more: {"n": n, "best_of": n + more}, st.integers(1, 2), st.integers(0, 1)),
    st.builds(
        lambda width, penalty, early: {
            "beam_search": BeamSearch(width=width, length_penalty=penalty, early_stopping=early)
        },
        st.integers(1, 3),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([True, False, "never"]),
    ),
)


class Machine(RuleBasedStateMachine):
    """Drives a scheduler with all features on a KV cache whose content is checked."""

    @initialize(
        num_blocks=st.integers(26, 40),
        num_host_blocks=st.sampled_from([0, 3, 60]),
        max_num_seqs=st.integers(3, 7),
        budget=st.integers(7, 20),
        max_prefill_tokens=st.none() | st.integers(1, 20),
        max_mixed_prefill_tokens=st.none() | st.integers(1, 9),
        sharing=st.booleans(),
        limited=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        token_s=st.sampled_from([0.0, 1.0]),
        defragments=st.booleans(),
        most_forced=st.sampled_from([0, 0, 2, 9]),
        max_steps_in_flight=st.integers(1, 2),
        max_adapters=st.none() | st.integers(1, 2),
        windows=st.sampled_from([(None,), (None,), (6,), (None, 6), (None, 9, 2)]),
        appends_ahead=st.booleans(),
    )
    def configure(
        self,
        num_blocks: int,
        num_host_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_prefill_tokens: int | None,
        max_mixed_prefill_tokens: int | None,
        sharing: bool,
        limited: bool,
        policy: str,
        token_s: float,
        defragments: bool,
        most_forced: int,
        max_steps_in_flight: int,
        max_adapters: int | None,
        windows: tuple[int | None, ...],
        appends_ahead: bool,
    ) -> None:
        steps_in_flight = 1 if most_forced else max_steps_in_flight
        governor = BandwidthGovernor(1, RATE, WINDOW_S) if limited else None
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=1 + (num_blocks - 1) * len(windows),
                block_size=SIZE,
                num_host_blocks=num_host_blocks,
                enable_prefix_caching=sharing,
                windows=windows,
                tokens_ahead=budget * steps_in_flight if appends_ahead else None,
            ),
            governor=governor,
        )
        self.limited = limited
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=max_prefill_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            max_model_len=MAX_LEN,
            max_waiting=100,
            policy=policy,
            lookahead=3,
            max_bypasses=3,
            force_evict_hold_s=2.0,
            # Tokens that are forced must be known before the next step is scheduled.
            max_steps_in_flight=steps_in_flight,
            max_adapters=max_adapters,
        )
        self.now = 100.0
        self.steady = 0.0
        self.heat = Thermometer()
        self.scheduler = Scheduler(
            self.config,
            self.blocks,
            thermal=ThermalGuard(ProportionalThermalPolicy(target_temp_c=80.0), lambda: self.heat),
            defragmenter=Defragmenter(self.blocks, DefragConfig(threshold=2))
            if defragments
            else None,
            costs=PreemptionCosts(prefill_s_per_token=token_s),
            clock=lambda: self.now,
        )
        self.runner = Runner(self.scheduler, Memory(SIZE), most_forced=most_forced)
        self.unfinished: dict[str, SequenceGroup] = {}
        self.cut: dict[int, int] = {}
        self.names = 0
        self.last_limit = max_num_seqs
        self.swaps: list[tuple[float, int]] = []

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 10),
        min_tokens=st.integers(0, 2),
        branches=branching,
        priority=st.integers(0, 2),
        client=st.sampled_from(["", "", "a", "b"]),
        adapter=st.sampled_from(["", "", "A", "B", "C"]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        branches: dict[str, object],
        priority: int,
        client: str,
        adapter: str,
    ) -> None:
        self.names += 1
        request = Request(
            request_id=f"r{self.names}",
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=frozenset({STOP}),
            priority=priority,
            client=client,
            adapter=adapter,
            extra_keys=(adapter,),
            **branches,
        )
        self.unfinished[request.request_id] = self.runner.add(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.unfinished:
            name = data.draw(st.sampled_from(sorted(self.unfinished)))
            assert self.scheduler.abort(name)
            assert self.unfinished.pop(name).finish_reason is FinishReason.ABORT

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        samples = [
            sample.seq_id
            for group in self.unfinished.values()
            if group.beam_state is None
            for sample in group.unfinished_seqs
            if sample.num_output_tokens
        ]
        if samples:
            sample = self.sequence(data.draw(st.sampled_from(samples)))
            self.cut[sample.seq_id] = sample.num_output_tokens
            assert self.scheduler.finish(sample.seq_id)
            if sample.group.finish_reason is FinishReason.ABORT:
                assert all(other.seq_id in self.cut for other in sample.group.unfinished_seqs)
                del self.unfinished[sample.request_id]

    def sequence(self, seq_id: int) -> Sequence:
        every = (sample for group in self.unfinished.values() for sample in group.unfinished_seqs)
        return next(sample for sample in every if sample.seq_id == seq_id)

    @rule(degrees=st.sampled_from([20.0, 79.0, 82.0, 86.0, 100.0]), trusted=st.booleans())
    def change_temperature(self, degrees: float, trusted: bool) -> None:
        self.heat.hottest_c, self.heat.may_raise_cap = degrees, trusted

    @rule(
        max_num_seqs=st.none() | st.integers(1, 6),
        force_evict=st.none() | st.integers(0, 4),
        max_prefill_tokens=st.none() | st.integers(1, 20),
        policy=st.sampled_from(list(VICTIM_ORDERS)),
        dry_run=st.booleans(),
    )
    def control(
        self,
        max_num_seqs: int | None,
        force_evict: int | None,
        max_prefill_tokens: int | None,
        policy: str,
        dry_run: bool,
    ) -> None:
        future: Future[BatchControlResult] = self.scheduler.control(
            BatchControl(
                max_num_seqs=max_num_seqs,
                force_evict=force_evict,
                max_prefill_tokens=max_prefill_tokens,
                policy=policy,
                dry_run=dry_run,
            )
        )
        while not future.done():
            self.step()
        answer = future.result(timeout=0)
        assert answer.previous_running >= answer.new_running >= 0
        if max_num_seqs is not None:
            assert answer.new_running <= max_num_seqs
        assert answer.new_running <= max(0, answer.previous_running - (force_evict or 0))

    @rule(data=st.data())
    def abort_and_swap(self, data: st.DataObject) -> None:
        if self.unfinished:
            names = data.draw(st.lists(st.sampled_from(sorted(self.unfinished)), max_size=3))
            running = self.scheduler.abort_and_swap(names)
            assert all(self.unfinished[name].status is SequenceStatus.RUNNING for name in running)

    @rule(seconds=st.sampled_from([-50.0, 0.0, 0.05, 0.5, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.steady += max(0.0, seconds)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.now += 0.02
        self.steady += 0.02
        while self.scheduler.reason_to_wait is not None:
            self.finish_oldest()
        self.runner.check_slots()
        ran = {
            seq.seq_id for group in self.scheduler._states.running for seq in group.allocated_seqs
        }
        output = self.scheduler.schedule()
        assert num_scheduled_tokens(output) <= self.config.max_num_batched_tokens
        num_prefill_tokens = sum(len(chunk.token_ids) for chunk in output.prompts)
        assert num_prefill_tokens <= output.max_prefill_tokens
        mixed = self.config.max_mixed_prefill_tokens
        decodes = any(each.seq_id in ran and each.samples for each in output.decodes)
        if mixed is not None and decodes:
            assert num_prefill_tokens <= mixed
        # The running limit holds within two steps: that of this step or that of the last one.
        assert self.scheduler.num_running_seqs <= max(output.max_running_seqs, self.last_limit)
        self.last_limit = output.max_running_seqs
        self.check_traffic(output)
        scheduled = (*output.prompts, *output.decodes)
        adapters = {each.adapter for each in scheduled if each.adapter}
        assert len(adapters) <= (self.config.max_adapters or len(adapters))
        for each in scheduled:
            assert each.adapter == self.scheduler._states.sequences[each.seq_id].request.adapter
        self.runner.launch(output)
        if len(self.runner.in_flight) == self.config.max_steps_in_flight:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        self.runner.finish_oldest()
        for name, group in tuple(self.unfinished.items()):
            if group.finish_reason is not None:
                del self.unfinished[name]
                self.check_finished(group)

    def check_finished(self, group: SequenceGroup) -> None:
        assert group.status is SequenceStatus.FINISHED
        if not any(sequence.seq_id in self.cut for sequence in group.finished_seqs):
            assert outcome(group) == alone(group.request, MAX_LEN)
            return
        every = attrs.evolve(group.request, n=group.request.num_seqs, best_of=None)
        expected = alone(every, MAX_LEN)
        for sequence in group.finished_seqs:
            tokens, reason = expected[self.runner.sample_of[sequence.seq_id]]
            got = tuple(sequence.output_token_ids)
            if sequence.seq_id in self.cut:
                # It may have got more tokens until its group had forked.
                assert len(got) >= self.cut[sequence.seq_id]
                assert got == tokens[: len(got)]
            else:
                assert (got, sequence.finish_reason) == (tokens, reason)

    def check_traffic(self, output: object) -> None:
        moved = sum(len(copies) for way, copies in output.moves if way is not Direction.WITHIN)
        if not self.limited or not moved:
            return
        self.swaps.append((self.steady, moved))
        total = 0
        for at, count in reversed(self.swaps):
            total += count
            assert total <= RATE * (self.steady - at + WINDOW_S) + 1e-6

    @invariant()
    def counters_agree_with_the_status_of_every_group(self) -> None:
        if hasattr(self, "scheduler"):
            states = [group.status for group in self.unfinished.values()]
            assert self.scheduler.num_waiting == states.count(SequenceStatus.WAITING)
            assert self.scheduler.num_swapped == states.count(SequenceStatus.SWAPPED)
            assert self.scheduler.num_preempted == states.count(SequenceStatus.PREEMPTED)
            running = [
                group
                for group in self.unfinished.values()
                if group.status is SequenceStatus.RUNNING
            ]
            assert self.scheduler.num_running == len(running)
            assert self.scheduler.num_running_seqs == sum(group.num_seqs for group in running)

    @invariant()
    def an_adapter_is_in_use_from_the_first_step_to_the_end_of_a_group(self) -> None:
        if hasattr(self, "scheduler"):
            admitted = [
                group.request.adapter
                for group in self.unfinished.values()
                if group.status is not SequenceStatus.WAITING and group.request.adapter
            ]
            assert self.scheduler.adapters == Counter(admitted)
            assert len(set(admitted)) <= (self.config.max_adapters or len(admitted))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.heat.hottest_c, self.heat.may_raise_cap = 20.0, True
        self.scheduler.control(BatchControl(max_num_seqs=self.config.max_num_seqs))
        self.now += 60.0
        self.steady += 60.0
        for _ in range(200 + 60 * len(self.unfinished)):
            if not self.unfinished:
                break
            self.pass_time(1.0)  # the thermal policy raises its limit in several steps
            self.step()
        assert not self.unfinished, "every admitted request finishes"
        assert not self.scheduler.adapters
        self.step()
        self.step()
        while self.runner.in_flight:
            self.finish_oldest()
        assert self.blocks.pool.num_free_blocks == self.blocks.pool.num_usable_blocks
        assert self.blocks.host_pool.num_free_blocks == self.blocks.config.num_host_blocks


def test_no_token_changes_and_no_request_is_lost() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.soak
def test_no_token_changes_and_no_request_is_lost_in_a_long_run() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=1500,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
