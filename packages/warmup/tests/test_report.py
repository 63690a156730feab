"""The report can be printed, stored and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trencadis.bucketing import Bucket
from trencadis.warmup import (
    BucketTime,
    CaptureReport,
    ConfigError,
    GraphOutcome,
    GraphStatus,
    Phase,
    StageTime,
    WarmupError,
    WarmupReport,
)


def bucket(batch: int, seq: int) -> Bucket:
    return Bucket(("batch", "seq"), (batch, seq))


REPORT = WarmupReport(
    executed=(
        BucketTime(Phase.PROMPT, bucket(2, 256), 1.5),
        BucketTime(Phase.PROMPT, bucket(1, 128), 0.25),
        BucketTime(Phase.DECODE, bucket(4, 128), 2.0),
    ),
    seconds=9.0,
    allocated=-(5 << 20),
    capture=CaptureReport(
        10 << 20,
        (
            GraphOutcome(Phase.PROMPT, bucket(1, 128), GraphStatus.CAPTURED, 0, 3 << 20, 0.5),
            GraphOutcome(Phase.PROMPT, bucket(2, 256), GraphStatus.RELEASED, 100, 8 << 20, 0.75),
            GraphOutcome(Phase.PROMPT, bucket(2, 512), GraphStatus.SKIPPED, 9 << 20),
        ),
    ),
    stages=(StageTime("Sampler", 1.0),),
    complete=False,
)


def test_a_saved_report_loads_equal(tmp_path: Path) -> None:
    path = tmp_path / "warmup.json"
    REPORT.save(path)
    assert WarmupReport.load(path) == REPORT
    assert [file.name for file in tmp_path.iterdir()] == ["warmup.json"]


def test_a_report_without_graphs_loads_equal(tmp_path: Path) -> None:
    plain = WarmupReport((), 0.0, 0)
    plain.save(tmp_path / "warmup.json")
    assert WarmupReport.load(tmp_path / "warmup.json") == plain


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"executed": [{"phase": "Lunch"}]}'])
def test_another_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(WarmupError, match=r"other\.json is not a warm-up report"):
        WarmupReport.load(path)


def test_table_has_a_row_per_stage() -> None:
    rows = [line.split("  ") for line in REPORT.table().splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells == [
        ["stage", "buckets", "seconds", "slowest", "memory"],
        ["Prompt", "2", "1.75", "(2, 256) 1.50"],
        ["Decode", "1", "2.00", "(4, 128) 2.00"],
        ["Graph/Prompt", "1/3 (1 released)", "1.25", "(2, 256) 0.75", "3 MiB"],
        ["Graph/Decode", "0/0", "0.00", "0 B"],
        ["Sampler", "1.00"],
        ["total", "9.00", "-5 MiB"],
    ]


def test_the_summary_is_the_log_line_with_sorted_shapes() -> None:
    assert REPORT.capture is not None
    assert REPORT.capture.summary(Phase.PROMPT, 3) == (
        "Graph/Prompt captured:1 (33.3%) used_mem:3 MiB buckets:[(1, 128)]"
    )
    assert "captured:1 (100.0%)" in REPORT.capture.summary(Phase.PROMPT, 1)
    assert REPORT.capture.summary(Phase.DECODE, 0) == (
        "Graph/Decode captured:0 (0.0%) used_mem:0 B buckets:[]"
    )


def test_a_report_is_complete_and_a_skipped_graph_took_nothing_unless_told_otherwise() -> None:
    plain = WarmupReport((), 0.0, 0)
    assert (plain.complete, plain.capture, plain.stages) == (True, None, ())
    skipped = GraphOutcome(Phase.PROMPT, bucket(1, 128), GraphStatus.SKIPPED, 5)
    assert (skipped.used, skipped.seconds) == (0, 0.0)


@pytest.mark.parametrize("size", [-1, 1 << 63])
def test_bytes_of_a_graph_and_of_a_budget_are_those_that_an_integer_holds(size: int) -> None:
    most = (1 << 63) - 1
    assert CaptureReport(most).outcomes == CaptureReport(0).outcomes == ()
    captured = (Phase.PROMPT, bucket(1, 128), GraphStatus.CAPTURED, 0)
    assert GraphOutcome(*captured, most).used == most
    assert WarmupReport((), 0.0, -most).allocated == -most
    with pytest.raises(ConfigError, match=f"used must be an integer from 0 to {most}, got"):
        GraphOutcome(*captured, size)
    with pytest.raises(ConfigError, match=f"budget must be an integer from 0 to {most}, got"):
        CaptureReport(size)
    with pytest.raises(ConfigError, match=f"allocated must be an integer from -{most} to {most}"):
        WarmupReport((), 0.0, -size if size > 0 else -most - 1)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"seconds": NaN}'])
def test_a_file_that_is_no_json_text_is_an_error_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(WarmupError, match=r"other\.json is not a warm-up report"):
        WarmupReport.load(path)


@pytest.mark.parametrize("field", ["seconds", "allocated", "complete"])
def test_a_report_with_a_wrong_value_is_not_loaded(tmp_path: Path, field: str) -> None:
    path = tmp_path / "warmup.json"
    REPORT.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {field: "many"}))
    with pytest.raises(WarmupError, match=f"not a warm-up report .*{field}"):
        WarmupReport.load(path)


def test_an_interrupted_save_leaves_the_report_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "warmup.json"
    REPORT.save(path)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WarmupReport((), 0.0, 0).save(path)
    assert WarmupReport.load(path) == REPORT


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    WarmupReport((), np.float32(1.5), 0).save(tmp_path / "warmup.json")  # type: ignore[arg-type]
    assert WarmupReport.load(tmp_path / "warmup.json").seconds == 1.5
