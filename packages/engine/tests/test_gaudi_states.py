"""Layers with a state on a simulated Gaudi: nothing is compiled in traffic, copied or left out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from transformers import AutoModelForCausalLM

from trencadis.engine import BatchControl, EngineConfig, EngineCore, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
FORKED = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, n=3, logit_bias={0: 0.0})
FAMILIES = ("Granite 4 (hybrid)", "Qwen 3 Next")


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(5)
    return [tuple(draw.randrange(250) for _ in range(length)) for length in (1, 3, 17, 40, 57)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Before the stand-in is loaded, on the CPU."""
    return save_family(request.param, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = own.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def make_core(model: Path, **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {
        **{"device": "hpu", "dtype": "float32", "max_model_len": 72, "max_num_seqs": 8},
        **{"block_size": 8, "max_num_batched_tokens": 24, "num_blocks": 73},
    }
    return EngineCore(EngineConfig(model=str(model), **settings | changes))


def serve(core: EngineCore, expected: list[list[int]], evicts: bool) -> None:
    found: dict[tuple[str, int], list[int]] = {}
    for number, prompt in enumerate(prompts()):
        core.add(f"{number}", GenerateRequest(prompt, GREEDY if number % 2 else FORKED))
    count = 0
    while core.has_work:
        count += 1
        if evicts and count % 5 == 0:
            core.control(BatchControl(force_evict=99))
            core.control(BatchControl(max_num_seqs=8))
        for token in core.step():
            found.setdefault((token.key, token.index), []).append(token.token_id)
        assert not core.take_failures()
    for (key, _), tokens in found.items():
        assert tokens == expected[int(key)], key
    assert len(found) == 5 + 2 * 3


@pytest.mark.gaudi
@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"async_scheduling": False}, marks=pytest.mark.slow)], ids=str
)
def test_traffic_compiles_nothing_whatever_happens_to_the_states(
    model: Path,
    expected: list[list[int]],
    mode: str,
    changes: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    bridge = request.getfixturevalue(f"{mode}_gaudi")
    core = make_core(model, num_host_blocks=64, **changes)
    core.warm_up()
    before, counted = core.executor.device.num_compilations(), bridge.counters.copy()
    for evicts in (False, True):
        serve(core, expected, evicts)
    assert core.stats.num_swaps > 0
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0
    assert core.executor.device.num_compilations() == before
    since = bridge.counters.since(counted)
    assert bool(since.replays) == (mode == "lazy")
    assert since.copied_bytes == since.fallbacks == 0
    core.close()


@pytest.mark.gaudi
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_model_that_sleeps_begins_with_states_of_zero(
    model: Path, expected: list[list[int]], mode: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{mode}_gaudi")
    core = make_core(model, warmup="none")
    serve(core, expected, evicts=False)
    worker: Any = core.executor.worker  # type: ignore[attr-defined]
    before = core.executor.device.num_compilations()
    worker.sleep()
    worker.wake()
    serve(core, expected, evicts=False)
    if mode == "eager":  # where programs stay, they are given the new cache
        assert core.executor.device.num_compilations() == before
    core.close()


@pytest.mark.gaudi
def test_a_pass_that_fails_leaves_no_cache_behind(
    model: Path, lazy_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(model, warmup="none")
    runner: Any = core.executor.worker.runner.forward_runner  # type: ignore[attr-defined]
    seen = []

    def failing(**_: Any) -> None:
        seen.append(runner.states.paged)
        raise RuntimeError("a defect of the model")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model", failing)
        core.add("0", GenerateRequest(prompts()[1], GREEDY))
        with pytest.raises(RuntimeError, match="a defect"):
            core.step()
    assert seen[0] is not None
    assert runner.states.paged is None
    core.close()
