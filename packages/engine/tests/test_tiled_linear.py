"""Linear layers of bf16 by the CPU's own kernel: right, and alike in every batch."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_families import FAMILIES, save_family
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trencadis.engine import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineCore,
    ModelError,
    SamplingParams,
)
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import device as cpu_device
from trencadis.engine.devices.cpu import native_kernel, tiled_linear, weight_tiles
from trencadis.engine.devices.cpu.attention import CPUAttention
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.onednn_linear import OneDNNLinear, onednn_packs_bf16
from trencadis.engine.devices.cpu.tiled_linear import (
    ByteLinear,
    IntegerLinear,
    TiledEmbedding,
    TiledLinear,
    group_linears,
    load_byte_kernel,
    load_linear_kernel,
)
from trencadis.engine.models import layer_inputs, rounded_weights
from trencadis.engine.models.layer_inputs import products_of_inputs, text_tokens
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_experts import experts_in
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedEmbedding, QuantizedLinear
from trencadis.engine.models.rounded_weights import round_weights, rounded_int4, rounded_int8

INTEGERS = (torch.int8, torch.uint8)
NAMES = {torch.bfloat16: "bf16", torch.int8: "int8", torch.uint8: "int4"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        for weights in (torch.bfloat16, *INTEGERS):
            load_linear_kernel(weights=weights)
    except NoKernel as error:
        if "off by" in str(error):
            raise
        pytest.skip(f"this processor has no kernel: {error}")


@pytest.fixture(scope="module")
def of_integers() -> type[IntegerLinear]:
    """What computes weights that `--quantization` has rounded, on this processor."""
    try:
        load_byte_kernel(torch.int8)
    except NoKernel:
        return IntegerLinear
    return ByteLinear


@pytest.fixture(params=[True, False], ids=["fp32", "pairs"])
def widens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each way to multiply that this processor has."""
    way: bool = request.param
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    try:
        for weights in (torch.bfloat16, *INTEGERS):
            load_linear_kernel(weights=weights, widens=way)
    except NoKernel as error:
        if "off by" in str(error):
            raise
        pytest.skip(str(error))
    return way


def layer(inputs: int, outputs: int, *, bias: bool, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)


def int8(plain: nn.Linear) -> IntegerLinear:
    return IntegerLinear(QuantizedLinear(rounded_int8(plain.weight.detach()), plain.bias))


def int4(plain: nn.Linear) -> IntegerLinear:
    group = 32 if plain.in_features % 32 == 0 else 8
    return IntegerLinear(QuantizedLinear(rounded_int4(plain.weight.detach(), group), plain.bias))


def with_minimums(plain: nn.Linear) -> IntegerLinear:
    packed = rounded_int4(plain.weight.detach())
    minimums = packed.scales.float() * torch.linspace(-3, 3, packed.groups)
    packed = PackedWeight(packed.steps, packed.scales, minimums=minimums)
    return IntegerLinear(QuantizedLinear(packed, plain.bias))


KINDS = [TiledLinear, int8, int4]


@pytest.mark.usefixtures("widens")
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # alike in all examples
)
@given(
    st.integers(1, 70),
    st.integers(1, 60).map(lambda pairs: 2 * pairs),
    st.integers(1, 100),
    st.booleans(),
    st.integers(1, 3),
)
def test_a_product_is_that_of_pytorch(
    num_rows: int, inputs: int, outputs: int, bias: bool, threads: int
) -> None:
    plain = layer(inputs, outputs, bias=bias, seed=num_rows)
    rows = torch.randn(1, num_rows, inputs).bfloat16()
    expected = plain.float()(rows.float())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = TiledLinear(plain.bfloat16())(rows)
    finally:
        torch.set_num_threads(before)
    assert (out.shape, out.dtype) == ((1, num_rows, outputs), torch.bfloat16)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=8e-3)


@pytest.mark.usefixtures("widens")
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # alike in all examples
)
@given(
    st.integers(1, 40),
    st.integers(1, 60).map(lambda pairs: 2 * pairs),
    st.integers(1, 100),
    st.booleans(),
)
def test_int8_weights_differ_by_half_a_step_of_their_output(
    num_rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    plain = layer(inputs, outputs, bias=bias, seed=num_rows)
    plain.weight.data[0] = 0.0
    rows = torch.randn(num_rows, inputs).bfloat16()
    steps = plain.weight.float().abs().amax(1, keepdim=True) / 127
    rounded = (plain.weight.float() / steps.clamp_min(1e-30)).round() * steps
    assert (rounded - plain.weight.float()).abs().le(steps * 0.501).all()
    expected = rows.float() @ rounded.T + (plain.bias.float() if bias else 0.0)
    out = int8(plain)(rows)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=8e-3)


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("packed", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 29, 70])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_layers_of_one_input_give_together_what_each_gives_alone(
    packed: Callable[[nn.Linear], TiledLinear], num_rows: int, threads: int
) -> None:
    layers = [
        packed(layer(48, outputs, bias=outputs == 33, seed=outputs)) for outputs in (96, 33, 5)
    ]
    rows = torch.randn(1, num_rows, 48).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = torch.ops.trencadis.tiled_linears(
            rows,
            [own.tiles for own in layers],
            [own.scales for own in layers],
            [own.shifts for own in layers],
            [own.bias for own in layers],
            [own.out_features for own in layers],
        )
        alone = [own(rows) for own in layers]
    finally:
        torch.set_num_threads(before)
    for out, expected in zip(together, alone, strict=True):
        assert torch.equal(out, expected)


class Gated(nn.Module):
    """Two layers with one input, and one with their result."""

    def __init__(self, kinds: Sequence[Callable[[nn.Linear], TiledLinear]]) -> None:
        super().__init__()
        shapes = ((32, 64), (32, 64), (64, 32))
        self.gate, self.up, self.down = (
            kind(layer(*shape, bias=False, seed=number))
            for number, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return out


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        *(((kind,) * 3, 2) for kind in KINDS),
        ((TiledLinear, int8, TiledLinear), 3),
        ((int4, int8, int4), 3),
    ],
)
def test_a_program_computes_layers_of_one_input_and_type_by_one_call(
    kinds: tuple[Callable[[nn.Linear], TiledLinear], ...], calls: int
) -> None:
    model, rows = Gated(kinds), torch.randn(1, 5, 32).bfloat16()
    names = [name for name, _ in model.named_buffers()]

    def run(rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, named, (rows,))

    inputs = [rows, *(buffer for _, buffer in model.named_buffers())]
    traced = make_fx(run, tracing_mode="fake")(*inputs)
    group_linears(traced)
    found = [node for node in traced.graph.nodes if "tiled_linear" in str(node.target)]
    assert len(found) == calls
    assert torch.equal(traced(*inputs), model(rows))


def test_a_layer_after_a_change_of_its_input_is_computed_after_it() -> None:
    def run(rows: torch.Tensor, *tiles: torch.Tensor) -> list[torch.Tensor]:
        hidden, outs = rows * 1, []
        for weight in tiles:
            outs.append(torch.ops.trencadis.tiled_linear(hidden, weight, None, None, None, 64))
            hidden.view(-1).add_(1)
        return outs

    layers = (TiledLinear(layer(32, 64, bias=False, seed=number)) for number in range(2))
    inputs = [torch.randn(5, 32).bfloat16(), *(own.tiles for own in layers)]
    traced = make_fx(run, tracing_mode="fake")(*inputs)
    group_linears(traced)
    for out, expected in zip(traced(*inputs), run(*inputs), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.usefixtures("widens")
def test_rows_that_are_not_adjacent_in_memory_are_read_in_order() -> None:
    tiled = TiledLinear(layer(34, 50, bias=True))
    rows = torch.randn(34, 9).bfloat16().T
    assert torch.equal(tiled(rows), tiled(rows.contiguous()))
    assert tiled(rows[:0]).shape == (0, 50)


@pytest.mark.usefixtures("widens")
def test_a_row_does_not_depend_on_the_others() -> None:
    tiled = TiledLinear(layer(96, 80, bias=False))
    rows = torch.randn(40, 96).bfloat16()
    together = tiled(rows)
    for count in (1, 2, 13, 25):
        assert torch.equal(tiled(rows[:count]), together[:count])


@pytest.mark.usefixtures("widens")
def test_what_is_not_finite_stays_in_its_own_row() -> None:
    tiled = TiledLinear(layer(64, 40, bias=True))
    rows = torch.randn(3, 64).bfloat16()
    clean = tiled(rows)
    rows[1] = float("nan")
    out = tiled(rows)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], clean[::2])


def linears(model: Path, **changes: object) -> tuple[set[type], list[tuple[int, ...]]]:
    """The types of an engine's linear layers, and what it generates."""
    given = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "warmup": "none"}
    llm = LLM(str(model), **{**given, **changes})
    kinds = {
        type(module)
        for module in llm.core.executor.worker._model.modules()
        if isinstance(module, (nn.Linear, OneDNNLinear, QuantizedLinear, TiledLinear))
    }
    results = llm.generate([list(range(1, 40)), [7], list(range(100, 117))], GREEDY)
    return kinds, [result.completions[0].token_ids for result in results]


def test_an_engine_computes_all_its_linear_layers_with_the_kernel(tiny_model: Path) -> None:
    kinds, tokens = linears(tiny_model)
    assert kinds == {TiledLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3


WITHOUT_KERNEL = OneDNNLinear if onednn_packs_bf16() else nn.Linear
"""What computes bf16 on this processor where the kernel does not."""


@pytest.mark.parametrize("fault", ["no compiler", "wrong results", "another processor"])
@pytest.mark.parametrize("packs", [True, False])
def test_without_a_right_kernel_onednn_computes_or_a_plain_layer(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    packs: bool,
) -> None:
    if packs and not onednn_packs_bf16():
        pytest.skip("oneDNN has no bf16 on this processor")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(cpu_device, "onednn_packs_bf16", lambda: packs)
    if fault == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif fault == "another processor":
        monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, "-mno-avx2"))
    else:
        right: Callable[..., torch.Tensor] = tiled_linear._product
        monkeypatch.setattr(tiled_linear, "_product", lambda *given: 1.1 * right(*given))
    kinds, tokens = linears(tiny_model)
    assert kinds == {OneDNNLinear if packs else nn.Linear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    reasons = {"no compiler": "no-such-compiler", "wrong results": "off by"}
    reason = reasons.get(fault, "no vectors of 256 bits")
    otherwise = "computed by oneDNN" if packs else "plain and slow, oneDNN has no bf16 here"
    assert f"Linear layers are {otherwise}: " in caplog.text
    assert reason in caplog.text


def test_a_processor_without_products_of_bf16_widens(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*native_kernel._FLAGS, "-mno-avx512bf16")
    monkeypatch.setattr(native_kernel, "_FLAGS", flags)
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    kinds, tokens = linears(tiny_model)
    assert kinds == {TiledLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    with pytest.raises(NoKernel, match="no products of pairs of bf16"):
        load_linear_kernel(widens=False)
    # Rounded by the source, not by an instruction: the same, also for what is not finite.
    tiled = TiledLinear(layer(64, 40, bias=True))
    rows = torch.randn(30, 64).bfloat16()
    rows[3], rows[4, 0], rows[5, 0] = float("nan"), float("inf"), 3e38
    rounded = tiled(rows)
    monkeypatch.undo()
    load_linear_kernel(widens=True)
    try:
        torch.testing.assert_close(rounded, tiled(rows), rtol=0, atol=0, equal_nan=True)
    finally:
        load_linear_kernel()


@pytest.mark.parametrize("weights", [torch.bfloat16, *INTEGERS])
@pytest.mark.parametrize("slow", [True, False])
def test_the_faster_way_to_multiply_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    weights: torch.dtype,
    slow: bool,
) -> None:
    """Whichever that is here: each is delayed in turn."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    right = tiled_linear._product

    def delayed(kernel: tiled_linear._Kernel, *given: object) -> torch.Tensor:
        if kernel.widens is slow:
            time.sleep(0.002)
        return right(kernel, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(tiled_linear, "_product", delayed)
    try:
        load_linear_kernel(weights=weights, widens=False)
    except NoKernel as error:
        pytest.skip(str(error))
    tiled_linear._KERNELS.clear()
    load_linear_kernel(weights=weights)
    assert tiled_linear._KERNELS[weights].widens is not slow
    multiplies = "pairs of bf16" if slow else "fp32"
    assert re.search(
        rf"of {NAMES[weights]}: the kernel multiplies {multiplies} \(trial: fp32 ", caplog.text
    )
    # Chosen once: loading another model does not change how the first one rounds.
    slow = not slow
    load_linear_kernel(weights=weights)
    assert tiled_linear._KERNELS[weights].widens is slow


@pytest.mark.parametrize("weights", [torch.bfloat16, *INTEGERS])
@pytest.mark.parametrize("wrong", [True, False])
def test_each_way_to_multiply_is_tried(
    monkeypatch: pytest.MonkeyPatch, weights: torch.dtype, wrong: bool
) -> None:
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    right = tiled_linear._product
    seen = []

    def of_one_way(kernel: tiled_linear._Kernel, *given: object) -> torch.Tensor:
        seen.append(kernel.widens)
        out: torch.Tensor = right(kernel, *given)  # type: ignore[arg-type]
        return out * 1.1 if kernel.widens is wrong else out

    monkeypatch.setattr(tiled_linear, "_product", of_one_way)
    try:
        load_linear_kernel(weights=weights)
    except NoKernel as error:
        assert "off by" in str(error)
    else:
        assert wrong not in seen, "a way that is wrong was tried"


def test_by_fp32_one_product_is_added_after_the_other(widens: bool) -> None:
    """Processors add products of pairs in another order, and would find 1."""
    if not widens:
        pytest.skip("the order of an instruction for pairs is that of the processor")
    plain = layer(4, 1, bias=False)
    plain.weight.data[0] = torch.tensor([2.0**24, 0.0, 1.0, -(2.0**24)])
    tiled = TiledLinear(plain)
    for num_rows in (1, 3):
        out = tiled(torch.ones(num_rows, 4).bfloat16())
        assert out.flatten().tolist() == [0.0] * num_rows


@pytest.mark.usefixtures("widens")
def test_values_that_are_not_normal_count_as_zero() -> None:
    plain = layer(64, 40, bias=False)
    tiny = 1e-39
    plain.weight.data.fill_(tiny)
    tiled = TiledLinear(plain)
    for num_rows in (1, 30):
        assert not tiled(torch.full((num_rows, 64), 1e10).bfloat16()).any()
    plain.weight.data.fill_(1e10)
    assert not TiledLinear(plain)(torch.full((30, 64), tiny).bfloat16()).any()
    assert torch.tensor(tiny) * 2 > 0, "the caller's arithmetic is as it was"


def test_rows_of_another_type_or_width_are_refused() -> None:
    """The kernel gets addresses: it would read beyond them."""
    tiled = TiledLinear(layer(64, 40, bias=False))
    for rows in (torch.ones(3, 32).bfloat16(), torch.ones(3, 64)):
        with pytest.raises(ValueError, match=r"for a layer of 64 inputs of torch\.bfloat16"):
            tiled(rows)


@pytest.mark.parametrize("compiler", ["g++", "no-such-compiler"])
def test_the_kernel_is_not_for_layers_with_an_odd_number_of_inputs(
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    kinds, _ = linears(make_tiny_model(tmp_path, intermediate_size=63))
    assert kinds == {WITHOUT_KERNEL} | ({TiledLinear} if compiler == "g++" else set())


def test_int8_halves_the_weights_of_linear_layers(
    tiny_model: Path, of_integers: type[IntegerLinear]
) -> None:
    kinds, tokens = linears(tiny_model, quantization="int8")
    assert kinds == {of_integers, IntegerLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    plain = layer(64, 96, bias=False)
    assert int8(plain).tiles.nbytes * 2 == TiledLinear(plain).tiles.nbytes


@pytest.mark.parametrize("num_rows", [1, 14, 29])
@pytest.mark.parametrize("weights", [torch.bfloat16, *INTEGERS])
def test_a_kernel_that_is_wrong_for_some_numbers_of_rows_is_not_used(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, weights: torch.dtype
) -> None:
    right: Callable[..., torch.Tensor] = tiled_linear._product

    def wrong(compute: object, rows: torch.Tensor, *given: object) -> torch.Tensor:
        return right(compute, rows, *given) * (1.1 if len(rows) == num_rows else 1.0)

    monkeypatch.setattr(tiled_linear, "_product", wrong)
    with pytest.raises(NoKernel, match=f"its result for {num_rows} rows is off by"):
        load_linear_kernel(weights=weights)


@pytest.mark.usefixtures("widens")
def test_a_large_batch_leaves_no_memory_taken() -> None:
    tiled = TiledLinear(layer(512, 32, bias=False))
    tiled(torch.zeros(1, 512).bfloat16())
    process = psutil.Process()
    before = process.memory_info().rss
    tiled(torch.zeros(1 << 16, 512, dtype=torch.bfloat16))  # its inputs are 64 MiB
    assert process.memory_info().rss - before < 32 << 20


def test_int8_tells_how_much_it_rounds(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    linears(tiny_model, quantization="int8")
    assert re.search(r"int8: (\S+) of \S+ GiB of weights \(embeddings apart\)", caplog.text)


def test_rounding_is_refused_where_most_weights_are_in_fused_experts() -> None:
    """int8 packs these, too, where they are multiplied so."""
    config = Qwen3MoeConfig(
        **{"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 1, "num_experts": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 64},
    )
    model = Qwen3MoeForCausalLM(config).bfloat16()
    for quantization, multiplies in (("int8", False), ("int4", True)):
        with pytest.raises(ConfigError, match=r"would round \S+ of \S+ GiB of weights") as refusal:
            round_weights(model, quantization, multiplies_experts=multiplies)
        assert refusal.value.field == "quantization"
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
        assert not experts_in(model)
    round_weights(model, "int8", multiplies_experts=True)
    assert [experts.down_proj.dtype for experts in experts_in(model)] == [torch.int8]


class Routed(nn.Module):
    """A layer of experts that a router and a gate choose."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(num_experts=64)
        self.router, self.gate = layer(128, 64, bias=False), layer(128, 1, bias=False)
        self.experts = nn.ModuleList(layer(128, 256, bias=False) for _ in range(6))


def test_int8_leaves_routers_and_gates_as_they_are() -> None:
    model = Routed()
    round_weights(model, "int8")
    assert (type(model.router), type(model.gate)) == (nn.Linear, nn.Linear)
    assert {type(expert) for expert in model.experts} == {QuantizedLinear}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_embedding_is_of_int8_and_one_with_a_tied_head(
    make_tiny_model: Callable[..., Path], tmp_path: Path, quantization: str, *, is_tied: bool
) -> None:
    model = make_tiny_model(tmp_path, tie_word_embeddings=is_tied, hidden_size=96, vocab_size=270)
    plain = LLM(str(model), dtype="bfloat16", max_model_len=64, warmup="none", device="cpu")
    llm = LLM(
        *(str(model),),
        **{"dtype": "bfloat16", "max_model_len": 64, "warmup": "none", "device": "cpu"},
        quantization=quantization,
    )
    held, original = llm.core.executor.worker._model, plain.core.executor.worker._model
    table, head = held.get_input_embeddings(), held.get_output_embeddings()
    assert type(table) is (TiledEmbedding if is_tied else QuantizedEmbedding)
    assert type(head) is IntegerLinear
    if is_tied:
        assert table.tiles is head.tiles
    token_ids = torch.randint(0, 270, (2, 70))
    weight = original.get_input_embeddings().weight
    expected = rounded_int8(weight.detach()).unpacked(torch.bfloat16)
    assert torch.equal(table(token_ids), expected[token_ids])
    assert len(llm.generate([[5, 6, 7]], GREEDY)[0].completions[0].token_ids) == 12
    llm.core.executor.sleep(1)
    llm.core.executor.wake()
    assert torch.equal(table(token_ids), expected[token_ids])
    if is_tied:
        assert table.tiles is head.tiles


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("rounding", [rounded_int8, rounded_int4])
@pytest.mark.parametrize("outputs", [1, 45, 96])
def test_an_embedding_reads_the_rows_of_its_head_in_words_and_bytes(
    rounding: Callable[[torch.Tensor], PackedWeight], outputs: int
) -> None:
    """A head of 4 bits is that of a GGUF file: `int4` keeps heads in 8."""
    packed = rounding(torch.randn(outputs, 64).bfloat16())
    table = TiledEmbedding(IntegerLinear(QuantizedLinear(packed)), torch.float32)
    token_ids = torch.randint(0, outputs, (3, 7))
    torch.testing.assert_close(table(token_ids), packed.unpacked()[token_ids], rtol=0, atol=0)


@pytest.mark.parametrize(
    "prepare",
    [functools.partial(round_weights, quantization="int4"), CPUDevice().optimize],
    ids=["round", "optimize"],
)
def test_loading_has_no_more_than_one_weight_twice(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., None]
) -> None:
    model, remaining = Routed(), []
    originals = [weakref.ref(module) for module in model.modules() if type(module) is nn.Linear]
    for kind in (TiledLinear, QuantizedLinear):

        def counting(
            self: nn.Module, *given: object, build: Any = kind.__init__, **named: object
        ) -> None:
            remaining.append(sum(original() is not None for original in originals))
            build(self, *given, **named)

        monkeypatch.setattr(kind, "__init__", counting)
    monkeypatch.setattr(CPUDevice, "_attention_of", lambda self, model: None)
    prepare(model)
    first, last = len(originals), len(originals) - len(remaining) + 1
    assert remaining == list(range(first, last - 1, -1)), "each original goes when it is replaced"


@pytest.mark.parametrize("pack", [rounded_int8, functools.partial(weight_tiles.tiled, columns=32)])
def test_packing_takes_little_beside_its_result(pack: Callable[..., object]) -> None:
    weight, sizes = torch.randn(5000, 64).bfloat16(), []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result._base is None:
                sizes.append((result.untyped_storage().nbytes(), func))
            return result

    with Recording():
        pack(weight)
    largest = [size for size, func in sizes if "empty" not in str(func)]
    assert max(largest) <= weight.nbytes


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("packed", KINDS)
def test_more_outputs_than_are_packed_at_a_time_keep_their_order(
    packed: Callable[[nn.Linear], TiledLinear],
) -> None:
    plain = layer(32, 2 * weight_tiles.CHUNK + 45, bias=True)
    rows = torch.randn(3, 32).bfloat16()
    off = 0.2 if packed is int4 else 0.02
    torch.testing.assert_close(packed(plain)(rows), plain(rows), atol=off, rtol=off)


@pytest.mark.slow
def test_compiled_programs_call_the_kernel(model_of_groups: Path, tmp_path: Path) -> None:
    for quantization in ("none", "int8", "int4"):
        given = {"quantization": quantization, "compile": True, "compile_cache": tmp_path}
        _, tokens = linears(model_of_groups, **given)
        assert [len(sampled) for sampled in tokens] == [12] * 3


def test_rounding_without_bf16_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="rounds weights of bf16") as refusal:
        linears(tiny_model, quantization="int8", dtype="float32")
    assert refusal.value.field == "quantization"


@pytest.fixture(scope="module")
def model_of_groups(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> Path:
    """A tiny model whose layers have a multiple of 32 inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("groups"), **sizes)


def test_without_a_kernel_integers_are_expanded_in_each_call(
    model_of_groups: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    kinds, tokens = linears(model_of_groups, quantization="int4")
    assert kinds == {QuantizedLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    assert "Packed weights are expanded in each call, and slow: " in caplog.text
    assert "no-such-compiler" in caplog.text


def test_without_vectors_of_512_bits_bf16_is_multiplied_by_those_of_256(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, "-mno-avx512f"))
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    kinds, tokens = linears(tiny_model)
    assert kinds == {TiledLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    assert tiled_linear._KERNELS[torch.bfloat16].columns == 16
    for num_rows in (1, 7, 20):
        plain, rows = layer(96, 45, bias=True), torch.randn(num_rows, 96).bfloat16()
        expected = F.linear(rows.float(), plain.weight.float(), plain.bias.float())
        out = TiledLinear(plain)(rows).float()
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=8e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_without_vectors_of_512_bits_integers_are_multiplied_by_those_of_256(
    model_of_groups: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, "-mno-avx512f"))
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    kinds, tokens = linears(model_of_groups, quantization=quantization)
    assert kinds == {IntegerLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    assert set(tiled_linear._KERNELS) == {torch.int8} | (
        {torch.uint8} if quantization == "int4" else set()
    ), "the head keeps 8 bits"
    for weights in INTEGERS:
        load_linear_kernel(weights=weights)
        assert tiled_linear._KERNELS[weights].columns == 16
    for bits in (4, 8):
        for num_rows in (1, 7, 20):
            check_zero_points(num_rows, 32, 2, 45, bits)


@pytest.mark.slow
def test_vectors_of_256_bits_give_the_same_bits_and_tokens(
    model_of_groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each output is summed alike, in fp32, whatever vector it is in."""

    def computed(flags: Sequence[str]) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
        monkeypatch.setattr(native_kernel, "_FLAGS", (*own_flags, *flags))
        monkeypatch.setattr(tiled_linear, "_KERNELS", {})
        for weights in (torch.bfloat16, *INTEGERS):
            load_linear_kernel(weights=weights, widens=True)
        rows = torch.randn(3000, 96, generator=torch.Generator().manual_seed(1))
        rows = (rows**7).bfloat16()  # numbers of all sizes: of like ones sums are exact
        outs = [kind(layer(96, 45, bias=True))(rows) for kind in (*KINDS, with_minimums)]
        tokens = [linears(model_of_groups, quantization=name)[1] for name in ("none", "int4")]
        return outs, tokens

    own_flags = native_kernel._FLAGS
    # Attention multiplies pairs of bf16 only with 512 bits, and so are products of bytes.
    monkeypatch.setattr(ByteLinear, "fits", staticmethod(lambda weight: False))
    monkeypatch.setattr(CPUDevice, "_attention_of", lambda self, model: CPUAttention())
    wide, tokens = computed(())
    narrow, of_narrow = computed(("-mno-avx512f",))
    assert tiled_linear._KERNELS[torch.bfloat16].columns == 16
    assert all(map(torch.equal, wide, narrow))
    assert tokens == of_narrow


@pytest.mark.usefixtures("widens")
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # alike in all examples
)
@given(
    st.integers(1, 31),
    st.integers(1, 20).map(lambda pairs: 2 * pairs),
    st.integers(1, 4),
    st.integers(1, 100),
    st.sampled_from([4, 8]),
)
def test_zero_points_and_groups_are_those_of_the_weight(
    num_rows: int, group: int, groups: int, outputs: int, bits: int
) -> None:
    # A word of 4 bits has weights of eight inputs.
    check_zero_points(num_rows, group if bits == 8 else 4 * group, groups, outputs, bits)


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize(("bits", "group", "fits"), [(4, 8, True), (4, 4, False), (8, 2, True)])
def test_a_weight_fits_whose_groups_are_whole_units_of_inputs(
    bits: int, group: int, fits: bool
) -> None:
    columns = 24 if bits == 8 else 12
    steps = torch.zeros(3, columns, dtype=torch.int8 if bits == 8 else torch.uint8)
    assert IntegerLinear.fits(PackedWeight(steps, torch.ones(3, 24 // group))) is fits


def check_zero_points(num_rows: int, group: int, groups: int, outputs: int, bits: int) -> None:
    torch.manual_seed(num_rows)
    inputs = group * groups
    rows = torch.randn(num_rows, inputs).bfloat16()
    columns = inputs if bits == 8 else inputs // 2
    steps = torch.randint(0, 256, (outputs, columns)).to(torch.uint8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = PackedWeight(
            steps if bits == 4 else steps.view(torch.int8),
            torch.rand(outputs, groups).to(dtype),
            torch.randint(0, 16, (outputs, groups), dtype=torch.int16),
            torch.randperm(inputs),
        )
        expected = rows.float() @ weight.unpacked().T
        out = IntegerLinear(QuantizedLinear(weight))(rows)
        largest = (rows.float().abs() @ weight.unpacked().abs().T).max().item()
        torch.testing.assert_close(out.float(), expected, atol=1e-6 * largest, rtol=8e-3)


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("kind", [int4, with_minimums])
def test_a_row_of_int4_does_not_depend_on_the_others(
    kind: Callable[[nn.Linear], IntegerLinear],
) -> None:
    tiled = kind(layer(96, 80, bias=True))
    rows = torch.randn(40, 96).bfloat16()
    together = tiled(rows)
    for count in (1, 2, 13, 25):
        assert torch.equal(tiled(rows[:count]), together[:count])


def test_int4_rounds_with_less_error_than_the_largest_weight_alone_asks_for() -> None:
    weight = torch.randn(64, 256).bfloat16()
    groups = weight.float().unflatten(1, (-1, 32))
    scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    of_largest = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum()
    error = (rounded_int4(weight).unpacked() - weight.float()).square().sum()
    assert error < 0.9 * of_largest
    assert not rounded_int4(torch.zeros(3, 64).bfloat16()).unpacked().any()


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1.0, 1e30])
def test_int4_is_as_exact_for_weights_of_every_size(size: float) -> None:
    weight = (torch.randn(8, 64).double() * size).bfloat16()
    error = (rounded_int4(weight).unpacked().double() - weight.double()).square().sum()
    assert error < 0.01 * weight.double().square().sum()


def products_of(seed: int, groups: int, rows: int = 200) -> torch.Tensor:
    """Products of inputs that go together, some of which are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(groups, 32, 32, generator=generator) * 10 ** torch.linspace(-0.4, 0.4, 32)
    inputs = torch.randn(groups, rows, 32, generator=generator) @ mixed
    return inputs.transpose(1, 2) @ inputs / rows


def output_errors(
    packed: PackedWeight, weight: torch.Tensor, products: torch.Tensor
) -> torch.Tensor:
    """The mean squared error of each output from each group of inputs, ``[outputs, groups]``."""
    errors = (packed.unpacked() - weight.float()).unflatten(1, (-1, 32))
    return torch.einsum("ogi,gij,ogj->og", errors, products, errors)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_the_scale_of_int4_has_the_least_error_for_its_steps(
    seed: int, outputs: int, groups: int, is_weighted: bool
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(outputs, 32 * groups).bfloat16()
    products = products_of(seed, groups)
    products /= products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    packed = rounded_int4(weight, products=products if is_weighted else None)
    # Some damping is part of what is minimised.
    alike = torch.eye(32).expand(groups, 32, 32)
    products = products + 1e-3 * alike if is_weighted else alike

    def error(factor: float) -> torch.Tensor:
        other = PackedWeight(packed.steps, packed.scales.float() * factor)
        return output_errors(other, weight, products)

    for factor in (0.98, 1.02):
        assert (error(factor) > error(1.0)).all()


def test_int4_makes_up_for_errors_where_inputs_go_together() -> None:
    weight = torch.randn(64, 128).bfloat16()
    products = products_of(1, 4)
    squares = torch.diag_embed(products.diagonal(dim1=1, dim2=2))
    errors = [
        output_errors(rounded_int4(weight, products=each), weight, products).sum()
        for each in (None, squares, products)
    ]
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] < 0.75 * errors[1]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_inputs_that_were_never_seen_or_are_no_numbers_weigh_the_same(value: float) -> None:
    # Fixed: a scale that is a near tie depends on how the error was summed.
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = rounded_int4(weight)
    unseen = rounded_int4(weight, products=torch.full((2, 32, 32), value))
    assert torch.equal(plain.unpacked(), unseen.unpacked())


@pytest.mark.parametrize("has_tokenizer", [True, False], ids=["text", "random tokens"])
def test_int4_weighs_errors_by_the_inputs_of_each_layer(
    model_of_groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tokenizer: bool
) -> None:
    """Those that a plain forward pass of transformers has; each start measures the same."""
    source = model_of_groups
    if not has_tokenizer:
        source = Path(shutil.copytree(source, tmp_path / "without"))
        for file in source.glob("*token*"):
            file.unlink()
    given: list[torch.Tensor] = []

    def rounded(weight: torch.Tensor, products: torch.Tensor | None) -> PackedWeight:
        assert products is not None
        given.append(products)
        return rounded_int4(weight, products=products)

    monkeypatch.setattr(rounded_weights, "rounded_int4", rounded)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj", "down_proj")):
            module.register_forward_pre_hook(lambda _, own, name=name: seen.update({name: own[0]}))
    if has_tokenizer:
        text = Path(layer_inputs.__file__).with_name("calibration.txt").read_text("utf-8")
        tokens = AutoTokenizer.from_pretrained(source).encode(text)[:1792]
        assert len(tokens) > 1024
        sequences = torch.tensor(tokens[: len(tokens) // 256 * 256]).view(-1, 256)
    else:
        generator = torch.Generator().manual_seed(0)
        sequences = torch.randint(model.config.vocab_size, (2, 256), generator=generator)
    with torch.no_grad():
        model(sequences, use_cache=False)
    fields = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "warmup": "none"}
    EngineCore(EngineConfig(model=str(source), quantization="int4", **fields)).close()
    expected = []
    for rows in seen.values():
        groups = rows.flatten(0, 1).float().unflatten(1, (-1, 32))
        products = torch.einsum("tgi,tgj->gij", groups, groups) / len(groups)
        squares = torch.diag_embed(products.diagonal(dim1=1, dim2=2))
        expected.append(products if has_tokenizer else squares)
    assert given
    for products in given:
        size = products.abs().max()
        assert any(
            own.shape == products.shape and (own - products).abs().max() < 0.1 * size
            for own in expected
        )


def test_inputs_that_always_go_together_can_be_made_up_for() -> None:
    """In fp32 a quarter of these products had an inverse that was not positive definite."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 1, 32, generator=generator)
    weight = torch.randn(3, 200 * 32, generator=generator).bfloat16()
    packed = rounded_int4(weight, products=inputs.transpose(1, 2) @ inputs)
    assert packed.unpacked().isfinite().all()


def test_of_a_layer_that_few_tokens_reach_the_squares_are_measured(model_of_groups: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_of_groups, dtype=torch.bfloat16)
    for tokens, has_products in ((list(range(256)) * 3, True), (list(range(200)), False)):
        products = products_of_inputs(model, tokens)
        assert products
        for each in products.values():
            others = each - torch.diag_embed(each.diagonal(dim1=1, dim2=2))
            assert bool(others.any()) == has_products


def test_no_code_of_a_checkpoint_is_run_for_its_tokenizer(
    model_of_groups: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(model_of_groups, tmp_path / "model"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w').close()")
    text_tokens(str(source))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_inputs_of_every_family_are_measured(tmp_path: Path) -> None:
    measured = 0
    for family in FAMILIES:
        try:
            spec = inspect_model(str(save_family(family, tmp_path / family)))
        except ModelError:  # it is not served
            continue
        if any(layer.states for layer in spec.layers):
            continue
        model = load_model(spec, torch.device("cpu"), torch.bfloat16, 64)
        products = products_of_inputs(model, [1, 2, 3])
        for name, module in model.named_modules():
            if type(module) is not nn.Linear or module is model.get_output_embeddings():
                continue
            if module.in_features % 32 == 0:
                shape = (module.in_features // 32, 32, 32)
                assert products[id(module)].shape == shape, (family, name)
                assert products[id(module)].isfinite().all(), (family, name)
        measured += 1
    assert measured > 30


def test_the_inputs_of_a_model_of_few_positions_are_measured() -> None:
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64}
    config = OPTConfig(vocab_size=100, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    for tokens in ([], list(range(100)) * 3):
        products = products_of_inputs(OPTForCausalLM(config).bfloat16(), tokens)
        assert len(products) == 2 * 6


@pytest.mark.parametrize("num_layers", [1, 9])
def test_int4_keeps_8_bits_where_4_cost_the_most(
    make_tiny_model: Callable[..., Path], tmp_path: Path, num_layers: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers}
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path, num_attention_heads=4, **sizes), dtype=torch.bfloat16
    )
    round_weights(model, "int4")
    of_4 = {
        name.removeprefix("model.layers.")
        for name, each in model.named_modules()
        if isinstance(each, QuantizedLinear) and each.steps.dtype is torch.uint8
    }
    outer = {0} if num_layers == 1 else {0, 1, 7, 8}
    assert of_4 == {
        f"{number}.mlp.{name}_proj"
        for number in range(num_layers)
        for name in ("gate", "up", *(() if number in outer else ("down",)))
    }


def test_int4_takes_less_than_a_third_of_bf16() -> None:
    plain = layer(512, 96, bias=False)
    held = sum(tensor.nbytes for tensor in int4(plain).buffers())
    assert held / plain.weight.nbytes <= 0.29


def test_int8_on_another_device_is_refused(tiny_model: Path, lazy_gaudi: object) -> None:
    with pytest.raises(ConfigError, match="hpu does not compute weights of int8"):
        linears(tiny_model, device="hpu", quantization="int8")
