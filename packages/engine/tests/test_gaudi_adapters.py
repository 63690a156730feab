"""Adapters on a simulated Gaudi: tokens are those of PEFT, and nothing is compiled for them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from adapters import Reference, save_adapter

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
RANKS = {"a": 4, "b": 64, "c": 16, "d": 17}
NAMES = (*RANKS,)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Before the stand-in is loaded, on the CPU."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model, folder / name, rank, rank, size=rank**-0.5)
        for name, rank in RANKS.items()
    }


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folders: dict[str, Path]) -> dict[Any, list[int]]:
    reference = Reference(tiny_model, folders)
    return {
        (name, prompt): reference.tokens(name, prompt, 8)
        for name in (*NAMES, None)
        for prompt in PROMPTS
    }


PROMPTS = [tuple(random.Random(i).randrange(256) for _ in range(3 + 4 * i)) for i in range(4)]


@pytest.fixture(params=["lazy", "eager"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def core_of(model: Path, **settings: object) -> EngineCore:
    values = {
        "max_model_len": 32,
        "max_num_seqs": 2,
        "block_size": 16,
        "max_num_batched_tokens": 32,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 64,
        **settings,
    }
    core = EngineCore(EngineConfig(model=model, device="hpu", dtype="float32", **values))
    core.warm_up()
    return core


@pytest.mark.gaudi
@pytest.mark.parametrize("settings", [{}, {"compile": False}], ids=["default", "uncompiled"])
def test_no_adapter_compiles_anything(
    expected: dict[Any, list[int]],
    folders: dict[str, Path],
    tiny_model: Path,
    mode: str,
    settings: dict[str, object],
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(f"{mode}_gaudi")
    core = core_of(tiny_model, **settings)
    before = core.executor.device.num_compilations()
    number = itertools.count()
    draw = random.Random(4)
    for round_number in range(3):
        for name in NAMES:
            if round_number != 1 or name in ("a", "b"):
                core.load_adapter(name, str(folders[name]))
        served = [adapter.name for adapter in core.adapters]
        asked = {
            f"r{next(number)}": (draw.choice([*served, None]), draw.choice(PROMPTS))
            for _ in range(10)
        }
        for key, (name, prompt) in asked.items():
            core.add(key, GenerateRequest(prompt, GREEDY, lora=name))
        found: dict[str, list[int]] = {key: [] for key in asked}
        while core.has_work:
            for token in core.step():
                found[token.key].append(token.token_id)
            assert not core.take_failures()
        for key, what in asked.items():
            assert found[key] == expected[what], what
        for name in served:
            core.unload_adapter(name)
    assert core.stats.num_compilations == 0
    assert core.stats.num_cold_forwards == 0
    assert core.executor.device.num_compilations() == before
    core.close()


@pytest.mark.gaudi
def test_a_step_reads_no_further_than_the_ranks_of_its_adapters(
    folders: dict[str, Path], tiny_model: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    """Programs are for the ranks 16 and 64, and for none: as in an engine without adapters."""
    counters = request.getfixturevalue(f"{mode}_gaudi").counters
    one_bucket = {"max_num_seqs": 1, "async_scheduling": False, "num_blocks": 5}
    core = core_of(tiny_model, **one_bucket)
    for name in ("a", "b", "c"):
        core.load_adapter(name, str(folders[name]))

    def cost(core: EngineCore, name: str | None) -> Any:
        """Of a decode step whose adapter has its slot."""
        core.add("r", GenerateRequest(PROMPTS[0], GREEDY, lora=name))
        core.step()
        core.step()
        before = counters.copy()
        core.step()
        found = counters.since(before)
        while core.has_work:
            core.step()
        return found

    found = {name: cost(core, name) for name in (None, "a", "b", "c", None)}
    layers = core.executor.worker.adapters.layers.shapes.values()
    num_graphs = core.stats.num_graphs
    core.close()
    plain = core_of(tiny_model, enable_lora=False, max_loras=1, max_lora_rank=16, **one_bucket)
    assert found[None] == cost(plain, None)
    assert num_graphs == 3 * plain.stats.num_graphs
    assert (num_graphs > 0) is (mode == "lazy")
    plain.close()
    num_bytes = 4 * 2 * sum(map(sum, layers))
    for name, rank in {"a": 16, "b": 64, "c": 16}.items():
        read = found[name].read_bytes - found[None].read_bytes
        assert rank * num_bytes <= read < 1.5 * rank * num_bytes
