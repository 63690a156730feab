"""The layer types that a paged cache supports."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.kvcache.errors import UnsupportedLayer

PAGED_ATTENTION = frozenset({"attention", "full_attention"})
"""Layer types that store one key and one value vector per token and never overwrite them.

The names are those of ``layer_types`` in a ``transformers`` model configuration.
"""


def require_paged_attention(layer_types: Iterable[str]) -> None:
    """Raises `UnsupportedLayer` for a model with a layer that does not store one entry per token.

    The error names the first such layer and its type. A sliding window overwrites entries that a
    shared prefix needs. A state-space or linear attention layer has one running state per
    sequence, which block copies would corrupt.
    """
    for index, layer_type in enumerate(layer_types):
        if layer_type not in PAGED_ATTENTION:
            raise UnsupportedLayer(
                f"layer {index} is {layer_type!r}, which this cache does not support: only "
                f"{', '.join(sorted(PAGED_ATTENTION))} layers store one entry per token"
            )
