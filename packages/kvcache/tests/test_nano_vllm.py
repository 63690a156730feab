"""`NanoBlockManager` call by call. `test_testing` checks it as an allocator."""

from __future__ import annotations

from nano_sequence import NanoSequence

from trencadis.kvcache.nano_vllm import NanoBlockManager

SIZE = 4


def compute(blocks: NanoBlockManager, seq: NanoSequence, count: int) -> None:
    """A step of nano-vllm's scheduler that computes so many tokens."""
    seq.num_scheduled_tokens = count
    blocks.hash_blocks(seq)
    seq.num_cached_tokens += count


def admitted(blocks: NanoBlockManager, seq_id: int, tokens: list[int]) -> NanoSequence:
    seq = NanoSequence(seq_id, list(tokens))
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
    assert blocks.can_allocate(NanoSequence(1, list(range(3 * SIZE + 1)))) == -1
    first = admitted(blocks, 1, list(range(2 * SIZE)))
    assert blocks.can_allocate(NanoSequence(2, list(range(50, 50 + SIZE + 1)))) == -1
    blocks.deallocate(first)
    assert (first.block_table, first.num_cached_tokens) == ([], 0)
    assert blocks.can_allocate(NanoSequence(2, list(range(50, 50 + 3 * SIZE)))) == 0


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
    assert blocks.can_allocate(NanoSequence(2, tokens)) == 0, "nothing is computed yet"
    compute(blocks, first, SIZE + 1)
    assert blocks.can_allocate(NanoSequence(2, tokens)) == 1
    compute(blocks, first, SIZE)
    second = admitted(blocks, 2, tokens)
    assert second.num_cached_tokens == 2 * SIZE
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.deallocate(first)
    assert admitted(blocks, 3, tokens).block_table[:2] == second.block_table[:2]
