"""How long a forward pass takes: a roofline model plus the host's launch time.

    seconds = max(operations / achieved operations per s, bytes / achieved bytes per s) + launch

Not modelled: activation traffic (small compared with weights in decode, hidden behind compute in
long prefill), and the host's work between two steps.
"""

from __future__ import annotations

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.simulated.hardware import Hardware
from trencadis.engine.simulated.model_shape import LOGIT_BYTES, ModelShape
from trencadis.warmup import Phase

LAUNCHES_PER_LAYER = 10
"""Two norms, four products of attention and feed-forward (fused where they share their input),
rotary embedding, cache write, attention, activation; residuals are fused into norms."""


@attrs.frozen
class Work:
    """The work of a forward pass: floating-point operations, bytes of device memory traffic."""

    flops: float
    hbm_bytes: float


@attrs.frozen
class CostModel:
    """Costs of one model on one accelerator, with a KV cache in blocks of ``block_size`` tokens.

    A multiply-add counts as 2 operations. A prompt bucket has the axes (batch,
    query, context_blocks), a decode bucket (batch, blocks), as in `trencadis.bucketing`.
    """

    model: ModelShape
    hardware: Hardware
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""
        return self.model.kv_bytes_per_token * self.block_size

    def work(self, phase: Phase, bucket: Bucket) -> Work:
        """The work of a forward pass padded to ``bucket``."""
        if phase is Phase.PROMPT:
            return self._prompt_work(*bucket.shape)
        return self._decode_work(*bucket.shape)

    def device_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds on the device."""
        work, hardware = self.work(phase, bucket), self.hardware
        return max(
            work.flops / (hardware.flops_per_s * hardware.compute_efficiency),
            work.hbm_bytes / self._achieved_bytes_per_s,
        )

    def launch_s(self, *, captured: bool) -> float:
        """Seconds that the host needs to launch a forward pass."""
        if captured:
            return self.hardware.replay_s
        return self.hardware.launch_s * LAUNCHES_PER_LAYER * self.model.num_layers

    def sample_s(self, rows: int) -> float:
        """Seconds to sample ``rows`` rows of logits: read them, and copy tokens to the host."""
        read = rows * self.model.vocab_size * LOGIT_BYTES / self._achieved_bytes_per_s
        return read + self.hardware.sample_s

    def swap_s(self, num_blocks: int) -> float:
        """Seconds to copy blocks between host and device, in one direction."""
        return num_blocks * self.block_bytes / self.hardware.link_bytes_per_s

    def move_s(self, num_blocks: int) -> float:
        """Seconds to copy blocks within the device. Each block is read and written."""
        return 2 * num_blocks * self.block_bytes / self._achieved_bytes_per_s

    @property
    def _achieved_bytes_per_s(self) -> float:
        return self.hardware.hbm_bytes_per_s * self.hardware.hbm_efficiency

    def _prompt_work(self, batch: int, query: int, context_blocks: int) -> Work:
        """Each token attends to the padded context and, on average, to half of its own chunk."""
        tokens, context = batch * query, context_blocks * self.block_size
        return self._work(
            tokens=tokens,
            pairs=tokens * (context + (query + 1) / 2),
            kv_read=batch * context,
            rows=batch,
        )

    def _decode_work(self, batch: int, blocks: int) -> Work:
        """The cache prefix is read once; each block is multiplied with the queries of one row.

        Not modelled: the extra gather of a block that several rows share.
        """
        prefix = blocks * self.block_size
        return self._work(tokens=batch, pairs=prefix, kv_read=prefix, rows=batch)

    def _work(self, *, tokens: int, pairs: float, kv_read: int, rows: int) -> Work:
        """``pairs`` of a token and one that it attends to; ``rows`` of logits are wanted."""
        model = self.model
        table = model.vocab_size * model.hidden_size
        matrices = model.num_layers * model.layer_matrices
        attention = 4 * model.num_layers * model.num_heads * model.head_dim
        weights = (matrices + table + tokens * model.hidden_size) * model.dtype_bytes
        kv = (kv_read + tokens) * model.kv_bytes_per_token
        return Work(
            flops=2 * tokens * matrices + attention * pairs + 2 * rows * table,
            hbm_bytes=weights + kv + rows * model.vocab_size * LOGIT_BYTES,
        )
