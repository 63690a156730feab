"""Background warm-up: when buckets are warmed up, and which one a batch uses until its own is."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from trencadis.bucketing import AxisConfig, Bucket, BucketGrid, BucketingConfig
from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner import background_warmup
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.model_input import ModelInput
from trencadis.warmup import Phase

GRIDS = Grids(
    BucketGrid({"batch": (1, 2), "query": (8, 16), "context_blocks": (0,)}, phase="prompt"),
    BucketGrid({"batch": (1, 2, 4), "blocks": (8, 16)}, phase="decode"),
)


@attrs.define
class FakeRuntime:
    """Notes what it executes. ``fails``: every bucket raises."""

    fails: bool = False
    executed: list[tuple[Phase, Bucket]] = attrs.field(factory=list)

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        self.executed.append((phase, bucket))
        if self.fails:
            raise RuntimeError("no memory")

    def synchronize(self) -> None:
        pass

    def free_memory(self) -> int:
        return 1 << 30


def test_before_requests_are_served_the_first_bucket_of_each_phase_is_warmed_up() -> None:
    runtime = FakeRuntime()
    loop = BackgroundWarmupLoop(runtime, GRIDS, in_thread=False)
    loop.warm_up_first()
    assert len(runtime.executed) == len({phase for phase, _ in runtime.executed}) == len(Phase)
    assert loop.is_running


def test_under_steady_traffic_a_bucket_is_warmed_up_once_it_is_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime()
    loop = BackgroundWarmupLoop(runtime, GRIDS, in_thread=False)
    loop.advance(idle=False)
    assert not runtime.executed
    monkeypatch.setattr(background_warmup, "_MAX_DELAY_SECONDS", -1.0)
    loop.advance(idle=False)
    assert len(runtime.executed) == 1


def test_warm_up_that_fails_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(fails=True)
    loop = BackgroundWarmupLoop(runtime, GRIDS, in_thread=False)
    for _ in range(3):
        loop.advance(idle=True)
    assert not loop.is_running
    assert len(runtime.executed) == 1
    assert caplog.text.count("Background warm-up failed and stops") == 1


@pytest.mark.parametrize(
    ("ready", "used"),
    [
        ((), 1),
        ((2, 4), 2),
        ((4,), 4),
        ((8,), 1),
        ((1, 2), 1),
    ],
)
def test_a_batch_uses_the_smallest_ready_bucket_that_is_not_much_larger(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, ready: tuple[int, ...], used: int
) -> None:
    """Buckets of 1, 2, 4 and 8 sequences; one of 8 is more than four times as large as one of 1."""
    axis = AxisConfig(min=60, step=60, max=60)
    core = EngineCore(
        EngineConfig(
            model=str(tiny_model),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            block_size=8,
            num_blocks=60,
            warmup="none",
            bucketing=BucketingConfig(strategy="exp", decode_blocks=axis),
        )
    )
    core.warm_up()
    runner = core.executor.worker.runner
    for bucket in core.executor.worker.grids.decode.buckets:
        shapes = runner.buckets.shapes(Phase.DECODE, bucket)
        others = bucket.shape[0] > 1 and runner.forward_runner.needs_warmup
        assert len(shapes) == 1 + others, "where none is compiled, others are run as they come"
    missed: list[Bucket] = []
    runner.buckets.prefer_ready(lambda phase, bucket: missed.append(bucket))
    for bucket in core.executor.worker.grids.decode.buckets:
        if bucket.shape[0] in ready:
            runner.execute(Phase.DECODE, bucket)
    batches: list[ModelInput] = []
    run = runner.forward_runner.run
    monkeypatch.setattr(
        runner.forward_runner, "run", lambda batch: batches.append(batch) or run(batch)
    )
    core.add("a", GenerateRequest((5, 6, 7), SamplingParams(temperature=0.0, max_tokens=3)))
    while core.has_work:
        core.step()
    assert {batch.shape.batch for batch in batches[1:]} == {used}
    assert (1 in ready) == (not [bucket for bucket in missed if bucket.shape == (1, 60)])
