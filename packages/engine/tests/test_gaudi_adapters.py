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
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Before the stand-in is loaded, on the CPU."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model, folder / name, rank=2 ** (1 + number), seed=number)
        for number, name in enumerate(NAMES)
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
    core = EngineCore(
        EngineConfig(
            model=tiny_model,
            device="hpu",
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            block_size=16,
            max_num_batched_tokens=64,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=16,
            **settings,
        )
    )
    core.warm_up()
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
