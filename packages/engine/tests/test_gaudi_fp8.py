"""FP8 on a simulated Gaudi: checkpoints, and bf16 that is rounded at load."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from adapters import Reference, save_adapter
from request_mix import finish
from safetensors.torch import load_file, save_file
from test_packed_weights import FORMATS, INPUT_SCALE, quantize
from test_ranks import start  # noqa: F401  (a fixture)
from torch import nn
from transformers import AutoModelForCausalLM

from trencadis.engine import (
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    ModelError,
    SamplingParams,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import HPUDevice
from trencadis.engine.devices.hpu import fp8_linear
from trencadis.engine.devices.hpu.fp8_linear import FP8Linear, use_fp8_products
from trencadis.engine.models import rounded_weights
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear
from trencadis.engine.models.rank_modules import SplitHead

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPTS = {"a": tuple(range(1, 30)), "b": (7,), "c": tuple(range(100, 117))}
NUM_LAYERS = 14
"""Linear layers of the tiny model's two decoder layers."""
WITH_INPUT_SCALES = (
    "fp8 with scales of inputs",
    "fp8 with scales of inputs of compressed-tensors",
)
FORMS = ("fp8 by channel", "fp8 by blocks", *WITH_INPUT_SCALES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any) -> Path:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("plain"), **SIZES)
    return model


class OnTheHost(nn.Module):
    """The product of numbers that are rounded to E4M3, by PyTorch."""

    def __init__(
        self, weight: torch.Tensor, *, rounds_weight: bool, input_scale: float | None = None
    ) -> None:
        super().__init__()
        self.weight = rounded(weight) if rounds_weight else weight
        self.input_scale = input_scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.input_scale is None:
            return rounded(rows) @ self.weight.t()
        return with_scale(rows, self.input_scale, 448) @ self.weight.t()


def with_scale(rows: torch.Tensor, scale: float, largest: float) -> torch.Tensor:
    """In E4M3, which ends at ``largest``, and back."""
    bounded = (rows / scale).clamp(-largest, largest)
    return bounded.to(torch.float8_e4m3fn).float() * scale


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row to 240 at most, in E4M3, and back."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 240
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def on_the_host(expanded: Path, **given: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(expanded, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        if name.endswith("_proj"):
            model.set_submodule(name, OnTheHost(layer.weight, **given))
    return model


def core_of(model: Path, **settings: Any) -> EngineCore:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "block_size": 16, "dtype": "float32"}
    core = EngineCore(EngineConfig(model=model, device="hpu", **{**sizes, **settings}))
    core.warm_up()
    return core


def served_by(core: EngineCore) -> dict[str, list[Any]]:
    for key, prompt in PROMPTS.items():
        core.add(key, GenerateRequest(prompt, GREEDY))
    found: dict[str, list[Any]] = {key: [] for key in PROMPTS}
    while core.has_work:
        for token in core.step():
            found[token.key].append(token)
        assert not core.take_failures()
    return found


@torch.no_grad()
def largest_error(
    model: Any, served: dict[str, list[Any]], prompts: Mapping[str, Sequence[int]] = PROMPTS
) -> float:
    """Between the log-probabilities of the tokens and those that a model gives for them."""
    errors = []
    for key, tokens in served.items():
        ids = [*prompts[key], *(token.token_id for token in tokens)]
        logits = model(torch.tensor([ids])).logits[0, len(prompts[key]) - 1 : -1]
        expected = logits.log_softmax(-1)
        errors += [
            abs(float(expected[place, token.token_id]) - token.logprobs.chosen.logprob)
            for place, token in enumerate(tokens)
        ]
    return max(errors)


def layers_in(core: EngineCore, kind: type) -> list[Any]:
    return [each for each in core.executor.worker._model.modules() if type(each) is kind]


@pytest.mark.gaudi
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_in_fp8_is_served_in_fp8(
    plain: Path, tmp_path: Path, form: str, mode: str, request: pytest.FixtureRequest
) -> None:
    model = quantize(plain, tmp_path, *FORMATS[form])
    expanded = tmp_path / "expanded"
    reference = on_the_host(
        expanded,
        rounds_weight=form == "fp8 by blocks",
        input_scale=INPUT_SCALE if form in WITH_INPUT_SCALES else None,
    )
    counters = request.getfixturevalue(f"{mode}_gaudi").counters
    core = core_of(model)
    layers = layers_in(core, FP8Linear)
    assert len(layers) == NUM_LAYERS
    assert {layer.steps.device.type for layer in layers} == {"hpu"}
    assert {layer.steps.dtype for layer in layers} == {torch.float8_e4m3fn}
    before = counters.copy()
    served = served_by(core)
    plain_model = AutoModelForCausalLM.from_pretrained(expanded, dtype=torch.float32)
    assert largest_error(reference, served) < 0.1 * largest_error(plain_model, served)
    assert core.stats.num_compilations == 0
    assert core.stats.num_cold_forwards == 0
    assert counters.since(before).fallbacks == 0
    core.close()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, [1.0, 2.0]])
def test_a_scale_of_inputs_that_is_none_is_named(plain: Path, tmp_path: Path, scale: Any) -> None:
    model = quantize(plain, tmp_path, *FORMATS[WITH_INPUT_SCALES[0]])
    file = model / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.input_scale"
    save_file({**load_file(file), name: torch.tensor(scale)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj .* input_scale is"):
        load_model(inspect_model(str(model)), torch.device("cpu"), torch.float32, 64)


@pytest.mark.parametrize("name", ["GAUDI2", "GAUDI3"])
def test_scales_of_inputs_are_doubled_where_numbers_end_at_240(
    name: str, eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a layer whose weights are not halved, such as a rank's part."""
    monkeypatch.setenv("GAUDI_STANDIN_NAME", name)
    rows = torch.randn(5, 64) * 3
    for largest in (448, 200):
        packed = attrs.evolve(
            packed_layer(largest=largest).packed, input_scale=torch.tensor([0.01])
        )
        model = nn.ModuleDict({"layer": QuantizedLinear(packed)})
        device = HPUDevice().torch_device
        use_fp8_products(model.to(device), device, torch.float32, is_gaudi2=name == "GAUDI2")
        found = model["layer"](rows.to(device)).cpu()
        scale, end = (0.02, 240) if name == "GAUDI2" else (0.01, 448)
        torch.testing.assert_close(found, with_scale(rows, scale, end) @ packed.unpacked().t())


@pytest.mark.slow
def test_two_gaudis_divide_a_checkpoint_in_fp8(
    plain: Path,
    tmp_path: Path,
    start: Callable[..., EngineCore],  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rounds its part of the inputs with a scale of its own."""
    monkeypatch.setenv("GAUDI_STANDIN_DEVICES", "2")
    model = quantize(plain, tmp_path, *FORMATS["fp8 by channel"])
    expanded = AutoModelForCausalLM.from_pretrained(tmp_path / "expanded", dtype=torch.float32)
    with stand_in_for_cores("lazy"):
        core = start(model, device="hpu", max_num_batched_tokens=32)
        error = largest_error(expanded, served_by(core))
    assert 1e-4 < error < 0.05


@pytest.mark.gaudi
def test_quantization_fp8_rounds_bf16_and_takes_half_of_its_memory(
    plain: Path, eager_gaudi: Any
) -> None:
    core, as_it_is = (
        core_of(plain, dtype="bfloat16", **settings) for settings in ({"quantization": "fp8"}, {})
    )
    weights = {type(each): each for each in core.executor.worker._model.modules()}
    assert len(layers_in(core, FP8Linear)) == NUM_LAYERS
    assert all(len(tokens) == 8 for tokens in served_by(core).values())
    assert core.stats.num_compilations == 0
    linear = sum(each.weight.nbytes for each in layers_in(as_it_is, nn.Linear))
    saved = as_it_is.executor.worker.weight_bytes - core.executor.worker.weight_bytes
    head = weights[nn.Linear].weight.nbytes
    outputs = sum(each.scales.nbytes for each in layers_in(core, FP8Linear))
    assert saved == (linear - head) // 2 - outputs


@pytest.mark.gaudi
def test_adapters_change_layers_of_fp8(plain: Path, tmp_path: Path, lazy_gaudi: Any) -> None:
    model = quantize(plain, tmp_path, *FORMATS["fp8 by channel"])
    folder = save_adapter(tmp_path / "expanded", tmp_path / "a", rank=4, seed=4, size=0.5)
    reference = Reference(tmp_path / "expanded", {"a": folder})
    core = core_of(model, enable_lora=True, max_loras=1, max_lora_rank=4)
    core.load_adapter("a", str(folder))
    prompt = PROMPTS["a"]
    core.add("a", GenerateRequest(prompt, GREEDY, lora="a"))
    served = finish(core)["a"]
    tokens = [*prompt, *(token.token_id for token in served)]
    found = torch.tensor([token.logprobs.chosen.logprob for token in served])
    with_it, without = (reference.logprobs(name, tokens)[-8:] for name in ("a", None))
    assert (found - with_it).abs().max() < 0.2 * (without - with_it).abs().max()


@pytest.mark.gaudi
def test_fp8_outlives_sleep_and_switches(plain: Path, tmp_path: Path, lazy_gaudi: Any) -> None:
    """To bf16 weights of the same structure and back: each model has its own products."""
    core = core_of(quantize(plain, tmp_path, *FORMATS["fp8 by channel"]), warmup="none")
    switcher = ModelSwitcher(core)
    in_fp8 = core.config
    in_bf16 = attrs.evolve(in_fp8, model=str(plain))
    rounds = attrs.evolve(in_bf16, dtype="bfloat16", quantization="fp8")

    def tokens() -> dict[str, list[int]]:
        return {key: [each.token_id for each in found] for key, found in served_by(core).items()}

    first = tokens()
    for level in (1, 2):
        switcher.sleep(level)
        switcher.wake_up()
        assert tokens() == first
    for config, layers in ((in_bf16, 0), (rounds, NUM_LAYERS), (in_fp8, NUM_LAYERS)):
        switcher.reconfigure_engine(config_payload(config), 1 << 30)
        assert len(layers_in(core, FP8Linear)) == layers
        found = tokens()
        assert all(len(each) == GREEDY.max_tokens for each in found.values())
    assert found == first
    core.close()


@pytest.mark.gaudi
def test_weights_are_rounded_before_the_device_has_them(
    tmp_path: Path, make_tiny_model: Any, eager_gaudi: Any
) -> None:
    """A model whose bf16 is larger than the device is served in FP8."""
    model = make_tiny_model(tmp_path, **{**SIZES, "hidden_size": 1024, "intermediate_size": 2048})
    fp32 = sum(file.stat().st_size for file in tmp_path.glob("**/*.safetensors"))
    eager_gaudi.memory.limit = fp32 // 2 * 9 // 10  # of bf16
    settings = {"dtype": "bfloat16", "max_model_len": 64, "warmup": "none", "num_blocks": 8}
    config = EngineConfig(model=model, device="hpu", **settings)
    assert layers_in(EngineCore(attrs.evolve(config, quantization="fp8")), FP8Linear)
    with pytest.raises(RuntimeError, match="Allocation failed"):
        EngineCore(config)


def test_weights_are_freed_while_others_are_rounded(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[weakref.ref[nn.Parameter]] = []
    alive = []
    rounds = rounded_weights.rounded_fp8

    def watched(weight: torch.Tensor) -> PackedWeight:
        alive.append(sum(each() is not None for each in weights))
        return rounds(weight)

    def watch(model: nn.Module) -> None:
        layers = [each for name, each in model.named_modules() if name.endswith("_proj")]
        weights[:] = [weakref.ref(each.weight) for each in layers]
        del layers
        rounded_weights.round_weights(model, "fp8")

    monkeypatch.setattr(rounded_weights, "rounded_fp8", watched)
    spec = inspect_model(str(plain))
    load_model(spec, torch.device("cpu"), torch.bfloat16, 64, round_weights=watch)
    assert alive[0] == NUM_LAYERS
    assert alive[-1] <= 2


def test_the_output_head_of_a_rank_is_not_rounded(plain: Path) -> None:
    model = load_model(inspect_model(str(plain)), torch.device("cpu"), torch.bfloat16, 64)
    whole = model.lm_head
    model.lm_head = SplitHead(whole, 258, 129)
    rounded_weights.round_weights(model, "fp8")
    assert model.lm_head.linear is whole
    assert sum(type(each) is QuantizedLinear for each in model.modules()) == NUM_LAYERS


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_are_rejected_on_a_gaudi(plain: Path, eager_gaudi: Any, quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"hpu does not compute weights of {quantization}"):
        core_of(plain, dtype="bfloat16", quantization=quantization)


def test_fp8_is_rejected_where_it_would_be_expanded(plain: Path) -> None:
    with pytest.raises(ConfigError, match="cpu expands weights of fp8"):
        EngineCore(EngineConfig(model=plain, device="cpu", quantization="fp8"))


def packed_layer(*, largest: float) -> QuantizedLinear:
    torch.manual_seed(0)
    steps = (torch.rand(48, 64) * 2 - 1) * largest
    steps[0, 0] = largest
    return QuantizedLinear(PackedWeight(steps.to(torch.float8_e4m3fn), torch.full((48, 1), 0.01)))


@pytest.mark.parametrize("name", ["GAUDI2", "GAUDI3"])
def test_numbers_that_a_gaudi_2_lacks_are_halved(
    name: str, eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in reads them as NaN, as the device does."""
    monkeypatch.setenv("GAUDI_STANDIN_NAME", name)
    model = nn.ModuleDict({"layer": packed_layer(largest=448)})
    model.register_parameter("of", nn.Parameter(torch.zeros(1), requires_grad=False))
    rows = torch.randn(5, 64)
    weight = model["layer"].packed.unpacked()
    device = HPUDevice()
    device.optimize(model.to(device.torch_device))
    layer = model["layer"]
    assert type(layer) is FP8Linear
    assert float(layer.steps.cpu().float().max()) == (224 if name == "GAUDI2" else 448)
    found = layer(rows.to(device.torch_device)).cpu()
    assert torch.allclose(found, rounded(rows) @ weight.t(), rtol=0.01, atol=0.05)


def test_a_kernel_that_differs_is_not_used(
    eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights are expanded in each call then."""
    trial = fp8_linear.fp8_trial

    def wrong(*arguments: Any) -> Any:
        found, expected = trial(*arguments)
        return found * 2, expected

    monkeypatch.setattr(fp8_linear, "fp8_trial", wrong)
    device = HPUDevice().torch_device
    model = nn.ModuleDict({"layer": packed_layer(largest=448)}).to(device)
    rows = torch.randn(5, 64)
    expected = rows @ model["layer"].packed.unpacked().cpu().t()
    with caplog.at_level(logging.WARNING, "trencadis.engine"):
        use_fp8_products(model, device, torch.float32, is_gaudi2=True)
    assert "fp8_gemm_v2 is not used: it differs" in caplog.text
    assert type(model["layer"]) is QuantizedLinear
    assert torch.allclose(model["layer"](rows.to(device)).cpu(), expected, rtol=0.05, atol=0.05)
