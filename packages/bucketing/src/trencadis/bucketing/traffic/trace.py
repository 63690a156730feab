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

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray

# Column names of public traces: Azure 2023 and 2024, BurstGPT, Mooncake.
LENGTH_COLUMNS = ("ContextTokens", "Request tokens", "input_length", "prompt_tokens", "length")
ARRIVAL_COLUMNS = ("TIMESTAMP", "Timestamp", "timestamp", "arrival")
OUTPUT_COLUMNS = ("GeneratedTokens", "Response tokens", "output_length", "completion_tokens")


@attrs.frozen(eq=False)
class Trace:
    """Requests in the order of the file.

    Attributes:
        lengths: prompt tokens, one per request.
        arrivals: arrival times, one per request, in seconds or in the file's own unit (Mooncake:
            milliseconds); None if the file has none.
        outputs: generated tokens, one per request, 0 for a request that failed; None if the file
            has none.
    """

    lengths: IntArray
    arrivals: npt.NDArray[np.float64] | None = None
    outputs: IntArray | None = None

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
        if not window > 0 or max_num_seqs < 1:
            raise BucketingError(
                f"no batches of {max_num_seqs} sequences in windows of {window}: raise them"
            )
        order = np.argsort(self.arrivals, kind="stable")
        windows = (self.arrivals[order] // window).astype(np.int64)
        rows: list[tuple[int, int]] = []
        for requests in np.split(self.lengths[order], np.flatnonzero(np.diff(windows)) + 1):
            for start in range(0, len(requests), max_num_seqs):
                batch = requests[start : start + max_num_seqs]
                rows.append((len(batch), int(batch.max())))
        return np.array(rows, dtype=np.int64)


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
    try:
        yield from _text_rows(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BucketingError(
            f"{path} is not a text file ({error}): give CSV or JSON lines"
        ) from None


def _text_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix in {".jsonl", ".ndjson"}:
            for line, text in enumerate(file, start=1):
                if text.strip():
                    yield line, _json_object(path, line, text)
        else:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
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
    if integer != length or integer < least:
        raise BucketingError(
            f"{path}, line {line}: length {value!r} is not an integer of at least {least}: "
            "correct the line or remove it"
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
            f"{path}, line {line}: {text!r} is not a time: give seconds or an ISO date"
        )
    return seconds
