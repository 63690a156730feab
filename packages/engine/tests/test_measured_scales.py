"""FP8 by the scales that Intel Neural Compressor measured, as vllm-gaudi's users have them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gaudi_fp8 import SIZES, largest_error, layers_in, with_scale
from test_gaudi_fp8_cache import PROMPTS, core_of, served_by
from torch import nn
from transformers import AutoModelForCausalLM

from trencadis.engine import ConfigError, EngineConfig, EngineCore
from trencadis.engine.devices.hpu.fp8_linear import FP8Linear, use_fp8_products
from trencadis.engine.models.calibration_files import read_measured_scales
from trencadis.engine.models.measured_scales import (
    FP8_RANGES,
    METHODS,
    MeasuredScales,
    round_by_measured,
)
from trencadis.engine.models.packed_weight import QuantizedLinear

MERGED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
HEADROOM = 0.25, 0.5
"""Of INC, for inputs and weights: what share of FP8's largest number the largest one becomes."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any) -> Path:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("plain"), **SIZES)
    return model


def node_of(name: str) -> str:
    before, dot, last = name.rpartition(".")
    return f"{before}{dot}{MERGED.get(last, last)}"


@torch.no_grad()
def measure(model: Path) -> dict[str, tuple[float, float]]:
    """The largest input and weight of each layer, as vLLM has them, and of keys and values."""
    found: dict[str, tuple[float, float]] = {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def saw(name: str, rows: torch.Tensor, weight: float) -> None:
        before = found.get(name, (0.0, 0.0))
        largest = float(rows.abs().max().bfloat16())
        found[name] = max(before[0], largest), max(before[1], weight)

    def watch(name: str, layer: nn.Linear) -> None:
        weight = float(layer.weight.abs().max().bfloat16())
        layer.register_forward_hook(lambda _, given, out: saw(node_of(name), given[0], weight))
        attention, _, last = name.rpartition(".")
        if last in ("k_proj", "v_proj"):
            cache = f"{attention}.attn.impl.{last[0]}_cache"
            layer.register_forward_hook(lambda _, given, out: saw(cache, out, 0.0))

    for name, layer in loaded.named_modules():
        if type(layer) is nn.Linear:
            watch(name, layer)
    for prompt in PROMPTS.values():
        loaded(torch.tensor([prompt]))
    return found


def write(directory: Path, measured: dict[str, tuple[float, float]], **settings: Any) -> Path:
    """Settings and measurements, in the layout of INC's files."""
    nodes = {
        name: {"inputs": [[[largest]]], **({"params": {"weight": [[weight]]}} if weight else {})}
        for name, (largest, weight) in measured.items()
    }
    content = {"GlobalRank": None, "LocalRank": -1, "Mode": "DynamicRange", "Nodes": nodes}
    (directory / "inc_output_hooks_maxabs.json").write_text(json.dumps(content))
    return write_settings(directory, **settings)


def write_settings(directory: Path, **settings: Any) -> Path:
    file = directory / "maxabs_quant_g3.json"
    own = {
        "method": "HOOKS",
        "mode": "QUANTIZE",
        "observer": "maxabs",
        "scale_method": "maxabs_hw",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": ["lm_head"]},
        "dump_stats_path": str(directory / "inc_output"),
    }
    file.write_text(json.dumps({**own, **settings}))
    return file


LARGEST = (0.0011, 0.5, 1.0, 3.4375, 7.0, 13.3125, 56.0, 57.0, 100.0, 448.0, 1234.0, 60000.0)
GOLDEN = {
    ("GAUDI2", "MAXABS_HW", 0): (-8, -4, -4, -4, 0, 0, 0, 0, 4, 4, 4, 4),
    ("GAUDI2", "MAXABS_HW", 1): (-8, -4, -4, -4, -4, 0, 0, 0, 0, 4, 4, 4),
    ("GAUDI3", "MAXABS_HW", 0): (-16, -7, -6, -5, -4, -3, -1, 0, 0, 2, 4, 7),
    ("GAUDI3", "MAXABS_HW", 1): (-17, -8, -7, -6, -5, -4, -2, -1, -1, 1, 3, 7),
    ("GAUDI2", "MAXABS_POW2", 0): (-15, -6, -5, -4, -3, -2, 0, 0, 1, 3, 5, 10),
    ("GAUDI2", "MAXABS_POW2", 1): (-16, -7, -6, -5, -4, -3, -1, -1, 0, 2, 4, 9),
    ("GAUDI3", "MAXABS_POW2", 0): (-16, -7, -6, -5, -4, -3, -1, 0, 0, 2, 4, 10),
    ("GAUDI3", "MAXABS_POW2", 1): (-17, -8, -7, -6, -5, -4, -2, -1, -1, 1, 3, 9),
}
"""Exponents of the scales of `LARGEST`, by neural_compressor_pt 3.10 itself (``ScaleToHwAligned``
and ``ScaleToPow2`` of ``calc_scale_from_maxabs`` in bf16): of inputs (0) and weights (1)."""


@pytest.mark.parametrize(("device", "method", "of"), GOLDEN)
def test_scales_are_those_of_inc(device: str, method: str, of: int) -> None:
    largest = torch.tensor(LARGEST, dtype=torch.bfloat16)
    scales = METHODS[method][of].scale_of(largest, FP8_RANGES[device])
    assert tuple(scales.float().log2().tolist()) == GOLDEN[device, method, of]


def test_arbitrary_scales_are_those_of_inc() -> None:
    largest = torch.tensor((0.5, 3.4375, 57.0, 1234.0), dtype=torch.bfloat16)
    scales = METHODS["MAXABS_ARBITRARY"][0].scale_of(largest, FP8_RANGES["GAUDI2"])
    assert scales.tolist() == [0.00836181640625, 0.057373046875, 0.94921875, 20.5]


class OnTheHost(nn.Module):
    """A product whose input has one scale, or one a token, and whose weight one, or one a row."""

    def __init__(self, weight: torch.Tensor, input_scale: float | None, scale: Any) -> None:
        super().__init__()
        self.weight = with_scale(weight, scale, 448)
        self.input_scale = input_scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale: Any = self.input_scale
        if scale is None:
            scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 240
        return with_scale(rows, scale, 448) @ self.weight.t()


def power(largest: float, headroom: float) -> float:
    return 2.0 ** math.ceil(math.log2(largest / (448 * headroom)))


def on_the_host(model: Path, measured: dict[str, tuple[float, float]], method: str) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, layer in list(loaded.named_modules()):
        if not name.endswith("_proj"):
            continue
        largest, of_weight = measured[node_of(name)]
        scales: tuple[Any, Any] = power(largest, HEADROOM[0]), power(of_weight, HEADROOM[1])
        if method == "unit_scale":
            scales = 1.0, 1.0
        elif "pcs_maxabs" in method:
            of_rows = [
                [power(float(row.abs().max()), HEADROOM[1])] for row in layer.weight.detach()
            ]
            scales = scales[0], torch.tensor(of_rows)
        elif method.startswith("act_maxabs_pcs"):
            scales = None, scales[1]
        loaded.set_submodule(name, OnTheHost(layer.weight.detach(), *scales))
    return loaded


@pytest.mark.gaudi
@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("lazy", "maxabs_hw"),
        ("eager", "act_maxabs_hw_weights_pcs_maxabs_pow2"),
        pytest.param("eager", "maxabs_pow2", marks=pytest.mark.slow),
        pytest.param("lazy", "unit_scale", marks=pytest.mark.slow),
        pytest.param(
            "eager", "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw", marks=pytest.mark.slow
        ),
    ],
)
def test_a_calibrated_model_is_served_with_its_scales(
    plain: Path, tmp_path: Path, mode: str, method: str, request: pytest.FixtureRequest
) -> None:
    measured = measure(plain)
    is_dynamic = method.startswith("act_maxabs_pcs")
    file = write(tmp_path, measured, scale_method=method, dynamic_quantization=is_dynamic)
    reference = on_the_host(plain, measured, method)
    counters = request.getfixturevalue(f"{mode}_gaudi").counters
    core = core_of(plain, quant_config=str(file), kv_cache_dtype="auto")
    assert len(layers_in(core, FP8Linear)) == 14
    before = counters.copy()
    served = served_by(core)
    as_it_is = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    error, by_itself = (largest_error(each, served, PROMPTS) for each in (reference, as_it_is))
    assert error < 0.1 * by_itself
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0
    assert counters.since(before).fallbacks == 0
    core.close()


@pytest.mark.gaudi
def test_keys_and_values_have_measured_scales(
    plain: Path, tmp_path: Path, lazy_gaudi: Any, caplog: pytest.LogCaptureFixture
) -> None:
    measured = measure(plain)
    file = write(tmp_path, measured)
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        core = core_of(plain, quant_config=str(file), kv_cache_dtype="fp8_inc")
    assert "with scales of the calibration: 2 layers" in caplog.text
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        module = core.executor.worker._model.get_submodule(name)
        for part, held in (("k", module.key_scale), ("v", module.value_scale)):
            largest = measured[f"{name}.attn.impl.{part}_cache"][0]
            assert held.item() == power(largest, HEADROOM[0])
    assert all(len(tokens) == 12 for tokens in served_by(core).values())


def layers_of(*names: str) -> nn.Module:
    """Linear layers with random weights, and paths such as ``model.layers.0.mlp.up_proj``."""
    torch.manual_seed(0)
    model = nn.Module()
    for name in names:
        parent = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        layer = nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
        parent.add_module(last, layer.requires_grad_(requires_grad=False))
    return model


QKV = tuple(f"model.layers.0.self_attn.{each}_proj" for each in "qkv")
MEASURED = {"model.layers.0.self_attn.qkv_proj": (56.0, 1.0), "lm_head": (4.0, 1.0)}


def scales_of(layer: Any) -> tuple[float, set[float]]:
    return layer.input_scale.item(), set(layer.scales.flatten().tolist())


@pytest.mark.parametrize("device", FP8_RANGES)
def test_layers_that_vllm_merges_have_one_scale(device: str, tmp_path: Path) -> None:
    """That of the largest of their weights; a Gaudi 2 doubles `input_scale`."""
    model = layers_of(*QKV)
    model.get_submodule(QKV[2]).weight[3, 4] = 5.0
    scales = read_measured_scales(str(write(tmp_path, MEASURED)), device)
    assert round_by_measured(model, scales) == 3
    largest = FP8_RANGES[device].largest
    expected = {"GAUDI2": (1.0 / 2, {2.0**-4}), "GAUDI3": (0.5, {2.0**-5})}[device]
    for name in QKV:
        layer = model.get_submodule(name)
        assert scales_of(layer) == expected
        assert layer.steps.float().abs().max() <= largest
    assert model.get_submodule(QKV[2]).packed.unpacked()[3, 4] == 5.0


def test_a_gaudi_2_divides_inputs_by_the_measured_scale(
    tmp_path: Path, eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDI_STANDIN_NAME", "GAUDI2")
    model = layers_of(QKV[0])
    round_by_measured(model, read_measured_scales(str(write(tmp_path, MEASURED)), "GAUDI2"))
    device = torch.device("hpu")
    use_fp8_products(model.to(device), device, torch.bfloat16, is_gaudi2=True)
    layer = model.get_submodule(QKV[0])
    assert type(layer) is FP8Linear
    assert float(layer.input_scale.cpu()) == 1.0


def test_scales_that_inc_made_on_a_device_are_preferred(tmp_path: Path) -> None:
    """As INC does; a scale of each output may be that of several layers."""
    file = write(tmp_path, MEASURED)
    made = tmp_path / "inc_output_hooks_maxabs_MAXABS_HW.json"
    of_outputs = [2.0**-5] * 32 + [2.0**-6] * 32 + [2.0**-7] * 32
    node = {"inputs": [8.0], "outputs": [1.0], "params": {"weight": {"0": of_outputs, "1": [1.0]}}}
    made.write_text(json.dumps({"Mode": "Scale", "Nodes": {node_of(QKV[0]): node}}))
    model = layers_of(*QKV)
    round_by_measured(model, read_measured_scales(str(file), "GAUDI3"))
    for name, exponent in zip(QKV, (-5, -6, -7), strict=True):
        assert scales_of(model.get_submodule(name)) == (8.0, {2.0**exponent})
    file = write_settings(tmp_path, recalc_scales=True)
    model = layers_of(*QKV)
    round_by_measured(model, read_measured_scales(str(file), "GAUDI3"))
    assert scales_of(model.get_submodule(QKV[0]))[0] == 0.5


def test_headroom_of_the_settings_is_used(tmp_path: Path) -> None:
    file = write(tmp_path, MEASURED, scale_params={"input_backoff": 1.0, "weight_backoff": 1.0})
    model = layers_of(*QKV)
    model.get_submodule(QKV[0]).weight[0, 0] = 7.0
    round_by_measured(model, read_measured_scales(str(file), "GAUDI3"))
    assert scales_of(model.get_submodule(QKV[0])) == (0.125, {2.0**-6})


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, set(QKV)),
        ({"blocklist": {"names": [], "types": []}}, {*QKV, "lm_head"}),
        ({"blocklist": {"names": ["self_attn"], "types": []}}, {"lm_head"}),
        ({"blocklist": {"names": ["qkv_.roj$"], "types": ["ParallelLMHead"]}}, set()),
        ({"blocklist": {"names": [], "types": ["QKVParallelLinear"]}}, {"lm_head"}),
        ({"allowlist": {"names": ["lm_"], "types": []}, "blocklist": {}}, {"lm_head"}),
        ({"allowlist": {"types": ["QKVParallelLinear"]}}, set(QKV)),
        ({"blocklist": {"types": ["Linear"]}}, set()),
    ],
)
def test_lists_say_which_layers_are_rounded(
    tmp_path: Path, settings: dict[str, Any], names: set[str]
) -> None:
    model = layers_of(*QKV, "lm_head")
    scales = read_measured_scales(str(write(tmp_path, MEASURED, **settings)), "GAUDI3")
    assert round_by_measured(model, scales) == len(names)
    found = {name for name, each in model.named_modules() if type(each) is QuantizedLinear}
    assert found == names


def test_a_layer_that_was_not_measured_is_named(tmp_path: Path) -> None:
    name = "model.layers.3.mlp.down_proj"
    file = write(tmp_path, MEASURED)
    with pytest.raises(ConfigError, match=f"layer {name} was not measured: calibrate") as raised:
        round_by_measured(layers_of(*QKV, name), read_measured_scales(str(file), "GAUDI3"))
    assert raised.value.field == "quant_config"
    file = write_settings(tmp_path, ignore_modules_wo_measures="True")
    model = layers_of(*QKV, name)
    assert round_by_measured(model, read_measured_scales(str(file), "GAUDI3")) == 3


def test_a_rank_has_its_own_measurements_or_those_of_one_device(tmp_path: Path) -> None:
    file = write(tmp_path, MEASURED)
    one = tmp_path / "inc_output_hooks_maxabs.json"

    def inputs(rank: int) -> float:
        scales = read_measured_scales(str(file), "GAUDI3", rank, 2)
        return scales.nodes["lm_head"].inputs[0]

    assert (inputs(0), inputs(1)) == (4.0, 4.0)
    own = one.read_text().replace("4.0", "9.0")
    (tmp_path / "inc_output_hooks_maxabs_1_2.json").write_text(own)
    assert (inputs(0), inputs(1)) == (4.0, 9.0)
    file = write_settings(tmp_path, seperate_measure_files=False)
    assert inputs(1) == 4.0
    one.unlink()
    with pytest.raises(ConfigError, match=r"dump_stats_path .*_maxabs\.json begins"):
        inputs(1)


WRONG = {
    "scale_method": ("max", {"default": {}}),
    "mode": ("MEASURE", 3),
    "observer": ("save",),
    "fp8_config": ("E5M2",),
    "fake_quant": (True,),
    "hp_dtype": ("fp8",),
    "dynamic_quantization": (True, "no"),
    "device_for_scales": ("GAUDI1",),
    "ignore_modules_wo_measures": ("maybe",),
    "blocklist": (["lm_head"], {"names": "lm_head"}, {"names": ["("]}, {"types": [3]}),
    "scale_params.input_backoff": (0, 2, "x", True),
    "dump_stats_path": (3, "/nowhere/inc_output"),
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, each in WRONG.items() for v in each])
def test_a_wrong_field_of_the_settings_is_named(tmp_path: Path, name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    file = write(tmp_path, MEASURED, **{outer: {inner: value} if inner else value})
    with pytest.raises(ConfigError) as raised:
        read_measured_scales(str(file), "GAUDI3")
    assert raised.value.field == "quant_config"
    message = str(raised.value)
    assert message.startswith(f"quant_config {file}: {name} is {value!r}"[:200])
    assert "and must be" in message


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"Nodes": 3}', '{"Nodes": {"lm_head": {"inputs": [["x"]]}}}', None]
)
@pytest.mark.parametrize("which", ["maxabs_quant_g3.json", "inc_output_hooks_maxabs.json"])
def test_a_file_that_is_none_of_incs_is_named(
    tmp_path: Path, which: str, content: str | None
) -> None:
    file = write(tmp_path, MEASURED)
    (tmp_path / which).unlink()
    if content is None:
        (tmp_path / which).mkdir()
    else:
        (tmp_path / which).write_text(content)
    with pytest.raises(ConfigError, match="quant_config") as raised:
        read_measured_scales(str(file), "GAUDI3")
    assert raised.value.field == "quant_config"


def read(tmp_path: Path, **settings: Any) -> MeasuredScales:
    return read_measured_scales(str(write_settings(tmp_path, **settings)), "GAUDI3")


@pytest.mark.parametrize("inputs", [[[[0.0]]], []])
def test_inputs_that_were_never_seen_are_an_error(tmp_path: Path, inputs: Any) -> None:
    write(tmp_path, MEASURED)
    content = {"Nodes": {node_of(QKV[0]): {"inputs": inputs}}}
    (tmp_path / "inc_output_hooks_maxabs.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no number above 0 for the inputs of model"):
        round_by_measured(layers_of(*QKV), read(tmp_path))


def test_scales_that_inc_searches_must_be_there(tmp_path: Path) -> None:
    write(tmp_path, MEASURED)
    with pytest.raises(ConfigError, match="run step 4 of vllm-gaudi's calibration"):
        round_by_measured(layers_of(*QKV), read(tmp_path, scale_method="maxabs_hw_opt_weight"))


def test_the_variable_and_vllms_name_are_read(plain: Path, tmp_path: Path) -> None:
    file = str(write(tmp_path, MEASURED))
    config = EngineConfig.from_env({"QUANT_CONFIG": file}, model=str(plain))
    assert (config.quant_config, config.rounding) == (file, "inc")
    with pytest.raises(ConfigError, match="quantization inc needs measured scales"):
        EngineConfig(model="m", quantization="inc")
    with pytest.raises(ConfigError, match="quantization is int8: leave one of them out"):
        EngineConfig(model="m", quantization="int8", quant_config=file)
    with pytest.raises(ConfigError, match="has scales of a Gaudi, and the device is cpu"):
        EngineCore(EngineConfig(model=str(plain), device="cpu", quant_config=file))
