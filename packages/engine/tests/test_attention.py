"""Paged attention gives what plain attention over the whole sequence gives."""

from __future__ import annotations

import functools
import types
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu.attention import CPUAttention, DecodeKernel, decode_kernel
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention import paged_attention
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.paged_context import MASKED, Attention, DecodeContext, PagedContext
from trencadis.engine.runner.model_input import (
    ModelInput,
    build_decode,
    build_prompt,
    lay_out_decodes,
)
from trencadis.engine.runner.shapes import DecodeShape, PromptShape
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence

upload = CPUDevice().upload
MODULE = types.SimpleNamespace(layer_idx=0)


@functools.cache
def kernel(groups: int, head_dim: int, dtype: torch.dtype) -> DecodeKernel:
    return decode_kernel(groups, 1, head_dim, dtype)


class KernelAttention(CPUAttention):
    """The CPU's attention with the decode kernel for the heads that it is called with."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        scale: float,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        own = CPUAttention(kernel(groups, query.shape[3], query.dtype))
        return own.attend(query, key, value, layer, paged, scale)


FORMULATIONS: list[Attention] = [BlockAttention(), RowAttention(), KernelAttention()]
"""PyTorch's operations on blocks, that of Gaudi without Intel's kernels, and that of the CPU."""

formulations = pytest.mark.parametrize(
    "attention", FORMULATIONS, ids=lambda attention: type(attention).__name__
)


class Sequences:
    """Random keys, values and queries of some sequences, and their blocks in a cache."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        attention: Attention = FORMULATIONS[0],
        block_size: int = 4,
    ) -> None:
        self.attention = attention
        self.rng = np.random.default_rng(sum(lengths))
        torch.manual_seed(sum(lengths))
        self.block_size, self.head_dim = block_size, 16
        counts = [-(-length // self.block_size) for length in lengths]
        ids = self.rng.permutation(sum(counts)) + 1
        self.tables = np.split(ids, np.cumsum(counts)[:-1])
        self.lengths = lengths
        self.q = [torch.randn(heads, n, self.head_dim).to(dtype) for n in lengths]
        self.k = [torch.randn(kv_heads, n, self.head_dim).to(dtype) for n in lengths]
        self.v = [torch.randn(kv_heads, n, self.head_dim).to(dtype) for n in lengths]
        self.cache = KVCache(
            num_layers=1,
            num_blocks=sum(counts) + 3,
            kv_heads=kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            dtype=dtype,
            token_rows=attention.token_rows,
        )

    def slot(self, held: torch.Tensor, row: int, position: int) -> torch.Tensor:
        """Where the keys or values of a token are: ``[kv_heads, D]``."""
        block, offset = self.tables[row][position // self.block_size], position % self.block_size
        if self.attention.token_rows:
            return held[int(block) * self.block_size + offset]
        return held[block, :, offset]

    def fill(self, row: int, length: int) -> None:
        """Put the first keys and values of a sequence into its blocks."""
        for i in range(length):
            self.slot(self.cache.key(0), row, i)[:] = self.k[row][:, i]
            self.slot(self.cache.value(0), row, i)[:] = self.v[row][:, i]

    def attend(
        self, parts: list[tuple[int, int, int]], query: int, batch: int, paged: PagedContext
    ) -> torch.Tensor:
        """Attention of (row, start, count) parts, as a decoder layer computes it."""
        tensors = (self.flat(parts, query, source, batch) for source in (self.q, self.k, self.v))
        paged = self.attention.prepare(paged, self.q[0].dtype)
        return paged_attention(MODULE, *tensors, None, paged=paged)[0]

    def expected(self, row: int) -> torch.Tensor:
        """Causal attention of the whole sequence, ``[T, H, D]``, in fp32."""
        q, k, v = (x[row][None].float() for x in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    def scheduled(self, row: int, start: int, count: int) -> ScheduledSequence:
        return ScheduledSequence(row, start, (1,) * count, self.tables[row], samples=True)

    def flat(
        self, parts: list[tuple[int, int, int]], query: int, source: list[torch.Tensor], batch: int
    ) -> torch.Tensor:
        """Padded rows ``[1, heads, batch * query, D]`` of (row, start, count) parts."""
        heads, _, size = source[0].shape
        out = torch.randn(batch, heads, query, size).to(source[0].dtype)
        for i, (row, start, count) in enumerate(parts):
            out[i, :, :count] = source[row][:, start : start + count]
        return out.transpose(0, 1).reshape(1, heads, batch * query, size)


shapes = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1)]),
)


def decode_input(
    case: Sequences, parts: list[tuple[int, int, int]], shape: DecodeShape, spare_pairs: int = 0
) -> ModelInput:
    decodes = [case.scheduled(*part) for part in parts]
    layout = lay_out_decodes(decodes, shape.blocks, case.cache.block_size)
    shape = attrs.evolve(shape, extra=layout.num_extra + spare_pairs)
    return build_decode(decodes, layout, shape, case.cache, upload)


@formulations
@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 2), st.integers(0, 4), st.integers(0, 5), st.booleans())
def test_decode_equals_plain_attention(
    attention: Attention,
    shape: tuple[list[int], tuple[int, int]],
    spare_rows: int,
    spare_blocks: int,
    spare_pairs: int,
    has_prefix: bool,
) -> None:
    lengths, (heads, kv_heads) = shape
    case = Sequences(lengths, heads, kv_heads, torch.float32, attention)
    for row, length in enumerate(lengths):
        case.fill(row, length - 1)
    batch = len(lengths) + spare_rows
    blocks = min(case.cache.num_blocks, 1 + max(t.max() for t in case.tables) + spare_blocks)
    parts = [(row, length - 1, 1) for row, length in enumerate(lengths)]
    built = decode_input(case, parts, DecodeShape(batch, int(blocks) * has_prefix), spare_pairs)
    out = case.attend(parts, 1, batch, built.unpack().paged)
    assert torch.isfinite(out).all()
    for row in range(len(lengths)):
        torch.testing.assert_close(out[0, row], case.expected(row)[-1], atol=1e-5, rtol=1e-4)


@formulations
@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_prompt_chunk_equals_plain_attention(
    attention: Attention, shape: tuple[list[int], tuple[int, int]], data: st.DataObject
) -> None:
    lengths, (heads, kv_heads) = shape
    case = Sequences(lengths, heads, kv_heads, torch.float32, attention)
    parts = []
    for row, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        parts.append((row, start, data.draw(st.integers(1, length - start))))
        case.fill(row, start)
    query = max(count for *_, count in parts) + data.draw(st.integers(0, 3))
    context = max(-(-start // 4) for _, start, _ in parts) + data.draw(st.integers(0, 2))
    batch = len(parts) + data.draw(st.integers(0, 2))
    built = build_prompt(
        [case.scheduled(*part) for part in parts],
        PromptShape(batch, query, context),
        case.cache,
        upload,
    )
    out = case.attend(parts, query, batch, built.unpack().paged)
    out = out.view(batch, query, heads, -1)
    for i, (row, start, count) in enumerate(parts):
        torch.testing.assert_close(
            out[i, :count], case.expected(row)[start : start + count], atol=1e-5, rtol=1e-4
        )


@formulations
def test_new_keys_land_in_their_slots_and_padding_in_block_0_alone(attention: Attention) -> None:
    case = Sequences([6, 3], 4, 2, torch.float32, attention)
    parts = [(0, 0, 6), (1, 0, 3)]
    built = build_prompt(
        [case.scheduled(*part) for part in parts], PromptShape(4, 8, 0), case.cache, upload
    )
    before = case.cache.key(0).clone()
    case.attend(parts, 8, 4, built.unpack().paged)
    written = {int(b) for table in case.tables for b in table} | {0}
    changes = (case.cache.key(0) != before).reshape(case.cache.num_blocks, -1).any(1)
    assert set(changes.nonzero().flatten().tolist()) == written
    for i in range(6):
        torch.testing.assert_close(case.slot(case.cache.key(0), 0, i), case.k[0][:, i])


@formulations
def test_block_shared_by_two_sequences_is_read_by_both(attention: Attention) -> None:
    """One prefix row for its first owner, one gathered pair for the other."""
    case = Sequences([8], 4, 2, torch.float32, attention)
    case.fill(0, 8)
    table = torch.as_tensor(case.tables[0])
    blocks = int(table.max()) + 1
    owners = torch.full((blocks + 2,), 2)
    owners[table], owners[blocks:] = 0, 1
    bias = torch.full((blocks + 2, 1, 1, 4), MASKED)
    bias[table] = bias[blocks:] = 0.0
    paged = DecodeContext(
        case.cache,
        blocks,
        table[-1].repeat(2),
        torch.tensor([3, 3]),
        owners,
        owners.clamp_max(1),
        bias,
        extra_blocks=table,
    )
    both = [(0, 7, 1), (0, 7, 1)]
    out = case.attend(both, 1, 2, paged)
    for row in range(2):
        torch.testing.assert_close(out[0, row], case.expected(0)[-1], atol=1e-5, rtol=1e-4)


@formulations
def test_bf16_stays_within_its_rounding(attention: Attention) -> None:
    case = Sequences([29, 17, 5], 6, 2, torch.bfloat16, attention)
    for row, length in enumerate(case.lengths):
        case.fill(row, length - 1)
    parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
    built = decode_input(case, parts, DecodeShape(3, case.cache.num_blocks))
    out = case.attend(parts, 1, 3, built.unpack().paged)
    for row in range(3):
        torch.testing.assert_close(
            out[0, row].float(), case.expected(row)[-1], atol=2e-2, rtol=2e-2
        )


def test_bf16_is_as_exact_in_every_formulation() -> None:
    """Sequences of up to 40 blocks: the largest error beside the largest value."""
    errors = []
    for attention in FORMULATIONS:
        case = Sequences([157, 90, 31, 8], 8, 2, torch.bfloat16, attention)
        for row, length in enumerate(case.lengths):
            case.fill(row, length - 1)
        parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
        built = decode_input(case, parts, DecodeShape(4, case.cache.num_blocks))
        out = case.attend(parts, 1, 4, built.unpack().paged)[0].float()
        expected = torch.stack([case.expected(row)[-1] for row in range(4)])
        errors.append(float((out - expected).abs().max() / expected.abs().max()))
    assert max(errors) < 0.01, errors


@formulations
@pytest.mark.parametrize("block_size", [16, 24, 64, 100, 256])
def test_every_block_size_and_dtype_is_right(attention: Attention, block_size: int) -> None:
    """One long sequence is divided between threads; 100 and 256 exceed what is scored at once."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        case = Sequences([700, 1, block_size], 6, 2, dtype, attention, block_size)
        for row, length in enumerate(case.lengths):
            case.fill(row, length - 1)
        parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
        built = decode_input(case, parts, DecodeShape(3, case.cache.num_blocks))
        out = case.attend(parts, 1, 3, built.unpack().paged)[0].float()
        expected = torch.stack([case.expected(row)[-1] for row in range(3)])
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=1e-2)


@formulations
@pytest.mark.parametrize("position", [5, 390])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_hundreds_do_not_overflow(attention: Attention, sign: int, position: int) -> None:
    """One position has all the weight, or none has a score near zero."""
    case = Sequences([400], 2, 2, torch.float32, attention, 16)
    case.q[0] = 160 * sign * (case.q[0].abs() + 1)
    case.k[0] = case.k[0].abs()
    case.k[0][:, position] *= 8
    case.fill(0, 399)
    built = decode_input(case, [(0, 399, 1)], DecodeShape(1, case.cache.num_blocks))
    out = case.attend([(0, 399, 1)], 1, 1, built.unpack().paged)
    torch.testing.assert_close(out[0, 0], case.expected(0)[-1], atol=1e-5, rtol=1e-3)


def test_the_kernel_rounds_to_the_nearest_bf16() -> None:
    outs = []
    for dtype in (torch.bfloat16, torch.float32):
        case = Sequences([60, 9], 6, 2, torch.bfloat16, KernelAttention(), 16)
        for row, length in enumerate(case.lengths):
            case.fill(row, length - 1)
        parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
        wide = Sequences([60, 9], 6, 2, dtype, KernelAttention(), 16)
        wide.q, wide.k, wide.v = ([x.to(dtype) for x in xs] for xs in (case.q, case.k, case.v))
        for name in ("key", "value"):
            getattr(wide.cache, name)(0).copy_(getattr(case.cache, name)(0))
        built = decode_input(wide, parts, DecodeShape(2, wide.cache.num_blocks))
        outs.append(wide.attend(parts, 1, 2, built.unpack().paged))
    assert (outs[0] == outs[1].bfloat16()).float().mean() > 0.99


def test_rows_that_own_no_block_are_zero() -> None:
    case = Sequences([20], 2, 1, torch.float32, KernelAttention())
    case.fill(0, 19)
    built = decode_input(case, [(0, 19, 1)], DecodeShape(4, case.cache.num_blocks))
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        out = case.attend([(0, 19, 1)], 1, 4, built.unpack().paged)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out[0, 1:].any()


@formulations
def test_what_is_not_finite_stays_in_its_own_sequence(attention: Attention) -> None:
    case = Sequences([30, 30], 4, 2, torch.float32, attention)
    case.q[0][:, -1], case.k[0][:, -1], case.v[0][:, -1] = float("nan"), float("inf"), -float("inf")
    for row in range(2):
        case.fill(row, 29)
    parts = [(0, 29, 1), (1, 29, 1)]
    built = decode_input(case, parts, DecodeShape(2, case.cache.num_blocks))
    out = case.attend(parts, 1, 2, built.unpack().paged)
    torch.testing.assert_close(out[0, 1], case.expected(1)[-1], atol=1e-5, rtol=1e-4)
    assert torch.isfinite(case.cache.key(0)).all()
    assert torch.isfinite(case.cache.value(0)).all()


@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "s_aux"])
def test_feature_that_is_not_computed_is_refused(feature: str) -> None:
    with pytest.raises(ModelError, match=feature):
        paged_attention(MODULE, *(torch.zeros(1, 1, 1, 4),) * 3, None, paged=None, **{feature: 5})
