"""Traces: recorded requests of a server, from CSV or JSON lines, to fit a grid to or to replay."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import IntArray
from trencadis.bucketing.shapes import MAX_SIZE, integer_array, numeric_array
from trencadis.bucketing.text_files import check_path, text_lines
from trencadis.bucketing.validators import instance_of, integer, number

# Column names of public traces: Azure 2023 and 2024, BurstGPT, Mooncake.
LENGTH_COLUMNS = ("ContextTokens", "Request tokens", "input_length", "prompt_tokens", "length")
ARRIVAL_COLUMNS = ("TIMESTAMP", "Timestamp", "timestamp", "arrival")
OUTPUT_COLUMNS = ("GeneratedTokens", "Response tokens", "output_length", "completion_tokens")


def _tokens(values: npt.ArrayLike) -> IntArray:
    tokens = integer_array("tokens of a trace", values)
    if tokens.ndim != 1 or (tokens.size and tokens.min() < 0):
        raise BucketingError("tokens of a trace must be a sequence of integers of 0 or more")
    return tokens


def _times(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    times = numeric_array("arrivals of a trace", values).astype(np.float64)
    if times.ndim != 1 or not np.all(np.isfinite(times)):
        raise BucketingError("arrivals of a trace must be a sequence of finite numbers")
    return times


@attrs.frozen(eq=False)
class Trace:
    """Requests in the order of the file.

    Attributes:
        lengths: prompt tokens, one per request.
        arrivals: arrival times, one per request, in seconds or in the file's own unit (Mooncake:
            milliseconds); None if the file has none.
        outputs: generated tokens, one per request, 0 for a request that failed; None if the file
            has none.

    Raises:
        BucketingError: lengths or outputs that are not integers of 0 or more, arrivals that are
            not finite numbers, or not one of each per request.
    """

    lengths: IntArray = attrs.field(converter=_tokens)
    arrivals: npt.NDArray[np.float64] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_times)
    )
    outputs: IntArray | None = attrs.field(
        default=None, converter=attrs.converters.optional(_tokens)
    )

    def __attrs_post_init__(self) -> None:
        for name, column in (("arrivals", self.arrivals), ("outputs", self.outputs)):
            if column is not None and len(column) != len(self.lengths):
                raise BucketingError(
                    f"a trace of {len(self.lengths)} lengths has {len(column)} {name}: "
                    "give one for each"
                )

    def requests(self) -> IntArray:
        """Every request as its own batch: one row (1, length) each."""
        return np.column_stack([np.ones_like(self.lengths), self.lengths])

    def batches(self, window: float, max_num_seqs: int) -> IntArray:
        """The prompt batches of a server that collects the requests of a time window.

        Args:
            window: its length, in the unit of `arrivals`.
            max_num_seqs: the most requests of a batch; a window with more gives several batches.

        Returns:
            One row (batch, longest length) per batch of at most `max_num_seqs` requests.

        Raises:
            BucketingError: a trace without arrival times, or an argument that gives no batch.
        """
        if self.arrivals is None:
            raise BucketingError("the trace has no arrival times: give one with a timestamp column")
        window = number(0, MAX_SIZE, exclusive_low=True).checked("window", window)
        max_num_seqs = integer(1).checked("max_num_seqs", max_num_seqs)
        order = np.argsort(self.arrivals, kind="stable")
        with np.errstate(over="ignore", invalid="ignore"):
            windows = self.arrivals[order] // window
        if not np.all(np.isfinite(windows)):
            raise BucketingError(
                f"windows of {shown(window)} are too short for the arrivals: raise them"
            )
        rows: list[tuple[int, int]] = []
        ends = np.flatnonzero(windows[1:] != windows[:-1]) + 1
        for requests in np.split(self.lengths[order], ends):
            for start in range(0, len(requests), max_num_seqs):
                batch = requests[start : start + max_num_seqs]
                rows.append((len(batch), int(batch.max())))
        return np.array(rows, dtype=np.int64).reshape(-1, 2)


def read_trace(path: str | os.PathLike[str], *, column: str | None = None) -> Trace:
    """Read a trace: CSV with a header, or one JSON object per line (`.jsonl`, `.ndjson`).

    Args:
        path: the file; its suffix gives the format.
        column: the column of the prompt length; by default the first of `LENGTH_COLUMNS` present.

    Raises:
        BucketingError: no request, no such column, or a length that is not an integer of at
            least 1; the message has the line.
        OSError: the file cannot be read.
    """
    lengths: list[int] = []
    arrivals: list[float] = []
    outputs: list[int] = []
    times: str | None = None
    generated: str | None = None
    check_path(path)
    instance_of(str, optional=True).checked("column", column)
    for line, row in _rows(Path(path)):
        if not lengths:
            column = column or next((name for name in LENGTH_COLUMNS if name in row), None)
            times = next((name for name in ARRIVAL_COLUMNS if name in row), None)
            generated = next((name for name in OUTPUT_COLUMNS if name in row), None)
        if column is None or column not in row:
            raise BucketingError(
                f"{path}, line {line} has columns {', '.join(map(str, row))}: "
                f"name the one with the prompt length, such as {column or LENGTH_COLUMNS[0]}"
            )
        lengths.append(_length(path, line, row[column]))
        if times is not None:
            arrivals.append(_seconds(path, line, row.get(times)))
        if generated is not None:
            outputs.append(_length(path, line, row.get(generated), least=0))
    if not lengths:
        raise BucketingError(f"{path} has no requests: give a trace with at least one")
    known = np.array(arrivals) if len(arrivals) == len(lengths) else None
    return Trace(
        np.array(lengths, dtype=np.int64),
        known,
        np.array(outputs, dtype=np.int64) if outputs else None,
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = text_lines(path)
    if path.suffix in {".jsonl", ".ndjson"}:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield number, _json_object(path, number, text)
        return
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise BucketingError(
            f"{path}, line {reader.line_num + 1} is not CSV ({error}): give CSV or JSON lines"
        ) from None


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BucketingError(f"{path}, line {line} is not JSON ({error}): correct it") from None
    if not isinstance(row, dict):
        raise BucketingError(f"{path}, line {line} is not a JSON object: correct it")
    return row


def _length(path: object, line: int, value: object, least: int = 1) -> int:
    try:
        length = float(str(value))
        integer = int(length)
    except (ValueError, OverflowError):
        length, integer = 0.0, -1
    if integer != length or integer < least or integer > MAX_SIZE:
        raise BucketingError(
            f"{path}, line {line}: length {shown(value)} is not an integer of at least {least}"
            f"{' that is possible' if integer > MAX_SIZE else ''}: correct the line or remove it"
        )
    return integer


def _seconds(path: object, line: int, value: object) -> float:
    """An arrival time in seconds, from a number or an ISO date. The time zone is ignored."""
    text = str(value)
    # fromisoformat of Python 3.10 reads at most six digits after the second; Azure has seven.
    date = re.match(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?", text)
    try:
        if date is None:
            seconds = float(text)
        else:
            moment = datetime.fromisoformat(date[1]).replace(tzinfo=timezone.utc)
            seconds = moment.timestamp() + float(date[2] or 0)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise BucketingError(
            f"{path}, line {line}: {shown(text)} is not a time: give seconds or an ISO date"
        )
    return seconds
