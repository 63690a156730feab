"""Adapters in compiled programs of the CPU: the tokens of PEFT, and no program for a load."""

from __future__ import annotations

import random
import statistics
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
from trencadis.engine.devices.cpu.recorded_layers import RecordedLayers
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
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_batch_without_adapters_runs_the_program_without_them(
    model: Path, folders: dict[str, Path]
) -> None:
    core = core_of(model)
    core.load_adapter("a", str(folders["a"]))
    for name in (None, "a"):
        core.add("r", GenerateRequest(PROMPTS[2], GREEDY, lora=name))
        core.step()
        with OperatorCalls() as calls:
            core.step()
        assert ("trencadis.add_adapters.default" in calls.names) is (name is not None)
        finish(core)
    core.close()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_in_bf16_they_compute_what_the_layers_do(
    quantization: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where the calls of a decode step are recorded and made again with other adapters."""
    model = make_tiny_model(tmp_path / "model", hidden_size=96, initializer_range=0.1)
    folders = {
        name: save_adapter(model, tmp_path / name, rank, rank, size=0.3)
        for name, rank in (("a", 8), ("b", 3), ("c", 20))
    }
    modules = {name: str(folder) for name, folder in folders.items()}
    settings = {"dtype": "bfloat16", "quantization": quantization, "lora_modules": modules}
    found = []
    for is_compiled in (True, False):
        core = core_of(model, compile=is_compiled, **settings)
        results = [serve(core, names) for names in (("a", None), ("b", "c"), ("c", "a", "b"))]
        found.append([x for each in results for _, x in sorted(each.items())])
        if is_compiled:
            runs = core.executor.worker.runner.forward_runner._layer_runs
            assert len(runs) == 4, "one token and more, without adapters and with them"
            for run in runs.values():
                assert isinstance(run, RecordedLayers)
                assert not run._refused
            assert runs[2, True]._lists
        core.close()
    errors = []
    for ours, expected in zip(*found, strict=True):
        for token, other in zip(ours, expected, strict=True):
            if token.token_id != other.token_id:
                break  # in bf16 two tokens may be as likely, and what follows differs
            errors.append(abs(token.logprobs.chosen.logprob - other.logprobs.chosen.logprob))
    assert len(errors) > 6 * len(found[0])
    assert statistics.median(errors) < 0.02


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
