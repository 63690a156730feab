from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache.block_pool import BlockBitmap

SIZE = 1300
IDS = st.integers(0, SIZE - 1)


@given(st.lists(IDS), st.tuples(IDS, IDS), IDS)
def test_agrees_with_a_set(toggled: list[int], bounds: tuple[int, int], start: int) -> None:
    low, high = min(bounds), max(bounds)
    ids = BlockBitmap(SIZE)
    ids.add_range(low, high)
    expected = set(range(low, high))
    for member in toggled:
        (ids.remove if member in expected else ids.add)(member)
        expected ^= {member}
    assert ids.count == len(expected)
    assert ids.lowest() == min(expected, default=-1)
    assert ids.highest() == max(expected, default=-1)
    assert list(ids.iter_descending()) == sorted(expected, reverse=True)
    missing = [member for member in ids.iter_missing(start) if member < SIZE]
    assert missing == [member for member in range(start, SIZE) if member not in expected]
    assert ids.count_between(low, high) == len(expected & set(range(low, high)))
    assert ids.count_runs() == sum(member - 1 not in expected for member in expected)
