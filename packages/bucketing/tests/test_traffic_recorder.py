"""The recorder: exact counts, bounded memory, merging and saving."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import BucketingError, TrafficRecorder, read_trace

AXES = ("batch", "seq")
shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10_000)), max_size=60)


def recorder(seen: list[tuple[int, int]], capacity: int = 1 << 16) -> TrafficRecorder:
    made = TrafficRecorder(AXES, capacity=capacity)
    for shape in seen:
        made.record(shape)
    return made


def counted(made: TrafficRecorder) -> dict[tuple[int, ...], int]:
    rows, counts = made.shapes()
    return {tuple(row): count for row, count in zip(rows.tolist(), counts.tolist(), strict=True)}


@given(shapes)
def test_counts_are_exact_below_the_capacity(seen: list[tuple[int, int]]) -> None:
    made = recorder(seen)
    assert counted(made) == Counter(seen)
    assert made.total == len(seen)
    assert made.resolution == (1, 1)


@given(shapes, st.integers(4, 12))
def test_memory_is_bounded_and_the_total_exact(seen: list[tuple[int, int]], capacity: int) -> None:
    made = recorder(seen, capacity)
    kept = counted(made)
    assert len(kept) <= capacity
    assert made.total == len(seen)
    # Every shape was counted, rounded up to the resolution.
    expected: Counter[tuple[int, ...]] = Counter()
    for shape in seen:
        pairs = zip(shape, made.resolution, strict=True)
        expected[tuple(math.ceil(size / unit) * unit for size, unit in pairs)] += 1
    assert kept == expected


@given(shapes, shapes, st.integers(4, 70))
def test_merging_adds_counts(
    one: list[tuple[int, int]], two: list[tuple[int, int]], capacity: int
) -> None:
    made = recorder(one, capacity)
    other = recorder(two)
    made.merge(other)
    assert made.total == len(one) + len(two)
    assert counted(other) == Counter(two)
    if capacity > len(one) + len(two):
        assert counted(made) == Counter(one + two)


def test_merging_takes_the_coarser_resolution() -> None:
    coarse = recorder([(1, n) for n in range(1, 50)], capacity=4)
    fine = recorder([(3, 7)])
    fine.merge(coarse)
    assert fine.resolution == coarse.resolution != (1, 1)
    assert fine.total == 50


@given(shapes, st.integers(4, 70))
def test_a_saved_recorder_loads_unchanged(
    tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, int]], capacity: int
) -> None:
    path = tmp_path_factory.mktemp("traffic") / "traffic.json"
    made = recorder(seen, capacity)
    made.save(path)
    loaded = TrafficRecorder.load(path)
    assert counted(loaded) == counted(made)
    assert (loaded.axes, loaded.resolution) == (made.axes, made.resolution)
    loaded.save(path.with_suffix(".again"))
    assert path.read_text() == path.with_suffix(".again").read_text()
    assert sorted(found.name for found in path.parent.iterdir()) == [
        "traffic.again",
        "traffic.json",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"axes": ["n"], "capacity": 9, "resolution": [3], "counts": []}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [[1]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [["x", 1]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [[4, 1e400]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [[4, NaN]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [[1e400, 4]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [[4.5, 1]]}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1], "counts": [4]}',
        '{"axes": ["n"], "capacity": 1e400, "resolution": [1], "counts": []}',
        '{"axes": ["n"], "capacity": 9, "resolution": [1, 1], "counts": []}',
        '{"axes": ["n", "n"], "capacity": 9, "resolution": [1, 1], "counts": []}',
        '{"axes": "n", "capacity": 9, "resolution": [], "counts": []}',
        "[" * 100_000,
    ],
)
def test_a_file_of_another_format_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(text)
    with pytest.raises(BucketingError, match=r"traffic\.json.* is not recorded traffic"):
        TrafficRecorder.load(path)


def test_a_bad_entry_or_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    start = '{"axes": ["n"], "capacity": 9, "resolution": [1],\n"counts": '
    path.write_text(start + "[[1, 2], [4, 1e400]]}")
    with pytest.raises(BucketingError, match=r"traffic\.json, entry 2 of counts is not .*inf"):
        TrafficRecorder.load(path)
    path.write_bytes(start.encode() + b"[]}\xff")
    with pytest.raises(BucketingError, match=r"traffic\.json, line 2 is not UTF-8 text"):
        TrafficRecorder.load(path)


def test_a_saved_file_keeps_its_link_and_its_permissions(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    made = TrafficRecorder(AXES)
    made.save(kept)
    assert kept.stat().st_mode & 0o777 == 0o666 & ~_umask()
    kept.chmod(0o400)
    link.symlink_to(kept)
    made.record((1, 1))
    made.save(link)
    assert link.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o400
    assert TrafficRecorder.load(kept).total == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "link.json"]


def test_a_file_that_cannot_be_saved_stays_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "place"
    (place / "in it").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        TrafficRecorder(AXES).save(place)
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_file_that_may_never_end_is_refused(tmp_path: Path) -> None:
    pipe, line = tmp_path / "pipe", tmp_path / "line.csv"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    limit = threading.Timer(60, os.close, [writer])  # what reads the pipe gets its end then
    limit.start()
    try:
        for path in (pipe, Path("/dev/null")):
            with pytest.raises(BucketingError, match="is not a regular file"):
                TrafficRecorder.load(path)
    finally:
        limit.cancel()
    os.close(writer)
    line.write_text("time\n" + "1" * (1 << 21))
    with pytest.raises(BucketingError, match=r"line\.csv, line 2 has more than 1048576 characters"):
        read_trace(line)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_bad_arguments_are_an_error() -> None:
    with pytest.raises(BucketingError, match="give at least one axis"):
        TrafficRecorder(())
    with pytest.raises(BucketingError, match="capacity must be an integer of at least 4, got 3"):
        TrafficRecorder(AXES, capacity=3)
    made = TrafficRecorder(AXES)
    wrong: list[tuple[Any, Any, str]] = [
        ((1,), 1, "cannot be counted: give a size for each of batch, seq"),
        ((1, -1), 1, "a size of shape must be an integer from 0 to .*, got -1"),
        ((1, 1), -1, "the count of a shape must be an integer from 0 to .*, got -1"),
        ((1, 1.5), 1, "a size of shape must be an integer from 0 to .*, got 1.5"),
        ((1, None), 1, "a size of shape must be an integer from 0 to .*, got None"),
        ("ab", 1, "a size of shape must be an integer from 0 to .*, got 'a'"),
        (7, 1, "shape 7 must be a sequence of integers"),
        ((1, 1), math.inf, "the count of a shape must be an integer from 0 to .*, got inf"),
        (
            (1, 1),
            10**5000,
            "the count of a shape must be an integer .*, got an integer of 16610 bits",
        ),
        ((1, 1), (1 << 40) - 1, "begin a new recorder"),
    ]
    made.record((1, 1), 2)
    for shape, count, message in wrong:
        with pytest.raises(BucketingError, match=message):
            made.record(shape, count)
    assert counted(made) == {(1, 1): 2}
    full = TrafficRecorder(AXES)
    full.record((1, 1), (1 << 40) - 1)
    full.record((1, 1), 1)  # as many as it holds
    with pytest.raises(BucketingError, match="keep them apart"):
        made.merge(full)
    with pytest.raises(BucketingError, match="traffic must be of type TrafficRecorder, got 3"):
        made.merge(3)  # type: ignore[arg-type]
    assert (made.total, counted(made)) == (2, {(1, 1): 2})
    with pytest.raises(BucketingError, match="record both with the same axes"):
        made.merge(TrafficRecorder(("batch",)))


def test_the_bounds_of_a_recorder_are_within_it() -> None:
    most = 1 << 40
    made = recorder([(most, most), (0, 0)], capacity=4)
    assert counted(made) == {(most, most): 1, (0, 0): 1}
    half, other = TrafficRecorder(AXES), TrafficRecorder(AXES)
    half.record((1, 1), most // 2)
    other.record((2, 2), most // 2)
    half.merge(other)
    assert half.total == most
    half.record((3, 3), 0)
    assert counted(half) == {(1, 1): most // 2, (2, 2): most // 2, (3, 3): 0}
    with pytest.raises(BucketingError, match=f"a size of shape must be .* from 0 to {most}, got"):
        made.record((most + 1, 1))


def test_a_recorder_keeps_65536_shapes_unless_told_otherwise(tmp_path: Path) -> None:
    TrafficRecorder(AXES).save(tmp_path / "traffic.json")
    assert json.loads((tmp_path / "traffic.json").read_text())["capacity"] == 65_536


def test_sixteen_axes_are_accepted_and_seventeen_are_not() -> None:
    names = [f"axis{number}" for number in range(17)]
    recorder = TrafficRecorder(names[:16])
    recorder.record((1,) * 16)
    assert recorder.total == 1
    with pytest.raises(BucketingError, match="are more than 16"):
        TrafficRecorder(names)
