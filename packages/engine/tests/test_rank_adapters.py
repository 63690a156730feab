"""Adapters of several ranks: the tokens of PEFT, and a load that is that of all ranks or none."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from adapters import Reference, save_adapter
from request_mix import SMALL, finish
from test_ranks import _one_thread, start  # noqa: F401  (fixtures)

from trencadis.engine import AdapterError, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices.inductor import cpp_compiler_missing

NAMES = ("a", "b", "c", None)
PROMPTS = [tuple(range(3 + i, 9 + 3 * i)) for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def tokens_of(core: EngineCore) -> dict[int, list[int]]:
    """Those of each prompt, with each adapter in turn."""
    for number, prompt in enumerate(PROMPTS):
        core.add(f"{number}", GenerateRequest(prompt, GREEDY, lora=NAMES[number % len(NAMES)]))
    return {int(key): [token.token_id for token in tokens] for key, tokens in finish(core).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        (2, {}),
        (2, {"intermediate_size": 96, "attention_bias": True}),
        # Each rank has a copy of the one key-value head.
        (4, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ],
)
def test_ranks_compute_what_peft_does(
    size: int,
    sizes: dict[str, object],
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    model = make_tiny_model(tmp_path / "model", **sizes)
    folders = {
        "a": save_adapter(model, tmp_path / "a", rank=4, seed=1),
        "b": save_adapter(model, tmp_path / "b", rank=8, seed=2, targets=["o_proj", "k_proj"]),
        "c": save_adapter(model, tmp_path / "c", rank=1, seed=3, targets=["down_proj", "up_proj"]),
    }
    reference = Reference(model, folders)
    expected = {
        number: reference.tokens(NAMES[number % len(NAMES)], prompt, 8)
        for number, prompt in enumerate(PROMPTS)
    }
    settings = {**SMALL, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    modules = {name: str(folder) for name, folder in folders.items() if name != "c"}
    core = start(model, size, **settings, lora_modules=modules, max_cpu_loras=3)
    with pytest.raises(AdapterError, match="cannot be read"):
        core.load_adapter("c", str(tmp_path / "nowhere"))
    core.load_adapter("c", str(folders["c"]))
    assert tokens_of(core) == expected
    fourth = save_adapter(model, tmp_path / "d", rank=4, seed=4)
    with pytest.raises(AdapterError, match="max_cpu_loras is 3"):
        core.load_adapter("d", str(fourth))
    core.unload_adapter("c")
    core.load_adapter("d", str(fourth))
    core.unload_adapter("d")
    core.load_adapter("c", str(folders["c"]))
    assert tokens_of(core) == expected
    switcher = ModelSwitcher(core)
    for level in (1, 2):
        switcher.sleep(level)
        switcher.wake_up()
        assert tokens_of(core) == expected
    whole = sum(path.stat().st_size for path in folders["a"].glob("*.safetensors"))
    (first,) = (each for each in core.adapters if each.name == "a")
    assert first.loaded.num_bytes == pytest.approx(whole, rel=0.2)


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler_missing() is not None, reason="needs a C++ compiler")
def test_compiled_ranks_compute_what_peft_does(
    tiny_model: Path,
    tmp_path: Path,
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    """Nothing is compiled after the warm-up, whatever is loaded."""
    folders = {
        "a": save_adapter(tiny_model, tmp_path / "a", rank=4, seed=1),
        "b": save_adapter(tiny_model, tmp_path / "b", rank=8, seed=2, targets=["o_proj", "v_proj"]),
        "c": save_adapter(tiny_model, tmp_path / "c", rank=1, seed=3, targets=["down_proj"]),
    }
    reference = Reference(tiny_model, folders)
    settings = {**SMALL, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "compile": True}
    cache = tmp_path / "programs"
    changes = {**settings, "warmup": "full", "compile_cache": str(cache)}
    core = start(tiny_model, 2, **changes, lora_modules={"a": str(folders["a"])})
    compiled = sorted(cache.rglob("*.so"))
    assert compiled
    for name in "bc":
        core.load_adapter(name, str(folders[name]))
    assert tokens_of(core) == {
        number: reference.tokens(NAMES[number % len(NAMES)], prompt, 8)
        for number, prompt in enumerate(PROMPTS)
    }
    assert core.stats.num_cold_forwards == 0
    assert sorted(cache.rglob("*.so")) == compiled


@pytest.mark.slow
def test_random_loads_and_aborts_over_two_ranks(
    tiny_model: Path,
    tmp_path: Path,
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    """Whatever is loaded, unloaded and aborted meanwhile, each request has the tokens of PEFT."""
    folders = {
        f"{rank}": save_adapter(tiny_model, tmp_path / f"{rank}", rank, rank, size=rank**-0.5)
        for rank in (1, 4, 8, 17, 33)
    }
    reference = Reference(tiny_model, folders)
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 40, "max_cpu_loras": 4}
    core, draw = start(tiny_model, 2, **SMALL | settings | {"num_blocks": 30}), random.Random(7)
    asked: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    found: dict[str, list[int]] = {}
    loaded: set[str] = set()

    def step() -> None:
        for token in core.step():
            found.setdefault(token.key, []).append(token.token_id)
        assert not core.take_failures()

    for number in range(300):
        name = draw.choice(sorted(folders))
        if name in loaded and draw.random() < 0.3:
            core.unload_adapter(name)
            loaded.remove(name)
        elif name not in loaded and len(loaded) < 4:
            with contextlib.suppress(AdapterError):  # what was unloaded may be in use
                core.load_adapter(name, str(folders[name]))
                loaded.add(name)
        lora, prompt = draw.choice([None, *sorted(loaded)]), draw.choice(PROMPTS)
        core.add(f"{number}", GenerateRequest(prompt, GREEDY, lora=lora))
        asked[f"{number}"] = lora, prompt
        if draw.random() < 0.2:
            key = draw.choice(sorted(asked))
            core.abort(key)
            del asked[key]
        while core.stats.num_waiting_reqs > 20 or draw.random() < 0.5:
            step()
    while core.has_work:
        step()
    for key, (lora, prompt) in asked.items():
        assert found[key] == reference.tokens(lora, prompt, 8), (key, lora)
    for name in loaded:
        core.unload_adapter(name)
    with pytest.raises(AdapterError, match="is not loaded"):
        core.add("late", GenerateRequest(PROMPTS[0], GREEDY, lora="1"))
