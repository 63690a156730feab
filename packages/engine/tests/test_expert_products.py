"""Gated experts by the CPU's own kernel: right, alike in every batch, and chosen alike."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_families import save_family
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from trencadis.engine import LLM, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import device as cpu_device
from trencadis.engine.devices.cpu import expert_products, native_kernel, router_products
from trencadis.engine.devices.cpu import tiled_linear as linears
from trencadis.engine.devices.cpu.expert_products import TiledExperts, load_expert_kernel
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.recorded_layers import RecordedLayers
from trencadis.engine.devices.cpu.router_products import load_router_functions, use_native_routers
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_experts import (
    MATRICES,
    is_gated_silu,
    packed_weight,
    round_experts,
)
from trencadis.engine.models.rounded_weights import round_weights, rounded_int8

from .conftest import SESSION_DEVICE, save_tiny_model

pytestmark = pytest.mark.skipif(SESSION_DEVICE is not None, reason="of the CPU device")

HALF_ULP = 2.0**-8
"""What rounding a number to bf16 changes it by at most, relative to it."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        for weights in (torch.bfloat16, torch.int8):
            load_expert_kernel(weights=weights)
        load_router_functions()
    except NoKernel as error:
        if "off" in str(error) or "topk" in str(error):
            raise
        pytest.skip(f"this processor has no kernel: {error}")


@pytest.fixture(params=[True, False], ids=["fp32", "pairs"])
def widens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each way to multiply that this processor has."""
    monkeypatch.setattr(linears, "_KERNELS", {})
    monkeypatch.setattr(expert_products, "_KERNELS", {})
    way: bool = request.param
    try:
        for weights in (torch.bfloat16, torch.int8):
            linears.load_linear_kernel(weights=weights, widens=way)
            load_expert_kernel(weights=weights)
            assert expert_products._KERNELS[weights].widens is way
    except NoKernel as error:
        if "off" in str(error):
            raise
        pytest.skip(str(error))
    return way


def plain_experts(number: int, hidden: int, inner: int, seed: int = 0) -> MixtralExperts:
    config = MixtralConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=number)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).bfloat16().requires_grad_(requires_grad=False)
    random = torch.Generator().manual_seed(seed)
    for weight in experts.parameters():
        weight.copy_(torch.randn(weight.shape, generator=random))
    return experts


def rounded(experts: MixtralExperts) -> MixtralExperts:
    """The same with weights of int8."""
    packed = copy.deepcopy(experts)
    round_experts([packed], rounded_int8)
    return packed


def unpacked(experts: MixtralExperts) -> Any:
    """What rounded experts mean, in fp32."""
    exact = attrs.make_class("Exact", [*MATRICES, "num_experts"])
    number = experts.num_experts
    both = (
        [packed_weight(experts, matrix, each).unpacked() for each in range(number)]
        for matrix in MATRICES
    )
    return exact(*both, number)


def batch(
    tokens: int, number: int, of_token: int, hidden: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts of each, and their weights."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, hidden, generator=random).bfloat16()
    chosen = torch.rand(tokens, number, generator=random).topk(of_token).indices
    return rows, chosen, torch.rand(tokens, of_token, generator=random) + 0.1


def reference(
    experts: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The exact sums ``[T, D]``, and how far off they may be with four roundings to bf16.

    A gate is multiplied by its sigmoid, whose logarithm changes by no more than the gate does.
    """
    out = np.zeros(rows.shape)
    bound = np.zeros(rows.shape)
    for token, (of_token, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, share in zip(of_token, shares.tolist(), strict=True):
            if not 0 <= expert < experts.num_experts:
                continue
            first = experts.gate_up_proj[expert].double().numpy()
            second = experts.down_proj[expert].double().numpy()
            gate, up = np.split(first @ rows[token].double().numpy(), 2)
            gated = gate / (1 + np.exp(-gate)) * up
            result = second @ gated
            out[token] += share * result
            off = np.abs(second) @ (np.abs(gated) * (3 + np.abs(gate)))
            bound[token] += share * (off + np.abs(result))
    return out, 1.02 * HALF_ULP * (bound + np.abs(out)) + 1e-6


def assert_right(
    found: torch.Tensor,
    experts: Any,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    assert (found.shape, found.dtype) == (rows.shape, torch.bfloat16)
    expected, bound = reference(experts, rows, chosen, weights)
    assert (np.abs(found.double().numpy() - expected) <= bound).all()


def with_threads(threads: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "int8"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # alike in all examples
)
@given(
    st.integers(1, 70),
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 4)))),
    st.integers(1, 40).map(lambda pairs: 2 * pairs),
    st.integers(1, 40).map(lambda pairs: 2 * pairs),
    st.integers(1, 3),
)
def test_the_sum_of_experts_is_that_of_numpy(
    packed: bool, tokens: int, numbers: tuple[int, int], hidden: int, inner: int, threads: int
) -> None:
    number, of_token = numbers
    plain = plain_experts(number, hidden, inner, seed=tokens)
    experts = rounded(plain) if packed else plain
    given = batch(tokens, number, of_token, hidden)
    tiled = TiledExperts(experts)
    found = with_threads(threads, lambda: tiled(*given))
    assert_right(found, unpacked(experts) if packed else experts, *given)


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_does_not_depend_on_the_others(threads: int) -> None:
    """Nor on the threads. One expert gets all tokens, two get none."""
    experts = plain_experts(6, 96, 70)
    rows, chosen, weights = batch(90, 4, 3, 96)
    chosen[:, 0] = 0
    chosen[:, 1:] = 1 + chosen[:, 1:] % 3
    chosen[:, 2] = 1 + (chosen[:, 1] + 1) % 3
    tiled = TiledExperts(experts)
    together = with_threads(threads, lambda: tiled(rows, chosen, weights))
    assert_right(together, experts, rows, chosen, weights)
    for part in (slice(0, 1), slice(3, 5), slice(7, 22), slice(30, 73)):
        alone = with_threads(1, lambda part=part: tiled(rows[part], chosen[part], weights[part]))
        assert torch.equal(alone, together[part])


@pytest.mark.usefixtures("widens")
def test_an_expert_may_be_chosen_twice_and_a_number_of_none_adds_nothing() -> None:
    """Where experts are divided between processes, the number of experts means another's."""
    experts = plain_experts(4, 64, 48)
    rows, chosen, weights = batch(3, 4, 3, 64)
    chosen[0], chosen[1], chosen[2] = (
        torch.tensor(each) for each in ([2, 2, 1], [4, 3, -1], [4, 4, 9])
    )
    tiled = TiledExperts(experts)
    assert_right(tiled(rows, chosen, weights), experts, rows, chosen, weights)
    assert not tiled(rows, chosen, weights)[2].any()
    one = tiled(rows[:1], chosen[:1], weights[:1])
    assert_right(one, experts, rows[:1], chosen[:1], weights[:1])
    assert tiled(rows[:0], chosen[:0], weights[:0]).shape == (0, 64)


@pytest.mark.usefixtures("widens")
def test_what_is_not_finite_stays_with_its_token_and_its_expert() -> None:
    experts = plain_experts(4, 64, 48)
    experts.down_proj[1] = torch.inf
    experts.gate_up_proj[3] = torch.nan
    rows, chosen, weights = batch(4, 4, 2, 64)
    chosen[:] = torch.tensor([0, 2])
    chosen[1, 1] = 3
    rows[2] = torch.nan
    found = TiledExperts(experts)(rows, chosen, weights)
    assert found[1].isnan().all()
    assert found[2].isnan().all()
    assert found[::3].isfinite().all()


@pytest.mark.usefixtures("widens")
def test_rows_and_choices_may_lie_apart_in_memory_and_weights_be_bf16() -> None:
    experts = plain_experts(4, 64, 48)
    rows, chosen, weights = batch(9, 4, 2, 64)
    weights = weights.bfloat16()
    expected = TiledExperts(experts)(rows, chosen, weights)
    assert_right(expected, experts, rows, chosen, weights)
    apart = TiledExperts(experts)(
        rows.t().contiguous().t(), chosen.t().contiguous().t(), weights.t().contiguous().t()
    )
    assert torch.equal(apart, expected)


def test_rows_of_another_type_or_width_are_refused() -> None:
    """The kernel gets addresses: it would read beyond them."""
    tiled = TiledExperts(plain_experts(4, 64, 48))
    for rows in (torch.ones(3, 32).bfloat16(), torch.ones(3, 64)):
        with pytest.raises(ValueError, match=r"for experts of 64 numbers of torch\.bfloat16"):
            tiled(rows, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8])
def test_without_vectors_of_512_bits_experts_are_computed_by_those_of_256(
    weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, "-mno-avx512f"))
    for module in (linears, expert_products):
        monkeypatch.setattr(module, "_KERNELS", {})
    load_expert_kernel(weights=weights)
    assert expert_products._KERNELS[weights].columns == 16
    plain = plain_experts(5, 96, 38)
    held = rounded(plain) if weights is torch.int8 else plain
    for tokens in (1, 7, 40):
        given = batch(tokens, 5, 2, 96)
        exact: Any = held if weights is torch.bfloat16 else unpacked(held)
        assert_right(TiledExperts(held)(*given), exact, *given)


def test_int8_experts_take_half_of_the_memory() -> None:
    plain = plain_experts(4, 64, 64)
    held = [TiledExperts(each) for each in (plain, rounded(plain))]
    sizes = [each.gate_up.nbytes + each.down.nbytes for each in held]
    assert sizes[0] == sum(each.nbytes for each in plain.parameters())
    assert sizes[1] * 2 == sizes[0]


@pytest.mark.parametrize("tokens", expert_products._TRIED)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8])
def test_a_kernel_that_is_wrong_for_some_numbers_of_tokens_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tokens: int, weights: torch.dtype
) -> None:
    right: Callable[..., torch.Tensor] = expert_products._sums

    def wrong(compute: object, rows: torch.Tensor, *given: Any) -> torch.Tensor:
        return right(compute, rows, *given) * (1.1 if len(rows) == tokens else 1.0)

    monkeypatch.setattr(expert_products, "_sums", wrong)
    with pytest.raises(NoKernel, match=f"its result for {tokens} tokens is off by"):
        load_expert_kernel(weights=weights)


def loaded(family: str, directory: Path, dtype: torch.dtype, **sizes: Any) -> Any:
    save_family(family, directory, **sizes)
    return load_model(inspect_model(str(directory)), torch.device("cpu"), dtype, 64)


GATED = [
    *("DeepSeek V2", "DeepSeek V3", "GLM-4.5 (MoE)", "Granite 3 (MoE)", "LFM 2 (MoE)", "Mixtral"),
    *("OLMoE", "Qwen 3 (MoE)", "Qwen 3 Next"),
]


@pytest.mark.parametrize("family", GATED)
@torch.inference_mode()
def test_families_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path, torch.bfloat16)
    plain: list[Any] = [each for each in model.modules() if is_gated_silu(each)]
    given = batch(12, 4, 2, 64)
    for experts in plain:
        experts.config._experts_implementation = "eager"
    expected = [experts.float()(given[0].float(), *given[1:]) for experts in plain]
    for experts in plain:
        experts.bfloat16()
    CPUDevice().optimize(model)
    tiled = [module for module in model.modules() if isinstance(module, TiledExperts)]
    assert len(tiled) == len(plain) > 0
    for ours, theirs in zip(tiled, expected, strict=True):
        error = (ours(*given).float() - theirs).abs().max() / theirs.abs().max()
        assert 0 < error < 0.02


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("gpt-oss", torch.bfloat16, {}),
        ("Mixtral", torch.float32, {}),
        ("Mixtral", torch.bfloat16, {"hidden_act": "gelu"}),
        ("Mixtral", torch.bfloat16, {"intermediate_size": 33}),
    ],
    ids=["another gate", "fp32", "gelu", "odd width"],
)
def test_experts_that_the_kernel_does_not_compute_stay_as_they_are(
    tmp_path: Path, family: str, dtype: torch.dtype, sizes: dict[str, Any]
) -> None:
    model = loaded(family, tmp_path, dtype, **sizes)
    CPUDevice().optimize(model)
    assert not any(isinstance(module, TiledExperts) for module in model.modules())
    assert any(hasattr(module, "_is_expert_parallel") for module in model.modules())


@pytest.mark.parametrize("fault", ["no compiler", "wrong experts", "wrong product", "wrong topk"])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "int8"])
def test_without_a_right_kernel_experts_stay_as_they_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    packed: bool,
) -> None:
    caplog.set_level(logging.INFO)
    model = loaded("Mixtral", tmp_path, torch.bfloat16)
    if packed:
        round_weights(model, "int8", multiplies_experts=True)
    if fault == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        module: Any = expert_products if fault == "wrong experts" else router_products
        names = {"wrong experts": "_sums", "wrong product": "_multiplied", "wrong topk": "_chosen"}
        right = getattr(module, names[fault])

        def wrong(*given: Any) -> Any:
            found = right(*given)
            return found * 1.1 if isinstance(found, torch.Tensor) else (found[0], found[1] + 1)

        monkeypatch.setattr(module, names[fault], wrong)
    CPUDevice().optimize(model)
    assert not any(isinstance(module, TiledExperts) for module in model.modules())
    reasons = {"no compiler": "no-such-compiler", "wrong topk": "not those of topk"}
    (said,) = (each for each in caplog.messages if each.startswith("Experts have no kernel"))
    assert reasons.get(fault, "off by") in said
    # Those of int8 are expanded for good.
    held = [module for module in model.modules() if is_gated_silu(module)]
    assert {each.down_proj.dtype for each in held} == {torch.bfloat16}


@pytest.mark.parametrize("agreed", [0, 1])
def test_ranks_have_the_kernel_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: int
) -> None:
    """Else their routers could choose other experts."""
    asked: list[int] = []

    def least(own: int) -> int:
        asked.append(own)
        return agreed if len(asked) == 1 else own

    monkeypatch.setattr(cpu_device, "least_over_ranks", least)
    model = loaded("Mixtral", tmp_path, torch.bfloat16)
    CPUDevice(num_ranks=2).optimize(model)
    assert asked[0] == 1
    assert any(isinstance(module, TiledExperts) for module in model.modules()) == bool(agreed)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 70),
    st.integers(1, 90),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 3),
)
def test_a_product_by_a_plain_weight_is_that_of_pytorch(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    random = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, inputs, generator=random).to(dtype)
    weight = torch.randn(outputs, inputs, generator=random).to(dtype)
    found = with_threads(threads, lambda: torch.ops.trencadis.plain_product(rows, weight))
    assert (found.shape, found.dtype) == ((num_rows, outputs), dtype)
    expected = rows.double() @ weight.double().t()
    sizes = rows.double().abs() @ weight.double().abs().t()
    off = HALF_ULP * expected.abs() if dtype is torch.bfloat16 else 0.0
    assert ((found.double() - expected).abs() <= 1.01 * off + 1e-6 * sizes).all()
    for row in range(num_rows):
        alone = torch.ops.trencadis.plain_product(rows[row : row + 1], weight)
        assert torch.equal(alone[0], found[row])


def test_a_large_product_is_divided_between_threads() -> None:
    rows, weight = torch.randn(301, 128), torch.randn(65, 128)
    found = [
        with_threads(threads, lambda: torch.ops.trencadis.plain_product(rows, weight))
        for threads in (1, 3)
    ]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], rows @ weight.t(), atol=1e-4, rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf, np.nan]),
            min_size=9,
            max_size=9,
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 9),
)
def test_the_largest_numbers_come_in_order_and_equal_ones_by_place(
    numbers: list[list[float]], count: int
) -> None:
    rows = torch.tensor(numbers)
    values, places = torch.ops.trencadis.largest_of_rows(rows, count)
    expected = torch.sort(rows, dim=-1, descending=True, stable=True)
    torch.testing.assert_close(values, expected.values[:, :count], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(places, expected.indices[:, :count])


def test_the_largest_of_many_rows_of_several_dimensions() -> None:
    rows = torch.rand(150, 3, 128)
    found = with_threads(3, lambda: torch.ops.trencadis.largest_of_rows(rows, 5))
    for ours, theirs in zip(found, rows.topk(5), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", GATED)
@torch.inference_mode()
def test_routers_of_programs_are_native(family: str, tmp_path: Path) -> None:
    model = loaded(family, tmp_path, torch.bfloat16)
    CPUDevice().optimize(model)
    block = next(
        module
        for module in model.modules()
        if any(isinstance(child, TiledExperts) for child in module.children())
    )
    named = {**dict(block.named_parameters()), **dict(block.named_buffers())}

    def run(rows: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        held = dict(zip(named, tensors, strict=True))
        found: torch.Tensor = torch.func.functional_call(block, held, (rows,))
        return found

    inputs = [torch.randn(1, 40, 64).bfloat16(), *named.values()]
    traced = make_fx(run, tracing_mode="fake")(*inputs)
    expected = traced(*inputs).float()
    use_native_routers(traced)
    targets = {str(node.target) for node in traced.graph.nodes}
    assert not targets & {"aten.mm.default", "aten.topk.default"}
    assert {"trencadis.plain_product.default", "trencadis.largest_of_rows.default"} <= targets
    found = traced(*inputs).float()
    # A number that is rounded otherwise may choose another expert for a token.
    rows_off = (found - expected).abs().amax((0, 2)) > 0.05 * expected.abs().max()
    assert rows_off.sum() <= 2


def _traced(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.GraphModule:
    traced = make_fx(run, tracing_mode="fake")(*inputs)
    use_native_routers(traced)
    return traced


def test_what_experts_do_not_depend_on_stays_pytorchs() -> None:
    """Neither a product that no choice follows from, nor one by a weight that is computed, nor the
    smallest numbers, nor those of another dimension."""
    tiled = TiledExperts(plain_experts(4, 64, 48))

    def other_layer(rows: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return (rows @ weight.t()).topk(2).values

    def computed(
        rows: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        scores = rows.float() @ (weight.float() * 2).t().contiguous()
        chosen = scores.topk(2, largest=False).indices
        first = scores.topk(1, dim=0).values.sum() * 0 + 1
        weights = first.expand(len(rows), 2)
        experts = torch.ops.trencadis.tiled_experts
        found: torch.Tensor = experts(rows, chosen, weights, gate_up, None, down, None)
        return found

    rows, weight = torch.randn(5, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    for run, left in ((other_layer, 1), (computed, 2)):
        inputs = (rows, weight, tiled.gate_up, tiled.down)
        traced = _traced(run, *inputs)
        targets = [str(node.target) for node in traced.graph.nodes]
        assert targets.count("aten.topk.default") == left
        assert "aten.mm.default" in targets
        assert torch.equal(traced(*inputs), run(*inputs))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Callable[[Path], None]) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    add_tokenizer(save_family("Qwen 3 (MoE)", directory))
    return directory


def engine(model: Path, **changes: Any) -> LLM:
    given = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "warmup": "none"}
    return LLM(str(model), **given | changes)


PROMPTS = [list(range(1, 30)), [7], list(range(100, 117)), [9, 8], list(range(40, 60))]


def tokens_of(llm: LLM, **named: Any) -> list[tuple[int, ...]]:
    results = llm.generate(PROMPTS, GREEDY, **named)
    return [tuple(result.completions[0].token_ids) for result in results]


def test_an_engine_computes_experts_with_the_kernel(model: Path) -> None:
    for quantization in ("none", "int8"):
        llm = engine(model, quantization=quantization)
        held: Any = llm.core.executor.worker._model
        tiled = [module for module in held.modules() if isinstance(module, TiledExperts)]
        assert len(tiled) == 4
        assert {each.gate_up.dtype for each in tiled} == {
            torch.int8 if quantization == "int8" else torch.bfloat16
        }
        alone = [
            tuple(llm.generate([prompt], GREEDY)[0].completions[0].token_ids) for prompt in PROMPTS
        ]
        assert [len(tokens) for tokens in alone] == [24] * 5


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_decode_steps_with_experts_are_recorded(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quantization: str,
) -> None:
    """The experts of each step are others than those that were recorded."""
    caplog.set_level(logging.INFO)
    made: list[RecordedLayers] = []
    init = RecordedLayers.__init__

    def noted(self: RecordedLayers, *given: Any) -> None:
        init(self, *given)
        made.append(self)

    given = {"compile": True, "compile_cache": tmp_path, "quantization": quantization}
    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "record_layers", lambda self, run, *_: run)
        unrecorded = tokens_of(engine(model, **given))
    monkeypatch.setattr(RecordedLayers, "__init__", noted)
    llm = engine(model, **given)
    assert tokens_of(llm) == unrecorded
    assert sum(len(layers._lists) for layers in made) > 0
    assert "not recorded" not in caplog.text
    switcher = ModelSwitcher(llm.core)
    switcher.sleep(1)
    switcher.wake_up()
    assert tokens_of(llm) == unrecorded
    dense = save_tiny_model(tmp_path / "dense")
    first, stash_bytes = llm.core.config, 0 if quantization == "none" else 1 << 30
    other = attrs.evolve(first, model=str(dense), quantization="none")
    for config in (other, first):  # and back, loaded anew or from the stash
        switcher.reconfigure_engine(config_payload(config), stash_bytes)
    assert tokens_of(llm) == unrecorded
