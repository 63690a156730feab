"""An error in a step ends the requests that it concerns; the others get their tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trencadis.engine import (
    LLM,
    AsyncEngine,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    LogSettings,
    RequestFailed,
    SamplingParams,
)
from trencadis.engine.core.engine_core import _MAX_FAILED_STEPS
from trencadis.engine.runner import sampler

POISON = 200
"""A token id; the injected defects concern requests whose prompt has it."""

PROMPTS = {
    "a": tuple(range(10, 40)),
    "b": (3, POISON, 7),
    "c": (5, 9),
    "d": tuple(range(60, 75)),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def make_core(tiny_model: Path) -> Callable[..., EngineCore]:
    def make(**changes: object) -> EngineCore:
        settings = {
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "block_size": 8,
            "num_blocks": 80,
            "warmup": "none",
            **changes,
        }
        return EngineCore(EngineConfig(model=str(tiny_model), **settings))

    return make


def serve(core: EngineCore, names: Iterable[str] = PROMPTS) -> tuple[dict[str, list[int]], set]:
    """The tokens of each request that ends well, and the keys of those that fail."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    failed = set()
    for _ in range(200):
        if not core.has_work:
            break
        for token in core.step():
            tokens[token.key].append(token.token_id)
        for failure in core.take_failures():
            failed.add(failure.key)
            del tokens[failure.key]
    assert not core.has_work
    assert core.stats.num_used_blocks == 0
    return tokens, failed


@pytest.fixture
def expected(make_core: Callable[..., EngineCore]) -> dict[str, list[int]]:
    core = make_core()
    for name, prompt in PROMPTS.items():
        core.add(name, GenerateRequest(prompt, GREEDY))
    tokens, failed = serve(core)
    assert not failed
    return tokens


def without(expected: dict[str, list[int]], *names: str) -> dict[str, list[int]]:
    return {name: tokens for name, tokens in expected.items() if name not in names}


def fail_forward(core: EngineCore, is_broken: Callable[[Any], bool]) -> None:
    """Let the forward pass of each batch raise for which ``is_broken`` holds."""
    forward_runner = core.executor.worker.runner.forward_runner

    def broken(run: Callable[[Any], Any], batch: Any) -> Any:
        if is_broken(batch):
            raise RuntimeError("defect in the model")
        return run(batch)

    forward_runner.run = partial(broken, forward_runner.run)
    forward_runner.probe = partial(broken, forward_runner.probe)


def test_a_prompt_that_breaks_the_model_ends_alone(make_core, expected) -> None:
    core = make_core()
    fail_forward(core, lambda batch: POISON in batch.unpack().token_ids.tolist()[0])
    for name, prompt in PROMPTS.items():
        core.add(name, GenerateRequest(prompt, GREEDY))
    tokens, failed = serve(core)
    assert failed == {"b"}
    assert tokens == without(expected, "b")


def test_a_sequence_that_breaks_the_decode_batch_ends_alone(make_core, expected) -> None:
    core = make_core()
    decoded = set()

    def is_broken(batch: Any) -> bool:
        """True for decodes of a batch with the third token of b."""
        ids = batch.unpack().token_ids.tolist()[0]
        decoded.update(ids)
        return len(ids) <= 8 and expected["b"][2] in ids

    others = [name for name in "acd" if expected["b"][2] not in (*PROMPTS[name], *expected[name])]
    assert others
    fail_forward(core, is_broken)
    for name in ("b", *others):
        core.add(name, GenerateRequest(PROMPTS[name], GREEDY))
    tokens, failed = serve(core, ("b", *others))
    assert failed == {"b"}
    assert tokens == {name: expected[name] for name in others}


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"n": 3}, id="samples"),
        pytest.param({"best_of": 3}, id="best of"),
        pytest.param({"use_beam_search": True, "n": 2, "best_of": 3}, id="beams"),
        pytest.param({"n": 6}, id="samples of several groups"),
    ],
)
def test_a_group_that_breaks_the_model_ends_alone(make_core, expected, params) -> None:
    core = make_core()
    fail_forward(core, lambda batch: POISON in batch.unpack().token_ids.tolist()[0])
    for name, prompt in PROMPTS.items():
        more = params if name == "b" else {}
        core.add(
            name,
            GenerateRequest(
                prompt, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **more)
            ),
        )
    tokens, failed = serve(core)
    assert failed == {"b"}
    assert tokens == without(expected, "b")


def test_a_request_that_cannot_be_sampled_ends_alone(make_core, expected, monkeypatch) -> None:
    """With the sampler of the host; that of a device has a test in test_device_sampler.py."""
    core = make_core(device="cpu")
    sample = sampler.sample

    def broken(logits: Any, rows: Any) -> Any:
        if any(row.samples[0].num_prompt_tokens == len(PROMPTS["b"]) for row in rows):
            raise RuntimeError("defect in the sampler")
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", broken)
    for name, prompt in PROMPTS.items():
        core.add(name, GenerateRequest(prompt, GREEDY))
    tokens, failed = serve(core)
    assert failed == {"b"}
    assert tokens == without(expected, "b")


@pytest.mark.parametrize("phase", ["schedule", "update", "run"])
def test_a_step_that_fails_as_a_whole_ends_admitted_requests_and_no_waiting_ones(
    make_core, expected, phase: str
) -> None:
    core = make_core(max_num_seqs=2)
    for name, prompt in PROMPTS.items():
        core.add(name, GenerateRequest(prompt, GREEDY))
    core.step()
    owner = core.executor.worker.runner if phase == "run" else core.scheduler
    healthy = getattr(owner, phase)

    def broken(*args: Any, **more: Any) -> Any:
        setattr(owner, phase, healthy)
        raise RuntimeError(f"defect in {phase}")

    setattr(owner, phase, broken)
    tokens, failed = serve(core)
    assert failed == {"a", "b"}
    assert tokens == without(expected, "a", "b")


def test_failed_moves_are_not_read_from_the_prefix_cache(make_core, monkeypatch) -> None:
    core = make_core()
    core.add("a", GenerateRequest(PROMPTS["a"], GREEDY))
    serve(core, "a")
    core.add("c", GenerateRequest(PROMPTS["c"], GREEDY))
    core.step()
    monkeypatch.setattr(core.executor.worker.runner, "run", None)
    core.step()
    monkeypatch.undo()
    assert [failure.key for failure in core.take_failures()] == ["c"]
    core.add("a", GenerateRequest(PROMPTS["a"], GREEDY))
    assert core.step()[0].num_cached_tokens == 0


def test_a_device_that_fails_for_good_ends_the_core(make_core) -> None:
    core = make_core()
    fail_forward(core, lambda batch: True)
    core.add("a", GenerateRequest(PROMPTS["a"], GREEDY))
    with pytest.raises(RuntimeError, match="defect in the model"):
        core.step()


def test_steps_that_fail_one_after_the_other_end_the_core(make_core, monkeypatch) -> None:
    core = make_core()

    def broken() -> None:
        raise RuntimeError("defect in schedule")

    monkeypatch.setattr(core.scheduler, "schedule", broken)
    core.add("a", GenerateRequest(PROMPTS["a"], GREEDY))
    assert core.step() == []
    assert core.step() == []
    with pytest.raises(RuntimeError, match="defect in schedule"):
        core.step()


def test_failed_steps_with_good_ones_between_them_end_no_core(
    make_core, expected, monkeypatch
) -> None:
    core = make_core()
    for _ in range(3):
        core.add("c", GenerateRequest(PROMPTS["c"], GREEDY))
        with monkeypatch.context() as patch:
            patch.setattr(core, "_run_step", failing)
            for _ in range(_MAX_FAILED_STEPS - 1):
                assert core.step() == []
        assert serve(core, "c") == ({"c": expected["c"]}, set())


def failing() -> None:
    raise RuntimeError("a defect")


def test_an_offline_batch_tells_which_prompt_failed_and_can_be_repeated(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    llm = LLM(str(tiny_model), dtype="float32", max_model_len=128, num_blocks=80, warmup="none")
    fail_forward(llm.core, lambda batch: POISON in batch.unpack().token_ids.tolist()[0])
    with pytest.raises(RequestFailed, match=r"prompt 1.*defect in the model"):
        llm.generate(list(PROMPTS.values()), GREEDY)
    assert not llm.core.has_work
    healthy = [PROMPTS[name] for name in "acd"]
    assert [result.completions[0].token_ids for result in llm.generate(healthy, GREEDY)] == [
        expected[name] for name in "acd"
    ]


DEFECTIVE_DEVICE = f"""
from trencadis.engine.devices import CPUDevice


class Defective(CPUDevice):
    def optimize(self, model):
        super().optimize(model)

        def check(module, inputs, named):
            if {POISON} in named["input_ids"].tolist()[0]:
                raise RuntimeError("defect in the model")

        model.register_forward_pre_hook(check, with_kwargs=True)
"""


def test_a_client_whose_request_breaks_the_model_hurts_no_other_client(
    tiny_model: Path,
    expected: dict[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "defective.py").write_text(DEFECTIVE_DEVICE)
    monkeypatch.syspath_prepend(tmp_path)
    config = EngineConfig(
        model=str(tiny_model),
        device="defective:Defective",
        dtype="float32",
        max_model_len=128,
        num_blocks=80,
        warmup="none",
    )

    async def body() -> None:
        engine = await AsyncEngine.start(config, LogSettings(level=logging.CRITICAL))

        async def collect(prompt: tuple[int, ...]) -> list[int]:
            deltas = [delta async for delta in engine.generate(GenerateRequest(prompt, GREEDY))]
            return [token for delta in deltas for token in delta.token_ids]

        try:
            for _ in range(2):
                results = await asyncio.wait_for(
                    asyncio.gather(*map(collect, PROMPTS.values()), return_exceptions=True), 120
                )
                outcome = dict(zip(PROMPTS, results, strict=True))
                error = outcome.pop("b")
                assert isinstance(error, RequestFailed)
                assert "defect in the model" in str(error)
                assert outcome == without(expected, "b")
            await engine.check_health()
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 300))
