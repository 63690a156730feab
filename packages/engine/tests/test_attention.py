"""Paged attention gives what plain attention over the whole sequence gives."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import attention as attention_module
from trencadis.engine.devices.cpu import native_kernel
from trencadis.engine.devices.cpu.attention import (
    AttentionKernel,
    CPUAttention,
    attention_kernel,
    attention_kernel_of,
)
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention import paged_attention
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.layer_spec import LIMITS, LayerSpec, features_of
from trencadis.engine.models.paged_context import (
    MASKED,
    Attention,
    DecodeContext,
    PagedContext,
    RaggedContext,
)
from trencadis.engine.runner import model_input
from trencadis.engine.runner.model_input import (
    ModelInput,
    build_decode,
    build_mixed,
    build_prompt,
    lay_out_decodes,
)
from trencadis.engine.runner.shapes import (
    ChunkSize,
    DecodeShape,
    MixedShape,
    PromptShape,
    RaggedShape,
    ragged_shape,
)
from trencadis.kvcache.state_cache import StateKey, StateShape
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import ScheduledSequence

upload = CPUDevice().upload


def layer_spec(heads: int, kv_heads: int, width: int, **changes: Any) -> LayerSpec:
    sizes = {"kv_heads": kv_heads, "key_width": width, "value_width": width, "scale": width**-0.5}
    return LayerSpec(**{"heads": heads, **sizes, **changes})


@functools.cache
def kernel(groups: int, head_dim: int, dtype: torch.dtype) -> AttentionKernel:
    return attention_kernel(groups, 1, head_dim, dtype)


class KernelAttention(CPUAttention):
    """The CPU's attention with the kernels for the heads that it is called with.

    ``widens``: how prefill multiplies.
    """

    def __init__(self, *, widens: bool = False) -> None:
        super().__init__()
        self._widens = widens

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        spec: LayerSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        chosen = attrs.evolve(kernel(groups, query.shape[3], query.dtype), widens=self._widens)
        return CPUAttention(chosen).attend(query, key, value, layer, paged, spec, sinks)


FORMULATIONS: list[Attention] = [BlockAttention(), RowAttention(), KernelAttention()]
"""PyTorch's operations on blocks, that of Gaudi without Intel's kernels, and that of the CPU."""

RAGGED = [x for x in FORMULATIONS if x.as_operator or isinstance(x, BlockAttention)]
"""Those that are given ragged and mixed contexts; blocks are what the CPU's kernels decline."""

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
        head_dim: int = 16,
        value_dim: int | None = None,
        **features: Any,
    ) -> None:
        self.attention = attention
        self.rng = np.random.default_rng(sum(lengths))
        torch.manual_seed(sum(lengths))
        self.block_size, self.head_dim = block_size, head_dim
        counts = [-(-length // self.block_size) for length in lengths]
        ids = self.rng.permutation(sum(counts)) + 1
        self.tables = np.split(ids, np.cumsum(counts)[:-1])
        self.lengths = lengths
        self.q = [torch.randn(heads, n, self.head_dim).to(dtype) for n in lengths]
        self.k = [torch.randn(kv_heads, n, self.head_dim).to(dtype) for n in lengths]
        self.spec = layer_spec(
            heads, kv_heads, head_dim, value_width=value_dim or head_dim, **features
        )
        self.sinks = (3 * torch.randn(heads)).to(dtype) if self.spec.sinks else None
        names = {"window": "sliding_window", "softcap": "softcap"}
        self.passed = {names[x]: features[x] for x in names if features.get(x) is not None}
        self.passed |= {} if self.sinks is None else {"s_aux": self.sinks}
        self.spec = attrs.evolve(self.spec, arguments=features_of(None, self.passed))
        self.module = types.SimpleNamespace(layer_idx=0, layer_spec=self.spec)
        width = self.spec.value_width
        self.v = [torch.randn(kv_heads, n, width).to(dtype) for n in lengths]
        self.cache = KVCache(
            layers=[self.spec],
            num_blocks=sum(counts) + 3,
            block_size=self.block_size,
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
        return paged_attention(self.module, *tensors, None, paged=paged, **self.passed)[0]

    def expected(self, row: int) -> torch.Tensor:
        """Attention of the whole sequence as the spec says, ``[T, H, D]``, in fp64, as fp32."""
        q, k, v = (x[row].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        scores = (q @ k.mT) * self.spec.scale
        if cap := self.spec.softcap:
            scores = cap * (scores / cap).tanh()
        place = torch.arange(num_tokens := q.shape[1])
        at, window = place[:, None], self.spec.window or num_tokens
        chunk = self.spec.chunk or num_tokens
        seen = (place <= at) & (at - place < window) & (at // chunk == place // chunk)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            of_heads = self.sinks.double()[:, None, None].expand(-1, num_tokens, 1)
            scores = torch.cat((scores, of_heads), -1)
        return (scores.softmax(-1)[..., :num_tokens] @ v).transpose(0, 1).float()

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

features = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            "window": st.integers(1, 9),
            "chunk": st.integers(1, 9),
            "softcap": st.sampled_from([0.5, 2.0, 30.0]),
            "sinks": st.just(value=True),
            "scale": st.sampled_from([0.1, 1.0]),
        },
    ),
)
"""What a layer computes beyond plain causal attention."""


def decode_input(
    case: Sequences, parts: list[tuple[int, int, int]], shape: DecodeShape, spare_pairs: int = 0
) -> ModelInput:
    decodes = [case.scheduled(*part) for part in parts]
    layout = lay_out_decodes(decodes, shape.blocks, case.cache.block_size)
    shape = attrs.evolve(shape, extra=layout.num_extra + spare_pairs)
    return build_decode(decodes, layout, shape, case.cache, upload)


@formulations
@settings(max_examples=60, deadline=None)
@given(
    *(shapes, features, st.integers(0, 2), st.integers(0, 4), st.integers(0, 5), st.booleans()),
    st.integers(0, 4),
)
def test_decode_equals_plain_attention(
    attention: Attention,
    shape: tuple[list[int], tuple[int, int]],
    features: dict[str, Any],
    spare_rows: int,
    spare_blocks: int,
    spare_pairs: int,
    has_prefix: bool,
    recent: int,
) -> None:
    lengths, (heads, kv_heads) = shape
    case = Sequences(lengths, heads, kv_heads, torch.float32, attention, **features)
    for row, length in enumerate(lengths):
        case.fill(row, length - 1)
    batch = len(lengths) + spare_rows
    blocks = min(case.cache.num_blocks, 1 + max(t.max() for t in case.tables) + spare_blocks)
    parts = [(row, length - 1, 1) for row, length in enumerate(lengths)]
    padded = DecodeShape(batch, int(blocks) * has_prefix, recent=recent * attention.reads_recent)
    built = decode_input(case, parts, padded, spare_pairs)
    out = case.attend(parts, 1, batch, built.unpack().paged)
    assert torch.isfinite(out).all()
    for row in range(len(lengths)):
        torch.testing.assert_close(out[0, row], case.expected(row)[-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "attention",
    [attention for attention in FORMULATIONS if attention.reads_recent],
    ids=lambda attention: type(attention).__name__,
)
@pytest.mark.parametrize("limit", ["window", "chunk"])
def test_the_last_blocks_have_a_window_wherever_it_ends(attention: Attention, limit: str) -> None:
    """Sequences shorter and longer than it, whose last token is at any place of a block."""
    lengths = [*range(1, 14)]
    for size, tokens in itertools.product((1, 2, 5, 6, 7), (1, 3)):
        case = Sequences(lengths, 2, 1, torch.float32, attention, **{limit: size})
        case.cache.key(0)[:], case.cache.value(0)[:] = 3.0, 9.0  # also of the padding block
        parts = [(row, n - min(n, tokens), min(n, tokens)) for row, n in enumerate(lengths)]
        for row, start, _ in parts:
            case.fill(row, start)
        if tokens == 1:
            shape = DecodeShape(len(lengths), 0, recent=3)
            paged = decode_input(case, parts, shape).unpack().paged
        else:
            padded = PromptShape(len(lengths), tokens, 4, recent=3)
            chunks = [case.scheduled(*part) for part in parts]
            paged = build_prompt(chunks, padded, case.cache, upload).unpack().paged
        out = case.attend(parts, tokens, len(lengths), paged).view(len(lengths), tokens, 2, -1)
        for row, start, count in parts:
            expected = case.expected(row)[start : start + count]
            torch.testing.assert_close(out[row, :count], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("features", [{"window": 9}, {"chunk": 12}, {"window": 9, "sinks": True}])
def test_decode_reads_only_the_blocks_of_a_window(
    features: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Sequences([200, 30, 5], 2, 1, torch.float32, FORMULATIONS[2], **features)
    parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
    for row, start, _ in parts:
        case.fill(row, start)
    seen = sum(start // 4 - case.spec.first_seen(start) // 4 + 1 for _, start, _ in parts)
    if not case.spec.sinks:
        monkeypatch.delattr(BlockAttention, "attend")  # the kernel computes it
    for blocks in (0, case.cache.num_blocks):
        paged = decode_input(case, parts, DecodeShape(3, blocks)).unpack().paged
        assert isinstance(paged, DecodeContext)
        assert len(CPUAttention().prepare(paged, torch.float32).within(case.spec).owners) == seen
        out = case.attend(parts, 1, 3, paged)[0]
        for row in range(3):
            torch.testing.assert_close(out[row], case.expected(row)[-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "attention",
    [attention for attention in FORMULATIONS if attention.scores_shared],
    ids=lambda attention: type(attention).__name__,
)
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1)]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(1, 30),
    st.sampled_from([8, 4096]),
    features,
)
def test_shared_blocks_are_scored_for_every_sequence(
    attention: Attention,
    own: list[int],
    heads: tuple[int, int],
    num_common: int,
    spare_rows: int,
    shared: int,
    at_once: int,
    features: dict[str, Any],
) -> None:
    common = 4 * num_common
    lengths = [common + length for length in own]
    case = Sequences(lengths, *heads, torch.float32, attention, **features)
    for row in range(1, len(own)):
        case.tables[row][:num_common] = case.tables[0][:num_common]
        case.k[row][:, :common] = case.k[0][:, :common]
        case.v[row][:, :common] = case.v[0][:, :common]
    for row, length in enumerate(case.lengths):
        case.fill(row, length - 1)
    batch, blocks = len(own) + spare_rows, 1 + int(max(t.max() for t in case.tables))
    parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
    decodes = [case.scheduled(*part) for part in parts]
    shared = min(shared, blocks)
    layout = lay_out_decodes(decodes, blocks, case.block_size, shared)
    shape = DecodeShape(batch, blocks, layout.num_extra, shared)
    built = build_decode(decodes, layout, shape, case.cache, upload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trencadis.engine.devices.hpu.attention._SHARED_AT_ONCE", at_once)
        out = case.attend(parts, 1, batch, built.unpack().paged)
    assert torch.isfinite(out).all()
    for row in range(len(own)):
        torch.testing.assert_close(out[0, row], case.expected(row)[-1], atol=1e-5, rtol=1e-4)


@formulations
@settings(max_examples=60, deadline=None)
@given(shapes, features, st.integers(0, 5), st.data())
def test_prompt_chunk_equals_plain_attention(
    attention: Attention,
    shape: tuple[list[int], tuple[int, int]],
    features: dict[str, Any],
    recent: int,
    data: st.DataObject,
) -> None:
    lengths, (heads, kv_heads) = shape
    case = Sequences(lengths, heads, kv_heads, torch.float32, attention, **features)
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
        PromptShape(
            batch, query, context, recent=recent * bool(context and attention.reads_recent)
        ),
        case.cache,
        upload,
    )
    out = case.attend(parts, query, batch, built.unpack().paged)
    out = out.view(batch, query, heads, -1)
    for i, (row, start, count) in enumerate(parts):
        torch.testing.assert_close(
            out[i, :count], case.expected(row)[start : start + count], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("attention", RAGGED, ids=lambda attention: type(attention).__name__)
@settings(max_examples=60, deadline=None)
@given(shapes, features, st.integers(0, 5), st.sampled_from([1, 4, 512]), st.data())
def test_ragged_chunks_equal_plain_attention(
    attention: Attention,
    shape: tuple[list[int], tuple[int, int]],
    features: dict[str, Any],
    spare: int,
    mask_rows: int,
    data: st.DataObject,
) -> None:
    lengths, (heads, kv_heads) = shape
    case = Sequences(lengths, heads, kv_heads, torch.float32, attention, **features)
    parts = []
    for row, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        parts.append((row, start, data.draw(st.integers(1, length - start))))
        case.fill(row, start)
    chunks = [case.scheduled(*part) for part in parts]
    exact = ragged_shape(chunks, case.block_size)
    padded = attrs.evolve(exact, num_tokens=exact.num_tokens + spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_input, "MASK_ROWS", mask_rows)
        tensors = build_prompt(chunks, padded, case.cache, upload).unpack()

    def flat(source: list[torch.Tensor]) -> torch.Tensor:
        rows = [source[row][:, start : start + count] for row, start, count in parts]
        return torch.cat((*rows, torch.randn(len(rows[0]), spare, rows[0].shape[-1])), dim=1)[None]

    given_tensors = [flat(source) for source in (case.q, case.k, case.v)]
    paged = attention.prepare(tensors.paged, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trencadis.engine.models.block_attention._ROWS", mask_rows)
        out, _ = paged_attention(case.module, *given_tensors, None, paged=paged, **case.passed)
    assert torch.isfinite(out).all()
    end = 0
    for (row, start, count), last in zip(parts, tensors.logit_rows.tolist(), strict=True):
        begin, end = end, end + count
        assert last == end - 1
        assert tensors.position_ids[0, begin:end].tolist() == list(range(start, start + count))
        expected = case.expected(row)[start : start + count]
        torch.testing.assert_close(out[0, begin:end], expected, atol=1e-5, rtol=1e-4)
        for position in range(start, start + count):
            held = case.slot(case.cache.key(0), row, position)
            torch.testing.assert_close(held, case.k[row][:, position])


def prefill(case: Sequences, parts: list[tuple[int, int, int]], spare: int = 0) -> torch.Tensor:
    """Attention of (row, start, count) chunks in one ragged batch, ``[T, H, D]``."""
    chunks = [case.scheduled(*part) for part in parts]
    exact = ragged_shape(chunks, case.block_size)
    padded = attrs.evolve(exact, num_tokens=exact.num_tokens + spare)
    paged = build_prompt(chunks, padded, case.cache, upload).unpack().paged
    tensors = []
    for source in (case.q, case.k, case.v):
        rows = [source[row][:, start : start + count] for row, start, count in parts]
        padding = torch.randn(len(rows[0]), spare, rows[0].shape[-1]).to(rows[0].dtype)
        tensors.append(torch.cat((*rows, padding), dim=1)[None])
    paged = case.attention.prepare(paged, tensors[0].dtype)
    return paged_attention(case.module, *tensors, None, paged=paged, **case.passed)[0][0]


def exact(case: Sequences, row: int) -> torch.Tensor:
    """Causal attention of the whole sequence, ``[T, H, D]``, in fp64."""
    q, k, v = (x[row].double() for x in (case.q, case.k, case.v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.mT) / case.head_dim**0.5
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return (scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize(
    "attention",
    [*RAGGED, KernelAttention(widens=True)],
    ids=[*(type(attention).__name__ for attention in RAGGED), "widens"],
)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from([(1, 1, 64), (9, 3, 64), (8, 1, 16), (4, 2, 80)]),
    st.sampled_from([4, 32]),
    st.integers(0, 3),
    st.sampled_from([None, None, "window", "chunk"]),
    st.data(),
)
def test_chunks_in_bf16_stay_within_its_rounding(
    attention: Attention,
    lengths: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    spare: int,
    limit: str | None,
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(1, 320)) if limit else 0
    limits = {limit: size} if limit else {}
    case = Sequences(lengths, *heads[:2], torch.bfloat16, attention, block_size, heads[2], **limits)
    parts = []
    for row, length in enumerate(lengths):
        start = data.draw(st.integers(0, length - 1))
        parts.append((row, start, data.draw(st.integers(1, length - start))))
        case.fill(row, start)
        unseen = {"window": start - size + 1, "chunk": start // (size or 1) * size, None: 0}[limit]
        for i in range(unseen):  # a block may belong to another sequence by now
            case.slot(case.cache.key(0), row, i)[:] = torch.nan
            case.slot(case.cache.value(0), row, i)[:] = torch.nan
    out = prefill(case, parts, spare)
    end = 0
    for row, start, count in parts:
        begin, end = end, end + count
        expected = case.expected(row)[start : start + count]
        torch.testing.assert_close(out[begin:end].float(), expected, atol=2e-2, rtol=2e-2)
        for position in range(start, start + count):
            for held, given_rows in ((case.cache.key(0), case.k), (case.cache.value(0), case.v)):
                assert torch.equal(case.slot(held, row, position), given_rows[row][:, position])
    assert not out[end:].any()


@pytest.mark.parametrize("widens", [False, True], ids=["pairs", "fp32"])
@pytest.mark.parametrize("limits", [{}, {"window": 50}, {"chunk": 70}], ids=str)
@pytest.mark.parametrize("cuts", [(1,), (64,), (100, 130), (31, 64, 65, 199)])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    cuts: tuple[int, ...], limits: dict[str, int], widens: bool
) -> None:
    if kernel(3, 64, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    attention = KernelAttention(widens=widens)
    case = Sequences([200], 6, 2, torch.bfloat16, attention, 16, 64, **limits)
    whole = prefill(case, [(0, 0, 200)])
    edges = (0, *cuts, 200)
    parts = [prefill(case, [(0, start, end - start)]) for start, end in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("limits", [{"window": 50}, {"chunk": 70}], ids=str)
def test_the_kernel_prefills_within_limits(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are far below zero, where a query begins after the first positions of its block."""
    if kernel(3, 64, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    case = Sequences([200], 6, 2, torch.bfloat16, KernelAttention(), 16, 64, **limits)
    case.k[0][:] = case.k[0][:, :1] + 0.1 * case.k[0]
    case.q[0][:] = case.k[0][:, :1].repeat_interleave(3, 0) * -60
    monkeypatch.setattr(BlockAttention, "attend", None)
    out = prefill(case, [(0, 0, 200)])
    torch.testing.assert_close(out.float(), case.expected(0), atol=4e-2, rtol=4e-2)


class ScatteredHeads(KernelAttention):
    """Gives the kernels tensors in which the values of a head are not adjacent."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        paged: Any,
        spec: LayerSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = (x.mT.contiguous().mT for x in (query, key, value))
        return super().attend(*given, layer, paged, spec, sinks)


def test_values_of_a_head_that_are_not_adjacent_are_read_in_order() -> None:
    outs = []
    for attention in (KernelAttention(), ScatteredHeads()):
        case = Sequences([40, 9], 6, 2, torch.bfloat16, attention, 16, 64)
        case.fill(0, 20)
        case.fill(1, 8)
        built = decode_input(case, [(1, 8, 1)], DecodeShape(1, case.cache.num_blocks))
        decoded = case.attend([(1, 8, 1)], 1, 1, built.unpack().paged)[0]
        outs.append(torch.cat((prefill(case, [(0, 20, 20)]), decoded)))
    assert torch.equal(*outs)


def test_a_processor_without_products_of_bf16_prefills_with_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_kernel, "_FLAGS", (*native_kernel._FLAGS, "-U__AVX512BF16__"))
    plain = attention_kernel(2, 1, 32, torch.bfloat16)
    assert plain.prefill is None
    case = Sequences([150], 2, 1, torch.bfloat16, CPUAttention(plain), 16, 32)
    out = prefill(case, [(0, 0, 150)]).double()
    torch.testing.assert_close(out, exact(case, 0), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("slow", [True, False])
def test_prefill_multiplies_in_the_faster_way(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Whichever that is here: each is delayed in turn."""
    if kernel(2, 32, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    right = attention_module._prefill

    def delayed(compute: Callable[..., int], widens: bool, *given: Any) -> torch.Tensor:
        if widens is slow:
            time.sleep(0.002)
        return right(compute, widens, *given)

    monkeypatch.setattr(attention_module, "_WIDENS", {})
    monkeypatch.setattr(attention_module, "_prefill", delayed)
    layer = layer_spec(2, 1, 32)
    assert attention_kernel_of(layer, torch.bfloat16).widens is not slow
    slow = not slow
    assert attention_kernel_of(layer, torch.bfloat16).widens is slow, "as it was measured first"


def test_prefill_by_fp32_adds_one_product_after_the_other() -> None:
    """Processors add products of pairs in another order: a key would have a score of 1, not 0."""
    if kernel(1, 32, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    case = Sequences([2], 1, 1, torch.bfloat16, KernelAttention(widens=True), 4, 32)
    case.q[0].fill_(1.0)
    case.k[0].zero_()
    case.v[0][:, 0], case.v[0][:, 1] = 0.0, 1.0
    case.k[0][0, 0, :4] = torch.tensor([2.0**24, 0.0, 1.0, -(2.0**24)])
    assert (prefill(case, [(0, 0, 2)])[1] == 0.5).all()


@pytest.mark.parametrize("widens", [False, True], ids=["pairs", "fp32"])
def test_neighbours_in_a_pair_do_not_touch_each_other(widens: bool) -> None:
    """Two keys of the same score, one with numbers beside the ones that count."""
    if kernel(1, 32, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    case = Sequences([2], 1, 1, torch.bfloat16, KernelAttention(widens=widens), 4, 32)
    case.q[0].zero_()
    case.q[0][..., 1::2] = 1.0
    case.k[0].fill_(1.0)
    case.k[0][0, 0, ::2] = -1.9921875  # all bits of its fraction are set
    case.v[0][:, 0], case.v[0][:, 1] = 0.0, 1.0
    assert (prefill(case, [(0, 0, 2)])[1] == 0.5).all()


@pytest.mark.parametrize("wrong", [True, False])
def test_each_way_of_prefill_is_tried(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    if kernel(2, 32, torch.bfloat16).prefill is None:
        pytest.skip("this processor prefills with PyTorch's operations")
    right = attention_module._prefill

    def of_one_way(compute: Callable[..., int], widens: bool, *given: Any) -> torch.Tensor:
        return right(compute, widens, *given) + (widens is wrong)

    monkeypatch.setattr(attention_module, "_prefill", of_one_way)
    with pytest.raises(native_kernel.NoKernel, match="off by"):
        attention_kernel_of(layer_spec(2, 1, 32), torch.bfloat16)


@pytest.mark.parametrize("wrong", ["narrow values", "one head", "fp32"])
def test_rows_that_the_cache_does_not_hold_are_not_read_by_a_kernel(wrong: str) -> None:
    """It would read beyond them."""
    own = kernel(2, 32, torch.bfloat16)
    query, keys = torch.zeros(1, 4, 5, 32).bfloat16(), torch.zeros(3, 2, 16, 32).bfloat16()
    key = value = torch.zeros(1, 2, 5, 32).bfloat16()
    assert own.fits(query, key, value, keys)
    if wrong == "narrow values":
        value = value[..., :16]
    elif wrong == "one head":
        key = value = key[:, :1]
    else:
        key = key.float()
    assert not own.fits(query, key, value, keys)


def test_a_kernel_without_memory_raises_and_writes_nothing() -> None:
    """An exception of C++ that leaves a kernel would end the process."""
    case = Sequences([40], 2, 1, torch.bfloat16, KernelAttention(), 16, 32)
    before = [case.cache.key(0).clone(), case.cache.value(0).clone()]
    own = kernel(2, 32, torch.bfloat16)
    found = {"decode": own.decode, "prefill": own.prefill}
    for name, compute in found.items():
        if compute is None:
            continue
        # A batch of so many tokens that its lists cannot be allocated.
        tokens = 1 << 50
        chunk = (ctypes.c_int64 * 4)(0, tokens, 0, 0)
        last = {
            "decode": (None, None, None, 0, 0, tokens, 1, 16, 0, 2),
            "prefill": (chunk, 1, tokens, 1, 16, 1.0, 0, 0, 2, 0),
        }[name]
        cache = (case.cache.key(0).data_ptr(), case.cache.value(0).data_ptr())
        assert compute(None, 0, 0, None, None, 0, 0, 0, 0, None, *cache, None, None, *last) != 0
    assert torch.equal(case.cache.key(0), before[0])
    assert torch.equal(case.cache.value(0), before[1])
    fails = attrs.evolve(own, decode=lambda *_: 1, prefill=lambda *_: 1)
    case.attention = CPUAttention(fails)
    decode = decode_input(case, [(0, 39, 1)], DecodeShape(1, 4))
    with pytest.raises(MemoryError, match="found no memory"):
        case.attend([(0, 39, 1)], 1, 1, decode.unpack().paged)
    shape = RaggedShape(40, (ChunkSize(40, 0, 0),))
    prompt = build_prompt([case.scheduled(0, 0, 40)], shape, case.cache, upload)
    with pytest.raises(MemoryError, match="found no memory"):
        case.attend([(0, 0, 40)], 40, 1, prompt.unpack().paged)


def test_masks_of_long_chunks_are_small() -> None:
    """Those of these chunks, each beside a context of a block, had a gigabyte."""
    sizes = (ChunkSize(20_000, 16, 1), ChunkSize(20_000, 16, 1), ChunkSize(20_000, 900, 57))
    cache = Sequences([1], 1, 1, torch.float32, FORMULATIONS[2]).cache
    paged = build_prompt((), RaggedShape(60_000, sizes), cache, upload).unpack().paged
    assert isinstance(paged, RaggedContext)
    storages = {
        chunk.mask.untyped_storage().data_ptr(): chunk.mask.untyped_storage().nbytes()
        for chunk in paged.chunks
        if chunk.mask is not None
    }
    assert sum(storages.values()) < 16 << 20


@pytest.mark.parametrize("attention", RAGGED, ids=lambda attention: type(attention).__name__)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.lists(st.integers(2, 30), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1)]),
    features,
    st.integers(0, 5),
    st.data(),
)
def test_decodes_and_chunks_in_one_row_equal_plain_attention(
    attention: Attention,
    decoded: list[int],
    chunked: list[int],
    heads: tuple[int, int],
    features: dict[str, Any],
    spare: int,
    data: st.DataObject,
) -> None:
    case = Sequences([*decoded, *chunked], *heads, torch.float32, attention, **features)
    parts = [(row, length - 1, 1) for row, length in enumerate(decoded)]
    for row, length in enumerate(chunked, len(decoded)):
        start = data.draw(st.integers(0, length - 2))
        parts.append((row, start, data.draw(st.integers(2, length - start))))
    for row, start, _ in parts:
        case.fill(row, start)
    scheduled = [case.scheduled(*part) for part in parts]
    decodes, chunks = scheduled[: len(decoded)], scheduled[len(decoded) :]
    layout = lay_out_decodes(decodes, case.cache.num_blocks, case.block_size)
    exact = ragged_shape(chunks, case.block_size)
    shape = MixedShape(
        DecodeShape(len(decodes), case.cache.num_blocks, layout.num_extra),
        attrs.evolve(exact, num_tokens=exact.num_tokens + spare),
    )
    tensors = build_mixed(decodes, layout, chunks, shape, case.cache, upload).unpack()

    def flat(source: list[torch.Tensor]) -> torch.Tensor:
        rows = [source[row][:, start : start + count] for row, start, count in parts]
        return torch.cat((*rows, torch.randn(len(rows[0]), spare, rows[0].shape[-1])), dim=1)[None]

    given_tensors = (flat(source) for source in (case.q, case.k, case.v))
    paged = attention.prepare(tensors.paged, torch.float32)
    out, _ = paged_attention(case.module, *given_tensors, None, paged=paged, **case.passed)
    assert torch.isfinite(out).all()
    assert out.shape[1] == tensors.token_ids.shape[1] == shape.num_tokens
    end = 0
    for (row, start, count), last in zip(parts, tensors.logit_rows.tolist(), strict=True):
        begin, end = end, end + count
        assert last == end - 1
        assert tensors.position_ids[0, begin:end].tolist() == list(range(start, start + count))
        expected = case.expected(row)[start : start + count]
        torch.testing.assert_close(out[0, begin:end], expected, atol=1e-5, rtol=1e-4)
        for position in range(start, start + count):
            held = case.slot(case.cache.key(0), row, position)
            torch.testing.assert_close(held, case.k[row][:, position])


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


@pytest.mark.parametrize("heads", [(1, 1, 64), (9, 3, 64), (4, 2, 80), (4, 2, 32)])
@pytest.mark.parametrize("block_size", [16, 30])
def test_decode_in_bf16_is_as_exact_for_every_size_of_heads(
    heads: tuple[int, int, int], block_size: int
) -> None:
    """Where a head is a multiple of 32, keys are scored four at a time, and the last one by one."""
    case = Sequences(
        [157, 90, 3], *heads[:2], torch.bfloat16, KernelAttention(), block_size, heads[2]
    )
    for row, length in enumerate(case.lengths):
        case.fill(row, length - 1)
    parts = [(row, length - 1, 1) for row, length in enumerate(case.lengths)]
    built = decode_input(case, parts, DecodeShape(3, case.cache.num_blocks))
    out = case.attend(parts, 1, 3, built.unpack().paged)[0].double()
    expected = torch.stack([exact(case, row)[-1] for row in range(3)])
    assert (out - expected).abs().max() < 0.005 * expected.abs().max()


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


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1] * 80, [1000, 1], [1, 1000]], ids=["many", "first", "last"])
def test_threads_wait_for_each_other(lengths: list[int]) -> None:
    """One writes tokens that another reads, or combines what another has computed of a row.

    Many rows are more than a thread takes at once. A long one is computed while the other thread,
    which combines it in one of the two orders, has nothing else to do: several calls make it
    likely that a missing wait is noticed.
    """
    case = Sequences(lengths, 3, 1, torch.float32, KernelAttention(), 256, 64)
    for row, length in enumerate(lengths):
        case.fill(row, length - 1)
    parts = [(row, length - 1, 1) for row, length in enumerate(lengths)]
    shape = DecodeShape(len(lengths), case.cache.num_blocks)
    paged = decode_input(case, parts, shape).unpack().paged
    expected = torch.stack([case.expected(row)[-1] for row in range(len(lengths))])
    before = [x.clone() for x in (case.cache.key(0), case.cache.value(0))]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(50):
            case.cache.key(0).copy_(before[0])
            case.cache.value(0).copy_(before[1])
            out = case.attend(parts, 1, len(lengths), paged)[0]
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    finally:
        torch.set_num_threads(threads)


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


@formulations
@pytest.mark.parametrize("value_dim", [8, 48])
def test_values_may_have_another_width_than_keys(attention: Attention, value_dim: int) -> None:
    case = Sequences([30, 9], 6, 2, torch.float32, attention, 4, 32, value_dim)
    assert attention.supports(case.spec) is None
    case.fill(0, 29)
    case.fill(1, 8)
    parts = [(0, 29, 1), (1, 8, 1)]
    built = decode_input(case, parts, DecodeShape(2, case.cache.num_blocks))
    decoded = case.attend(parts, 1, 2, built.unpack().paged)[0]
    chunks = [case.scheduled(0, 20, 10), case.scheduled(1, 0, 9)]
    padded = build_prompt(chunks, PromptShape(2, 10, 5), case.cache, upload).unpack().paged
    prefilled = case.attend([(0, 20, 10), (1, 0, 9)], 10, 2, padded).view(2, 10, 6, -1)
    for row, (start, end) in enumerate(((20, 30), (0, 9))):
        expected = case.expected(row)
        torch.testing.assert_close(decoded[row], expected[-1], atol=1e-5, rtol=1e-4)
        out = prefilled[row, : end - start]
        torch.testing.assert_close(out, expected[start:end], atol=1e-5, rtol=1e-4)
    if attention.as_operator or isinstance(attention, BlockAttention):
        ragged = prefill(case, [(0, 20, 10), (1, 0, 9)])
        whole = torch.cat((case.expected(0)[20:], case.expected(1)))
        torch.testing.assert_close(ragged, whole, atol=1e-5, rtol=1e-4)


def test_a_kernel_declines_layers_that_it_was_not_compiled_for() -> None:
    own = kernel(3, 32, torch.float32)
    for features in ({}, {"window": 5}, {"chunk": 5}):
        assert own.supports(layer_spec(6, 2, 32, **features)) is None
    sizes = ({"heads": 4}, {"value_width": 16}, {"key_width": 16})
    for changes in (*sizes, {"sinks": True}, {"softcap": 9.0}):
        assert own.supports(attrs.evolve(layer_spec(6, 2, 32), **changes))
    with pytest.raises(native_kernel.NoKernel, match="other heads"):
        attention_kernel_of(layer_spec(6, 2, 32, value_width=16), torch.float32)


COMPUTED = {"window": 5, "chunk": 5, "sinks": True, "softcap": 5.0}
REJECTED = {
    "kind": ("linear_attention", "is of kind linear_attention"),
    "calls": (2, "attends 2 times"),
    "others": (("indices",), "passes indices to attention"),
    "states": ((StateShape(StateKey("conv", 0), (4,)),), "keeps a state"),
}


@given(features)
def test_limits_are_the_features_that_leave_out_keys(drawn: dict[str, Any]) -> None:
    spec, place = layer_spec(6, 2, 16, **drawn), torch.arange(30)
    causal = place <= place[:, None]
    seen = causal & spec.sees(place[:, None], place)
    assert spec.has_limits == bool(LIMITS & drawn.keys()) == bool((causal & ~seen).any())
    assert [int(row.nonzero()[0]) for row in seen] == list(map(spec.first_seen, range(30)))
    assert sorted(limit for limit in spec.limits if limit) == sorted(
        drawn[name] for name in LIMITS & drawn.keys()
    )


@formulations
def test_no_attention_ignores_a_feature_of_a_layer(attention: Attention) -> None:
    declared = {each.name for each in attrs.fields(LayerSpec) if "words" in each.metadata}
    assert declared == COMPUTED.keys() | REJECTED.keys()
    for name in COMPUTED:  # the tests of `attend` draw it
        find(features, lambda drawn, name=name: bool(drawn.get(name)))
    lacking = attention.supports(layer_spec(6, 2, 16, **COMPUTED))
    assert lacking is None, f"what is in FORMULATIONS computes all FEATURES; this {lacking}"
    for name, (value, words) in REJECTED.items():
        assert attention.supports(layer_spec(6, 2, 16, **{name: value})) == words


@pytest.mark.parametrize(
    "call",
    [
        *({"sliding_window": 5}, {"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"scaling": 0.5}),
        {"indices": torch.zeros(4)},
    ],
    ids=lambda call: next(iter(call)),
)
def test_a_call_that_the_spec_does_not_declare_is_an_error(call: dict[str, Any]) -> None:
    case = Sequences([4], 2, 1, torch.float32)
    tensors = (source[0][None] for source in (case.q, case.k, case.v))
    with pytest.raises(ModelError, match="was read as"):
        paged_attention(case.module, *tensors, None, paged=None, **call)


def test_a_mask_that_the_spec_does_not_declare_is_an_error() -> None:
    case = Sequences([4], 2, 1, torch.float32)
    tensors = (source[0][None] for source in (case.q, case.k, case.v))
    with pytest.raises(ModelError, match="attention_mask"):
        paged_attention(case.module, *tensors, torch.zeros(1, 1, 4, 4), paged=None)
