"""Adapters in compiled programs of the CPU: the tokens of PEFT, and no program for a load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Reference, save_adapter
from request_mix import finish
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.devices.cpu.device import CPUDevice
from trencadis.engine.models.block_attention import BlockAttention

RANKS = {"a": 4, "b": 16, "c": 33}
NAMES = (*RANKS, None)
PROMPTS = [tuple(random.Random(i).randrange(256) for _ in range(2 + 5 * i)) for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def model(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Three layers: the one between is neither the first nor the last.
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(model, folder / name, rank, rank, size=rank**-0.5)
        for name, rank in RANKS.items()
    }


def core_of(model: Path, device: Any = "cpu", **settings: object) -> EngineCore:
    values = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "compile": True,
        "warmup": "full",
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 64,
        **settings,
    }
    core = EngineCore(EngineConfig(model=model, device=device, **values))
    core.warm_up()
    return core


def serve(core: EngineCore, names: tuple[str | None, ...]) -> dict[int, list[Any]]:
    """The tokens of all prompts, whose adapters are ``names`` in turn."""
    for number, prompt in enumerate(PROMPTS):
        core.add(f"{number}", GenerateRequest(prompt, GREEDY, lora=names[number % len(names)]))
    return {int(key): tokens for key, tokens in finish(core).items()}


def check(core: EngineCore, folders: Mapping[str, Path], reference: Reference) -> None:
    """The tokens of PEFT with what is loaded, and nothing compiled since the warm-up."""
    for names in ((None,), NAMES, ("c", "a"), ("b",)):
        for name in filter(None, names):
            core.load_adapter(name, str(folders[name]))
        for number, tokens in serve(core, names).items():
            name = names[number % len(names)]
            found = [token.token_id for token in tokens]
            assert found == reference.tokens(name, PROMPTS[number], 8), (names, name)
        for name in filter(None, names):
            core.unload_adapter(name)
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0


@pytest.mark.slow
def test_programs_compute_what_peft_does(model: Path, folders: dict[str, Path]) -> None:
    core = core_of(model)
    check(core, folders, Reference(model, folders))
    core.close()


class OperatorCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_batch_without_adapters_runs_the_program_without_them(
    model: Path, folders: dict[str, Path]
) -> None:
    core = core_of(model)
    core.load_adapter("a", str(folders["a"]))
    for name, expected in ((None, 0), ("a", 3 * 7)):
        core.add("r", GenerateRequest(PROMPTS[2], GREEDY, lora=name))
        core.step()
        with OperatorCalls() as calls:
            core.step()
        assert calls.counts["trencadis.add_adapters.default"] == expected
        finish(core)
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_in_bf16_they_compute_what_the_layers_do(
    quantization: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """With the kernel of adapters, beside kernels of the weights."""
    model = make_tiny_model(tmp_path / "model", hidden_size=96, initializer_range=0.1)
    folder = save_adapter(model, tmp_path / "a", rank=8, size=0.3)
    settings = {
        "dtype": "bfloat16",
        "quantization": quantization,
        "lora_modules": {"a": str(folder)},
    }
    scores = []
    for is_compiled in (True, False):
        core = core_of(model, compile=is_compiled, **settings)
        first = [tokens[0] for _, tokens in sorted(serve(core, ("a", None)).items())]
        scores.append(torch.tensor([token.logprobs.chosen.logprob for token in first]))
        core.close()
    torch.testing.assert_close(*scores, atol=0.05, rtol=0)


class InliningDevice(CPUDevice):
    """A CPU whose programs contain attention, and so adapters, as those of CUDA do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = BlockAttention()

    def optimize(self, model: torch.nn.Module) -> None:
        """Not as a CPU does: its attention is called by programs."""


@pytest.mark.slow
def test_programs_may_contain_adapters(model: Path, folders: dict[str, Path]) -> None:
    reference = Reference(model, folders)
    core = core_of(model, InliningDevice(), warmup="none", max_num_seqs=1)
    core.load_adapter("c", str(folders["c"]))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    core.add("r", GenerateRequest(PROMPTS[1], params, lora="c"))
    found = [token.token_id for token in finish(core)["r"]]
    assert found == reference.tokens("c", PROMPTS[1], 3)
    assert core.executor.worker.runner.forward_runner.num_warm == 2, "of a prompt, of decodes"
    core.close()
