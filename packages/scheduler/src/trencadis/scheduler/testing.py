"""Tests of a scheduler of continuous batching, for its author: random requests, aborts, shortage.

    from trencadis.scheduler.testing import check_scheduler

    def test_my_scheduler():
        check_scheduler(lambda limits: MyScheduler(limits))

And strategies of Hypothesis for tests of one's own: `traffic`, `heat`. It needs Hypothesis, the
extra ``test``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
from hypothesis import HealthCheck
from hypothesis import settings as Settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

DEFAULT_SETTINGS = Settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

MOST_IDLE_STEPS = 3
"""Steps in a row that may compute nothing while requests are unfinished, as during a swap."""


class SchedulerFault(AssertionError):
    """What a scheduler did wrong. Hypothesis adds the shortest calls that show it."""


@attrs.frozen
class Limits:
    """What a scheduler must keep to. The cache holds any one request, and often not all of them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_cache_tokens: int


@attrs.frozen
class Work:
    """Tokens ``start`` to ``start + num_tokens`` of a request, which a step computes."""

    request_id: str
    start: int
    num_tokens: int


class ServingScheduler(Protocol):
    """A scheduler of requests with one answer each."""

    def add(self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, /) -> None:
        """A new request. Its answer has ``max_tokens`` tokens, at least 1."""

    def abort(self, request_id: str, /) -> None:
        """The end of an unfinished request."""

    def schedule(self) -> Iterable[Work]:
        """What the next step computes. Its results follow by `update` before the next call.

        A request whose blocks were taken away is computed again, from any of its first tokens. One
        whose first tokens were computed for another request need not compute them.
        """

    def update(self, token_ids: Mapping[str, int], /) -> Collection[str]:
        """A token for each request of the step whose last token was computed.

        Returns the requests that have finished by that.
        """


@runtime_checkable
class LimitableScheduler(Protocol):
    """One whose running limit can be lowered while it serves, and raised again."""

    def set_running_limit(self, limit: int, /) -> None:
        """The most requests in a step. It holds from the step after the next one on."""


def check_scheduler(
    make: Callable[[Limits], ServingScheduler], settings: Settings = DEFAULT_SETTINGS
) -> None:
    """Drive the schedulers that ``make(limits)`` returns through random calls.

    Each token of a request must be computed, in order, before the next one is drawn; a step stays
    within the limits; an aborted or finished request is not computed; all others finish, with as
    many tokens as they asked for. Raises `SchedulerFault`; an error of the scheduler is passed on.
    """
    run_state_machine_as_test(
        lambda: SchedulerMachine(make),  # type: ignore[arg-type]  # any function may make one
        settings=settings,
    )


@attrs.frozen
class Arrival:
    """A request of a trace. ``after_s``: since the one before."""

    after_s: float
    num_prompt_tokens: int
    max_tokens: int


def traffic(
    *, max_requests: int = 20, max_prompt_tokens: int = 512, max_tokens: int = 128
) -> st.SearchStrategy[list[Arrival]]:
    """Requests in the order of their arrival: bursts and pauses, short and long ones."""

    def lengths(most: int) -> st.SearchStrategy[int]:
        return st.integers(1, most) | st.sampled_from(sorted({1, min(2, most), most}))

    arrivals = st.builds(
        Arrival,
        after_s=st.just(0.0) | st.sampled_from([0.001, 0.1, 1.0, 30.0]),
        num_prompt_tokens=lengths(max_prompt_tokens),
        max_tokens=lengths(max_tokens),
    )
    return st.lists(arrivals, min_size=1, max_size=max_requests)


@attrs.frozen
class Heat:
    """A moment of a device. ``temperature_c``: None where its sensor gives no reading."""

    after_s: float
    temperature_c: float | None
    power_w: float | None


def heat(
    *, target_temp_c: float = 80.0, max_moments: int = 60, with_faults: bool = True
) -> st.SearchStrategy[list[Heat]]:
    """Temperatures below, about and far above a target, and powers, with or without gaps."""
    degrees = [target_temp_c + difference for difference in (-40, -3, -0.5, 0, 1, 8, 15)]
    gap = st.none() if with_faults else st.nothing()
    moments = st.builds(
        Heat,
        after_s=st.sampled_from([0.125, 1.0, 7.0, 40.0]),  # their sums are exact
        temperature_c=st.sampled_from(degrees) | gap,
        power_w=st.sampled_from([90.0, 250.0, 520.0, 700.0]) | gap,
    )
    return st.lists(moments, min_size=2, max_size=max_moments)


@attrs.define
class _Request:
    """What is expected of a request. ``num_computed``: of its first tokens, once or again."""

    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    num_computed: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


PROMPTS = st.builds(
    lambda theme, length, tail: [theme] * length + tail,
    st.integers(0, 1),
    st.integers(1, 12),
    st.lists(st.integers(0, 1), max_size=4),
)
"""Prompts of 1 to 16 tokens, which often begin alike."""


class SchedulerMachine(RuleBasedStateMachine):
    """The calls of one scheduler, and what must hold in each step."""

    def __init__(self, make: Callable[[Limits], ServingScheduler]) -> None:
        super().__init__()
        self._make = make
        self._requests: dict[str, _Request] = {}
        self._ended: set[str] = set()
        self._computed: set[tuple[int, ...]] = set()
        """Token ids from the first one on, for which some request has computed all."""
        self._num_idle = 0
        self._limits_before: list[int] = []
        """The running limits before the last step and before the next one."""
        self._has_fault = False

    @initialize(
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(6, 24),
        num_cache_tokens=st.integers(24, 64),
    )
    def start(self, max_num_seqs: int, max_num_batched_tokens: int, num_cache_tokens: int) -> None:
        self.limits = Limits(max_num_seqs, max_num_batched_tokens, num_cache_tokens)
        self.scheduler = self._make(self.limits)
        self._limits_before = [max_num_seqs] * 2

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        request_id = f"r{len(self._requests) + len(self._ended)}"
        self.scheduler.add(request_id, tuple(prompt), max_tokens)
        self._requests[request_id] = _Request(list(prompt), len(prompt), max_tokens)

    @precondition(lambda self: self._requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self._requests)))
        self.scheduler.abort(request_id)
        self._end(request_id)

    @precondition(lambda self: isinstance(self.scheduler, LimitableScheduler))
    @rule(limit=st.integers(1, 6))
    def set_running_limit(self, limit: int) -> None:
        limit = min(limit, self.limits.max_num_seqs)
        self.scheduler.set_running_limit(limit)  # type: ignore[attr-defined]
        self._limits_before[-1] = limit

    @rule(num_steps=st.sampled_from([1, 1, 2, 5]))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def teardown(self) -> None:
        if self._has_fault or not hasattr(self, "scheduler"):
            return
        most = 50 + 20 * sum(
            len(request.token_ids) + request.max_tokens for request in self._requests.values()
        )
        for _ in range(most):
            if not self._requests:
                return
            self._step()
        self._require(False, f"after {most} steps these have not finished: {self._unfinished()}")

    def _step(self) -> None:
        work = list(self.scheduler.schedule())
        self._check_limits(work)
        sampled: dict[str, int] = {}
        for item in work:
            request = self._checked(item)
            request.num_computed = item.start + item.num_tokens
            if request.num_computed == len(request.token_ids):
                # A token that depends on all before it, so that equal prompts go on alike.
                sampled[item.request_id] = sum(request.token_ids) % 2
        for item in work:
            request = self._requests[item.request_id]
            self._computed.update(
                tuple(request.token_ids[:end])
                for end in range(item.start + 1, request.num_computed + 1)
            )
        finished = set(self.scheduler.update(dict(sampled)))
        for request_id, token_id in sampled.items():
            self._requests[request_id].token_ids.append(token_id)
        complete = {
            request_id
            for request_id in sampled
            if self._requests[request_id].num_output_tokens == self._requests[request_id].max_tokens
        }
        self._require(
            finished == complete,
            f"update() says that {sorted(finished)} have finished: those with all of their tokens "
            f"are {sorted(complete)}",
        )
        for request_id in complete:
            self._end(request_id)

    def _check_limits(self, work: Sequence[Work]) -> None:
        num_tokens = sum(item.num_tokens for item in work)
        self._require(
            num_tokens <= self.limits.max_num_batched_tokens,
            f"a step computes {num_tokens} tokens, max_num_batched_tokens is "
            f"{self.limits.max_num_batched_tokens}",
        )
        names = [item.request_id for item in work]
        self._require(len(set(names)) == len(names), f"a step computes a request twice: {names}")
        limit = max(self._limits_before)
        self._require(
            len(names) <= limit, f"a step computes {len(names)} requests, the limit is {limit}"
        )
        self._limits_before = [*self._limits_before[1:], self._limits_before[-1]]
        self._num_idle = 0 if work or not self._requests else self._num_idle + 1
        self._require(
            self._num_idle <= MOST_IDLE_STEPS,
            f"{self._num_idle} steps compute nothing, though these have not finished: "
            f"{self._unfinished()}",
        )

    def _checked(self, item: Work) -> _Request:
        name, end = item.request_id, item.start + item.num_tokens
        self._require(
            name in self._requests,
            f"a step computes {name}, which "
            + ("has ended" if name in self._ended else "was never added"),
        )
        request = self._requests[name]
        self._require(
            0 <= item.start < end <= len(request.token_ids),
            f"a step computes tokens {item.start} to {end} of {name}, which has "
            f"{len(request.token_ids)}",
        )
        self._require(
            item.start <= request.num_computed
            or tuple(request.token_ids[: item.start]) in self._computed,
            f"a step computes tokens {item.start} to {end} of {name}: those from "
            f"{request.num_computed} to {item.start} were not computed",
        )
        return request

    def _end(self, request_id: str) -> None:
        del self._requests[request_id]
        self._ended.add(request_id)

    def _unfinished(self) -> list[str]:
        return sorted(self._requests)

    def _require(self, holds: bool, fault: str) -> None:
        if not holds:
            self._has_fault = True
            raise SchedulerFault(fault)
