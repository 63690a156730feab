"""The scans of layers with a state in static shapes, beside those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from trencadis.engine.models.state_functions import StaticFunctions, are_static, functions_of

LENGTHS = st.lists(st.integers(0, 150), min_size=1, max_size=3).filter(lambda found: max(found) > 0)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


def draw(seed: int, lengths: list[int]) -> tuple[torch.Generator, StaticFunctions]:
    functions = StaticFunctions()
    functions.lengths = torch.tensor(lengths)
    return torch.Generator().manual_seed(seed), functions


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sampled_from([(0.0, float("inf")), (0.01, 0.5)]))
def test_padding_changes_no_state_of_mamba_2(
    lengths: list[int], seed: int, limit: tuple[float, float]
) -> None:
    generator, functions = draw(seed, lengths)
    rows, length, heads, width, groups, size = len(lengths), max(lengths), 4, 8, 2, 6

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, dt = random(rows, length, heads, width), random(rows, length, heads)
    b, c = random(rows, length, groups, size), random(rows, length, groups, size)
    begun = random(rows, heads, width, size)
    shared: dict[str, Any] = {
        **{"D": random(heads), "dt_bias": random(heads), "dt_softplus": True, "dt_limit": limit},
        "return_final_states": True,
    }
    a = -random(heads).abs()
    out, states = functions.mamba2_chunk_scan(x, dt, a, b, c, 16, initial_states=begun, **shared)
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        if not n:
            close(states[one], begun[one])
            continue
        cut = (x[one, :n], dt[one, :n], a, b[one, :n], c[one, :n], 16)
        expected, state = modeling_mamba2.mamba2_chunk_scan(
            *cut, initial_states=begun[one], **shared
        )
        close(out[one, :n], expected)
        close(states[one], state)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 99), st.sampled_from([1.0, 2.0]), st.booleans())
def test_padding_changes_no_state_of_the_gated_delta_rule(
    lengths: list[int], seed: int, most: float, alike: bool
) -> None:
    """Also where all keys are alike, so that powers of what they have in common are huge."""
    generator, functions = draw(seed, lengths)
    rows, length, heads, size, width = len(lengths), max(lengths), 4, 8, 6

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = random(rows, length, 2, size), random(rows, length, 2, size)
    if alike:
        k = k[:, :1].expand(-1, length, -1, -1)
    v, begun = random(rows, length, heads, width), random(rows, heads, size, width)
    g = -torch.rand(rows, length, heads, generator=generator) * (0.01 if alike else 1.0)
    beta = torch.rand(rows, length, heads, generator=generator) * (1.0 if alike else most)
    out, states = functions.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=begun, use_qk_l2norm_in_kernel=True
    )
    for row, n in enumerate(lengths):
        one = slice(row, row + 1)
        if not n:
            close(states[one], begun[one])
            continue
        expected, state = modeling_qwen3_next.torch_chunk_gated_delta_rule(
            *(x[one, :n] for x in (q, k, v)),
            **{"g": g[one, :n], "beta": beta[one, :n], "initial_state": begun[one]},
            **{"use_qk_l2norm_in_kernel": True, "output_final_state": True},
        )
        close(out[one, :n], expected)
        close(states[one], state)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_alone_is_computed_as_by_transformers(seed: int) -> None:
    generator, functions = draw(seed, [1, 1])
    functions.lengths = None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, z, dt, bias, d = (random(2, 4, 8) for _ in range(5))
    a, b, c = -random(4, 8, 6).abs(), random(2, 2, 6), random(2, 2, 6)
    ours = random(2, 4, 8, 6)
    theirs = ours.clone()
    named: dict[str, Any] = {"dt_bias": bias[0], "dt_softplus": True, "z": z}
    close(
        functions.mamba2_selective_state_update(ours, x, dt, a, b, c, d[0], **named),
        modeling_mamba2.mamba2_selective_state_update(theirs, x, dt, a, b, c, d[0], **named),
    )
    close(ours, theirs)
    q, k, v = random(2, 1, 2, 8), random(2, 1, 2, 8), random(2, 1, 4, 6)
    given_ = {"g": -random(2, 1, 4).abs(), "beta": random(2, 1, 4).sigmoid()}
    given_ |= {"initial_state": random(2, 4, 8, 6), "use_qk_l2norm_in_kernel": True}
    theirs_of = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    for result, expected in zip(
        functions.torch_recurrent_gated_delta_rule(q, k, v, **given_),
        theirs_of(q, k, v, **given_, output_final_state=True),
        strict=True,
    ):
        close(result, expected)


def test_layers_that_call_an_unknown_function_are_not_static() -> None:
    mixer = modeling_mamba2.Mamba2Mixer.__new__(modeling_mamba2.Mamba2Mixer)
    names = functions_of(mixer)
    assert "mamba2_chunk_scan" in names
    assert are_static(names)
    assert not are_static(names | {"another_scan"})
    assert not are_static(frozenset())


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_reads_each_input_with_those_before(
    width: int, activation: str | None, bias: bool, dtype: torch.dtype
) -> None:
    known, taps = inputs(2, 3, 7).to(dtype), inputs(3, width).to(dtype)
    added = inputs(3).to(dtype) if bias else None
    functions = StaticFunctions()
    out = functions.causal_conv1d_fn(known, taps, added, activation)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 8 - width))
    wide = None if added is None else added.float()
    expected = F.conv1d(known.float(), taps.float().unsqueeze(1), wide, groups=3)
    expected = expected if activation is None else F.silu(expected)
    torch.testing.assert_close(out, expected.to(dtype))
    # Token by token, from a state that has as many inputs before as the width, or one less.
    for kept in {width - 1, width} - {0}:
        state = known[:, :, :kept].clone()
        for token in range(kept, 7):
            one = functions.causal_conv1d_update(
                known[:, :, token : token + 1], state, taps, added, activation
            )
            place = token - width + 1
            torch.testing.assert_close(one, out[:, :, place : place + 1])
            assert torch.equal(state, known[:, :, token + 1 - kept : token + 1])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_a_model_leaves_out_of_mamba_2_is_left_out(groups: int) -> None:
    rows, length, heads, width, size = 2, 70, 4, 8, 6
    x, dt = inputs(rows, length, heads, width), inputs(rows, length, heads).abs()
    a, b, c = (
        -inputs(heads).abs(),
        inputs(rows, length, groups, size),
        inputs(rows, length, groups, size, seed=1),
    )
    functions = StaticFunctions()
    out, states = functions.mamba2_chunk_scan(x, dt, a, b, c, 16)
    expected, state = modeling_mamba2.mamba2_chunk_scan(
        x, dt, a, b, c, 16, return_final_states=True
    )
    close(out, expected)
    close(states, state)
    one, of_head = inputs(rows, heads, width), -inputs(heads, width, size).abs()
    step = inputs(rows, heads, width).abs()
    ours = states.clone()
    theirs = states.clone()
    given_ = (one, step, of_head, b[:, 0], c[:, 0])
    close(
        functions.mamba2_selective_state_update(ours, *given_),
        modeling_mamba2.mamba2_selective_state_update(theirs, *given_),
    )
    close(ours, theirs)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_what_a_model_leaves_out_of_the_delta_rule_is_left_out(
    normalised: bool, length: int
) -> None:
    """No state before, as many heads of keys as of values."""
    q, k, v = (0.3 * inputs(2, length, 4, 8, seed=seed) for seed in range(3))
    g, beta = -inputs(2, length, 4).abs(), inputs(2, length, 4).sigmoid()
    named = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": normalised}
    out, states = StaticFunctions().torch_chunk_gated_delta_rule(q, k, v, **named)
    expected, state = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        q, k, v, **named, initial_state=None, output_final_state=True
    )
    close(out, expected)
    close(states, state)
    one = {name: value[:, :1] for name, value in (("g", g), ("beta", beta))}
    one |= {"initial_state": states, "use_qk_l2norm_in_kernel": normalised}
    ours = StaticFunctions().torch_recurrent_gated_delta_rule(q[:, :1], k[:, :1], v[:, :1], **one)
    theirs = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        q[:, :1], k[:, :1], v[:, :1], **one, output_final_state=True
    )
    for own, other in zip(ours, theirs, strict=True):
        close(own, other)
