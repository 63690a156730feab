"""The exact shapes of a step's forward passes, before they are padded to a bucket.

Kept apart from `model_input` because the simulated device uses shapes and does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.kvcache import ceil_div
from trencadis.scheduler import ScheduledSequence


@attrs.frozen
class PromptShape:
    """Padded shape of a prefill batch: sequences, tokens of each, context blocks of each."""

    batch: int
    query: int
    context_blocks: int


@attrs.frozen
class DecodeShape:
    """Padded shape of a decode batch: sequences, blocks of the cache prefix, gathered pairs.

    ``extra`` is the number of (block, sequence) pairs beyond each block's first owner: a block that
    several sequences share is read in place for its first owner and gathered for the others.
    """

    batch: int
    blocks: int
    extra: int = 0


ForwardShape = PromptShape | DecodeShape


def prompt_shape(chunks: Sequence[ScheduledSequence], block_size: int) -> PromptShape:
    """The smallest shape that holds these prefill chunks."""
    return PromptShape(
        len(chunks),
        max(len(chunk.token_ids) for chunk in chunks),
        max(ceil_div(chunk.start, block_size) for chunk in chunks),
    )


def decode_shape(decodes: Sequence[ScheduledSequence]) -> DecodeShape:
    """The smallest shape: the cache prefix up to the highest block of these sequences."""
    highest = int(np.concatenate([decode.block_table for decode in decodes]).max())
    return DecodeShape(len(decodes), 1 + highest)
