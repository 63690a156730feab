"""Linear layers of integers whose inputs are rounded to int8: exact sums, and who computes so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from trencadis.engine import LLM, SamplingParams
from trencadis.engine.devices.cpu import byte_linear, native_kernel, tiled_linear, weight_tiles
from trencadis.engine.devices.cpu import device as cpu_device
from trencadis.engine.devices.cpu.byte_linear import part_of, rounded_rows
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.tiled_linear import (
    ByteLinear,
    IntegerLinear,
    TiledEmbedding,
    TiledLinear,
    load_byte_kernel,
    load_linear_kernel,
)
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear

INTEGERS = (torch.int8, torch.uint8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPES = st.tuples(
    st.integers(1, 40),  # rows
    st.sampled_from([32, 64, 96, 128]),  # inputs of a group
    st.integers(1, 3),  # groups
    st.integers(1, 100),  # outputs
    st.sampled_from([4, 8]),
    st.integers(1, 3),  # threads
)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        for weights in INTEGERS:
            load_byte_kernel(weights)
            load_linear_kernel(weights=weights)
    except NoKernel as error:
        if "off by" in str(error):
            raise
        pytest.skip(f"this processor has no kernel: {error}")


@pytest.fixture
def set_threads() -> Generator[Callable[[int], None], None, None]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_weight(
    generator: np.random.Generator, outputs: int, groups: int, group: int, bits: int, **more: Any
) -> PackedWeight:
    """All integers that there are, and scales that are powers of two."""
    columns = groups * group // (2 if bits == 4 else 1)
    steps = torch.from_numpy(generator.integers(0, 256, (outputs, columns), np.uint8))
    scales = torch.from_numpy(2.0 ** generator.integers(-2, 3, (outputs, groups)))
    return PackedWeight(
        steps if bits == 4 else steps.view(torch.int8),
        scales.to(more.pop("dtype", torch.float32)),
        **more,
    )


def whole_rows(generator: np.random.Generator, rows: int, inputs: int) -> torch.Tensor:
    """Integers whose largest one in 32 is 127, which are rounded to what they are."""
    whole = generator.integers(-127, 128, (rows, inputs))
    signs = generator.choice([-127, 127], (rows, inputs // 32))
    places = 32 * np.arange(inputs // 32) + generator.integers(0, 32, (rows, inputs // 32))
    np.put_along_axis(whole, places, signs, axis=1)
    return torch.from_numpy(whole).bfloat16()


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # alike in all examples
)
@given(
    SHAPES,
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(["", "zero points", "minimums"]),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_sums_of_integers_are_exact(
    set_threads: Callable[[int], None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shifts: str,
    bias: bool,
    seed: int,
) -> None:
    num_rows, group, groups, outputs, bits, threads = shape
    generator = np.random.default_rng(seed)
    more: dict[str, Any] = {"dtype": dtype}
    if shifts == "zero points":
        zeros = generator.integers(0, 16, (outputs, groups), np.int16)
        more["zero_points"] = torch.from_numpy(zeros)
    elif shifts:
        more["minimums"] = torch.from_numpy(generator.integers(-9, 10, (outputs, groups))).float()
    weight = random_weight(generator, outputs, groups, group, bits, **more)
    rows = whole_rows(generator, num_rows, groups * group)
    added = torch.from_numpy(generator.integers(-9, 10, outputs)).bfloat16() if bias else None
    set_threads(threads)
    given_bias = None if added is None else nn.Parameter(added, requires_grad=False)
    out = ByteLinear(QuantizedLinear(weight, given_bias))(rows)
    exact = rows.double().numpy() @ weight.unpacked(torch.float64).numpy().T
    exact += 0 if added is None else added.double().numpy()
    assert np.abs(exact).max() < 1 << 22, "fp32 has all quarters of such numbers"
    assert torch.equal(out, torch.from_numpy(exact).float().bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 5, 12, 30])
@pytest.mark.parametrize("group", [32, 64, 96])
def test_rows_are_rounded_in_parts_to_127_steps_of_the_largest_value(
    num_rows: int, group: int, bits: int
) -> None:
    generator = np.random.default_rng(num_rows)
    inputs = 3 * group
    numbers = generator.standard_normal((num_rows, inputs)) ** 5
    rows = torch.from_numpy(numbers.astype(np.float32)).bfloat16()
    part = 64 if group % 64 == 0 else 32
    parts = rows.float().numpy().reshape(num_rows, -1, part)
    steps = np.abs(parts).max(2, keepdims=True) / np.float32(127)
    whole = np.rint(parts * (np.float32(1) / steps))
    assert np.abs(whole).max() == 127
    # Each output is an input.
    one_of_each = torch.eye(inputs, dtype=torch.int8)
    if bits == 4:
        one_of_each = ((one_of_each[:, ::2] + 8) | (one_of_each[:, 1::2] + 8) << 4).view(
            torch.uint8
        )
    weight = PackedWeight(one_of_each, torch.ones(inputs, 3))
    out = ByteLinear(QuantizedLinear(weight))(rows)
    expected = torch.from_numpy((whole * steps).reshape(num_rows, inputs)).bfloat16()
    assert torch.equal(out, expected)
    torch.testing.assert_close(rounded_rows(rows, 3).bfloat16(), expected, atol=0, rtol=0.02)


def random_layer(
    inputs: int, outputs: int, bits: int = 8, groups: int = 1, seed: int = 0
) -> ByteLinear:
    generator = np.random.default_rng(seed)
    weight = random_weight(generator, outputs, groups, inputs // groups, bits)
    return ByteLinear(QuantizedLinear(weight, nn.Parameter(torch.randn(outputs).bfloat16())))


KINDS = pytest.mark.parametrize(("bits", "groups"), [(8, 1), (4, 3), (8, 3), (4, 1)])


@KINDS
def test_a_row_does_not_depend_on_the_others(bits: int, groups: int) -> None:
    layer, rows = random_layer(192, 80, bits, groups), torch.randn(40, 192).bfloat16()
    together = layer(rows)
    for count in (1, 2, 6, 7, 12, 13, 25):
        assert torch.equal(layer(rows[:count]), together[:count])


@KINDS
@pytest.mark.parametrize("num_rows", [1, 3, 29])
def test_what_is_not_finite_stays_in_its_own_row(bits: int, groups: int, num_rows: int) -> None:
    layer = random_layer(192, 40, bits, groups)
    rows = torch.randn(num_rows, 192).bfloat16()
    clean = layer(rows)
    for value in (float("nan"), float("inf"), -float("inf")):
        changed = rows.clone()
        changed[0, 70] = value
        out = layer(changed)
        assert out[0].isnan().all()
        assert torch.equal(out[1:], clean[1:])


@KINDS
def test_rows_of_nothing_give_the_bias(bits: int, groups: int) -> None:
    layer = random_layer(192, 40, bits, groups)
    for value in (0.0, 1e-39, 1e-33):
        for num_rows in (1, 30):
            out = layer(torch.full((num_rows, 192), value).bfloat16())
            assert torch.equal(out, layer.bias.expand(num_rows, 40))
    assert layer(torch.zeros(0, 192).bfloat16()).shape == (0, 40)


@KINDS
@pytest.mark.parametrize("num_rows", [1, 3, 29])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_layers_of_one_input_give_together_what_each_gives_alone(
    set_threads: Callable[[int], None], bits: int, groups: int, num_rows: int, threads: int
) -> None:
    layers = [random_layer(192, outputs, bits, groups, outputs) for outputs in (96, 33, 5)]
    rows = torch.randn(1, num_rows, 192).bfloat16()
    set_threads(threads)
    together = torch.ops.trencadis.tiled_linears(
        rows,
        [own.tiles for own in layers],
        [own.scales for own in layers],
        [own.shifts for own in layers],
        [own.bias for own in layers],
        [own.out_features for own in layers],
    )
    for out, own in zip(together, layers, strict=True):
        assert torch.equal(out, own(rows))


def test_inputs_in_another_order_and_rows_that_are_not_adjacent_are_read_in_order() -> None:
    generator = np.random.default_rng(0)
    order = torch.randperm(96)
    weight = random_weight(generator, 50, 3, 32, 4, order=order)
    rows = whole_rows(generator, 9, 96)
    layer, given_rows = ByteLinear(QuantizedLinear(weight)), rows[:, order.argsort()]
    expected = given_rows.double() @ weight.unpacked(torch.float64).T
    assert torch.equal(layer(given_rows), expected.float().bfloat16())
    assert torch.equal(layer(given_rows.T.contiguous().T), layer(given_rows))


@pytest.mark.parametrize("bits", [4, 8])
def test_more_outputs_than_are_packed_at_a_time_keep_their_order(bits: int) -> None:
    generator = np.random.default_rng(0)
    outputs = 2 * weight_tiles.CHUNK + 45
    weight = random_weight(generator, outputs, 1, 32, bits)
    rows = whole_rows(generator, 3, 32)
    expected = rows.double() @ weight.unpacked(torch.float64).T
    assert torch.equal(ByteLinear(QuantizedLinear(weight))(rows), expected.float().bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_an_embedding_reads_the_rows_of_a_head(bits: int, groups: int) -> None:
    weight = random_weight(np.random.default_rng(0), 77, groups, 96 // groups, bits)
    table = TiledEmbedding(ByteLinear(QuantizedLinear(weight)), torch.bfloat16)
    token_ids = torch.randint(0, 77, (2, 30))
    assert torch.equal(table(token_ids), weight.unpacked(torch.bfloat16)[token_ids])
    assert torch.equal(table(token_ids[0, 0]), weight.unpacked(torch.bfloat16)[token_ids[0, 0]])


@pytest.mark.parametrize(
    ("inputs", "groups", "part"),
    [
        (576, 1, 64),
        (96, 1, 32),
        (192, 6, 32),
        (512, 4, 64),
        (48, 1, 0),
        (96, 6, 0),
        (1 << 18, 1, 0),
    ],
)
def test_a_part_is_of_one_group(inputs: int, groups: int, part: int) -> None:
    assert part_of(inputs, groups) == part


def test_the_largest_sum_of_a_layer_is_an_integer_of_32_bits() -> None:
    inputs = byte_linear._MOST_INPUTS
    weight = PackedWeight(torch.full((2, inputs), -128, dtype=torch.int8), torch.ones(2, 1))
    rows = torch.full((1, inputs), 1.0).bfloat16()
    out = ByteLinear(QuantizedLinear(weight))(rows).float()
    torch.testing.assert_close(out, torch.full((1, 2), -128.0 * inputs), rtol=0.01, atol=0)


@pytest.mark.parametrize("num_rows", [1, 14, 29])
@pytest.mark.parametrize("weights", INTEGERS)
def test_a_kernel_that_is_wrong_for_some_numbers_of_rows_is_not_used(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, weights: torch.dtype
) -> None:
    right = tiled_linear._product

    def wrong(compute: Any, rows: torch.Tensor, *given: Any) -> torch.Tensor:
        return right(compute, rows, *given) * (1.1 if len(rows) == num_rows else 1.0)

    monkeypatch.setattr(tiled_linear, "_product", wrong)
    with pytest.raises(NoKernel, match=f"its result for {num_rows} rows is off by"):
        load_byte_kernel(weights)


def layers_of(model: Path, **changes: Any) -> tuple[dict[str, set[type]], list[list[int]]]:
    """The types of an engine's linear layers and of its head, and what it generates."""
    given = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "warmup": "none"}
    llm = LLM(str(model), **{**given, **changes})
    held: Any = llm.core.executor.worker._model  # type: ignore[attr-defined]
    modules = [each for each in held.modules() if isinstance(each, (TiledLinear, nn.Linear))]
    head = held.get_output_embeddings()
    kinds = {
        "decoder": {type(module) for module in modules if module is not head},
        "head": {type(head)},
    }
    results = llm.generate([list(range(1, 40)), [7], list(range(100, 117))], GREEDY)
    return kinds, [result.completions[0].token_ids for result in results]


@pytest.fixture(scope="module")
def model_of_groups(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> Path:
    """A tiny model whose layers have a multiple of 32 inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("groups"), **sizes)


@pytest.mark.parametrize(("quantization", "kind"), [("int8", ByteLinear), ("int4", IntegerLinear)])
def test_an_engine_of_int8_rounds_the_inputs_of_its_decoder_layers(
    model_of_groups: Path,
    quantization: str,
    kind: type[IntegerLinear],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And compiles the kernel for these alone."""
    asked = []

    def noted(weights: torch.dtype, *given: Any, **named: Any) -> None:
        asked.append(weights)
        load_byte_kernel(weights, *given, **named)

    monkeypatch.setattr(cpu_device, "load_byte_kernel", noted)
    kinds, tokens = layers_of(model_of_groups, quantization=quantization)
    assert asked == [torch.int8] * (quantization == "int8")
    assert kinds == {"decoder": {kind}, "head": {IntegerLinear}}
    assert [len(sampled) for sampled in tokens] == [12] * 3


@pytest.mark.slow
def test_programs_call_the_kernel_and_decode_steps_are_replayed(
    model_of_groups: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = {"quantization": "int8", "compile": True, "compile_cache": tmp_path}
    kinds, tokens = layers_of(model_of_groups, **given)
    assert kinds == {"decoder": {ByteLinear}, "head": {IntegerLinear}}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    assert "Decode steps are not recorded" not in caplog.text


def test_a_model_computes_what_the_definition_of_rounded_inputs_says(
    model_of_groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = list(range(3, 60))

    def scores() -> torch.Tensor:
        given: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64}
        llm = LLM(str(model_of_groups), **given, warmup="none", quantization="int8")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        scored = llm.generate([token_ids], params)[0].prompt_logprobs or ()
        return torch.tensor([each.chosen.logprob for each in scored if each is not None])

    def defined(self: ByteLinear, rows: torch.Tensor) -> torch.Tensor:
        assert self.scales is not None
        whole = weight_tiles.integers_of(self.tiles, torch.arange(self.out_features)).double()
        scales = self.scales.flatten()[: self.out_features]
        return (rounded_rows(rows, 1).double() @ whole.T * scales).bfloat16()

    found = scores()
    assert len(found) == len(token_ids) - 1
    with monkeypatch.context() as changed:
        changed.setattr(ByteLinear, "forward", defined)
        expected = scores()
    monkeypatch.setattr(ByteLinear, "fits", staticmethod(lambda weight: False))
    unrounded = scores()
    assert (found - expected).abs().mean() < 0.2 * (found - unrounded).abs().mean()


@pytest.mark.parametrize("flag", ["-mno-avx512vnni", "-mno-avx512f"])
def test_without_products_of_bytes_inputs_stay_bf16(
    model_of_groups: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flag: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, flag))
    monkeypatch.setattr(tiled_linear, "_KERNELS", {})
    kinds, tokens = layers_of(model_of_groups, quantization="int8")
    assert kinds == {"decoder": {IntegerLinear}, "head": {IntegerLinear}}
    assert [len(sampled) for sampled in tokens] == [12] * 3
    assert "Inputs of packed weights stay bf16: " in caplog.text
    assert "no products of bytes" in caplog.text


def test_inputs_that_are_no_parts_stay_bf16(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 4}
    kinds, tokens = layers_of(make_tiny_model(tmp_path, **sizes), quantization="int8")
    assert kinds["decoder"] == {ByteLinear, IntegerLinear}
    assert [len(sampled) for sampled in tokens] == [12] * 3
