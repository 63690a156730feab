"""`check_scheduler`: sound schedulers pass, and it finds each of the planted faults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pytest
from harness import Memory, Runner, alone, outcome
from hypothesis import Phase, given, settings

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import BatchControl, Request, Scheduler, SchedulerConfig, ThermalGuard
from trencadis.scheduler.output import SchedulerOutput
from trencadis.scheduler.testing import (
    DEFAULT_SETTINGS,
    Arrival,
    Heat,
    Limits,
    SchedulerFault,
    Work,
    check_scheduler,
    heat,
    traffic,
)
from trencadis.scheduler.thermal import ProportionalThermalPolicy

FIRST_FAULT = settings(
    DEFAULT_SETTINGS, max_examples=3000, stateful_step_count=25, phases=[Phase.generate]
)
"""Without the search for the shortest example, which takes seconds."""


class Ours:
    """`Scheduler` with the methods of `ServingScheduler`."""

    def __init__(self, limits: Limits) -> None:
        self.output: SchedulerOutput
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=24,
            ),
            # One block more, because block 0 is padding.
            BlockManager(
                CacheConfig(num_blocks=limits.num_cache_tokens // 4 + 1, block_size=4, watermark=0)
            ),
        )

    def add(self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        prompt = tuple(prompt_token_ids)
        self.scheduler.add(
            Request(request_id=request_id, prompt_token_ids=prompt, max_tokens=max_tokens)
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def set_running_limit(self, limit: int) -> None:
        self.scheduler.control(BatchControl(max_num_seqs=limit))

    def schedule(self) -> Iterable[Work]:
        self.output = self.scheduler.schedule()
        sequences = self.scheduler._states.sequences
        self.computed = {
            sequences[scheduled.seq_id].request_id: scheduled
            for scheduled in (*self.output.decodes, *self.output.prompts)
        }
        return [
            Work(request_id, scheduled.start, len(scheduled.token_ids))
            for request_id, scheduled in self.computed.items()
        ]

    def update(self, token_ids: Mapping[str, int]) -> Collection[str]:
        sampled = {self.computed[name].seq_id: token_id for name, token_id in token_ids.items()}
        updates = self.scheduler.update(self.output, sampled)
        return [update.request_id for update in updates if update.finish_reason is not None]


@attrs.define(eq=False)
class ToyRequest:
    request_id: str
    token_ids: list[int]
    num_outputs_left: int
    num_computed: int = 0


class Toy:
    """A small sound scheduler, whose methods the faults below replace."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.limit = limits.max_num_seqs
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []

    def add(self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        self.waiting.append(ToyRequest(request_id, list(prompt_token_ids), max_tokens))

    def abort(self, request_id: str) -> None:
        for queue in (self.waiting, self.running):
            queue[:] = [request for request in queue if request.request_id != request_id]

    def set_running_limit(self, limit: int) -> None:
        self.limit = limit

    def schedule(self) -> Iterable[Work]:
        while len(self.running) > self.limit:
            self.preempt()
        while self.num_cached_tokens() > self.limits.num_cache_tokens:
            self.preempt()
        while self.waiting and len(self.running) < self.limit and self.has_place():
            self.running.append(self.waiting.pop(0))
        budget, work = self.budget(), []
        for request in self.running:
            num_tokens = min(budget, len(request.token_ids) - request.num_computed)
            if num_tokens > 0:
                work.append(Work(request.request_id, request.num_computed, num_tokens))
                self.compute(request, num_tokens)
                budget -= num_tokens
        return work

    def budget(self) -> int:
        return self.limits.max_num_batched_tokens

    def num_cached_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.running)

    def has_place(self) -> bool:
        needed = self.num_cached_tokens() + len(self.waiting[0].token_ids)
        return needed <= self.limits.num_cache_tokens

    def compute(self, request: ToyRequest, num_tokens: int) -> None:
        request.num_computed += num_tokens

    def preempt(self) -> None:
        victim = self.running.pop()
        victim.num_computed = 0
        self.waiting.insert(0, victim)

    def update(self, token_ids: Mapping[str, int]) -> Collection[str]:
        finished = []
        for request in list(self.running):
            if request.request_id in token_ids:
                request.token_ids.append(token_ids[request.request_id])
                request.num_outputs_left -= 1
                if self.is_complete(request):
                    self.running.remove(request)
                    finished.append(request.request_id)
        return finished

    def is_complete(self, request: ToyRequest) -> bool:
        return request.num_outputs_left == 0


class LosesWhatItPreempts(Toy):
    def preempt(self) -> None:
        self.running.pop()


class PreemptsWithoutComputingAgain(Toy):
    def preempt(self) -> None:
        self.waiting.insert(0, self.running.pop())
        self.waiting[0].num_computed = len(self.waiting[0].token_ids)


class SkipsATokenOfAChunk(Toy):
    def compute(self, request: ToyRequest, num_tokens: int) -> None:
        request.num_computed += num_tokens + (num_tokens == self.limits.max_num_batched_tokens)


class ExceedsTheBudget(Toy):
    def budget(self) -> int:
        return super().budget() + 1


class IgnoresALowerLimit(Toy):
    def set_running_limit(self, limit: int) -> None:
        self.limit = max(self.limit, limit)


class LowersTheLimitLate(Toy):
    def set_running_limit(self, limit: int) -> None:
        self.later = [self.limit, self.limit, limit]

    def schedule(self) -> Iterable[Work]:
        if getattr(self, "later", None):
            self.limit = self.later.pop(0)
        return super().schedule()


class ForgetsToAbortWhatRuns(Toy):
    def abort(self, request_id: str) -> None:
        running = list(self.running)
        super().abort(request_id)
        self.running = running


class DrawsOneTokenMore(Toy):
    def is_complete(self, request: ToyRequest) -> bool:
        return request.num_outputs_left < 0


class EndsOneTokenEarly(Toy):
    def is_complete(self, request: ToyRequest) -> bool:
        return request.num_outputs_left <= 1


class ComputesARequestTwice(Toy):
    def schedule(self) -> Iterable[Work]:
        work = list(super().schedule())
        return [*work, *work[:1]] if len(work) == 3 else work


class WaitsForAFullBatch(Toy):
    def schedule(self) -> Iterable[Work]:
        is_small = len(self.waiting) + len(self.running) < min(2, self.limits.max_num_seqs)
        return [] if is_small else super().schedule()


class PreemptsForEver(Toy):
    def schedule(self) -> Iterable[Work]:
        if len(self.running) > 1:
            self.waiting.append(self.running[0])
            self.running[0].num_computed = 0
            del self.running[0]
        return super().schedule()


@pytest.mark.parametrize("scheduler", [Toy, Ours])
def test_a_sound_scheduler_passes(scheduler: Any) -> None:
    check_scheduler(scheduler, settings(DEFAULT_SETTINGS, max_examples=40))


@pytest.mark.parametrize(
    ("scheduler", "fault"),
    [
        (LosesWhatItPreempts, "steps compute nothing"),
        (PreemptsWithoutComputingAgain, "steps compute nothing"),
        (SkipsATokenOfAChunk, "were not computed|steps compute nothing"),
        (ExceedsTheBudget, "max_num_batched_tokens is"),
        (IgnoresALowerLimit, "the limit is"),
        (LowersTheLimitLate, "the limit is"),
        (ForgetsToAbortWhatRuns, "which has ended"),
        (DrawsOneTokenMore, "those with all of their tokens"),
        (EndsOneTokenEarly, "those with all of their tokens"),
        (ComputesARequestTwice, "a request twice|max_num_batched_tokens is"),
        (WaitsForAFullBatch, "steps compute nothing"),
        (PreemptsForEver, "have not finished"),
    ],
)
def test_a_planted_fault_is_found(scheduler: Any, fault: str) -> None:
    with pytest.raises(SchedulerFault, match=fault):
        check_scheduler(scheduler, FIRST_FAULT)


class Readings:
    """The `ThermalState` of a device, as a recording says."""

    hottest_c: float | None = 20.0
    power_w: float | None = None
    may_raise_cap = True
    temperatures_c: Mapping[int, float] = {}


@settings(max_examples=60, deadline=None)
@given(arrivals=traffic(max_requests=8, max_prompt_tokens=20, max_tokens=8), moments=heat())
def test_no_heat_changes_the_answers_of_any_traffic(
    arrivals: list[Arrival], moments: list[Heat]
) -> None:
    readings, now = Readings(), 0.0
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    runner = Runner(
        Scheduler(
            config,
            BlockManager(CacheConfig(num_blocks=17, block_size=4)),
            thermal=ThermalGuard(ProportionalThermalPolicy(target_temp_c=80.0), lambda: readings),
            clock=lambda: now,
        ),
        Memory(4),
    )
    requests = [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=tuple(j % 5 for j in range(i, i + arrival.num_prompt_tokens)),
            max_tokens=arrival.max_tokens,
        )
        for i, arrival in enumerate(arrivals)
    ]
    groups, due = [], 0.0
    for i in range(1000):
        moment = moments[i % len(moments)]
        now += moment.after_s
        readings.hottest_c, readings.power_w = moment.temperature_c, moment.power_w
        while len(groups) < len(requests) and due + arrivals[len(groups)].after_s <= now:
            due += arrivals[len(groups)].after_s
            groups.append(runner.add(requests[len(groups)]))
        if len(groups) == len(requests) and not runner.scheduler.has_work:
            break
        runner.step()
    expected = [alone(request, 32) for request in requests]
    assert [outcome(group) for group in groups] == expected
