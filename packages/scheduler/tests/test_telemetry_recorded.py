"""Recorded files, on a clock that the test advances."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import SensorError, open_source
from trencadis.scheduler.telemetry.errors import BadRecording
from trencadis.scheduler.telemetry.recorded import RecordedSource

PAGE = Path(__file__).parents[3] / "docs" / "scheduler" / "telemetry.md"

CSV = """time_s,device,temperature_c,power_w
100,0,50,300.5
100,1,52,
102,0,60,400
104,0,NaN,
"""


def playing(tmp_path: Path, text: str, name: str = "day.csv", **options: Any) -> tuple[Any, Any]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    now_s = [7.0]
    source = RecordedSource(path, clock=lambda: now_s[0], **options)
    return source, now_s


def test_a_recording_plays_from_its_first_line_with_the_clock(tmp_path: Path) -> None:
    source, now_s = playing(tmp_path, CSV)
    assert [(r.temperature_c, r.power_w, r.age_s) for r in source.read()] == [
        (50.0, 300.5, 0.0),
        (52.0, None, 0.0),
    ]
    now_s[0] += 3.0
    assert [(r.temperature_c, r.age_s) for r in source.read()] == [(60.0, 1.0), (52.0, 3.0)]
    now_s[0] += 1.0
    assert math.isnan(source.read()[0].temperature_c)


def test_a_recording_fails_after_its_end(tmp_path: Path) -> None:
    source, now_s = playing(tmp_path, CSV)
    source.read()
    now_s[0] += 4.0
    assert len(source.read()) == 2
    now_s[0] += 0.5
    with pytest.raises(SensorError, match="has ended, after 4 s"):
        source.read()


def test_a_looped_recording_starts_again(tmp_path: Path) -> None:
    source, now_s = playing(tmp_path, CSV, loop=True)
    source.read()
    now_s[0] += 4.5
    assert source.read()[0].temperature_c == 50.0


def test_a_looped_recording_of_a_single_moment_stands_still(tmp_path: Path) -> None:
    source, now_s = playing(tmp_path, "".join(CSV.splitlines(keepends=True)[:2]), loop=True)
    for _ in range(3):
        assert [r.temperature_c for r in source.read()] == [50.0]
        now_s[0] += 4.5


def test_a_recording_plays_faster(tmp_path: Path) -> None:
    source, now_s = playing(tmp_path, CSV, speed=10.0)
    source.read()
    now_s[0] += 0.25
    assert [(r.temperature_c, r.age_s) for r in source.read()] == [
        (60.0, pytest.approx(0.05)),
        (52.0, pytest.approx(0.25)),
    ]


def test_json_lines_are_read(tmp_path: Path) -> None:
    text = '{"time_s": 0, "device": 3, "temperature_c": 71.5, "power_w": null}\n\n'
    source, _ = playing(tmp_path, text, name="day.jsonl")
    assert [(r.device, r.temperature_c, r.power_w) for r in source.read()] == [(3, 71.5, None)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "time_s,device,temperature_c\n0,0,warm\n", "line 2"),
        ("a.csv", "time_s,temperature_c\n0,50\n", "line 2"),
        ("a.csv", "time_s,device,temperature_c\n0,0,50\nnan,0,50\n", "line 3"),
        ("a.csv", "time_s,device,temperature_c\n0,-1,50\n", "line 2"),
        ("a.csv", "time_s,device,temperature_c\n", "no reading"),
        ("a.jsonl", "{}\n", "line 1"),
        ("a.jsonl", '{"time_s": 0, "device": 0, "temperature_c": 1}\nx\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, name: str, text: str, line: str) -> None:
    with pytest.raises(BadRecording, match=line):
        playing(tmp_path, text, name=name)


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert f"```text\n{done.stdout}```" in page


def test_a_missing_file_and_a_bad_speed_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.csv: No such file"):
        open_source(f"recorded:{tmp_path / 'nowhere.csv'}")
    with pytest.raises(ConfigError, match="speed"):
        playing(tmp_path, CSV, speed=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"time_s,device,temperature_c,power_w\n0,0,\xff,\n"),
        ("a.jsonl", b'{"time_s": 0, "device": 1e400, "temperature_c": 50}'),
        ("a.jsonl", b'{"time_s": 1e400, "device": 0, "temperature_c": 50}'),
        ("a.jsonl", b'{"time_s": 0, "device": 0, "temperature_c": 1' + b"0" * 400 + b"}"),
    ],
)
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadRecording, match=re.escape(str(path))):
        RecordedSource(path)


@pytest.mark.parametrize("speed", [0, -1.0, math.nan, math.inf, "fast", None, True])
def test_a_speed_that_is_no_positive_number_is_refused(tmp_path: Path, speed: Any) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time_s,device,temperature_c,power_w\n0,0,50,\n")
    with pytest.raises(ConfigError, match="speed of a recording"):
        RecordedSource(path, speed=speed)
