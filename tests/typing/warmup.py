"""A runtime with graphs is warmed up before traffic, or behind it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from typing_extensions import assert_type

from trencadis.bucketing import Bucket, BucketGrid, TrafficRecorder
from trencadis.warmup import (
    BackgroundWarmup,
    BucketTime,
    CaptureReport,
    GraphRuntime,
    MemoryPlan,
    Phase,
    Runtime,
    WarmupConfig,
    WarmupReport,
    expected_replays,
    warm_up,
)


class Host:
    """A runtime of the user's own: it implements `GraphRuntime` without deriving from it."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[Phase, Bucket], int] = {}

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        assert bucket["batch"] > 0

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        self.graphs[phase, bucket] = bucket["batch"] * bucket["seq"] << 20

    def release(self, phase: Phase, bucket: Bucket) -> None:
        del self.graphs[phase, bucket]

    def synchronize(self) -> None:
        pass

    def free_memory(self) -> int:
        return (16 << 30) - sum(self.graphs.values())


def before_traffic(prompts: BucketGrid, decodes: BucketGrid) -> WarmupReport:
    traffic = TrafficRecorder(prompts.axes)
    traffic.record((1, 200), count=9)
    host: GraphRuntime = Host()
    report = warm_up(
        host,
        prompts.buckets,
        iter(decodes),
        config=WarmupConfig(prompt_strategy="traffic"),
        memory=MemoryPlan.from_profile(16 << 30, graph_reserved_mem=0.2, block_bytes=2 << 20),
        replays={Phase.PROMPT: expected_replays(prompts, traffic)},
        stop=lambda: False,
    )
    assert_type(report.capture, CaptureReport | None)
    if report.capture is not None:
        assert_type(report.capture.captured(Phase.DECODE), tuple[Bucket, ...])
    return report


def behind_traffic(runtime: Runtime, prompts: BucketGrid, decodes: BucketGrid) -> None:
    warmup = BackgroundWarmup(runtime, prompts, decodes)
    while not warmup.ready:
        assert_type(warmup.advance(), BucketTime | None)
    assert_type(warmup.next_bucket(), tuple[Phase, Bucket] | None)
    assert_type(warmup.progress.seconds_left, float | None)


def main() -> None:
    prompts = BucketGrid({"batch": (1, 2), "seq": (128, 256)})
    decodes = BucketGrid({"batch": (1, 2), "seq": (1,)})
    behind_traffic(Host(), prompts, decodes)
    report = before_traffic(prompts, decodes)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        report.save(path)
        assert_type(WarmupReport.load(path), WarmupReport)
