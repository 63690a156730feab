"""The result of a warm-up: values that can be printed, compared, and stored as JSON."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import WarmupError
from trencadis.warmup.log_lines import format_bytes
from trencadis.warmup.runtime import Phase
from trencadis.warmup.validators import MAX_BYTES, boolean, instance_of, integer, number


@attrs.frozen
class BucketTime:
    """Seconds that the first execution of a bucket took."""

    phase: Phase = attrs.field(validator=instance_of(Phase))
    bucket: Bucket = attrs.field(validator=instance_of(Bucket))
    seconds: float = attrs.field(validator=number())


class GraphStatus(enum.Enum):
    """The final state of a bucket's graph."""

    CAPTURED = "captured"
    RELEASED = "released"
    """Captured, measured as too large for the budget, and released; never replayed."""
    SKIPPED = "skipped"
    """Never captured, because the prediction did not fit."""


@attrs.frozen
class GraphOutcome:
    """One bucket's graph: the predicted lower bound of its size and its measured size, bytes.

    ``used`` and ``seconds`` are 0 if it was skipped.
    """

    phase: Phase = attrs.field(validator=instance_of(Phase))
    bucket: Bucket = attrs.field(validator=instance_of(Bucket))
    status: GraphStatus = attrs.field(validator=instance_of(GraphStatus))
    predicted: int = attrs.field(validator=number())
    used: int = attrs.field(default=0, validator=integer(0, MAX_BYTES))
    seconds: float = attrs.field(default=0.0, validator=number())


@attrs.frozen
class CaptureReport:
    """The outcome of every graph, in the order of the decisions. ``budget`` is in bytes."""

    budget: int = attrs.field(validator=integer(0, MAX_BYTES))
    outcomes: tuple[GraphOutcome, ...] = ()

    def captured(self, phase: Phase) -> tuple[Bucket, ...]:
        """The buckets whose graphs are replayed, sorted by shape."""
        return tuple(sorted(graph.bucket for graph in self._with(phase, GraphStatus.CAPTURED)))

    def used(self, phase: Phase) -> int:
        """Bytes of the captured graphs of a phase."""
        return sum(graph.used for graph in self._with(phase, GraphStatus.CAPTURED))

    def count(self, phase: Phase, status: GraphStatus) -> int:
        """Graphs of a phase with this outcome."""
        return len(self._with(phase, status))

    def summary(self, phase: Phase, total: int) -> str:
        """The log line of seed 000; ``total``: buckets of the phase."""
        captured = self.captured(phase)
        shapes = ", ".join(str(bucket.shape) for bucket in captured)
        return (
            f"Graph/{phase.value} captured:{len(captured)} "
            f"({100 * len(captured) / max(1, total):.1f}%) "
            f"used_mem:{format_bytes(self.used(phase))} buckets:[{shapes}]"
        )

    def _with(self, phase: Phase, status: GraphStatus) -> list[GraphOutcome]:
        return [graph for graph in self.outcomes if graph.phase is phase and graph.status is status]


@attrs.frozen
class StageTime:
    """Seconds of a stage without buckets, such as that of the sampler."""

    name: str = attrs.field(validator=instance_of(str))
    seconds: float = attrs.field(validator=number())


@attrs.frozen
class WarmupReport:
    """The result of a warm-up.

    ``allocated`` is device memory in bytes, negative if memory was released. ``complete`` is False
    if the warm-up was stopped early.
    """

    executed: tuple[BucketTime, ...]
    seconds: float = attrs.field(validator=number())
    allocated: int = attrs.field(validator=integer(-MAX_BYTES, MAX_BYTES))
    capture: CaptureReport | None = None
    stages: tuple[StageTime, ...] = ()
    complete: bool = attrs.field(default=True, validator=boolean())

    def describe(self) -> str:
        """The log line of seed 000."""
        return (
            f"Warmup {'finished' if self.complete else 'stopped'} in {self.seconds:.0f} secs, "
            f"allocated {format_bytes(self.allocated)} of device memory"
        )

    def table(self) -> str:
        """A plain-text table: buckets, seconds, slowest bucket and memory of each stage."""
        rows: list[tuple[str, ...]] = [("stage", "buckets", "seconds", "slowest", "memory")]
        rows += [self._bucket_row(phase) for phase in Phase]
        if self.capture is not None:
            rows += [_graph_row(self.capture, phase) for phase in Phase]
        rows += [(stage.name, "", f"{stage.seconds:.2f}", "", "") for stage in self.stages]
        rows.append(("total", "", f"{self.seconds:.2f}", "", format_bytes(self.allocated)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a JSON file. An existing file is replaced atomically."""
        content = attrs.asdict(self, value_serializer=_to_json)
        partial = Path(f"{os.fspath(path)}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WarmupReport:
        """Read a file that `save` wrote. Raises `WarmupError` for other content, and `OSError`."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            capture = content["capture"]
            return cls(
                executed=tuple(BucketTime(**_parse_keys(entry)) for entry in content["executed"]),
                seconds=content["seconds"],
                allocated=content["allocated"],
                capture=None if capture is None else _parse_capture(capture),
                stages=tuple(StageTime(**stage) for stage in content["stages"]),
                complete=content["complete"],
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WarmupError(
                f"{path} is not a warm-up report ({error}): write it again with WarmupReport.save"
            ) from None

    def _bucket_row(self, phase: Phase) -> tuple[str, ...]:
        entries = [entry for entry in self.executed if entry.phase is phase]
        slowest = max(entries, key=lambda entry: entry.seconds, default=None)
        return (
            phase.value,
            str(len(entries)),
            f"{sum(entry.seconds for entry in entries):.2f}",
            f"{slowest.bucket.shape} {slowest.seconds:.2f}" if slowest else "",
            "",
        )


def _graph_row(capture: CaptureReport, phase: Phase) -> tuple[str, ...]:
    graphs = [graph for graph in capture.outcomes if graph.phase is phase]
    slowest = max(graphs, key=lambda graph: graph.seconds, default=None)
    released = capture.count(phase, GraphStatus.RELEASED)
    return (
        f"Graph/{phase.value}",
        f"{len(capture.captured(phase))}/{len(graphs)}"
        + (f" ({released} released)" if released else ""),
        f"{sum(graph.seconds for graph in graphs):.2f}",
        f"{slowest.bucket.shape} {slowest.seconds:.2f}" if slowest else "",
        format_bytes(capture.used(phase)),
    )


def _to_json(_: object, __: object, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _parse_capture(content: dict[str, Any]) -> CaptureReport:
    outcomes = (_parse_keys(graph) for graph in content["outcomes"])
    return CaptureReport(
        content["budget"],
        tuple(
            GraphOutcome(**{**graph, "status": GraphStatus(graph["status"])}) for graph in outcomes
        ),
    )


def _parse_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Convert phase and bucket; keep the other entries."""
    return {**content, "phase": Phase(content["phase"]), "bucket": Bucket(**content["bucket"])}
