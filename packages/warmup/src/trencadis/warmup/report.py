"""What warm-up did: values that can be printed, kept as JSON and compared."""

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


@attrs.frozen
class BucketTime:
    """Seconds that the first execution of a bucket took."""

    phase: Phase
    bucket: Bucket
    seconds: float


class GraphStatus(enum.Enum):
    """What became of a bucket's graph."""

    CAPTURED = "captured"
    RELEASED = "released"
    """Captured, found larger than what was left, released at once; never replayed."""
    SKIPPED = "skipped"
    """Predicted not to fit, never captured."""


@attrs.frozen
class GraphOutcome:
    """One bucket's graph: the least it was predicted to take, and what it took, in bytes.

    ``used`` and ``seconds`` are 0 where it was skipped.
    """

    phase: Phase
    bucket: Bucket
    status: GraphStatus
    predicted: int
    used: int = 0
    seconds: float = 0.0


@attrs.frozen
class CaptureReport:
    """What became of every graph, in the order of decision. ``budget`` is in bytes."""

    budget: int
    outcomes: tuple[GraphOutcome, ...] = ()

    def captured(self, phase: Phase) -> tuple[Bucket, ...]:
        """The buckets that are replayed, sorted by shape."""
        return tuple(sorted(one.bucket for one in self._with(phase, GraphStatus.CAPTURED)))

    def used(self, phase: Phase) -> int:
        """Bytes that the captured graphs of a phase take."""
        return sum(one.used for one in self._with(phase, GraphStatus.CAPTURED))

    def count(self, phase: Phase, status: GraphStatus) -> int:
        return len(self._with(phase, status))

    def summary(self, phase: Phase, total: int) -> str:
        """The log line of the seeds; ``total`` buckets were to be captured."""
        captured = self.captured(phase)
        shapes = ", ".join(str(bucket.shape) for bucket in captured)
        return (
            f"Graph/{phase.value} captured:{len(captured)} "
            f"({100 * len(captured) / max(1, total):.1f}%) "
            f"used_mem:{format_bytes(self.used(phase))} buckets:[{shapes}]"
        )

    def _with(self, phase: Phase, status: GraphStatus) -> list[GraphOutcome]:
        return [one for one in self.outcomes if one.phase is phase and one.status is status]


@attrs.frozen
class StageTime:
    """Seconds of a stage that has no buckets of its own, such as the sampler's."""

    name: str
    seconds: float


@attrs.frozen
class WarmupReport:
    """Result of a warm-up.

    ``allocated`` is device memory in bytes, negative means released. ``complete`` is False where
    it was stopped before its end.
    """

    executed: tuple[BucketTime, ...]
    seconds: float
    allocated: int
    capture: CaptureReport | None = None
    stages: tuple[StageTime, ...] = ()
    complete: bool = True

    def describe(self) -> str:
        """The log line of the seeds."""
        return (
            f"Warmup {'finished' if self.complete else 'stopped'} in {self.seconds:.0f} secs, "
            f"allocated {format_bytes(self.allocated)} of device memory"
        )

    def table(self) -> str:
        """A table in plain text: each stage's buckets, seconds, slowest bucket and memory."""
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
        """Write everything to a JSON file, replacing it in one step."""
        content = attrs.asdict(self, value_serializer=_plain)
        partial = Path(f"{os.fspath(path)}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WarmupReport:
        """Read what `save` wrote. Raises `WarmupError` for another file, `OSError` for none."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
            capture = content["capture"]
            return cls(
                executed=tuple(BucketTime(**_keys(one)) for one in content["executed"]),
                seconds=content["seconds"],
                allocated=content["allocated"],
                capture=None if capture is None else _capture(capture),
                stages=tuple(StageTime(**one) for one in content["stages"]),
                complete=content["complete"],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise WarmupError(f"{path} holds no warm-up report ({error}): save it anew") from None

    def _bucket_row(self, phase: Phase) -> tuple[str, ...]:
        times = [one for one in self.executed if one.phase is phase]
        slowest = max(times, key=lambda one: one.seconds, default=None)
        return (
            phase.value,
            str(len(times)),
            f"{sum(one.seconds for one in times):.2f}",
            f"{slowest.bucket.shape} {slowest.seconds:.2f}" if slowest else "",
            "",
        )


def _graph_row(capture: CaptureReport, phase: Phase) -> tuple[str, ...]:
    graphs = [one for one in capture.outcomes if one.phase is phase]
    slowest = max(graphs, key=lambda one: one.seconds, default=None)
    released = capture.count(phase, GraphStatus.RELEASED)
    return (
        f"Graph/{phase.value}",
        f"{len(capture.captured(phase))}/{len(graphs)}"
        + (f" ({released} released)" if released else ""),
        f"{sum(one.seconds for one in graphs):.2f}",
        f"{slowest.bucket.shape} {slowest.seconds:.2f}" if slowest else "",
        format_bytes(capture.used(phase)),
    )


def _plain(_: object, __: object, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _capture(content: dict[str, Any]) -> CaptureReport:
    outcomes = (_keys(one) for one in content["outcomes"])
    return CaptureReport(
        content["budget"],
        tuple(GraphOutcome(**{**one, "status": GraphStatus(one["status"])}) for one in outcomes),
    )


def _keys(content: dict[str, Any]) -> dict[str, Any]:
    """Phase and bucket as values again, the rest as it is."""
    return {**content, "phase": Phase(content["phase"]), "bucket": Bucket(**content["bucket"])}
