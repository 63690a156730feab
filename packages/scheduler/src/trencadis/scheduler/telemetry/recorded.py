"""Plays back a recorded file, for demonstrations, tests and the analysis of incidents."""

from __future__ import annotations

import csv
import json
import math
import time
from bisect import bisect_right
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from trencadis.scheduler.clock import Clock
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import BadRecording, SensorError
from trencadis.scheduler.telemetry.source import Reading, TemperatureSource
from trencadis.scheduler.validators import instance_of, number


class RecordedSource(TemperatureSource):
    """Plays ``path`` from its first line on, at ``speed`` times the recorded speed.

    The file is a ``.csv`` with the header ``time_s,device,temperature_c,power_w``, or a ``.jsonl``
    with an object of these keys per line. ``power_w`` may be missing or empty; values may be NaN.
    Times are seconds of any origin. After the last line the source fails, or starts again with
    ``loop``. Raises `ConfigError`, and `BadRecording`, which names the line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        speed: float = 1.0,
        loop: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        instance_of(str, PathLike).checked("path of a recording", path)
        self._path = Path(path)
        self._speed = number(0, exclusive_low=True).checked("speed of a recording", speed)
        self._loop = loop
        self._clock = clock
        self._timeline = sorted(_load(self._path), key=lambda item: item[0])
        self._times_s = [time_s for time_s, _ in self._timeline]
        self._started_at_s: float | None = None

    @property
    def name(self) -> str:
        return "recorded"

    def read(self) -> list[Reading]:
        """The latest reading of each device. Raises `SensorError` after the end."""
        now_s = self._clock()
        if self._started_at_s is None:
            self._started_at_s = now_s
        first_s, last_s = self._times_s[0], self._times_s[-1]
        played_s = (now_s - self._started_at_s) * self._speed
        if self._loop and last_s > first_s:
            played_s %= last_s - first_s
        if played_s > last_s - first_s and not self._loop:
            raise SensorError(f"{self._path} has ended, after {last_s - first_s:g} s")
        at_s = first_s + played_s
        latest: dict[int, Reading] = {}
        for time_s, reading in self._timeline[: bisect_right(self._times_s, at_s)]:
            age_s = (at_s - time_s) / self._speed
            latest[reading.device] = Reading(
                reading.device, reading.temperature_c, reading.power_w, age_s
            )
        return [latest[device] for device in sorted(latest)]


def _load(path: Path) -> list[tuple[float, Reading]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the recording {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadRecording(f"{path} is not UTF-8 ({error}): convert it") from error
    rows = _jsonl_rows(path, text) if path.suffix == ".jsonl" else _csv_rows(text)
    timeline = [_reading(path, line, row) for line, row in rows]
    if not timeline:
        raise BadRecording(f"{path} has no reading: record at least one line")
    return timeline


def _csv_rows(text: str) -> Iterator[tuple[int, Any]]:
    rows = csv.DictReader(text.splitlines())
    for row in rows:
        yield rows.line_num, row


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            yield line, json.loads(content)
        except ValueError as error:
            raise BadRecording(f"{path}, line {line}: not JSON ({error})") from error


def _reading(path: Path, line: int, row: Any) -> tuple[float, Reading]:
    try:
        power = row.get("power_w")
        power_w = None if power in {None, ""} else float(power)
        reading = Reading(int(row["device"]), float(row["temperature_c"]), power_w)
        time_s = float(row["time_s"])
        if not math.isfinite(time_s) or reading.device < 0:
            raise ValueError("time_s must be finite and device at least 0")
        return time_s, reading
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadRecording(
            f"{path}, line {line}: {row!r} is not a reading ({type(error).__name__}: {error}): "
            "time_s, device and temperature_c must be numbers"
        ) from error
