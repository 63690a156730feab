"""Background warm-up: the most likely bucket is next; ready after the first of each phase."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup import (
    BackgroundWarmup,
    ConfigError,
    InvalidAnswer,
    Phase,
    WarmupError,
    warm_up,
)

PROMPT = BucketGrid({"batch": (1, 2), "seq": (128, 256)})
DECODE = BucketGrid({"batch": (1, 2), "blocks": (64,)})


def background(device: Any, **options: Any) -> BackgroundWarmup:
    return BackgroundWarmup(
        device, PROMPT.buckets, DECODE.buckets, clock=lambda: device.now, **options
    )


def drain(warmup: BackgroundWarmup) -> list[tuple[Phase, tuple[int, ...]]]:
    order = []
    while (spent := warmup.advance()) is not None:
        order.append((spent.phase, spent.bucket.shape))
    return order


def test_ready_with_the_first_bucket_of_each_phase(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0))
    assert not warmup.ready
    warmup.advance()
    assert not warmup.ready
    warmup.advance()
    assert warmup.ready
    assert warmup.progress.done == 2


def test_without_traffic_small_shapes_come_first_in_both_phases(graph_device: Any) -> None:
    order = drain(background(graph_device(lambda *_: 0)))
    assert order == [
        (Phase.PROMPT, (1, 128)),
        (Phase.DECODE, (1, 64)),
        (Phase.PROMPT, (1, 256)),
        (Phase.DECODE, (2, 64)),
        (Phase.PROMPT, (2, 128)),
        (Phase.PROMPT, (2, 256)),
    ]


def test_recorded_traffic_decides_after_the_first_bucket_of_each_phase(graph_device: Any) -> None:
    replays = {Phase.PROMPT: {PROMPT.buckets[3]: 9.0, PROMPT.buckets[1]: 5.0}}
    order = drain(background(graph_device(lambda *_: 0), replays=replays))
    assert order[:3] == [
        (Phase.PROMPT, (2, 256)),
        (Phase.DECODE, (1, 64)),
        (Phase.PROMPT, (1, 256)),
    ]


def test_a_missed_bucket_comes_next(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0))
    warmup.advance(), warmup.advance()
    warmup.record_miss(Phase.PROMPT, PROMPT.buckets[3])
    assert warmup.next_bucket() == (Phase.PROMPT, PROMPT.buckets[3])


def test_a_miss_counts_as_one_more_expected_replay(graph_device: Any) -> None:
    first, expected, missed = PROMPT.buckets[0], PROMPT.buckets[1], PROMPT.buckets[3]
    replays = {Phase.PROMPT: {first: 9.0, expected: 2.5, missed: 2.0}}
    warmup = background(graph_device(lambda *_: 0), replays=replays)
    warmup.advance(), warmup.advance()
    warmup.record_miss(Phase.PROMPT, missed)
    assert warmup.next_bucket() == (Phase.PROMPT, missed)
    warmup = background(
        graph_device(lambda *_: 0), replays={Phase.PROMPT: {first: 9.0, expected: 2.5, missed: 1.0}}
    )
    warmup.advance(), warmup.advance()
    warmup.record_miss(Phase.PROMPT, missed)
    assert warmup.next_bucket() == (Phase.PROMPT, expected)


def test_a_bucket_that_traffic_has_compiled_is_not_executed_again(graph_device: Any) -> None:
    device = graph_device(lambda *_: 0)
    warmup = background(device)
    warmup.mark_ready(Phase.PROMPT, PROMPT.buckets[0])
    assert warmup.is_ready(Phase.PROMPT, PROMPT.buckets[0])
    drain(warmup)
    assert (Phase.PROMPT, (1, 128)) not in device.executed
    assert len(device.executed) == 5
    assert warmup.progress.fraction == 1.0


def test_unknown_buckets_are_neither_ready_nor_counted(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0))
    unknown = Bucket(("batch", "seq"), (64, 4096))
    warmup.mark_ready(Phase.PROMPT, unknown)
    warmup.record_miss(Phase.PROMPT, unknown)
    assert not warmup.is_ready(Phase.PROMPT, unknown)
    assert warmup.progress.done == 0


def test_time_left_is_the_mean_time_for_each_cold_bucket(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0))
    assert warmup.progress.seconds_left is None
    warmup.advance()
    assert warmup.progress.seconds_left == pytest.approx(5.0)


def test_the_report_of_an_unfinished_warm_up_is_incomplete(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0))
    warmup.advance()
    assert not warmup.report.complete
    assert len(warmup.report.executed) == 1


def test_a_bucket_that_the_runtime_marks_ready_while_it_executes_counts_once(
    graph_device: Any,
) -> None:
    class Eager(graph_device):  # type: ignore[misc]
        def execute(self, phase: Phase, bucket: Bucket) -> None:
            super().execute(phase, bucket)
            warmup.mark_ready(phase, bucket)

    warmup = background(Eager(lambda *_: 0))
    assert len(drain(warmup)) == warmup.progress.done == warmup.progress.total == 6
    assert warmup.report.complete
    assert len(warmup.report.executed) == 6


def test_a_runtime_that_advances_the_warm_up_itself_is_told_so(graph_device: Any) -> None:
    class Eager(graph_device):  # type: ignore[misc]
        def execute(self, phase: Phase, bucket: Bucket) -> None:
            warmup.advance()

    warmup = background(Eager(lambda *_: 0))
    for _ in range(2):
        with pytest.raises(WarmupError, match=r"executes the Prompt bucket Bucket\(batch=1"):
            warmup.advance()
        assert warmup.progress.done == 0


def test_a_bucket_that_fails_stays_cold(graph_device: Any) -> None:
    warmup = background(graph_device(lambda *_: 0, fail_at=(1, 128)))
    with pytest.raises(RuntimeError):
        warmup.advance()
    assert not warmup.is_ready(Phase.PROMPT, PROMPT.buckets[0])


def test_without_buckets_it_is_ready_and_done(graph_device: Any) -> None:
    warmup = BackgroundWarmup(graph_device(lambda *_: 0), (), ())
    assert warmup.ready
    assert warmup.advance() is None
    assert warmup.progress.fraction == 1.0


def test_log_lines_are_those_of_warm_up(
    graph_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        drain(background(graph_device(lambda *_: 0, free=1 << 30)))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "[Warmup][Prompt][1/4] batch_size:1 seq_len:128 free_mem:1 GiB"
    assert lines[1] == "[Warmup][Decode][1/2] batch_size:1 num_blocks:64 free_mem:1 GiB"
    assert lines[-1] == "Warmup finished in 6 secs, allocated 0 B of device memory"


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1.0, "9", None, True])
def test_replays_that_are_no_finite_numbers_are_refused(graph_device: Any, count: Any) -> None:
    with pytest.raises(ConfigError, match=r"replays of Bucket.* must be a finite number"):
        background(graph_device(lambda *_: 0), replays={Phase.PROMPT: {PROMPT.buckets[0]: count}})


@pytest.mark.parametrize(
    "replays", [5, {"Prompt": {}}, {Phase.PROMPT: 5}, {Phase.PROMPT: {(1, 128): 1.0}}]
)
def test_replays_of_another_form_are_refused(graph_device: Any, replays: Any) -> None:
    with pytest.raises(ConfigError, match="replays"):
        background(graph_device(lambda *_: 0), replays=replays)


@pytest.mark.parametrize("buckets", [None, 5, [5], ["x"], [(1, 128)]])
def test_buckets_of_another_type_are_refused(graph_device: Any, buckets: Any) -> None:
    device = graph_device(lambda *_: 0)
    with pytest.raises(ConfigError, match="prompt_buckets"):
        BackgroundWarmup(device, buckets, ())
    with pytest.raises(ConfigError, match="decode_buckets"):
        BackgroundWarmup(device, (), buckets)


def test_the_class_of_a_runtime_is_refused_in_place_of_an_instance(graph_device: Any) -> None:
    for build in (
        lambda: BackgroundWarmup(graph_device, PROMPT.buckets, ()),
        lambda: warm_up(graph_device, PROMPT.buckets, ()),
    ):
        with pytest.raises(ConfigError, match="runtime is the class GraphDevice: pass an instance"):
            build()


def test_a_runtime_that_lacks_methods_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match="type object has no execute, synchronize, free_memory"):
        BackgroundWarmup(object(), (), ())  # type: ignore[arg-type]


def test_a_clock_that_cannot_be_called_is_refused(graph_device: Any) -> None:
    with pytest.raises(ConfigError, match="clock must be callable, got"):
        BackgroundWarmup(graph_device(lambda *_: 0), (), (), clock=5.0)  # type: ignore[arg-type]


def test_no_context_counts_as_one_block_in_the_size_of_a_shape(graph_device: Any) -> None:
    grid = BucketGrid({"batch": (1,), "query": (128, 200), "context_blocks": (0, 1, 2)})
    warmup = BackgroundWarmup(graph_device(lambda *_: 0), grid.buckets, ())
    contexts = [(query, context) for _, (_, query, context) in drain(warmup)]
    assert contexts == [(128, 0), (128, 1), (200, 0), (200, 1), (128, 2), (200, 2)]


@pytest.mark.parametrize("phase, bucket", [("Prompt", PROMPT.buckets[0]), (Phase.PROMPT, (1, 128))])
def test_a_phase_or_bucket_of_another_type_is_refused(
    graph_device: Any, phase: Any, bucket: Any
) -> None:
    warmup = background(graph_device(lambda *_: 0))
    for call in (warmup.is_ready, warmup.record_miss, warmup.mark_ready):
        with pytest.raises(ConfigError, match="must be of type"):
            call(phase, bucket)
    assert warmup.progress.done == 0


@pytest.mark.parametrize("seconds", [None, "1", float("nan"), float("inf")])
def test_a_clock_that_fails_leaves_the_bucket_cold(graph_device: Any, seconds: Any) -> None:
    device = graph_device(lambda *_: 0)
    answers = [seconds, 0.0, seconds, 0.0, 1.0]
    warmup = BackgroundWarmup(device, PROMPT.buckets, (), clock=lambda: answers.pop(0))
    for _ in range(2):
        with pytest.raises(InvalidAnswer, match=r"clock\(\) returned"):
            warmup.advance()
        assert warmup.progress.done == 0
    measured = warmup.advance()
    assert measured is not None
    assert measured.seconds == 1.0
    assert warmup.progress.seconds_left == 3.0


@pytest.mark.parametrize("compiled_by", ["advance", "traffic"])
def test_a_last_bucket_whose_memory_cannot_be_read_stays_cold(
    graph_device: Any, compiled_by: str
) -> None:
    class Vague(graph_device):  # type: ignore[misc]
        def free_memory(self) -> int:
            return answers.pop(0)

    answers: list[Any] = [0, 0, None, 0, 0]
    bucket = PROMPT.buckets[0]
    device = Vague(lambda *_: 0)
    warmup = BackgroundWarmup(device, [bucket], (), clock=lambda: device.now)
    if compiled_by == "traffic":
        answers.pop(0)
    finish = {
        "advance": warmup.advance,
        "traffic": lambda: warmup.mark_ready(Phase.PROMPT, bucket),
    }[compiled_by]
    with pytest.raises(InvalidAnswer):
        finish()
    assert not warmup.is_ready(Phase.PROMPT, bucket)
    assert warmup.progress.seconds_left is None
    finish()
    assert warmup.is_ready(Phase.PROMPT, bucket)
