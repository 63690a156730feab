"""Sums over ranks through shared memory: those of the process group, whatever the shape."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.devices.cpu import rank_sums
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.rank_sums import RankSums
from trencadis.engine.models.rank_part import RankPart

LIMIT_SECONDS = 60.0


def sums_of(size: int, limit_s: float = LIMIT_SECONDS) -> list[RankSums]:
    """The ends of the ranks, in this process. Skips without a compiler."""
    memory = os.memfd_create("sums")
    try:
        return [RankSums(memory, RankPart(rank, size), limit_s) for rank in range(size)]
    except NoKernel as error:
        pytest.skip(str(error))
    finally:
        os.close(memory)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each in a thread."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
        assert not thread.is_alive()
    return results


@pytest.fixture(scope="module")
def of_sizes() -> Iterator[dict[int, list[RankSums]]]:
    yield {size: sums_of(size) for size in (1, 2, 3)}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 3]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([(0, 8), (1, 1), (3, 1023), (1, 1024), (2, 1030), (32, 96), (5, 2, 7)]),
    st.integers(1, 5),
    st.booleans(),
)
def test_all_ranks_get_the_same_sum(
    of_sizes: dict[int, list[RankSums]],
    size: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    count: int,
    is_transposed: bool,
) -> None:
    """Several sums in a row, which the ranks come to at their own times."""
    random = torch.Generator().manual_seed(count)
    parts = torch.randn(count, size, *shape, generator=random).to(dtype)
    if is_transposed:
        parts = parts.transpose(-1, -2)

    def rank(number: int) -> list[torch.Tensor | None]:
        return [of_sizes[size][number](parts[turn, number]) for turn in range(count)]

    found = together(*(lambda number=number: rank(number) for number in range(size)))
    for turn in range(count):
        expected = torch.zeros(parts[turn, 0].shape)
        for part in parts[turn]:
            expected += part.float()
        for number in range(size):
            assert torch.equal(found[number][turn], expected.to(dtype))


def test_more_than_the_memory_of_a_rank_is_summed_in_pieces(
    of_sizes: dict[int, list[RankSums]],
) -> None:
    count = rank_sums._PLACE_BYTES // 4 * 2 + 5
    parts = torch.arange(count, dtype=torch.float32), torch.ones(count)
    found = together(*(lambda n=n: of_sizes[2][n](parts[n]) for n in range(2)))
    assert torch.equal(found[0], parts[0] + 1)
    assert torch.equal(found[0], found[1])


def test_numbers_beyond_the_largest_and_none_stay_so(
    of_sizes: dict[int, list[RankSums]],
) -> None:
    nan, infinite = float("nan"), float("inf")
    part = torch.tensor([nan, infinite, -infinite, 3e38, 0.0]).bfloat16()
    (found,) = together(lambda: of_sizes[1][0](part))
    assert torch.equal(found.isnan(), part.isnan())
    assert torch.equal(found[1:], part[1:])


def test_other_types_are_left_to_the_process_group(of_sizes: dict[int, list[RankSums]]) -> None:
    assert of_sizes[2][0](torch.ones(3, dtype=torch.float16)) is None


def test_a_rank_that_does_not_come_is_named_after_the_limit() -> None:
    first, _second = sums_of(2, limit_s=0.2)
    with pytest.raises(RuntimeError, match=r"rank 1 has not come to a sum within 0\.2 s"):
        first(torch.ones(3))
