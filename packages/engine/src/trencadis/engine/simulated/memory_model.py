"""The device memory that weights, activations, logits and graphs take."""

from __future__ import annotations

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.errors import ConfigError
from trencadis.engine.simulated.hardware import Hardware
from trencadis.engine.simulated.model_shape import LOGIT_BYTES, ModelShape
from trencadis.warmup import Phase, format_bytes


@attrs.frozen
class MemoryModel:
    """Sizes in bytes of what a model needs on an accelerator.

    Both formulas for activations are fitted to the log of seed 000 (Llama 3 8B on Gaudi 2). In it,
    a prefill graph of 1,024 tokens takes 1.44 GiB, a decode graph 3.4 MiB on average over batches
    of 1, 2 and 4, and the profiling run of 4,096 tokens 504 MiB.
    """

    model: ModelShape
    hardware: Hardware

    def graph_bytes(self, phase: Phase, bucket: Bucket) -> int:
        """A captured graph. On Gaudi it holds the activations between layers, for every token."""
        fixed = self.hardware.graph_bytes
        if not self.hardware.graph_keeps_activations:
            return fixed
        batch, *rest = bucket.shape
        tokens = batch * rest[0] if phase is Phase.PROMPT else batch
        kept = self.model.intermediate_size + 2 * self.model.hidden_size
        return fixed + tokens * self.model.num_layers * kept * self.model.dtype_bytes

    def workspace(self, tokens: int, rows: int) -> int:
        """The largest forward pass: activations of one layer for ``tokens``, logits of ``rows``."""
        per_token = 3 * self.model.intermediate_size + 4 * self.model.hidden_size
        logits = rows * self.model.vocab_size * LOGIT_BYTES
        return tokens * per_token * self.model.dtype_bytes + logits

    def free_after_profile(self, tokens: int, rows: int) -> int:
        """Free memory beside the weights and the largest forward pass.

        Raises `ConfigError` where they do not fit.
        """
        needed = self.model.weight_bytes + self.workspace(tokens, rows)
        free = self.hardware.hbm_bytes - needed
        if free <= 0:
            raise ConfigError(
                f"the model needs {format_bytes(needed)} for weights and the largest forward pass, "
                f"{self.hardware.name} has {format_bytes(self.hardware.hbm_bytes)}: choose a "
                "smaller model or a larger device, or lower max_num_batched_tokens"
            )
        return free
