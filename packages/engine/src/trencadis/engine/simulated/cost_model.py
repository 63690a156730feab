"""How long the parts of a step take: a roofline for each part of a forward pass, and the host.

    seconds = max(operations / achieved operations per s, bytes / achieved bytes per s)

A part waits for the one before it, so the times of the parts are added; within a part, memory is
read while the matrix engines compute (on Gaudi: forum.habana.ai/t/1272). Not modelled: activation
traffic, apart from the share of the peaks that `Hardware` states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.runner.shapes import GATHER_COST
from trencadis.engine.simulated.hardware import Hardware
from trencadis.engine.simulated.model_shape import LOGIT_BYTES, ModelShape
from trencadis.kvcache import ceil_div, most_window_blocks
from trencadis.warmup import Phase

LAUNCHES_PER_LAYER = 10
"""Two norms, four products of attention and feed-forward (fused where they share their input),
rotary embedding, cache write, attention, activation; residuals are fused into norms."""

SAMPLER_LAUNCHES = 4
"""Unpacking the sampling parameters, editing the logits, drawing, collecting the ids."""

END_PROGRAMS = 2
"""Of a forward pass: before the layers and after them (`CompiledForward`)."""

SAMPLER_PROGRAMS = 2
"""A copy of the sampler's numbers, and the draw (docs/gaudi.md, counted on the stand-in)."""

LOGIT_READS = {"greedy": 1.1, "random": 1.15, "top_p": 4.9, "top_k": 5.6}
"""How often the program of each kind of draw reads the logits: 128,256 tokens, pointwise operations
fused (tests/logit_reads.py). A batch is drawn by one program, which its most demanding row asks
for."""

HOST_LOGIT_S = 1.6e-9
"""Seconds of the host per logit, to find the largest of a row: 32 rows of 128,256, PyTorch on one
core of an AMD EPYC, 2026-11-21."""

_INDEX_BYTES = 4
"""An id, position or block number in the array that is uploaded for a forward pass, and a sampled
token id."""


class Sharing(NamedTuple):
    """What a decode batch reads beside each block once, for the sequence that owns it.

    The first ``scored`` blocks are scored for every sequence of the batch; ``gathered`` are pairs
    of a block elsewhere and a further sequence that has it. See `DecodeShape`.
    """

    scored: int = 0
    gathered: int = 0


NOT_SHARED = Sharing()


@attrs.frozen
class Part:
    """Work of one part of a forward pass.

    Floating-point operations of its matrix products, padding included; bytes of device memory
    traffic; bytes of an element of the products' operands.
    """

    flops: float
    hbm_bytes: float
    element_bytes: int


class _Read(NamedTuple):
    """What so many ``layers`` read of the cache: ``positions``, counted as often as each is read.

    ``attended``: positions that the queries of one sequence are multiplied with, in sum;
    ``attended_by_all``: those of all.
    """

    layers: int
    attended: float
    positions: int
    attended_by_all: int = 0


@attrs.frozen
class Work:
    """The work of a forward pass: the layers' weight matrices, their attention, the output head."""

    matrices: Part
    attention: Part
    head: Part


@attrs.frozen
class ForwardTimes:
    """Seconds on the device of the parts of a forward pass, as in `Work`, and of collectives."""

    matrices_s: float
    attention_s: float
    head_s: float
    collectives_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all parts, one after the other."""
        return self.matrices_s + self.attention_s + self.head_s + self.collectives_s


@attrs.frozen
class CostModel:
    """Costs of one model on one accelerator, with a KV cache in blocks of ``block_size`` tokens.

    ``num_ranks``: accelerators that divide the model; ``model`` is what one of them has then, see
    `ModelShape.divided`.
    ``draw``: what requests ask for, one of `LOGIT_READS`. ``compiled``: a forward pass without a
    graph is `num_programs` programs, as in the default mode of a Gaudi.

    A multiply-add counts as 2 operations. A prompt bucket has the axes (batch,
    query, context_blocks), a decode bucket (batch, blocks), as in `trencadis.bucketing`.
    """

    model: ModelShape
    hardware: Hardware
    block_size: int
    draw: str = "greedy"
    compiled: bool = False
    num_ranks: int = 1

    @property
    def num_programs(self) -> int:
        """What a forward pass starts without a graph: programs, or operations."""
        if self.compiled:
            return self.model.num_layers + END_PROGRAMS
        return LAUNCHES_PER_LAYER * self.model.num_layers

    @property
    def num_sampler_launches(self) -> int:
        """What sampling starts."""
        return SAMPLER_PROGRAMS if self.compiled else SAMPLER_LAUNCHES

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""
        return self.model.kv_bytes_per_token * self.block_size

    def work(self, phase: Phase, bucket: Bucket, sharing: Sharing = NOT_SHARED) -> Work:
        """The work of a forward pass padded to ``bucket``; ``sharing`` is of decode."""
        if phase is Phase.PROMPT:
            return self._prompt_work(*bucket.shape)
        batch, blocks = bucket.shape
        return self._decode_work(batch, blocks, sharing)

    def forward_times(
        self, phase: Phase, bucket: Bucket, sharing: Sharing = NOT_SHARED
    ) -> ForwardTimes:
        """Seconds on the device, by part."""
        work = self.work(phase, bucket, sharing)
        return ForwardTimes(
            self._part_s(work.matrices),
            self._part_s(work.attention),
            self._part_s(work.head),
            self.collectives_s(phase, bucket),
        )

    def collectives_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds in which the ranks exchange values: a sum of hidden states after the embedding
        and after attention and feed-forward of each layer, and the logits."""
        if self.num_ranks == 1:
            return 0.0
        batch, *rest = bucket.shape
        tokens = batch * rest[0] if phase is Phase.PROMPT else batch
        hidden = tokens * self.model.hidden_size * self.model.dtype_bytes
        # To gather is the second half of a sum.
        logits = batch * self._logit_bytes * self.num_ranks // 2
        sums = (2 * self.model.num_layers + 1) * self.hardware.sum_s(self.num_ranks, hidden)
        return sums + self.hardware.sum_s(self.num_ranks, logits)

    def compute_share(self, phase: Phase, bucket: Bucket) -> float:
        """The share of a forward pass in which the matrix engines work, 0 to 1.

        The rest waits for memory. A part is bound by one of both, so this is its operations' time
        over its own.
        """
        work = self.work(phase, bucket)
        parts = (work.matrices, work.attention, work.head)
        return sum(map(self._compute_s, parts)) / sum(map(self._part_s, parts))

    def device_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds on the device."""
        return self.forward_times(phase, bucket).total_s

    def launch_s(self, device_s: float, *, captured: bool) -> float:
        """Seconds that launching a forward pass adds to its ``device_s`` on the device."""
        hardware = self.hardware
        if captured:
            return hardware.replay_s
        if self.compiled:
            # The device starts with the first one, while the host starts the others.
            started_s = hardware.replay_s * self.num_programs
            return max(hardware.replay_s, started_s - device_s)
        launches_s = hardware.launch_s * self.num_programs
        if hardware.launches_overlap:
            return max(hardware.launch_s, launches_s - device_s)
        return launches_s

    def upload_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds to copy the batch to the device: one array of int32.

        Id, position and slot of each token; owner and filled positions of each block; the row of
        the logits and the sampling parameters of each sequence are a few numbers as well.
        """
        batch, *rest = bucket.shape
        tokens = batch * rest[0] if phase is Phase.PROMPT else batch
        blocks = batch * rest[1] if phase is Phase.PROMPT else rest[0]
        size = _INDEX_BYTES * (3 * tokens + 2 * blocks + 8 * batch)
        return self.hardware.copy_s + size / self.hardware.link_bytes_per_s

    def sample_s(self, rows: int) -> float:
        """Seconds to sample ``rows`` rows of logits on the device: read them, launch."""
        read = (
            LOGIT_READS[self.draw] * rows * self._logit_bytes / self.hardware.achieved_bytes_per_s
        )
        return read + self.num_sampler_launches * self.hardware.launch_s

    def fetch_s(self, rows: int) -> float:
        """Seconds to wait for the device and copy ``rows`` sampled token ids to the host."""
        return self.hardware.copy_s + rows * _INDEX_BYTES / self.hardware.link_bytes_per_s

    def host_sample_s(self, rows: int) -> float:
        """Seconds of the host to sample ``rows`` rows of logits that it has."""
        return rows * self.model.vocab_size * HOST_LOGIT_S

    def fetch_logits_s(self, rows: int) -> float:
        """Seconds to wait for the device and copy ``rows`` rows of logits to the host."""
        return self.hardware.copy_s + rows * self._logit_bytes / self.hardware.link_bytes_per_s

    def host_s(self, num_seqs: int) -> float:
        """Seconds of the host in a step of ``num_seqs`` sequences, to decide and to report it."""
        return self.hardware.step_s + num_seqs * self.hardware.sequence_s

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to copy blocks between host and device, in one direction."""
        return num_blocks * self.block_bytes / self.hardware.link_bytes_per_s

    def move_s(self, num_blocks: int) -> float:
        """Seconds to copy blocks within the device. Each block is read and written."""
        return 2 * num_blocks * self.block_bytes / self.hardware.achieved_bytes_per_s

    @property
    def _logit_bytes(self) -> int:
        """Bytes of one row of logits."""
        return self.model.vocab_size * LOGIT_BYTES

    def _part_s(self, part: Part) -> float:
        memory_s = part.hbm_bytes / self.hardware.achieved_bytes_per_s
        return max(self._compute_s(part), memory_s)

    def _compute_s(self, part: Part) -> float:
        return part.flops / self.hardware.product_flops_per_s(part.element_bytes)

    def _prompt_work(self, batch: int, query: int, context_blocks: int) -> Work:
        """Each token attends to the padded context and, on average, to half of its own chunk."""
        tokens = batch * query
        reads = []
        for layers, blocks in self._layers_by_read(context_blocks):
            context = (context_blocks if blocks is None else blocks) * self.block_size
            attended = batch * (context + (query + 1) / 2)
            reads.append(_Read(layers, attended, batch * context))
        return self._work(tokens, reads, queries=query, rows=batch)

    def _decode_work(self, batch: int, blocks: int, sharing: Sharing) -> Work:
        """The cache prefix is read once; each block is multiplied with the queries of one row,
        those that are scored for every sequence with the queries of all.

        What is gathered is read, written as a copy, and read again by the product: so are the last
        blocks of each sequence, for layers with a window that reads less by that.
        """
        prefix, scored, gathered = (
            count * self.block_size for count in (blocks, sharing.scored, sharing.gathered)
        )
        reads = []
        most = (blocks + sharing.gathered) / (GATHER_COST * batch)
        for layers, last in self._layers_by_read(most):
            if last is None:
                positions = prefix + GATHER_COST * gathered
                reads.append(_Read(layers, prefix - scored + gathered, positions, scored))
            else:
                own = batch * last * self.block_size
                reads.append(_Read(layers, own, GATHER_COST * own))
        return self._work(batch, reads, queries=1, rows=batch)

    def _layers_by_read(self, most: float) -> list[tuple[int, int | None]]:
        """How many layers read so many last blocks of each sequence, None: all blocks.

        ``most``: below how many blocks of each sequence it reads less.
        """
        found: dict[int | None, int] = {}
        for window in self.model.windows:
            needed = most_window_blocks(window, 1, self.block_size)
            key = needed if needed < most else None
            found[key] = found.get(key, 0) + 1
        full = self.model.num_layers - len(self.model.windows)
        found[None] = found.get(None, 0) + full
        return [(layers, blocks) for blocks, layers in found.items() if layers]

    def _work(
        self,
        tokens: int,
        reads: Sequence[_Read],
        *,
        queries: int,
        rows: int,
    ) -> Work:
        """What layers ``read`` is attended to by ``queries`` tokens, or by all ``tokens``.

        ``rows`` of logits are wanted.
        """
        model = self.model
        table = self._table
        num_used, rows_of_each = self._routed(tokens)
        read = model.dense_matrices + num_used * model.expert_matrices
        computed = (
            self._padded(tokens) * model.dense_matrices
            + num_used * self._padded(rows_of_each) * model.expert_matrices
        )
        # One product for all query heads that share a KV head.
        group = model.num_heads // model.num_kv_heads
        together, of_all = self._padded(queries * group), self._padded(tokens * group)
        products = sum(
            each.layers * (together * each.attended + of_all * each.attended_by_all)
            for each in reads
        )
        positions = sum(each.layers * (each.positions + tokens) for each in reads)
        return Work(
            matrices=Part(
                flops=2 * model.num_layers * computed,
                hbm_bytes=model.num_layers * read * model.matrix_dtype_bytes
                + tokens * model.hidden_size * model.dtype_bytes,
                element_bytes=model.matrix_dtype_bytes,
            ),
            attention=Part(
                flops=4 * model.num_kv_heads * model.head_dim * products,
                hbm_bytes=positions * model.kv_bytes_per_token / model.num_layers,
                element_bytes=model.attention_dtype_bytes,
            ),
            head=Part(
                flops=2 * self._padded(rows) * table,
                hbm_bytes=table * model.dtype_bytes + rows * self._logit_bytes,
                element_bytes=model.dtype_bytes,
            ),
        )

    def _routed(self, tokens: int) -> tuple[float, int]:
        """How many experts of a layer some token is routed to, and the tokens of each.

        Each expert is as likely as any other. What no token is routed to is not read.
        """
        model = self.model
        if not model.num_experts:
            return 0.0, 0
        share = model.experts_per_token / model.num_experts
        num_used = model.num_experts * (1.0 - (1.0 - share) ** tokens)
        return num_used, math.ceil(tokens * model.experts_per_token / num_used)

    @property
    def _table(self) -> int:
        """Elements of the output head."""
        return self.model.vocab_size * self.model.hidden_size

    def _padded(self, rows: int) -> int:
        """The rows that a product of ``rows`` rows computes."""
        size = self.hardware.product_rows
        return ceil_div(rows, size) * size
