"""`NanoBlockManager` with sequences as nano-vllm has them; `interop` runs its own scheduler."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache.nano_vllm import NanoBlockManager

SIZE = 4


@attrs.define(eq=False)
class Sequence:
    """What nano-vllm's ``Sequence`` holds of its blocks."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int] = attrs.Factory(list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


def compute(blocks: NanoBlockManager, seq: Sequence, count: int) -> None:
    """A step of nano-vllm's scheduler that computes so many tokens."""
    seq.num_scheduled_tokens = count
    blocks.hash_blocks(seq)
    seq.num_cached_tokens += count


def admitted(blocks: NanoBlockManager, seq_id: int, tokens: list[int]) -> Sequence:
    seq = Sequence(seq_id, list(tokens))
    cached = blocks.can_allocate(seq)
    assert cached >= 0
    blocks.allocate(seq, cached)
    assert seq.num_cached_tokens == cached * SIZE
    return seq


def test_blocks_are_those_of_nano_vllm_from_0_on() -> None:
    blocks = NanoBlockManager(3, SIZE)
    seq = admitted(blocks, 7, list(range(3 * SIZE)))
    assert sorted(seq.block_table) == [0, 1, 2]
    assert seq.num_cached_tokens == 0


def test_what_does_not_fit_now_is_minus_one_and_takes_nothing() -> None:
    blocks = NanoBlockManager(3, SIZE)
    assert blocks.can_allocate(Sequence(1, list(range(3 * SIZE + 1)))) == -1
    first = admitted(blocks, 1, list(range(2 * SIZE)))
    assert blocks.can_allocate(Sequence(2, list(range(50, 50 + SIZE + 1)))) == -1
    blocks.deallocate(first)
    assert (first.block_table, first.num_cached_tokens) == ([], 0)
    assert blocks.can_allocate(Sequence(2, list(range(50, 50 + 3 * SIZE)))) == 0


def test_a_block_is_needed_for_the_first_token_of_one_alone() -> None:
    blocks = NanoBlockManager(2, SIZE)
    seq = admitted(blocks, 1, list(range(SIZE)))
    other = admitted(blocks, 2, [9, 9])
    assert blocks.can_append(other)
    seq.token_ids.append(4)
    assert not blocks.can_append(seq), "no block is free"
    blocks.deallocate(other)
    assert blocks.can_append(seq)
    blocks.may_append(seq)
    assert len(seq.block_table) == 2
    seq.token_ids.append(5)
    assert blocks.can_append(seq)
    blocks.may_append(seq)
    assert len(seq.block_table) == 2


def test_a_prompt_shares_the_full_blocks_that_are_computed() -> None:
    blocks = NanoBlockManager(8, SIZE)
    tokens = list(range(2 * SIZE + 1))
    first = admitted(blocks, 1, tokens)
    assert blocks.can_allocate(Sequence(2, tokens)) == 0, "nothing is computed yet"
    compute(blocks, first, SIZE + 1)
    assert blocks.can_allocate(Sequence(2, tokens)) == 1
    compute(blocks, first, SIZE)
    second = admitted(blocks, 2, tokens)
    assert second.num_cached_tokens == 2 * SIZE
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.deallocate(first)
    assert admitted(blocks, 3, tokens).block_table[:2] == second.block_table[:2]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 9)),
        min_size=1,
        max_size=12,
    )
)
def test_every_sequence_reads_its_own_tokens(requests: list[tuple[list[int], int]]) -> None:
    blocks, slots = NanoBlockManager(9, SIZE), dict[tuple[int, int], int]()
    for seq_id, (prompt, num_new) in enumerate(requests):
        seq = admitted(blocks, seq_id, prompt)
        for number in range(num_new):
            if number:
                seq.token_ids.append(number % 3)
                assert blocks.can_append(seq)
                blocks.may_append(seq)
            begin = min(seq.num_cached_tokens, len(seq) - 1)
            for at in range(begin, len(seq)):
                slots[seq.block_table[at // SIZE], at % SIZE] = seq.token_ids[at]
            compute(blocks, seq, len(seq) - seq.num_cached_tokens)
            held = [slots[seq.block_table[at // SIZE], at % SIZE] for at in range(len(seq))]
            assert held == seq.token_ids
        blocks.deallocate(seq)
    assert blocks.manager.pool.num_free_blocks == 9
