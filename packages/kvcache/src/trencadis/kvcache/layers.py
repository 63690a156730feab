"""Which layers may live in a paged cache at all."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.kvcache.errors import UnsupportedLayer

PAGED_ATTENTION = frozenset({"attention", "full_attention"})
"""Kinds whose state is one key and one value vector per token, each written once.

The names are those of ``layer_types`` in a ``transformers`` model configuration.
"""


def require_paged_attention(layer_types: Iterable[str]) -> None:
    """Refuse a model with a layer whose state is not one entry per token.

    A sliding window overwrites what a shared prefix needs; a state space or linear attention
    layer has one running state, which a block copy would tear. Raises `UnsupportedLayer`, which
    names the first such layer and its kind.
    """
    for index, kind in enumerate(layer_types):
        if kind not in PAGED_ATTENTION:
            raise UnsupportedLayer(
                f"layer {index} is {kind!r}, which this cache cannot hold: only "
                f"{', '.join(sorted(PAGED_ATTENTION))} layers keep one entry per token"
            )
