"""Traces: the formats that are read, and errors with their line."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import BucketingError, Trace, read_trace
from trencadis.bucketing.traffic import split_to_limits


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_azure_traces(tmp_path: Path) -> None:
    # Two lines of the trace of 2023 (seven digits of a second) and one as in that of 2024.
    path = written(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
        "2023-11-16 18:17:05+00:00,7,8\n",
    )
    trace = read_trace(path)
    assert trace.lengths.tolist() == [4808, 3180, 7]
    assert trace.arrivals is not None
    assert (trace.arrivals - trace.arrivals[0]).tolist() == pytest.approx([0, 0.052, 1.02004])
    assert trace.outputs is not None
    assert trace.outputs.tolist() == [10, 8, 8]


def test_json_lines(tmp_path: Path) -> None:
    # Columns of the Mooncake trace.
    rows = [{"timestamp": 0, "input_length": 5}, {"timestamp": 27.5, "input_length": 6}]
    path = written(tmp_path, "trace.jsonl", "\n\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert trace.lengths.tolist() == [5, 6]
    assert trace.arrivals is not None
    assert trace.arrivals.tolist() == [0, 27.5]
    assert trace.outputs is None


def test_the_length_column_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, "trace.csv", "id,n\n1,64.0\n2,3\n")
    trace = read_trace(path, column="n")
    assert trace.lengths.tolist() == [64, 3]
    assert trace.arrivals is None
    assert trace.requests().tolist() == [[1, 64], [1, 3]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "has no requests"),
        ("a.csv", "ContextTokens\n", "has no requests"),
        ("a.csv", "n\n1\n", "line 2 has columns n: name the one with the prompt length"),
        ("a.csv", "length\n1\nnan\n", "line 3: length 'nan' is not an integer"),
        ("a.csv", "length\n1\ninf\n", "line 3: length 'inf' is not an integer"),
        ("a.csv", "length\n1.5\n", "line 2: length '1.5'"),
        ("a.csv", "length\n0\n", "line 2: length '0'"),
        ("a.csv", "length\n-4\n", "line 2: length '-4'"),
        ("a.csv", "length\n1e300\n", "line 2: length '1e300'"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("a.csv", "length,n\n4\n,5\n", "line 3: length ''"),
        ("a.csv", "length,timestamp\n4,noon\n", "line 2: 'noon' is not a time"),
        ("a.csv", "length,timestamp\n4,inf\n", "line 2: 'inf' is not a time"),
        ("a.csv", "length,output_length\n4,0\n4,-1\n", "line 3: length '-1' is not an integer"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", '{"length": 1}\n{"n": 1}\n', "line 2 has columns n"),
        ("a.jsonl", '{"length": true}\n', "line 1: length True"),
    ],
)
def test_a_bad_trace_is_an_error_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(BucketingError, match=message):
        read_trace(written(tmp_path, name, text))


def test_the_shortest_and_the_longest_prompt_are_read(tmp_path: Path) -> None:
    largest = 1 << 40
    trace = read_trace(
        written(tmp_path, "a.csv", f"length,output_length\n1,0\n{largest},{largest}")
    )
    assert trace.lengths.tolist() == [1, largest]
    assert trace.outputs is not None
    assert trace.outputs.tolist() == [0, largest]
    path = written(tmp_path, "a.csv", f"length\n{largest + 1}\n")
    with pytest.raises(BucketingError, match="is not an integer of at least 1 that is possible:"):
        read_trace(path)


def test_a_line_of_as_many_characters_as_are_read_is_read(tmp_path: Path) -> None:
    most = 1 << 20
    line = '{"length": 3, "text": ""}'
    text = line.replace('""', '"' + "x" * (most - len(line)) + '"')
    assert len(text) == most
    assert read_trace(written(tmp_path, "a.jsonl", text)).lengths.tolist() == [3]
    with pytest.raises(BucketingError, match="line 1 has more than 1048576 characters"):
        read_trace(written(tmp_path, "a.jsonl", text + " "))


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl"])
def test_a_binary_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    with pytest.raises(BucketingError, match=r"line 1 is not UTF-8 text \(byte 0x89\)"):
        read_trace(path)
    start = b"length\n1\n" if name == "trace.csv" else b'{"length": 1}\n{"length": 2}\n'
    path.write_bytes(start + b"4\xff\n")
    with pytest.raises(BucketingError, match="line 3 is not UTF-8"):
        read_trace(path)


def test_a_trace_in_memory_is_checked() -> None:
    for lengths in ("abc", [1.5], [-1], [[1]], [math.nan], [10**30], None):
        with pytest.raises(BucketingError, match="tokens of a trace"):
            Trace(lengths)  # type: ignore[arg-type]
    for arrivals in (["x"], [math.inf], [1.0, 2.0]):
        with pytest.raises(BucketingError, match=r"arrivals|lengths"):
            Trace([3], arrivals)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="a trace of 1 lengths has 2 outputs"):
        Trace([3], outputs=[1, 2])  # type: ignore[arg-type]
    assert Trace([], []).batches(1.0, 4).shape == (0, 2)  # type: ignore[arg-type]


def test_a_window_too_short_to_be_counted_is_an_error() -> None:
    trace = Trace([5, 6, 7], [0.0, 1e12, 2e12])  # type: ignore[arg-type]
    assert trace.batches(1e-3, 16).tolist() == [[1, 5], [1, 6], [1, 7]]
    with pytest.raises(BucketingError, match="too short for the arrivals"):
        trace.batches(1e-300, 16)


def test_batches_collect_the_requests_of_a_window(tmp_path: Path) -> None:
    text = "arrival,length\n" + "".join(
        f"{arrival},{length}\n"
        for arrival, length in ((5.2, 9), (0.1, 1), (0.9, 3), (0.5, 2), (5.3, 4), (2.0, 7))
    )
    trace = read_trace(written(tmp_path, "trace.csv", text))
    assert trace.batches(1.0, 16).tolist() == [[3, 3], [1, 7], [2, 9]]
    assert trace.batches(1.0, 2).tolist() == [[2, 2], [1, 3], [1, 7], [2, 9]]
    assert trace.batches(1.0, 1).tolist() == [[1, n] for n in (1, 2, 3, 7, 9, 4)]
    for window, most in ((0.0, 2), (float("nan"), 2), (1.0, 0)):
        with pytest.raises(
            BucketingError, match=r"must be (a finite number above 0|an integer of at least 1)"
        ):
            trace.batches(window, most)
    with pytest.raises(BucketingError, match="no arrival times"):
        Trace(trace.lengths).batches(1.0, 2)


def run_by_the_server(batch: int, length: int, most: int, budget: int) -> Counter[tuple[int, int]]:
    """The prefill batches of `batch` prompts of `length` tokens, one chunk after the other."""
    ran: Counter[tuple[int, int]] = Counter()
    for start in range(0, length, most):
        query, left = min(most, length - start), batch
        while left:
            size = min(left, budget // query)
            ran[size, query] += 1
            left -= size
    return ran


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=6
    ),
    st.integers(1, 20),
    st.integers(0, 60),
)
def test_long_prompts_and_large_batches_are_divided_as_the_server_does(
    seen: list[tuple[int, int, int]], most: int, more: int
) -> None:
    table = np.array(seen)
    rows, counts = split_to_limits(
        table[:, :2], table[:, 2], max_query=most, max_num_batched_tokens=most + more
    )
    expected: Counter[tuple[int, int]] = Counter()
    for batch, length, times in seen:
        for shape, number in run_by_the_server(batch, length, most, most + more).items():
            expected[shape] += times * number
    found: Counter[tuple[int, int]] = Counter()
    for (batch, query), times in zip(rows.tolist(), counts.tolist(), strict=True):
        found[batch, query] += times
    assert found == expected
