"""A step and its result are values, which an executor in other processes can be sent."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from request_mix import GREEDY, SMALL, WAYS, finish, prompts, serve

from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
)
from trencadis.engine.api.requests import PoolingRequest
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.runner.in_process import InProcessExecutor, ModelStash
from trencadis.engine.runner.step import (
    PendingStep,
    RowRequest,
    SampleSettings,
    StepInput,
    StepResult,
)
from trencadis.kvcache import CopyPlan
from trencadis.scheduler import ScheduledSequence


@attrs.frozen
class EncodedStep:
    """A step that was encoded; its result comes back encoded."""

    pending: PendingStep

    def wait(self) -> StepResult:
        return pickle.loads(pickle.dumps(self.pending.wait(), 5))  # noqa: S301


class EncodingExecutor(InProcessExecutor):
    """Executes what it has encoded and decoded, as ranks in other processes would get it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_bytes: list[int] = []

    def execute(self, step: StepInput) -> PendingStep:
        encoded = pickle.dumps(step, 5)
        self.num_bytes.append(len(encoded))
        return EncodedStep(super().execute(pickle.loads(encoded)))  # noqa: S301


@pytest.fixture
def both(tiny_model: Path) -> Callable[..., tuple[EngineCore, EngineCore]]:
    """A core with an executor in its process, and one whose steps are encoded."""

    def make(**changes: object) -> tuple[EngineCore, EngineCore]:
        config = EngineConfig(model=str(tiny_model), **{**SMALL, **changes})
        cores = EngineCore(config), EngineCore(config, EncodingExecutor(config))
        for core in cores:
            core.warm_up()
        return cores

    return make


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="enough blocks"),
        pytest.param({"num_blocks": 18, "swap_space": 0}, id="recomputed"),
        pytest.param({"num_blocks": 18, "num_host_blocks": 64}, id="swapped"),
    ],
)
def test_a_step_that_was_encoded_gives_the_same_tokens(
    both: Callable[..., tuple[EngineCore, EngineCore]],
    ways: list[dict[str, Any]],
    changes: dict[str, object],
) -> None:
    here, elsewhere = both(**changes)
    assert serve(here, ways) == serve(elsewhere, ways)
    if "num_blocks" in changes:
        assert elsewhere.stats.num_preemptions > 0
        assert (elsewhere.stats.num_swap_out_bytes > 0) == ("num_host_blocks" in changes)


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs the extra `structured`"
)
def test_the_masks_of_a_structured_output_are_encoded_as_arrays(
    both: Callable[..., tuple[EngineCore, EngineCore]],
) -> None:
    forms = StructuredOutput(regex="[a-c]{9}"), StructuredOutput(choice=["yes", "no"])
    ways = [{"temperature": 0.8, "seed": 1, "structured_output": form} for form in forms]
    here, elsewhere = both()
    assert serve(here, ways) == serve(elsewhere, ways)


def test_log_probabilities_of_prompts_come_back(
    both: Callable[..., tuple[EngineCore, EngineCore]],
) -> None:
    here, elsewhere = both()
    found = serve(here, [{**GREEDY, "prompt_logprobs": 2}])
    assert sum(token.prompt_logprobs is not None for (token, *_) in found.values()) == 6
    assert serve(elsewhere, [{**GREEDY, "prompt_logprobs": 2}]) == found


def test_embeddings_come_back(both: Callable[..., tuple[EngineCore, EngineCore]]) -> None:
    here, elsewhere = both(runner="pooling")
    for core in (here, elsewhere):
        for number, prompt in enumerate(prompts(6)):
            core.add(f"{number}", PoolingRequest(prompt))
    tokens = finish(here)
    assert all(token.embedding for (token,) in tokens.values())
    assert finish(elsewhere) == tokens


def test_an_error_of_one_request_comes_back(
    both: Callable[..., tuple[EngineCore, EngineCore]],
) -> None:
    _, core = both()
    run = core.executor.worker.runner.forward_runner.run

    def broken(batch: Any) -> Any:
        if 251 in batch.unpack().token_ids.tolist()[0]:
            raise RuntimeError("defect in the model")
        return run(batch)

    core.executor.worker.runner.forward_runner.run = broken
    core.add("a", GenerateRequest((1, 2, 3), SamplingParams(**GREEDY)))
    core.add("b", GenerateRequest((1, 251, 3), SamplingParams(**GREEDY)))
    keys = {token.key for _ in range(20) for token in core.step()}
    (failure,) = core.take_failures()
    assert keys == {"a"}
    assert failure.key == "b"
    assert "defect in the model" in failure.message


@pytest.mark.parametrize(("penalty", "is_sent"), [(1.0, False), (1.2, True)])
def test_the_tokens_of_a_sequence_are_sent_only_where_penalties_need_them(
    both: Callable[..., tuple[EngineCore, EngineCore]], penalty: float, is_sent: bool
) -> None:
    """Of two decodes, one of a long prompt: its block table is longer by a few numbers."""
    sizes = []
    for length in (8, 96):
        _, core = both(enable_prefix_caching=False)
        params = SamplingParams(**GREEDY, repetition_penalty=penalty)
        core.add("a", GenerateRequest(tuple(range(length)), params))
        while core.has_work:
            core.step()
        sizes.append(core.executor.num_bytes[-1])
    assert (sizes[1] - sizes[0] > 88) == is_sent


def test_a_switch_of_models_reaches_the_core_through_the_executor_alone(
    tiny_model: Path, tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    first = EngineConfig(model=str(tiny_model), **SMALL)
    other = make_tiny_model(tmp_path, num_hidden_layers=1)
    second = attrs.evolve(first, model=str(other), block_size=16)
    alone = [serve(EngineCore(config), [GREEDY]) for config in (first, second)]
    core = EngineCore(first, EncodingExecutor(first))
    switcher = ModelSwitcher(core)
    for config, expected in ((second, alone[1]), (first, alone[0])):
        switcher.reconfigure_engine(config_payload(config), 1 << 30)
        assert serve(core, [GREEDY]) == expected
    switcher.sleep(1)
    switcher.wake_up()
    assert serve(core, [GREEDY]) == alone[0]


@pytest.mark.parametrize("device", ["cpu", "hpu"])
def test_two_steps_may_be_in_flight(
    tiny_model: Path, request: pytest.FixtureRequest, device: str
) -> None:
    """Two prompts, and a decode of the first beside the second: waited for later, equal tokens."""
    if device == "hpu":
        request.getfixturevalue("lazy_gaudi")
    config = EngineConfig(model=str(tiny_model), **{**SMALL, "device": device})

    def executor() -> InProcessExecutor:
        made = InProcessExecutor(config)
        made.load(config.for_device(made.device_facts.defaults))
        made.plan_memory()
        made.warm_up()
        return made

    def step(number: int, sequence: ScheduledSequence) -> StepInput:
        num_tokens = sequence.start + len(sequence.token_ids)
        row = RowRequest(num_tokens, (SampleSettings(SamplingParams(), sequence.seq_id, 20),))
        prompt, decode = ((sequence,), ()) if sequence.start == 0 else ((), (sequence,))
        return StepInput(number, prompt, decode, CopyPlan(), {sequence.seq_id: row})

    def chunk(seq_id: int, start: int, count: int, blocks: list[int]) -> ScheduledSequence:
        tokens = tuple(range(seq_id * 30 + start, seq_id * 30 + start + count))
        return ScheduledSequence(seq_id, start, tokens, np.array(blocks, np.int32), samples=True)

    steps = [
        step(1, chunk(1, 0, 20, [1, 2, 3])),
        step(2, chunk(2, 0, 20, [4, 5, 6])),
        step(3, chunk(1, 20, 1, [1, 2, 3])),
        step(4, chunk(2, 20, 1, [4, 5, 6])),
    ]
    waiting, in_flight = executor(), executor()
    expected = [waiting.execute(one).wait().token_ids for one in steps]
    results = []
    for pair in (steps[:2], steps[2:]):
        results += [pending.wait() for pending in [in_flight.execute(one) for one in pair]]
    assert [result.token_ids for result in results] == expected
    # The time of a step that began behind another one tells nothing of its own.
    assert (results[1].timing is None) == (device == "hpu")


@attrs.define(eq=False)
class SleepingWorker:
    """The weights of a model, as a stash sees them."""

    weight_bytes: int
    is_discarded: bool = False
    config: EngineConfig = attrs.field(factory=lambda: EngineConfig(model="m"))

    def discard(self) -> None:
        self.is_discarded = True


def test_the_stash_is_filled_to_its_limit_and_drops_the_oldest_models() -> None:
    stash = ModelStash()
    stash.limit_bytes = 10
    workers = [SleepingWorker(size) for size in (11, 10, 4, 6, 1)]
    assert [stash.put(worker) for worker in workers] == [False, True, True, True, True]
    assert [worker.is_discarded for worker in workers] == [False, True, True, False, False]
    assert (list(stash), stash.num_bytes) == (workers[3:], 7)
    assert not stash.put(workers[1]), "its weights are gone"
