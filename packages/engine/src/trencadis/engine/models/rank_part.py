"""The part of a model that one rank of tensor parallelism has.

Each rank has a share of the attention heads and of the columns between two linear layers, so it
computes a part of each sum, and the ranks add their parts (`rank_modules`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.engine.errors import ModelError
from trencadis.engine.models.layer_spec import LayerSpec


@attrs.frozen
class RankPart:
    """Rank ``rank`` of ``size`` ranks, counted from 0."""

    rank: int
    size: int

    def layers_of(self, layers: Sequence[LayerSpec], name: str) -> tuple[LayerSpec, ...]:
        """The layers as this rank computes them, with its share of the heads.

        Where there are fewer key-value heads than ranks, several ranks have the same one. Raises
        `ModelError` for heads that cannot be shared equally.
        """
        return tuple(
            attrs.evolve(
                layer,
                heads=self._share(layer.heads, "attention heads", name),
                kv_heads=self._share_of_kv_heads(layer.kv_heads, name),
            )
            for layer in layers
        )

    def repeats_kv_heads(self, layers: Sequence[LayerSpec]) -> bool:
        """Whether a key-value head is that of several ranks. ``layers`` are those of the model."""
        return any(layer.kv_heads < self.size for layer in layers)

    def kv_heads_of(self, num_kv_heads: int) -> range:
        """The key-value heads of this rank, of so many."""
        first = self.rank * num_kv_heads // self.size
        return range(first, first + max(1, num_kv_heads // self.size))

    def _share(self, count: int, what: str, name: str) -> int:
        if count % self.size:
            raise ModelError(
                f"{name} cannot be served with tensor_parallel_size {self.size}, which does not "
                f"divide its {count} {what}: choose a number that does"
            )
        return count // self.size

    def _share_of_kv_heads(self, count: int, name: str) -> int:
        if 0 < count < self.size and self.size % count == 0:
            return 1
        return self._share(count, "key-value heads", name)
