"""Checkpoints with packed weights: unpacked exactly, kept packed, served like their expansion."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from trencadis.engine import LLM, ConfigError, ModelError, SamplingParams
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.tiled_linear import IntegerLinear, load_linear_kernel
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear

Array = npt.NDArray[Any]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GROUP = 16
BLOCK = (40, 48)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of the eight numbers of a word, from the lowest bits on: AutoAWQ, `order_map`."""


ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


def words(numbers: Array, bits: int, axis: int) -> Array:
    """Numbers in words of 32 bits, the first in the lowest bits: the definition, one by one."""
    numbers = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    packed = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for column in range(padded.shape[1]):
        packed[:, column // per_word] |= padded[:, column] << np.uint32(bits * (column % per_word))
    return np.moveaxis(packed, -1, axis).view(np.int32)


class Layer:
    """Random steps, scales and zero points of a layer, and its weight by NumPy."""

    def __init__(
        self, outputs: int, inputs: int, bits: int, *, zeros: bool, reorders: bool
    ) -> None:
        draw = np.random.default_rng(outputs * inputs + bits)
        self.groups = inputs // GROUP
        self.steps = draw.integers(0, 1 << bits, (outputs, inputs))
        self.scales = draw.uniform(0.01, 0.02, (outputs, self.groups)).astype(np.float16)
        middle = 1 << (bits - 1)
        shape = (outputs, self.groups)
        drawn = draw.integers(middle - 8, middle + 8, shape)
        self.zeros = drawn if zeros else np.full(shape, middle)
        of_inputs = np.arange(inputs) // GROUP
        self.of_inputs = draw.permutation(of_inputs) if reorders else of_inputs
        self.weight = (self.steps - self.zeros[:, self.of_inputs]) * self.scales.astype(np.float32)[
            :, self.of_inputs
        ]


def gptq(layer: Layer, bits: int, less: int = 1) -> dict[str, Array]:
    return {
        "qweight": words(layer.steps, bits, 1).T,
        # One less in each number of a word at once: a 0 borrows from the next one.
        "qzeros": (words(layer.zeros, bits, 0).view(np.uint32) - less * ONES[bits])
        .view(np.int32)
        .T,
        "scales": layer.scales.T,
        "g_idx": layer.of_inputs.astype(np.int32),
    }


def awq(layer: Layer) -> dict[str, Array]:
    def shuffled(numbers: Array) -> Array:
        return numbers.T.reshape(numbers.shape[1], -1, 8)[..., AWQ_COLUMNS].reshape(
            numbers.shape[1], -1
        )

    return {
        "qweight": words(shuffled(layer.steps), 4, 1),
        "qzeros": words(shuffled(layer.zeros), 4, 1),
        "scales": layer.scales.T,
    }


def pack_quantized(
    layer: Layer, bits: int, *, zeros: bool, reorders: bool, is_old: bool = False
) -> dict[str, Array]:
    tensors = {
        "weight_packed": words(layer.steps, bits, 1),
        "weight_scale": layer.scales,
        "weight_shape": np.array(layer.steps.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = words(layer.zeros, bits, 0)
        if is_old:  # compressed-tensors before 0.10
            tensors["weight_zero_point"] = (layer.zeros - (1 << (bits - 1))).astype(np.int8)
    tensors["weight_g_idx"] = np.full(layer.steps.shape[1], -1, np.int32)
    if reorders:
        tensors["weight_g_idx"] = layer.of_inputs.astype(np.int32)
    return tensors


def compressed(stored: str, bits: int, strategy: str, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = GROUP
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


Packs = Callable[[int, int], tuple[Mapping[str, Any], Array]]


def of_integers(bits: int, *, zeros: bool, reorders: bool, packs: Callable[[Layer], Any]) -> Packs:
    def pack(outputs: int, inputs: int) -> tuple[Mapping[str, Any], Array]:
        layer = Layer(outputs, inputs, bits, zeros=zeros, reorders=reorders)
        return packs(layer), layer.weight

    return pack


def plain_int8(outputs: int, inputs: int) -> tuple[Mapping[str, Any], Array]:
    draw = np.random.default_rng(outputs * inputs)
    steps = draw.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = draw.uniform(1e-4, 2e-4, (outputs, 1)).astype(np.float32)
    return {"weight": steps, "weight_scale": scales}, steps * scales


INPUT_SCALE = 0.01
"""Of FP8 layers with a scale of inputs, of which some are beyond 448 times that."""


def fp8(
    shape: Callable[[int], tuple[int, ...]],
    name: str = "weight_scale",
    *,
    inputs_shape: tuple[int, ...] | None = None,
) -> Packs:
    def pack(outputs: int, inputs: int) -> tuple[Mapping[str, Any], Array]:
        steps = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        scales = np.full(shape(outputs), 0.03, np.float32)
        weight = steps.float().numpy() * scales.reshape(-1, 1)
        of_inputs = {}
        if inputs_shape is not None:
            of_inputs["input_scale"] = np.full(inputs_shape, INPUT_SCALE, np.float32)
        return {"weight": steps, name: scales, **of_inputs}, weight

    return pack


def fp8_by_blocks(name: str) -> Packs:
    """The last blocks of outputs and inputs are smaller than the others, or all."""

    def pack(outputs: int, inputs: int) -> tuple[Mapping[str, Any], Array]:
        draw = np.random.default_rng(outputs * inputs)
        steps = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        scales = draw.uniform(0.01, 0.06, (-(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])))
        scales = scales.astype(np.float32)
        weight = steps.float().numpy().copy()
        for row in range(outputs):
            for column in range(inputs):
                weight[row, column] *= scales[row // BLOCK[0], column // BLOCK[1]]
        return {"weight": steps, name: scales}, weight

    return pack


def of_gptq(bits: int, *, stored: str = "gptq") -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": stored,
    }  # fmt: skip


FORMATS: dict[str, tuple[dict[str, Any], Packs]] = {
    **{
        f"gptq of {bits} bits{' in another order' if reorders else ''}": (
            of_gptq(bits),
            of_integers(bits, zeros=True, reorders=reorders, packs=lambda x, b=bits: gptq(x, b)),  # type: ignore[misc]
        )
        for bits in (4, 8)
        for reorders in (False, True)
    },
    "gptq_v2": (
        of_gptq(4, stored="gptq_v2"),
        of_integers(4, zeros=True, reorders=False, packs=lambda x: gptq(x, 4, less=0)),
    ),
    "gptq, symmetric": (
        of_gptq(4),
        of_integers(4, zeros=False, reorders=False, packs=lambda x: gptq(x, 4)),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        of_integers(4, zeros=True, reorders=False, packs=awq),
    ),
    **{
        f"pack-quantized, {bits} bits, zeros {zeros}, reorders {reorders}": (
            compressed("pack-quantized", bits, "group"),
            of_integers(
                bits,
                zeros=zeros,
                reorders=reorders,
                packs=lambda x, b=bits, z=zeros, r=reorders: pack_quantized(  # type: ignore[misc]
                    x, b, zeros=z, reorders=r
                ),
            ),
        )
        for bits, zeros, reorders in ((4, False, False), (4, True, False), (4, True, True),
                                      (8, True, False))
    },
    "pack-quantized of an old version": (
        compressed("pack-quantized", 4, "group"),
        of_integers(4, zeros=True, reorders=False, packs=lambda x: pack_quantized(
            x, 4, zeros=True, reorders=False, is_old=True)),
    ),
    "int-quantized": (compressed("int-quantized", 8, "channel"), plain_int8),
    "fp8 by channel": (
        compressed("float-quantized", 8, "channel", "float"), fp8(lambda outputs: (outputs, 1)),
    ),
    "fp8 by tensor": (compressed("float-quantized", 8, "tensor", "float"), fp8(lambda _: (1,))),
    "fp8 of one scale": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8(lambda _: ()),
    ),
    "fp8 of one scale, by transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8(lambda _: (), "weight_scale_inv"),
    ),
    "fp8 with scales of inputs": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8(lambda outputs: (), inputs_shape=()),
    ),
    "fp8 with scales of inputs of compressed-tensors": (
        {
            **compressed("float-quantized", 8, "channel", "float"),
            "config_groups": {"a": {
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
                },
            }},
        },
        fp8(lambda outputs: (outputs, 1), inputs_shape=(1,)),
    ),
    "fp8 by blocks": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
        },
        fp8_by_blocks("weight_scale_inv"),
    ),
    "fp8 by blocks of compressed-tensors": (
        {
            **compressed("float-quantized", 8, "block", "float"),
            "config_groups": {"a": {"weights": {
                "num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK),
            }}},
        },
        fp8_by_blocks("weight_scale"),
    ),
}  # fmt: skip


def quantize(model: Path, target: Path, settings: dict[str, Any], pack: Packs) -> Path:
    """Two copies of a model: with packed layers, and in ``expanded`` with what they mean, fp32."""
    torch.manual_seed(0)
    directory = Path(shutil.copytree(model, target / "packed"))
    expanded = Path(shutil.copytree(model, target / "expanded"))
    tensors = load_file(model / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]:
        packed, weight = pack(*tensors.pop(name).shape)
        layer = name.removesuffix(".weight")
        for own, array in packed.items():
            value = array if isinstance(array, torch.Tensor) else torch.from_numpy(array.copy())
            tensors[f"{layer}.{own}"] = value.contiguous()
        plain[name] = torch.from_numpy(weight.astype(np.float32)).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(plain, expanded / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=FORMATS)
def packed_model(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Path],
) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = make_tiny_model(tmp_path_factory.mktemp("plain"), **sizes)
    return quantize(model, tmp_path_factory.mktemp("packed"), *FORMATS[request.param])


def generated(model: Path, dtype: str, device: str = "cpu") -> tuple[list[Any], set[type]]:
    """Tokens, and the types of the layers of queries."""
    llm = LLM(str(model), device=device, dtype=dtype, max_model_len=64, warmup="none")
    results = llm.generate([list(range(1, 40)), [7], list(range(100, 117))], GREEDY)
    modules = dict(llm.core.executor.worker._model.named_modules())
    kinds = {type(module) for name, module in modules.items() if name.endswith("q_proj")}
    return [result.completions[0].token_ids for result in results], kinds


def test_weights_are_unpacked_exactly_and_stay_packed(packed_model: Path) -> None:
    spec = inspect_model(str(packed_model))
    assert spec.packing is not None
    model = load_model(spec, torch.device("cpu"), torch.float32, 64)
    expanded = load_file(packed_model.parent / "expanded" / "model.safetensors")
    layers = {n: own for n, own in model.named_modules() if isinstance(own, QuantizedLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(layer.packed.unpacked(), expanded[f"{name}.weight"])
        assert layer.steps.dtype is spec.packing.form.steps_dtype, "`WeightFormat.steps_dtype`"
        bytes_held = sum(tensor.nbytes for tensor in (layer.steps, layer.scales))
        assert bytes_held <= layer.in_features * layer.out_features * 1.25
        assert not isinstance(layer.scales, torch.nn.Parameter)


def layer_in_bf16(model: Path) -> type:
    """Integers are multiplied by the kernel, where there is one."""
    packing = inspect_model(str(model)).packing
    assert packing is not None
    if packing.form.is_float:
        return QuantizedLinear
    try:
        load_linear_kernel(weights=packing.form.steps_dtype)
    except NoKernel:
        return QuantizedLinear
    return IntegerLinear


def test_a_packed_model_serves_the_tokens_of_its_expansion(packed_model: Path) -> None:
    tokens, kinds = generated(packed_model, "float32")
    assert kinds == {QuantizedLinear}
    assert tokens == generated(packed_model.parent / "expanded", "float32")[0]
    in_bf16, kinds = generated(packed_model, "auto")
    assert [len(sampled) for sampled in in_bf16] == [12] * 3
    assert kinds == {layer_in_bf16(packed_model)}


def packed_with(tiny_model: Path, directory: Path, settings: dict[str, Any]) -> str:
    return str(quantize(tiny_model, directory, settings, plain_int8))


@pytest.mark.parametrize(
    ("settings", "words_of_error"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "packed as bitsandbytes, which"),
        (compressed("nvfp4-pack-quantized", 4, "group", "float"), "with float of 4 bits"),
        (compressed("pack-quantized", 2, "group"), "with int of 2 bits"),
        (compressed("int-quantized", 8, "block"), "with scales by block"),
        (compressed("float-quantized", 8, "tensor_group", "float"), "with scales by tensor_group"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "with numbers of e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"with blocks of \[0, 128\]"),
        (
            {
                **compressed("pack-quantized", 4, "group"),
                "transform_config": {"config_groups": {"a": {}}},
            },
            "with transforms of activations",
        ),
        (
            {
                **compressed("pack-quantized", 4, "group"),
                "config_groups": {
                    "a": {"weights": {"num_bits": 4}},
                    "b": {"weights": {"num_bits": 8}},
                },
            },
            "with settings for several groups of layers",
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "order gemv"),
        ({"quant_method": "gptq"}, "packed as gptq, which is not read"),
    ],
)
def test_a_format_that_is_not_read_is_named(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], words_of_error: str
) -> None:
    with pytest.raises(ModelError, match=words_of_error) as refusal:
        LLM(packed_with(tiny_model, tmp_path, settings), device="cpu")
    assert "\n" not in str(refusal.value)


def test_damaged_layers_and_weights_outside_of_linear_layers_are_named(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = compressed("int-quantized", 8, "channel")
    file = Path(packed_with(tiny_model, tmp_path, settings)) / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.self_attn.q_proj"
    for tensors, expected in (
        ({**whole, f"{name}.weight_scale": torch.ones(7, 1)}, rf"layer {name} .* scales of"),
        ({**whole, f"{name}.weight": torch.zeros(2, 48, dtype=torch.int8)}, "cannot be read"),
        ({k: v for k, v in whole.items() if k != f"{name}.weight"}, "cannot be read: 'weight'"),
        ({**whole, "model.layers.0.experts.weight_scale": torch.ones(1)}, "linear layers alone"),
        ({**whole, "model.layers.0.mlp.act.scales": torch.ones(1)}, "with scaled activations"),
    ):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ModelError, match=expected):
            generated(file.parent, "float32")


@pytest.mark.parametrize("form", ["fp8 by channel", "fp8 by blocks"])
def test_fp8_that_nothing_scales_is_named(tiny_model: Path, tmp_path: Path, form: str) -> None:
    file = quantize(tiny_model, tmp_path, *FORMATS[form]) / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    scale = next(key for key in whole if key.startswith(f"{name}_scale"))
    without = {key: tensor for key, tensor in whole.items() if key != scale}
    fused = "model.layers.0.mlp.experts.down_proj"
    for tensors, expected in (
        (without, name),
        ({**whole, fused: torch.ones(2, 2).to(torch.float8_e4m3fn)}, fused),
    ):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ModelError, match=f"without scales of their own .* {expected}$"):
            LLM(str(file.parent), device="cpu")


def test_packed_weights_are_rounded_no_further_and_rejected_on_a_gaudi(
    tiny_model: Path, tmp_path: Path, lazy_gaudi: object
) -> None:
    model = packed_with(tiny_model, tmp_path, compressed("int-quantized", 8, "channel"))
    with pytest.raises(ConfigError, match="int8 rounds weights of bf16"):
        LLM(model, device="cpu", quantization="int8")
    expected = r"hpu does not compute weights of compressed-tensors \(8 bits, channels\):"
    with pytest.raises(ConfigError, match=expected):
        LLM(model, device="hpu")


def test_a_packed_weight_of_another_form_is_refused() -> None:
    steps, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 2)
    assert PackedWeight(steps, scales).group == 4
    for wrong in (
        (steps.int(), scales),
        (steps, scales.int()),
        (steps, scales[:3]),
        (steps, torch.ones(4, 9)),
        (steps, scales, torch.zeros(4, 2)),
        (steps, scales, None, torch.arange(7)),
    ):
        with pytest.raises(ModelError, match="a packed weight cannot be used"):
            PackedWeight(*wrong)  # type: ignore[arg-type]
