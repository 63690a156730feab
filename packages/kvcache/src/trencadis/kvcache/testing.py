"""Tests of a block allocator, for its author: random operations, and contents that must not mix.

    from trencadis.kvcache.testing import check_allocator

    def test_my_allocator():
        check_allocator(lambda num_blocks, block_size: MyAllocator(num_blocks, block_size))

It needs Hypothesis, the extra ``test``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
from hypothesis import HealthCheck
from hypothesis import settings as Settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trencadis.kvcache.rounding import ceil_div

DEFAULT_SETTINGS = Settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class AllocatorFault(AssertionError):
    """What an allocator did wrong. Hypothesis adds the shortest operations that show it."""


class PagedAllocator(Protocol):
    """An allocator of the blocks of a KV cache. Sequences are named by integers.

    Nothing but the block tables holds blocks: what no table names is free, or cached and free.
    """

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given to a sequence, with those that are only cached."""

    def allocate(self, seq_id: int, token_ids: Sequence[int], /) -> int | None:
        """Blocks for all these tokens; returns how many of the first tokens need no computation.

        At least one token is left to compute. None where the free blocks do not suffice: nothing
        has changed then.
        """

    def append(self, seq_id: int, token_id: int, /) -> Iterable[tuple[int, int]] | None:
        """A slot for one more token; returns (source, target) of blocks to copy before its write.

        None where no free block is left, as for `allocate`.
        """

    def mark_computed(self, seq_id: int, num_tokens: int, /) -> None:
        """The first ``num_tokens`` of a sequence are in the cache, and may be shared."""

    def free(self, seq_id: int, /) -> None: ...

    def block_table(self, seq_id: int, /) -> Sequence[int]:
        """The blocks of a sequence, in the order of its tokens."""


@runtime_checkable
class ForkingAllocator(Protocol):
    """One whose sequences can be forked; its `append` then copies a shared last block."""

    def fork(self, seq_id: int, child_id: int, /) -> None:
        """A new sequence with the tokens of another one, all of which are computed."""


def check_allocator(
    make: Callable[[int, int], PagedAllocator],
    settings: Settings = DEFAULT_SETTINGS,
    *,
    block_sizes: Sequence[int] = (1, 2, 4),
) -> None:
    """Run random operations on the allocators that ``make(num_blocks, block_size)`` returns.

    Each slot is written with a number that depends on all tokens up to it, and read after each
    operation. So contents that mix, a shared block that is written, leaked blocks and needless
    rejections are found. Raises `AllocatorFault`; an error of the allocator is passed on.
    """
    run_state_machine_as_test(
        lambda: AllocatorMachine(make, block_sizes),  # type: ignore[arg-type]  # any function may make one
        settings=settings,
    )


@attrs.define
class _Sequence:
    """What is expected of a sequence."""

    token_ids: list[int]
    num_computed: int

    def stamps(self) -> list[int]:
        """A number for each token that depends on all tokens up to it."""
        state, stamps = 1, []
        for token_id in self.token_ids:
            state = (state * 1_000_003 + token_id + 1) % (1 << 61)
            stamps.append(state)
        return stamps


PROMPTS = st.builds(
    lambda theme, length, tail: [theme] * length + tail,
    st.integers(0, 1),
    st.integers(1, 14),
    st.lists(st.integers(0, 1), max_size=4),
)
"""Prompts of 1 to 18 tokens, which often begin alike."""


class AllocatorMachine(RuleBasedStateMachine):
    """The operations on one allocator, and what must hold after each."""

    def __init__(
        self, make: Callable[[int, int], PagedAllocator], block_sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self._make = make
        self._block_sizes = list(block_sizes)
        self._sequences: dict[int, _Sequence] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._next_id = 1
        self._has_fault = False

    @initialize(num_blocks=st.integers(3, 16), data=st.data())
    def start(self, num_blocks: int, data: Any) -> None:
        block_size = data.draw(st.sampled_from(self._block_sizes))
        self.num_blocks, self.size = num_blocks, block_size
        self.allocator = self._make(num_blocks, block_size)
        self._require(
            self.allocator.num_free_blocks == num_blocks,
            f"a new allocator of {num_blocks} blocks has {self.allocator.num_free_blocks} free",
        )

    @rule(prompt=PROMPTS)
    def allocate(self, prompt: list[int]) -> None:
        seq_id, before = self._new_id(), self._state()
        needed = ceil_div(len(prompt), self.size)
        cached = self.allocator.allocate(seq_id, tuple(prompt))
        if cached is None:
            self._rejected(f"allocate of {needed} blocks", needed, before)
            return
        self._require(
            0 <= cached < len(prompt),
            f"allocate says that {cached} of {len(prompt)} tokens are cached: one must be left",
        )
        self._sequences[seq_id] = _Sequence(prompt, cached)

    @precondition(lambda self: self._sequences)
    @rule(data=st.data(), share=st.sampled_from([0.3, 1.0]))
    def prefill(self, data: Any, share: float) -> None:
        seq_id, sequence = self._pick(data)
        left = len(sequence.token_ids) - sequence.num_computed
        self._compute(seq_id, sequence.num_computed + ceil_div(round(share * left * 10), 10))

    @precondition(lambda self: self._sequences)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data: Any, token_ids: list[int]) -> None:
        seq_id, sequence = self._pick(data)
        for token_id in token_ids:
            self._compute(seq_id, len(sequence.token_ids))
            before = self._state()
            copies = self.allocator.append(seq_id, token_id)
            if copies is None:
                self._rejected("append", 1, before)
                return
            for source, target in copies:
                for offset in range(self.size):
                    if (source, offset) in self._slots:
                        self._slots[target, offset] = self._slots[source, offset]
            sequence.token_ids.append(token_id)
        self._compute(seq_id, len(sequence.token_ids))

    @precondition(lambda self: self._sequences and isinstance(self.allocator, ForkingAllocator))
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        seq_id, sequence = self._pick(data)
        self._compute(seq_id, len(sequence.token_ids))
        child_id = self._new_id()
        self.allocator.fork(seq_id, child_id)  # type: ignore[attr-defined]
        self._sequences[child_id] = _Sequence(list(sequence.token_ids), sequence.num_computed)

    @precondition(lambda self: self._sequences)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        seq_id, _ = self._pick(data)
        self.allocator.free(seq_id)
        del self._sequences[seq_id]

    @invariant()
    def tables_have_a_block_for_each_token(self) -> None:
        for seq_id, sequence in self._sequences.items():
            table = self._table(seq_id)
            needed = ceil_div(len(sequence.token_ids), self.size)
            self._require(
                len(set(table)) == len(table) == needed,
                f"{len(sequence.token_ids)} tokens have the blocks {table}: {needed} are needed, "
                "each once",
            )

    @invariant()
    def no_block_is_lost(self) -> None:
        if not hasattr(self, "allocator"):
            return
        held = {block for seq_id in self._sequences for block in self._table(seq_id)}
        self._require(
            len(held) + self.allocator.num_free_blocks == self.num_blocks,
            f"{len(held)} blocks are in tables and {self.allocator.num_free_blocks} free, of "
            f"{self.num_blocks}",
        )

    @invariant()
    def contents_do_not_mix(self) -> None:
        for seq_id, sequence in self._sequences.items():
            table, stamps = self._table(seq_id), sequence.stamps()
            for position in range(sequence.num_computed):
                block = table[position // self.size]
                self._require(
                    self._slots.get((block, position % self.size)) == stamps[position],
                    f"block {block} has another content than sequence {seq_id} has at token "
                    f"{position}",
                )

    def teardown(self) -> None:
        if self._has_fault or not hasattr(self, "allocator"):
            return
        for seq_id in self._sequences:
            self.allocator.free(seq_id)
        self._sequences.clear()
        self.no_block_is_lost()

    def _compute(self, seq_id: int, end: int) -> None:
        """What a forward pass writes."""
        self.tables_have_a_block_for_each_token()
        sequence = self._sequences[seq_id]
        table, stamps = self._table(seq_id), sequence.stamps()
        for position in range(sequence.num_computed, end):
            self._slots[table[position // self.size], position % self.size] = stamps[position]
        if end > sequence.num_computed:
            sequence.num_computed = end
            self.allocator.mark_computed(seq_id, end)

    def _rejected(self, what: str, needed: int, before: object) -> None:
        free = self.allocator.num_free_blocks
        self._require(needed > free, f"{what} is rejected though {free} blocks are free")
        self._require(self._state() == before, f"{what} is rejected and changes something")

    def _state(self) -> tuple[int, dict[int, list[int]]]:
        tables = {seq_id: self._table(seq_id) for seq_id in self._sequences}
        return self.allocator.num_free_blocks, tables

    def _table(self, seq_id: int) -> list[int]:
        return [int(block) for block in self.allocator.block_table(seq_id)]

    def _pick(self, data: Any) -> tuple[int, _Sequence]:
        seq_id = data.draw(st.sampled_from(sorted(self._sequences)))
        return seq_id, self._sequences[seq_id]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _require(self, holds: bool, fault: str) -> None:
        if not holds:
            self._has_fault = True
            raise AllocatorFault(fault)
