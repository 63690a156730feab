"""What a Gaudi computes by Intel's operations: here those of the stand-in, on the host."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from model_families import save_family
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from trencadis.engine import ConfigError
from trencadis.engine.devices.hpu import cached_rows, experts, fp8_linear, kernel_trials, kernels
from trencadis.engine.devices.hpu.cached_rows import LARGEST, CachedRows, as_kept, as_read
from trencadis.engine.devices.hpu.experts import ExpertSizes, num_chosen
from trencadis.engine.devices.hpu.fp8_linear import FP8Linear, use_fp8_products
from trencadis.engine.devices.hpu.kernels import FusedPromptAttention, prompt_attention
from trencadis.engine.devices.kernel_trial import TOLERANCE, largest_difference
from trencadis.engine.doctor.check_list import KERNELS
from trencadis.engine.models.loader import inspect_model
from trencadis.engine.models.packed_experts import (
    MATRICES,
    are_packed,
    packed_weight,
    put_weights,
    round_experts,
    scales_of,
)
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear, rounded_fp8

STANDIN = Path(__file__).parent / "habana_standin"
CPU = torch.device("cpu")


def loaded(file: str, name: str) -> Any:
    """A module of the stand-in without the rest of it, which would change PyTorch."""
    spec = importlib.util.spec_from_file_location(name, STANDIN / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Operations(TorchDispatchMode):
    """Notes the keys of each attention; has ``index_copy_`` of FP8, which a CPU lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_keys: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_copy_.default and args[0].dtype in LARGEST:
            target, dim, index, source = args
            func(target.view(torch.uint8), dim, index, source.view(torch.uint8))
            return target
        if func is torch.ops.hpu.sdpa_recomp_fwd.default:
            self.num_keys.append(args[1].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operations]:
    """``torch.ops.hpu`` and the kernels of ``habana_frameworks.torch.hpex``."""
    monkeypatch.delenv("GAUDI_STANDIN_NAME", raising=False)
    for package in ("kernels", "normalization"):
        name = f"habana_frameworks.torch.hpex.{package}"
        monkeypatch.setitem(sys.modules, name, None)  # taken out again at the end
        loaded(f"habana_frameworks/torch/hpex/{package}/__init__.py", name)
    custom_ops = loaded("gaudi_standin/custom_ops.py", "operations_of_the_stand_in")
    library = custom_ops.register()
    with Operations() as noted:
        yield noted
    library._destroy()
    del sys.modules["operations_of_the_stand_in"]


# Linear layers of FP8.


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row to 240 at most, in E4M3, and back."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 240
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def weight_of(outputs: int = 6, inputs: int = 16, *, largest: float = 240) -> PackedWeight:
    torch.manual_seed(0)
    steps = (torch.rand(outputs, inputs) * 2 - 1) * largest
    steps[0, 0] = largest
    scales = torch.rand(outputs, 1) / 100 + 0.01
    return PackedWeight(steps.to(torch.float8_e4m3fn), scales)


def model_of(*weights: PackedWeight, bias: bool = False) -> nn.ModuleList:
    biases = [nn.Parameter(torch.randn(each.shape[0])) if bias else None for each in weights]
    return nn.ModuleList(map(QuantizedLinear, weights, biases))


@pytest.mark.parametrize("shape", [(16,), (1, 16), (5, 16), (2, 3, 16)])
def test_a_layer_rounds_each_row_by_its_own_scale(shape):
    weight, bias = weight_of(), nn.Parameter(torch.randn(6))
    rows = torch.randn(shape) * torch.logspace(-3, 3, math.prod(shape) // 16).view(*shape[:-1], 1)
    layer = FP8Linear(weight, bias)
    assert (layer.in_features, layer.out_features) == (16, 6)
    found = layer(rows)
    assert found.shape == (*shape[:-1], 6)
    expected = rounded(rows) @ weight.unpacked().t() + bias
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_row_of_zeros_is_finite_and_of_the_bias_alone():
    bias = nn.Parameter(torch.randn(6))
    found = FP8Linear(weight_of(), bias)(torch.zeros(2, 16))
    assert torch.equal(found, bias.expand(2, 6))


def test_with_one_scale_inputs_beyond_it_are_the_largest():
    weight = weight_of()
    scaled = attrs.evolve(weight, input_scale=torch.tensor([0.25]))
    rows = torch.randn(3, 16)
    rows[0, 0], rows[1, 0] = 200.0, -200.0
    bounded = (rows / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.25
    torch.testing.assert_close(FP8Linear(scaled)(rows), bounded @ weight.unpacked().t())


@pytest.mark.parametrize("input_scale", [None, 1 / 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_of_a_product_agrees_with_the_host(dtype, input_scale):
    found, expected = fp8_linear.fp8_trial(CPU, dtype, input_scale=input_scale)
    assert found.shape == expected.shape == (2, 5, 48)
    assert largest_difference(found, expected) <= TOLERANCE[dtype]
    assert expected[1, 2].abs().max() > 0, "a bias"
    sizes = {"outputs": 7, "inputs": 32}
    assert fp8_linear.fp8_trial(CPU, dtype, **sizes)[0].shape == (2, 5, 7)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_fp8_are_multiplied_where_the_kernel_agrees(bias):
    model = model_of(weight_of(), weight_of(8, 16), bias=bias)
    biases = [each.bias for each in model]
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=False)
    assert [type(each) for each in model] == [FP8Linear] * 2
    assert [each.bias for each in model] == biases
    for each, weight in zip(model, (weight_of(), weight_of(8, 16)), strict=True):
        assert torch.equal(each.steps.float(), weight.steps.float())
        assert torch.equal(each.scales, weight.scales.flatten())


@pytest.mark.parametrize(
    ("largest", "is_gaudi2", "becomes"),
    [(448, True, 224), (448, False, 448), (240, True, 240), (256, True, 128)],
)
def test_numbers_that_a_gaudi_2_lacks_are_halved(largest, is_gaudi2, becomes):
    weight = weight_of(largest=largest)
    model = model_of(attrs.evolve(weight))
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=is_gaudi2)
    [layer] = model
    assert float(layer.steps.float().max()) == becomes
    halves = 2 if becomes < largest else 1
    assert torch.equal(layer.scales, weight.scales.flatten() * halves)


@pytest.mark.parametrize("is_gaudi2", [False, True])
def test_a_scale_of_inputs_is_kept_and_doubled_on_a_gaudi_2(is_gaudi2):
    weight = attrs.evolve(weight_of(), input_scale=torch.tensor([0.5]))
    model = model_of(weight, weight_of())
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=is_gaudi2)
    assert model[0].input_scale.tolist() == [1.0 if is_gaudi2 else 0.5]
    assert model[1].input_scale is None


@pytest.mark.parametrize("is_gaudi2", [False, True])
def test_scales_of_blocks_become_those_of_outputs(is_gaudi2):
    steps = weight_of(largest=448).steps
    blocks = PackedWeight(steps, torch.rand(6, 4) + 0.1)
    model = model_of(blocks)
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=is_gaudi2)
    [layer] = model
    assert layer.scales.shape == (6,)
    expected = rounded_fp8(blocks.unpacked())
    assert torch.equal(layer.steps.float(), expected.steps.float())
    assert torch.equal(layer.scales, expected.scales.flatten())


def wrong_trial(monkeypatch: pytest.MonkeyPatch, *, one_scale_alone: bool = False) -> None:
    trial = fp8_linear.fp8_trial

    def wrong(*given: Any, **named: Any) -> Any:
        found, expected = trial(*given, **named)
        return found * (1 if one_scale_alone and "input_scale" not in named else 2), expected

    monkeypatch.setattr(fp8_linear, "fp8_trial", wrong)


@pytest.mark.parametrize("is_gaudi2", [False, True])
def test_where_the_kernel_differs_weights_are_expanded(monkeypatch, caplog, is_gaudi2):
    wrong_trial(monkeypatch)
    weight = attrs.evolve(weight_of(largest=448), input_scale=torch.tensor([0.5]))
    blocks = PackedWeight(weight.steps, torch.rand(6, 4) + 0.1)
    model = model_of(weight, blocks)
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=is_gaudi2)
    assert [type(each) for each in model] == [QuantizedLinear] * 2
    assert caplog.text.count("is not used") == 1, "the scale of inputs is not tried"
    assert model[0].input_scale is None
    rows = torch.randn(2, 16)
    torch.testing.assert_close(model[0](rows), rows @ weight.unpacked().t())
    torch.testing.assert_close(model[1](rows), rows @ blocks.unpacked().t())
    assert float(model[0].steps.float().max()) == (224 if is_gaudi2 else 448)
    assert model[1].packed.groups == 4


def test_where_one_scale_of_inputs_differs_rows_have_their_own(monkeypatch, caplog):
    wrong_trial(monkeypatch, one_scale_alone=True)
    model = model_of(attrs.evolve(weight_of(), input_scale=torch.tensor([0.5])))
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=True)
    assert type(model[0]) is FP8Linear
    assert model[0].input_scale is None
    assert "fp8_gemm_v2 with one scale of inputs is not used" in caplog.text


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("is_gaudi2", [True, False])
def test_experts_are_halved_as_layers_are_and_expanded_where_the_kernel_differs(
    monkeypatch, usable, is_gaudi2
):
    if not usable:
        wrong_trial(monkeypatch)
    module = mixtral()
    for matrix in MATRICES:
        outputs, inputs = getattr(module, matrix).shape[1:]
        put_weights(module, matrix, [weight_of(outputs, inputs, largest=448)] * 4)
    weights = {matrix: packed_weight(module, matrix, 3).unpacked() for matrix in MATRICES}
    use_fp8_products(nn.ModuleList([module]), CPU, torch.float32, is_gaudi2=is_gaudi2)
    for matrix, weight in weights.items():
        if usable:
            found = packed_weight(module, matrix, 3)
            assert float(found.steps.float().max()) == (224 if is_gaudi2 else 448)
            # Halves of the smallest numbers may be none of E4M3.
            torch.testing.assert_close(found.unpacked(), weight, rtol=0.02, atol=1e-3)
        else:
            assert torch.equal(getattr(module, matrix)[3], weight)
            assert not are_packed(module)


def test_a_model_without_fp8_is_not_tried(monkeypatch):
    monkeypatch.setattr(fp8_linear, "fp8_trial", None)
    integers = PackedWeight(torch.ones(6, 16, dtype=torch.int8), torch.ones(6, 1))
    model = model_of(integers)
    use_fp8_products(model, CPU, torch.float32, is_gaudi2=True)
    assert type(model[0]) is QuantizedLinear


# Experts.


def mixtral(**sizes: int) -> Any:
    torch.manual_seed(0)
    named = {"num_local_experts": 4, "num_experts_per_tok": 2, **sizes}
    config = MixtralConfig(hidden_size=16, intermediate_size=24, **named)
    made = MixtralExperts(config).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_()
    return made


def routed(tokens: int, number: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = torch.rand(tokens, number).topk(2).indices
    return torch.randn(tokens, 16), chosen, torch.rand(tokens, 2)


def test_fused_experts_are_those_of_all(monkeypatch):
    module, given = mixtral(), routed(7)
    expected = experts.all_experts(module, *given)
    torch.testing.assert_close(experts.fused_experts(module, *given), expected)
    weights = given[2].double()
    assert experts.fused_experts(module, *given[:2], weights).dtype is torch.float32


@pytest.mark.parametrize("rows", [128, 129])
@pytest.mark.parametrize("expands", [False, True])
def test_more_than_128_rows_of_fp8_are_computed_by_the_kernel(monkeypatch, rows, expands):
    """Where it is used: with expanded weights, so that inputs are not rounded."""
    module = mixtral()
    round_experts([module])
    module.expands_to_kernel = expands
    hidden, chosen, weights = routed(rows)
    found = experts.fp8_experts(module, hidden, chosen, weights)
    is_expanded = expands and rows > 128
    wide = SimpleNamespace(
        **{
            matrix: getattr(module, matrix).float() * getattr(module, scales_of(matrix))
            for matrix in MATRICES
        },
        num_experts=4,
    )
    expected = experts.fused_experts(wide, hidden, chosen, weights)
    near = torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert near == is_expanded, "products of FP8 round their inputs"
    assert (found - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_experts_are_computed_by_what_agrees_with_the_host(monkeypatch, usable, packed):
    trial = experts.experts_trial

    def tried(*given: Any) -> Any:
        sizes.append(given[2])
        found, expected = trial(*given)
        return (found if usable else found + 1), expected

    sizes: list[ExpertSizes] = []
    monkeypatch.setattr(experts, "experts_trial", tried)
    model = nn.ModuleList([mixtral(), mixtral(), mixtral(num_local_experts=3)])
    plain = nn.Linear(2, 2)
    model.insert(0, plain)
    if packed:
        round_experts(list(model))
    experts.use_static_experts(model, CPU)
    assert sizes == [ExpertSizes(4, 2, 16, 24), ExpertSizes(3, 2, 16, 24)]
    name = "fp8" if packed else "fused" if usable else "all"
    for each in list(model)[1:]:
        assert each.config._experts_implementation == f"trencadis_{name}_experts"
        if packed:
            assert each.expands_to_kernel is usable


def test_experts_of_another_kind_have_the_products_of_all(monkeypatch):
    monkeypatch.setattr(experts, "experts_trial", None)
    module = mixtral()
    module.act_fn = nn.GELU()
    experts.use_static_experts(nn.ModuleList([module]), CPU)
    assert module.config._experts_implementation == "trencadis_all_experts"


@pytest.mark.parametrize(
    "sizes", [ExpertSizes(), ExpertSizes(12, 3, 80, 24), ExpertSizes(1, 1, 8, 4)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_of_experts_agrees_with_the_host(sizes, dtype):
    found, expected = experts.experts_trial(CPU, dtype, sizes)
    assert found.shape == expected.shape == (6, sizes.hidden)
    assert largest_difference(found, expected) <= TOLERANCE[dtype]
    assert 0.1 < expected.abs().max() < 4
    assert len(torch.unique(expected, dim=0)) == 6, "six tokens"


@pytest.mark.parametrize("left_out", [0, 11])
def test_the_trial_of_experts_finds_the_first_and_last_one_missing(monkeypatch, left_out):
    right = experts.fused_experts

    def kernel(module: Any, hidden: Any, chosen: Any, weights: Any) -> torch.Tensor:
        return right(module, hidden, chosen, torch.where(chosen == left_out, 0.0, weights))

    monkeypatch.setattr(experts, "fused_experts", kernel)
    found, expected = experts.experts_trial(CPU, torch.float32, ExpertSizes(12, 3, 80, 24))
    assert largest_difference(found, expected) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_topk", "top_k_experts"])
def test_the_experts_of_a_token_are_found_under_each_name(name):
    assert num_chosen(SimpleNamespace(**{name: 3}), 8) == 3
    assert num_chosen(SimpleNamespace(**{name: 9}), 8) == 8
    assert num_chosen(SimpleNamespace(**{name: None}), 8) == 2
    assert num_chosen(SimpleNamespace(), 1) == 1
    assert str(ExpertSizes()) == "2 of 4 experts of 16 for 32 numbers"


# Rows of a cache of FP8.


@pytest.mark.parametrize("kept", LARGEST)
def test_what_is_kept_is_rounded_to_the_nearest_and_at_most_the_largest(kept):
    largest = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}[kept]
    assert LARGEST[kept] == largest
    rows = torch.tensor([[0.0, 1.0, 3.3, -0.07, largest, 2 * largest, -2 * largest]])
    found = as_kept(rows, kept)
    assert found.dtype is kept
    assert torch.equal(found.float(), rows.clamp(-largest, largest).to(kept).float())
    for dtype in (torch.float32, torch.bfloat16):
        read = as_read(found, dtype)
        assert read.dtype is dtype
        assert torch.equal(read.float(), found.float())


def test_rows_of_the_models_type_stay_as_they_are():
    rows = torch.randn(2, 3)
    assert as_kept(rows, torch.float32) is rows
    assert as_read(rows, torch.bfloat16) is rows


@pytest.mark.parametrize("held_in", [torch.float32, *LARGEST])
def test_blocks_are_read_in_place_gathered_or_by_sequence(held_in):
    """Six blocks of 4 tokens, two heads of 3 numbers."""
    rows = torch.arange(6 * 4 * 2 * 3).view(24, 2, 3).remainder(7).float()
    held = CachedRows(rows.to(held_in), 4, torch.float32)
    assert held.is_rounded == (held_in is not torch.float32)
    blocks = rows.view(6, 4, 2, 3).transpose(1, 2)
    assert torch.equal(held.in_place(1, 3), blocks[1:4])
    named = torch.tensor([4, 0, 5, 5])
    assert torch.equal(held.selected(named), blocks[named])
    sequences = rows.view(6, 4, 2, 3)[named].view(2, 8, 2, 3).transpose(1, 2)
    assert torch.equal(held.of_sequences(named, 2), sequences)
    assert torch.equal(held.tokens(5, 6), rows[5:11].transpose(0, 1))


@pytest.mark.parametrize("kept", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_of_a_cache_agrees_with_the_host_exactly(kept, dtype):
    found, expected = cached_rows.cache_trial(CPU, dtype, kept)
    assert found.shape == expected.shape == (1, 2, 12, 16)
    assert torch.equal(found.float(), expected)
    assert expected.abs().max() == LARGEST[kept]
    assert (expected[0, 0].abs().amax(1) > 0).sum() == 6, "six rows were written"
    assert cached_rows.cache_trial(CPU, dtype, kept, kv_heads=3, width=8)[0].shape == (1, 3, 12, 8)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_cache_of_fp8_needs_kernels_that_agree(monkeypatch, wrong):
    trial = cached_rows.cache_trial

    def tried(*given: Any) -> Any:
        found, expected = trial(*given)
        return (found * 2 if wrong else found), expected

    monkeypatch.setattr(cached_rows, "cache_trial", tried)
    if not wrong:
        cached_rows.check_kernels(CPU, torch.float32, torch.float8_e4m3fn)
        return
    with pytest.raises(ConfigError, match="kv_cache_dtype: FP8 needs cast_to_fp8_v2") as refusal:
        cached_rows.check_kernels(CPU, torch.float32, torch.float8_e4m3fn)
    assert refusal.value.field == "kv_cache_dtype"


# Attention, norms and the other kernels, as the doctor tries them.


def fused(**sliced: int) -> FusedPromptAttention:
    kernel = sys.modules["habana_frameworks.torch.hpex.kernels"].FusedSDPA
    return FusedPromptAttention(kernel, "fast", **sliced)


def attention_of(
    attend: Callable[..., torch.Tensor], heads: int, kv_heads: int, queries: int, keys: int
) -> torch.Tensor:
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, 8)
    key, value = torch.randn(2, 2, kv_heads, keys, 8)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    bias = torch.where(seen, 0.0, -1e9).expand(2, 1, queries, keys).contiguous()
    return attend(query, key, value, 0.3, bias, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"),
    [(4, 2, 2, 6), (4, 2, 5, 12), (2, 2, 4, 4), (6, 2, 7, 13), (4, 1, 8, 16), (3, 3, 1, 9)],
)
@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_attention_in_slices_is_that_of_the_whole(heads, kv_heads, queries, keys, length):
    sizes = (heads, kv_heads, queries, keys)
    expected = attention_of(prompt_attention, *sizes)
    found = attention_of(fused(sliced_from=keys, slice_length=length), *sizes)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(attention_of(fused(), *sizes), expected)


@pytest.mark.parametrize(("sliced_from", "slices"), [(12, [4, 2, 4, 4, 2, 4, 4, 4]), (13, [12])])
def test_attention_is_sliced_from_its_number_of_keys_on(operations, sliced_from, slices):
    """Ten queries behind two keys of context: a slice of 4 has no keys that come after it."""
    attention_of(fused(sliced_from=sliced_from, slice_length=4), 2, 2, 10, 12)
    assert operations.num_keys == slices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Mixtral", "Llama"])
def test_each_kernel_of_the_doctor_agrees_at_the_shapes_of_a_model(family, dtype, tmp_path):
    spec = inspect_model(str(save_family(family, tmp_path)))
    trials = kernel_trials.kernel_trials(spec, dtype, CPU, "fast")
    assert tuple(trials) == KERNELS
    for name, trial in trials.items():
        found, expected = trial()
        assert largest_difference(found, expected) <= TOLERANCE[dtype], name
        assert expected.abs().max() > 0, name
    layer, text = spec.layers[0], spec.config
    assert trials["cast_from_fp8"]()[0].shape == (1, layer.kv_heads, 12, layer.key_width)
    assert trials["fp8_gemm_v2"]()[0].shape == (2, 5, text.hidden_size)
    assert trials["FusedRMSNorm"]()[0].shape == (1, 128, text.hidden_size)
    hidden = text.hidden_size if family == "Mixtral" else ExpertSizes().hidden
    assert trials["mixture_of_experts"]()[0].shape == (6, hidden)
    assert trials["index_copy_"]()[0].shape == (512, layer.kv_heads, layer.key_width)
    assert trials["index_reduce_ amax"]()[0].shape == (9, layer.heads)
    width = layer.key_width
    assert trials["FusedSDPA"]()[0].shape[-3:] == (layer.heads, 128, width)
    heads = layer.heads + layer.kv_heads
    assert trials["apply_rotary_pos_emb"]()[0].numel() == 6 * heads * width


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("block_softmax_adjustment", "hpu", "there is no operation hpu::block_softmax_adjustment"),
        ("mixture_of_experts", "hpu", "there is no operation hpu::mixture_of_experts"),
        ("fp8_gemm_v2", "hpu", "there is no operation hpu::fp8_gemm_v2"),
        ("cast_from_fp8", "hpu", "there is no operation hpu::cast_from_fp8"),
        ("FusedSDPA", "kernels", "hpex.kernels has no FusedSDPA"),
        ("FusedRMSNorm", "normalization", "hpex.normalization has no FusedRMSNorm"),
        ("apply_rotary_pos_emb", "kernels", "hpex.kernels has no apply_rotary_pos_emb"),
    ],
)
def test_a_kernel_that_a_release_lacks_is_named(name, lost, said, tmp_path, monkeypatch):
    spec = inspect_model(str(save_family("Llama", tmp_path)))
    if lost == "hpu":
        empty = SimpleNamespace(hpu=SimpleNamespace())
        monkeypatch.setattr(kernel_trials, "torch", SimpleNamespace(ops=empty))
    else:
        monkeypatch.delattr(sys.modules[f"habana_frameworks.torch.hpex.{lost}"], name)
    trials = kernel_trials.kernel_trials(spec, torch.float32, CPU, "fast")
    with pytest.raises(kernel_trials.MissingKernelError, match=said):
        trials[name]()
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpex.kernels", None)
    if lost == "kernels":
        with pytest.raises(kernel_trials.MissingKernelError, match=said):
            trials[name]()


class OnGaudi(torch.Tensor):
    """A tensor of the host that says that it is on a Gaudi."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("hpu")


def rotary_of(**changes: Any) -> tuple[list[torch.Tensor], int, int]:
    """What is rotated, and how often by the kernel and by what it replaces."""
    torch.manual_seed(0)
    sizes = {"batch": 1, "width": 16, "rotated": 16, "unsqueeze_dim": 1, "kind": OnGaudi, **changes}
    calls = [0, 0]
    kernel = sys.modules["habana_frameworks.torch.hpex.kernels"].apply_rotary_pos_emb

    def by_kernel(*given: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return kernel(*given)

    def replaced(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        calls[1] += 1
        assert unsqueeze_dim == sizes["unsqueeze_dim"]
        return q, k

    tokens = torch.outer(torch.arange(6.0), torch.rand(sizes["rotated"] // 2)).repeat(1, 2)
    angles = tokens.expand(sizes["batch"], -1, -1)
    query, key = (torch.randn(sizes["batch"], heads, 6, sizes["width"]) for heads in (4, 2))
    given = [x.as_subclass(sizes["kind"]) for x in (query, key, angles.cos(), angles.sin())]
    fused = kernels.FusedRotary(by_kernel, replaced)
    found = fused(*given, unsqueeze_dim=sizes["unsqueeze_dim"])
    if calls[0]:
        expected = kernel_trials._rotate(query, key, angles.cos(), angles.sin())
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own.as_subclass(torch.Tensor), other)
    return found, *calls


@pytest.mark.parametrize(
    ("changes", "by_kernel"),
    [
        ({}, 2),
        ({"batch": 2}, 0),
        ({"rotated": 8}, 0),
        ({"unsqueeze_dim": 2}, 0),
        ({"kind": torch.Tensor}, 0),
    ],
)
def test_heads_are_rotated_by_the_kernel_on_a_gaudi_where_it_takes_them(changes, by_kernel):
    _, calls, replaced = rotary_of(**changes)
    assert (calls, replaced) == (by_kernel, 0 if by_kernel else 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_attention_without_a_kernel_has_groups_of_heads(heads, kv_heads, queries):
    """Whatever the number of queries is, as that of heads or another."""
    torch.manual_seed(0)
    query, key = torch.randn(2, heads, queries, 8), torch.randn(2, kv_heads, queries, 8)
    found = prompt_attention(query, key, key, 0.3, None, None)
    whole = key.repeat_interleave(heads // kv_heads, 1)
    scores = query @ whole.transpose(2, 3) * 0.3
    scores = scores.masked_fill(torch.ones(queries, queries).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1) @ whole)
