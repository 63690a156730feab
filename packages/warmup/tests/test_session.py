"""Every bucket runs once, largest first, and the log says so in the words users know."""

from __future__ import annotations

import logging

import pytest

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup import Phase, warm_up

GIB = 1 << 30


class RecordingRuntime:
    """A runtime whose buckets take a second and 1 MiB each, on its own clock."""

    def __init__(self, fail_at: tuple[int, ...] | None = None) -> None:
        self.executed: list[tuple[Phase, tuple[int, ...]]] = []
        self.now = 0.0
        self.free = 80 * GIB
        self._pending = False
        self._fail_at = fail_at

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        if bucket.shape == self._fail_at:
            raise RuntimeError(f"no graph for {bucket.shape}")
        self.executed.append((phase, bucket.shape))
        self.free -= 1 << 20
        self._pending = True

    def synchronize(self) -> None:
        self.now += self._pending  # the work is done when it is waited for
        self._pending = False

    def free_memory(self) -> int:
        return self.free


def logged_grids() -> tuple[BucketGrid, BucketGrid]:
    """The grids of the logged start in the plugin's documentation."""
    prompt = BucketGrid({"batch": (1, 2, 4), "seq": range(128, 1025, 128)})
    decode = BucketGrid({"batch": (1, 2, 4), "seq": range(128, 2049, 128)})
    return prompt, decode


def test_all_buckets_run_prompts_first_and_largest_first() -> None:
    runtime = RecordingRuntime()
    prompt, decode = logged_grids()
    report = warm_up(runtime, prompt.buckets, decode.buckets, clock=lambda: runtime.now)
    shapes = [shape for _, shape in runtime.executed]
    assert len(shapes) == 24 + 48
    assert shapes[:3] == [(4, 1024), (4, 896), (4, 768)]
    assert shapes[23] == (1, 128)
    assert shapes[24] == (4, 2048)
    assert [phase for phase, _ in runtime.executed] == [Phase.PROMPT] * 24 + [Phase.DECODE] * 48
    assert len(report.executed) == 72
    assert all(one.seconds == 1.0 for one in report.executed)
    assert report.seconds == 72.0
    assert report.allocated == 72 << 20


def test_log_lines_are_those_of_the_plugin(caplog: pytest.LogCaptureFixture) -> None:
    runtime = RecordingRuntime()
    runtime.free = int(79.16 * GIB)
    prompt, decode = logged_grids()
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up(runtime, prompt.buckets, decode.buckets, clock=lambda: runtime.now)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB"
    assert lines[23].startswith("[Warmup][Prompt][24/24] batch_size:1 seq_len:128 free_mem:")
    assert lines[71].startswith("[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:")
    assert lines[72] == "Warmup finished in 72 secs, allocated 72 MiB of device memory"


def test_paged_axes_are_logged_under_their_names(caplog: pytest.LogCaptureFixture) -> None:
    grid = BucketGrid({"batch": (1,), "query": (128,), "context_blocks": (16,)})
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up(RecordingRuntime(), grid.buckets, ())
    assert "batch_size:1 query_len:128 num_blocks:16" in caplog.text


def test_error_of_the_runtime_is_passed_on() -> None:
    prompt, decode = logged_grids()
    with pytest.raises(RuntimeError, match="no graph"):
        warm_up(RecordingRuntime(fail_at=(2, 512)), prompt.buckets, decode.buckets)
