"""Steps that are started before the results of the last one: same tokens, and nothing waits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from request_mix import GREEDY, SMALL, WAYS, prompts, serve

from trencadis.engine import (
    LLM,
    BatchControl,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    NewToken,
    SamplingParams,
    StructuredOutput,
)
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.step import PendingStep, StepInput, StepResult

MIXED = [params for ways in WAYS.values() for params in ways]


@attrs.frozen
class WatchedStep:
    """A step that notes when the host begins to wait for it."""

    number: int
    events: list[tuple[str, int]]
    pending: PendingStep

    def wait(self) -> StepResult:
        self.events.append(("wait", self.number))
        return self.pending.wait()


class WatchedExecutor(InProcessExecutor):
    """Notes in which order steps are launched and waited for. ``fails``: numbers of steps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.events: list[tuple[str, int]] = []
        self.fails: set[int] = set()

    def execute(self, step: StepInput) -> PendingStep:
        self.events.append(("launch", step.number))
        if step.number in self.fails:
            raise RuntimeError(f"step {step.number} fails")
        return WatchedStep(step.number, self.events, super().execute(step))

    @property
    def num_overlapped(self) -> int:
        """Steps that were launched before the host waited for the one before."""
        order = {event: place for place, event in enumerate(self.events)}
        launched = [number for kind, number in self.events if kind == "launch"]
        pairs = ((("launch", number), ("wait", number - 1)) for number in launched)
        return sum(wait in order and order[launch] < order[wait] for launch, wait in pairs)


def tokens(reported: dict[str, list[NewToken]]) -> dict[str, list[list[tuple[int, str | None]]]]:
    """Token and finish reason of each sample.

    Batches differ, and with them the last bits of log-probabilities.
    """
    return {
        key: [
            [(token.token_id, token.finish_reason) for token in of_key if token.index == index]
            for index in sorted({token.index for token in of_key})
        ]
        for key, of_key in reported.items()
    }


Make = Callable[..., tuple[EngineCore, WatchedExecutor]]


@pytest.fixture
def make(tiny_model: Path) -> Make:
    def make(**changes: object) -> tuple[EngineCore, WatchedExecutor]:
        settings = {**SMALL, "async_scheduling": True, **changes}
        config = EngineConfig(model=str(tiny_model), **settings)
        executor = WatchedExecutor(config)
        core = EngineCore(config, executor)
        core.warm_up()
        return core, executor

    return make


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="enough blocks"),
        pytest.param({"num_blocks": 18, "swap_space": 0}, id="recomputed"),
        pytest.param({"num_blocks": 18, "num_host_blocks": 64}, id="swapped"),
        pytest.param({"use_buckets": False}, id="without buckets"),
        pytest.param({"enable_prefix_caching": False}, id="without prefix caching"),
    ],
)
def test_tokens_are_those_of_steps_that_wait(make: Make, changes: dict[str, object]) -> None:
    core, executor = make(**changes)
    waiting, waits = make(**changes, async_scheduling=False)
    count = 2 * len(MIXED)
    assert tokens(serve(core, MIXED, count)) == tokens(serve(waiting, MIXED, count))
    assert executor.num_overlapped > 0
    assert waits.num_overlapped == 0
    assert core.blocks.pool.num_used_blocks == 0


def test_every_decode_step_is_launched_before_the_host_waits(make: Make) -> None:
    core, executor = make()
    serve(core, [GREEDY], 4)
    launched = [number for kind, number in executor.events if kind == "launch"]
    assert executor.num_overlapped == len(launched) - 1


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({**GREEDY, "repetition_penalty": 1.3}, id="penalties"),
        pytest.param({**GREEDY, "use_beam_search": True, "best_of": 2}, id="beams"),
        pytest.param(
            {"temperature": 0.0, "structured_output": StructuredOutput(regex="[a-c]{9}")},
            id="structured output",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("llguidance") is None, reason="needs the extra"
            ),
        ),
    ],
)
def test_rows_that_depend_on_the_last_token_wait_for_it(make: Make, params: dict[str, Any]) -> None:
    core, executor = make(max_num_batched_tokens=64)  # each prompt in one step
    serve(core, [{"max_tokens": 12, **params}], 1)
    assert len(executor.events) > 4
    assert executor.num_overlapped == 0


def test_a_stop_token_leaves_nothing_behind(make: Make) -> None:
    """The row that was launched for the ended sequence gives no token."""
    core, _ = make()
    whole = serve(core, [{**GREEDY, "max_tokens": 30}], 3)
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    stops = [{**params, "stop_token_ids": [whole[key][5].token_id]} for key in sorted(whole)]
    core, executor = make()
    cut = serve(core, stops, 3)
    for key, tokens in cut.items():
        ids = [token.token_id for token in whole[key]]
        end = ids.index(ids[5]) + 1
        assert [token.token_id for token in tokens] == ids[:end]
        assert tokens[-1].finish_reason == "stop"
    assert executor.num_overlapped > 0
    assert core.blocks.pool.num_used_blocks == 0


def test_an_abort_between_two_steps_in_flight_ends_one_request_alone(make: Make) -> None:
    core, _ = make()
    whole = serve(core, [GREEDY], 3)
    core, _ = make()
    for number, prompt in enumerate(prompts(3)):
        core.add(f"{number}", GenerateRequest(prompt, SamplingParams(**GREEDY)))
    got: dict[str, list[int]] = {}
    while core.has_work:
        for token in core.step():
            got.setdefault(token.key, []).append(token.token_id)
        if len(got.get("1", ())) == 4:
            core.abort("1")
    assert {key: len(ids) for key, ids in got.items()} == {"0": 12, "1": 4, "2": 12}
    for key, ids in got.items():
        assert ids == [token.token_id for token in whole[key]][: len(ids)]
    assert core.blocks.pool.num_used_blocks == 0


def test_an_abort_of_beams_in_flight_ends_one_request_alone(make: Make) -> None:
    core, _ = make()
    whole = serve(core, [GREEDY], 1)
    core, _ = make()
    (prompt,) = prompts(1)
    core.add("0", GenerateRequest(prompt, SamplingParams(**GREEDY)))
    got = [token.token_id for _ in range(4) for token in core.step()]
    core.add("1", GenerateRequest((1, 2, 3), SamplingParams(use_beam_search=True, n=2)))
    got += [token.token_id for token in core.step()]
    core.abort("1")  # the step of its prompt is in flight
    while core.has_work:
        got += [token.token_id for token in core.step()]
    assert not core.take_failures()
    assert got == [token.token_id for token in whole["0"]]


def test_an_order_is_carried_out_although_steps_are_in_flight(make: Make) -> None:
    core, _ = make()
    whole = serve(core, [{**GREEDY, "max_tokens": 30}], 4)
    core, _ = make()
    for number, prompt in enumerate(prompts(4)):
        core.add(
            f"{number}", GenerateRequest(prompt, SamplingParams(**{**GREEDY, "max_tokens": 30}))
        )
    got: dict[str, list[int]] = {}
    order = None
    while core.has_work:
        for token in core.step():
            got.setdefault(token.key, []).append(token.token_id)
        if order is None and len(got.get("0", ())) == 4:
            order = core.control(BatchControl(max_num_seqs=1))
    assert order is not None
    assert order.result(timeout=0).new_running == 1
    assert got == {key: [t.token_id for t in of_one] for key, of_one in whole.items()}


def test_a_step_that_fails_with_another_in_flight_ends_what_was_admitted(make: Make) -> None:
    core, executor = make()
    for number, prompt in enumerate(prompts(2)):
        core.add(f"{number}", GenerateRequest(prompt, SamplingParams(**GREEDY)))
    executor.fails.add(6)
    while core.has_work:
        core.step()
    assert {failure.key for failure in core.take_failures()} == {"0", "1"}
    assert core.blocks.pool.num_used_blocks == 0
    executor.fails.clear()
    served = serve(core, [GREEDY], 2)
    assert all(len(tokens) == 12 for tokens in served.values())


def test_sleep_drops_the_steps_in_flight(make: Make) -> None:
    core, _ = make()
    whole = serve(core, [GREEDY], 2)
    for number, prompt in enumerate(prompts(2)):
        core.add(f"{number}", GenerateRequest(prompt, SamplingParams(**GREEDY)))
    for _ in range(4):
        core.step()
    switcher = ModelSwitcher(core)
    switcher.sleep(1)
    assert not core.has_work
    switcher.wake_up()
    assert tokens(serve(core, [GREEDY], 2)) == tokens(whole)


def test_a_call_of_llm_leaves_the_prefix_cache_and_the_requests_of_others(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **SMALL, async_scheduling=True)
    params, prompt = SamplingParams(**GREEDY), list(range(40))
    first = llm.generate([prompt], params)[0].completions[0].token_ids
    assert llm.generate([prompt], params)[0].completions[0].token_ids == first
    assert llm.core.stats.num_prefix_hit_tokens > 0
    longer = SamplingParams(**GREEDY | {"max_tokens": 60})
    llm.core.add("other", GenerateRequest(tuple(prompt), longer))
    llm.generate([prompt], params)
    assert not llm.core.take_failures()
    count = 0
    while llm.core.has_work:
        count += len(llm.core.step())
    assert count > 40, "the other request goes on"
