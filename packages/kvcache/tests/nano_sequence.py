"""A sequence as nano-vllm's scheduler passes it to its block manager."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class NanoSequence:
    """What nano-vllm's ``Sequence`` holds of its blocks."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int] = attrs.Factory(list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)
