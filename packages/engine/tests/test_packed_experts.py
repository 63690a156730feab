"""Fused experts with weights of FP8: read as they are, expanded on a CPU, multiplied on a Gaudi."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from safetensors.torch import load_file, save_file
from test_gaudi_fp8 import OnTheHost, largest_error, rounded
from test_gaudi_fp8_cache import PROMPTS, core_of, served_by
from test_packed_weights import FORMATS, quantize
from transformers import AutoModelForCausalLM

from trencadis.engine import EngineConfig, EngineCore, ModelError
from trencadis.engine.devices.hpu import experts as products
from trencadis.engine.devices.hpu.fp8_linear import use_fp8_products
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_checkpoint import loading_arguments
from trencadis.engine.models.packed_experts import (
    MATRICES,
    expand_experts,
    experts_in,
    packed_weight,
    round_experts,
)
from trencadis.engine.models.rank_loading import divide
from trencadis.engine.models.rank_part import RankPart

FORMS = ("fp8 by channel", "fp8 by blocks")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Any) -> Path:
    """Mixtral, whose checkpoints have the names of another module and other names of matrices."""
    directory = tmp_path_factory.mktemp("mixtral")
    add_tokenizer(save_family("Mixtral", directory))
    return directory


@pytest.fixture(params=["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def gaudi(stand_in: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    with stand_in(request.param) as bridge:
        yield bridge


class ExpertsOnTheHost(torch.nn.Module):
    """All experts, whose inputs are rounded for each token, and weighted."""

    def __init__(self, experts: Any, *, rounds_weight: bool, rounds_inputs: bool) -> None:
        super().__init__()
        matrices = (getattr(experts, name).detach() for name in MATRICES)
        self.gate_up, self.down = (rounded(x) if rounds_weight else x for x in matrices)
        self.rounds = rounded if rounds_inputs else lambda rows: rows

    def forward(self, hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = (self.rounds(hidden) @ gate_up.t()).chunk(2, dim=-1)
            result = self.rounds(torch.nn.functional.silu(gate) * up) @ down.t()
            out += result * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


def on_the_host(directory: Path, **given: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        if name.endswith("_proj"):
            rounds = given["rounds_weight"]
            model.set_submodule(name, OnTheHost(layer.weight, rounds_weight=rounds))
        elif name.endswith(".experts"):
            model.set_submodule(name, ExpertsOnTheHost(layer, **given))
    return model


@pytest.mark.parametrize("family", ["Mixtral", "Qwen 3 (MoE)"])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_read_exactly_and_expanded_on_a_cpu(
    tmp_path: Path, family: str, form: str, add_tokenizer: Any
) -> None:
    add_tokenizer(save_family(family, tmp_path / "plain"))
    directory = quantize(tmp_path / "plain", tmp_path, *FORMATS[form])
    model = load_model(inspect_model(str(directory)), torch.device("cpu"), torch.float32, 64)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "expanded", dtype=torch.float32)
    whole = dict(reference.named_parameters())
    packed = experts_in(model)
    assert len(packed) == reference.config.num_hidden_layers
    for experts in packed:
        for matrix in MATRICES:
            assert getattr(experts, matrix).dtype is torch.float8_e4m3fn
    expand_experts(model, torch.float32)
    found = {n: x for n, x in model.named_parameters() if ".experts." in n}
    assert found.keys() == {n for n in whole if ".experts." in n}
    for name, weight in found.items():
        assert torch.equal(weight, whole[name]), name


def test_a_cpu_serves_them_as_it_serves_their_expansion(plain: Path, tmp_path: Path) -> None:
    directory = quantize(plain, tmp_path, *FORMATS["fp8 by channel"])
    tokens = []
    for each in (directory, tmp_path / "expanded"):
        core = EngineCore(
            EngineConfig(model=each, device="cpu", dtype="float32", max_model_len=64, warmup="none")
        )
        assert not experts_in(core.executor.worker._model)
        served = served_by(core)
        tokens.append({key: [each.token_id for each in made] for key, made in served.items()})
    assert tokens[0] == tokens[1]


@pytest.mark.gaudi
@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("fp8 by channel", 128),
        ("fp8 by channel", 0),
        pytest.param("fp8 by blocks", 128, marks=pytest.mark.slow),
    ],
)
def test_a_gaudi_multiplies_few_rows_in_fp8_and_expands_for_many(
    gaudi: Any, plain: Path, tmp_path: Path, form: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the input and those between the products are rounded in FP8 alone."""
    monkeypatch.setattr(products, "_ROWS_OF_A_PRODUCT", rows)
    directory = quantize(plain, tmp_path, *FORMATS[form])
    core = core_of(directory, kv_cache_dtype="auto")
    packed = experts_in(core.executor.worker._model)
    assert {getattr(each, m).dtype for each in packed for m in MATRICES} == {torch.float8_e4m3fn}
    assert {each.down_proj.device.type for each in packed} == {"hpu"}
    before = gaudi.counters.copy()
    served = served_by(core)
    reference = on_the_host(
        tmp_path / "expanded", rounds_weight=form == "fp8 by blocks", rounds_inputs=rows > 0
    )
    as_it_is = AutoModelForCausalLM.from_pretrained(tmp_path / "expanded", dtype=torch.float32)
    error, by_itself = (largest_error(each, served, PROMPTS) for each in (reference, as_it_is))
    assert error < 0.1 * by_itself
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0
    assert gaudi.counters.since(before).fallbacks == 0


@pytest.mark.gaudi
def test_quantization_fp8_rounds_experts_too(lazy_gaudi: Any, plain: Path) -> None:
    given = {"kv_cache_dtype": "auto", "dtype": "bfloat16", "warmup": "none"}
    in_fp8, as_it_is = (
        EngineCore(EngineConfig(model=plain, device="hpu", max_model_len=64, **given, **more))
        for more in ({"quantization": "fp8"}, {})
    )
    experts = experts_in(in_fp8.executor.worker._model)
    assert experts
    of_experts = sum(getattr(each, matrix).nbytes for each in experts for matrix in MATRICES)
    sizes = [core.executor.worker.weight_bytes for core in (as_it_is, in_fp8)]
    assert sizes[0] - sizes[1] > 0.9 * of_experts
    assert all(len(tokens) == 12 for tokens in served_by(in_fp8).values())


@pytest.mark.parametrize("is_gaudi2", [False, True])
def test_numbers_that_a_gaudi_2_lacks_are_halved(
    plain: Path, is_gaudi2: bool, eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDI_STANDIN_NAME", "GAUDI2" if is_gaudi2 else "GAUDI3")
    model = load_model(inspect_model(str(plain)), torch.device("cpu"), torch.bfloat16, 64)
    round_experts(model.modules())
    layer = experts_in(model)[0]
    layer.down_proj[1] = (layer.down_proj[1].float() * (448 / 240)).to(torch.float8_e4m3fn)
    weights = [packed_weight(layer, "down_proj", number).unpacked() for number in range(2)]
    use_fp8_products(model, torch.device("hpu"), torch.bfloat16, is_gaudi2=is_gaudi2)
    for number, most in ((0, 240), (1, 224 if is_gaudi2 else 448)):
        found = packed_weight(layer, "down_proj", number)
        assert found.steps.float().abs().max() == most
        assert torch.allclose(found.unpacked(), weights[number], rtol=0.07, atol=1e-4)


def test_a_checkpoint_without_some_expert_is_refused(plain: Path, tmp_path: Path) -> None:
    directory = quantize(plain, tmp_path, *FORMATS["fp8 by channel"])
    file = directory / "model.safetensors"
    left = {n: x for n, x in load_file(file).items() if ".1.block_sparse_moe.experts.2." not in n}
    save_file(left, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts has no packed weights of 1 of"):
        load_model(inspect_model(str(directory)), torch.device("cpu"), torch.float32, 64)


def test_ranks_do_not_divide_experts_of_fp8(plain: Path, tmp_path: Path) -> None:
    directory = quantize(plain, tmp_path, *FORMATS["fp8 by channel"])
    spec = inspect_model(str(directory))
    assert spec.packing is not None
    divided = divide(spec.config, spec.layers, spec.source, RankPart(0, 2))
    given = loading_arguments(spec.config, spec.packing, spec.source, divided)
    with pytest.raises(ModelError, match=r"experts in FP8 .* are not divided between ranks"):
        AutoModelForCausalLM.from_pretrained(directory, **given)


def test_integers_of_experts_stay_refused(plain: Path, tmp_path: Path) -> None:
    directory = quantize(plain, tmp_path, *FORMATS["int-quantized"])
    with pytest.raises(ModelError, match="are read for linear layers alone"):
        load_model(inspect_model(str(directory)), torch.device("cpu"), torch.float32, 64)
