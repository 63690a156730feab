"""Every bucket runs once, largest first, with the log lines of the plugin."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.warmup import (
    ConfigError,
    GraphStatus,
    InvalidAnswer,
    MemoryPlan,
    Phase,
    WarmupConfig,
    WarmupError,
    WarmupReport,
    warm_up,
)

GIB = 1 << 30


class RecordingRuntime:
    """A runtime without graphs whose buckets take a second and 1 MiB each, on its own clock."""

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


class NoSampler:
    """A sampler that counts its calls."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.samples = 0

    def open_batch(self, batch_size: int, requests: object) -> None:
        self.batches.append(batch_size)

    def sample(self, config: object) -> None:
        self.samples += 1

    def reset(self) -> None:
        pass

    def close_batch(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def logged_grids() -> tuple[BucketGrid, BucketGrid]:
    """The grids of the logged start in the plugin's documentation."""
    prompt = BucketGrid({"batch": (1, 2, 4), "seq": range(128, 1025, 128)})
    decode = BucketGrid({"batch": (1, 2, 4), "seq": range(128, 2049, 128)})
    return prompt, decode


def test_all_buckets_run_prompts_first_and_largest_first() -> None:
    runtime = RecordingRuntime()
    prompt, decode = logged_grids()
    # The clock of a host may begin anywhere.
    report = warm_up(runtime, prompt.buckets, decode.buckets, clock=lambda: 900.0 + runtime.now)
    shapes = [shape for _, shape in runtime.executed]
    assert len(shapes) == 24 + 48
    assert shapes[:3] == [(4, 1024), (4, 896), (4, 768)]
    assert shapes[23] == (1, 128)
    assert shapes[24] == (4, 2048)
    assert [phase for phase, _ in runtime.executed] == [Phase.PROMPT] * 24 + [Phase.DECODE] * 48
    assert len(report.executed) == 72
    assert all(entry.seconds == 1.0 for entry in report.executed)
    assert report.seconds == 72.0
    assert report.allocated == 72 << 20


def test_log_lines_are_those_of_the_plugin(caplog: pytest.LogCaptureFixture) -> None:
    runtime = RecordingRuntime()
    runtime.free = int(79.16 * GIB)
    prompt, decode = logged_grids()
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up(runtime, prompt.buckets, decode.buckets, clock=lambda: runtime.now)
    lines = lines_of_the_plugin(caplog)
    assert lines[0] == "[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB"
    assert lines[23].startswith("[Warmup][Prompt][24/24] batch_size:1 seq_len:128 free_mem:")
    assert lines[69].startswith("[Warmup][Decode][46/48] batch_size:1 seq_len:256 free_mem:")
    assert lines[70].startswith("[Warmup][Decode][47/48] batch_size:2 seq_len:128 free_mem:")
    assert lines[71].startswith("[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:")
    assert lines[72] == "Warmup finished in 72 secs, allocated 72 MiB of device memory"


def lines_of_the_plugin(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if not line.startswith("Warmup: ")]


def test_every_half_minute_the_log_tells_how_long_the_rest_takes(
    graph_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each bucket and each graph takes a second here."""
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        logged_start(graph_device)
    assert [line for line in caplog.messages if line.startswith("Warmup: ")] == [
        "Warmup: 30 of 72 buckets after 30 secs, the others take about 42 secs",
        "Warmup: 60 of 72 buckets after 60 secs, the others take about 12 secs",
        "Warmup: 30 of 72 graphs after 30 secs, the others take about 42 secs",
        "Warmup: 60 of 72 graphs after 60 secs, the others take about 12 secs",
    ]


def test_a_bucket_that_takes_longer_than_that_has_a_line_but_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = RecordingRuntime()
    _, decode = logged_grids()
    buckets = decode.buckets[:3]
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up(runtime, (), buckets, clock=lambda: 600 * runtime.now)
    assert [line for line in caplog.messages if line.startswith("Warmup: ")] == [
        "Warmup: 1 of 3 buckets after 600 secs, the others take about 1200 secs",
        "Warmup: 2 of 3 buckets after 1200 secs, the others take about 600 secs",
    ]


def test_paged_axes_are_logged_under_their_names(caplog: pytest.LogCaptureFixture) -> None:
    grid = BucketGrid({"batch": (1,), "query": (128,), "context_blocks": (16,)})
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up(RecordingRuntime(), grid.buckets, ())
    assert "batch_size:1 query_len:128 num_blocks:16" in caplog.text


def test_error_of_the_runtime_is_passed_on() -> None:
    prompt, decode = logged_grids()
    with pytest.raises(RuntimeError, match="no graph"):
        warm_up(RecordingRuntime(fail_at=(2, 512)), prompt.buckets, decode.buckets)


# The logged start of the plugin's page: 24 prompt and 48 decode graphs, 1.41 MiB of graph for each
# prompt token and 3.4 MiB for each decode graph, 55.43 GiB free when graphs are captured.

PLAN = MemoryPlan.from_profile(int(79.16 * GIB), 0.5, 0.4, 0.3, block_bytes=16 << 20)


def logged_cost(phase: Phase, bucket: Bucket) -> int:
    tokens = bucket["batch"] * bucket["seq"]
    return int((1.41 * tokens if phase is Phase.PROMPT else 3.4) * (1 << 20))


def logged_start(graph_device: Any, **options: Any) -> tuple[Any, WarmupReport]:
    device = graph_device(logged_cost, free=int(55.43 * GIB))
    prompt, decode = logged_grids()
    report = warm_up(
        device,
        prompt.buckets,
        decode.buckets,
        **{"memory": PLAN, "clock": lambda: device.now, **options},
    )
    return device, report


def test_the_logged_start_captures_every_decode_graph_and_the_prompts_that_fit(
    graph_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        device, report = logged_start(graph_device)
    assert report.capture is not None
    assert len(report.capture.captured(Phase.DECODE)) == 48
    # 15 prompt graphs as in the log; a 16th, of 1,536 tokens or more, would break the budget.
    assert [bucket.shape for bucket in report.capture.captured(Phase.PROMPT)] == [
        *((1, seq) for seq in range(128, 1025, 128)),
        *((2, seq) for seq in range(128, 641, 128)),
        *((4, seq) for seq in (128, 256)),
    ]
    left = 15.85 * GIB - device.used
    assert 0 <= left < logged_cost(Phase.PROMPT, Bucket(("batch", "seq"), (2, 768)))
    assert not device.released

    lines = lines_of_the_plugin(caplog)[72:]
    assert lines[0] == (
        "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.755 GiB for prompt and "
        "11.095 GiB for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)"
    )
    graphs = [line.partition(" free_mem")[0] for line in lines if line.startswith("[Warmup]")]
    assert graphs[0] == "[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128"
    # The log's first pass took 11 graphs and 7.92 GiB of the 4.755; 8 are within them.
    assert graphs[7] == "[Warmup][Graph/Prompt][8/24] batch_size:1 seq_len:640"
    assert graphs[8] == "[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128"
    assert graphs[55] == "[Warmup][Graph/Decode][48/48] batch_size:1 seq_len:2048"
    assert graphs[56:] == [
        "[Warmup][Graph/Prompt][9/24] batch_size:2 seq_len:384",
        "[Warmup][Graph/Prompt][10/24] batch_size:1 seq_len:768",
        "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896",
        "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256",
        "[Warmup][Graph/Prompt][13/24] batch_size:2 seq_len:512",
        "[Warmup][Graph/Prompt][14/24] batch_size:1 seq_len:1024",
        "[Warmup][Graph/Prompt][15/24] batch_size:2 seq_len:640",
    ]
    assert lines[-3].startswith(
        "Graph/Prompt captured:15 (62.5%) used_mem:13.75 GiB buckets:[(1, 128), (1, 256), "
    )
    assert lines[-2].startswith("Graph/Decode captured:48 (100.0%) used_mem:163.2 MiB buckets:[")
    assert lines[-1] == "Warmup finished in 135 secs, allocated 13.91 GiB of device memory"


def test_graphs_come_after_all_buckets_then_sampler_then_defragmenter(
    graph_device: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = NoSampler()
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        _, report = logged_start(
            graph_device,
            sampler=sampler,
            defragmenter=lambda: logging.getLogger("trencadis.warmup").info("defragmenter runs"),
        )
    text = caplog.text
    marks = ["[Decode][48/48]", "[Graph/Prompt][15/24]", "Sampler warmup completed", "defragmenter"]
    assert [text.index(mark) for mark in marks] == sorted(text.index(mark) for mark in marks)
    assert sampler.batches == [0, 1, 2, 4]
    assert sampler.samples == 48
    assert [stage.name for stage in report.stages] == ["Sampler", "Defragmenter"]


def test_skip_executes_nothing(graph_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    sampler = NoSampler()
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        device, report = logged_start(
            graph_device,
            config=WarmupConfig(skip=True),
            sampler=sampler,
            defragmenter=lambda: pytest.fail("the defragmenter is skipped too"),
        )
    assert not device.executed
    assert not device.ever_captured
    assert not sampler.batches
    assert report.executed == ()
    assert [record.getMessage() for record in caplog.records] == ["Skipping warmup..."]


def test_the_sampler_is_warmed_up_for_batches_of_prompts_too() -> None:
    """Prompts that end in one batch are sampled in one batch."""
    sampler = NoSampler()
    prompt = BucketGrid({"batch": (1, 3), "query": (128,), "context_blocks": (0,)})
    decode = BucketGrid({"batch": (2, 4), "blocks": (128,)})
    warm_up(RecordingRuntime(), prompt.buckets, decode.buckets, sampler=sampler)
    assert sampler.batches == [0, 1, 2, 3, 4]


def test_enforce_eager_executes_buckets_without_graphs_and_sampler(
    graph_device: Any,
) -> None:
    sampler = NoSampler()
    config = WarmupConfig(enforce_eager=True)
    device, report = logged_start(graph_device, config=config, sampler=sampler)
    assert len(device.executed) == 72
    assert not device.ever_captured
    assert report.capture is None
    assert not sampler.batches


def test_the_strategies_of_the_config_set_the_order(graph_device: Any) -> None:
    config = WarmupConfig(prompt_strategy="max_bs", decode_strategy="min_tokens")
    _, report = logged_start(graph_device, config=config)
    assert report.capture is not None
    captured = [o for o in report.capture.outcomes if o.status is GraphStatus.CAPTURED]
    assert captured[0].bucket.shape == (4, 128)
    first_decode = next(o for o in captured if o.phase is Phase.DECODE)
    assert first_decode.bucket.shape == (1, 128)


def test_the_traffic_strategy_captures_the_most_replayed_bucket_first(graph_device: Any) -> None:
    wanted = Bucket(("batch", "seq"), (2, 1024))
    _, report = logged_start(
        graph_device,
        config=WarmupConfig(prompt_strategy="traffic"),
        replays={Phase.PROMPT: {wanted: 1e6}},
    )
    assert report.capture is not None
    assert report.capture.outcomes[0].bucket == wanted


def test_a_memory_plan_without_graph_runtime_is_an_error() -> None:
    prompt, decode = logged_grids()
    with pytest.raises(WarmupError, match="RecordingRuntime cannot capture graphs"):
        warm_up(RecordingRuntime(), prompt.buckets, decode.buckets, memory=PLAN)


@pytest.mark.parametrize("buckets", [5, 100])
def test_stop_ends_between_two_buckets(graph_device: Any, buckets: int) -> None:
    device = graph_device(logged_cost, free=int(55.43 * GIB))

    def stop() -> bool:
        return len(device.executed) + len(device.ever_captured) >= buckets

    prompt, decode = logged_grids()
    sampler = NoSampler()
    report = warm_up(
        device, prompt.buckets, decode.buckets, memory=PLAN, sampler=sampler, stop=stop
    )
    assert not report.complete
    assert report.describe().startswith("Warmup stopped in ")
    assert len(device.executed) + len(device.ever_captured) == buckets
    assert not sampler.batches


def test_ctrl_c_within_a_bucket_ends_warm_up_at_once(graph_device: Any) -> None:
    def interrupted(phase: Phase, bucket: Bucket) -> int:
        if bucket["seq"] == 512:
            raise KeyboardInterrupt
        return logged_cost(phase, bucket)

    device = graph_device(interrupted, free=int(55.43 * GIB))
    prompt, decode = logged_grids()
    with pytest.raises(KeyboardInterrupt):
        warm_up(device, prompt.buckets, decode.buckets, memory=PLAN)
    assert (Phase.PROMPT, Bucket(("batch", "seq"), (1, 640))) not in device.ever_captured


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("runtime", object()),
        ("prompt_buckets", None),
        ("decode_buckets", [(1, 128)]),
        ("config", {"skip": True}),
        ("config", []),
        ("memory", 1 << 30),
        ("replays", {"Prompt": {}}),
        ("sampler", object()),
        ("defragmenter", "yes"),
        ("stop", False),
        ("clock", 0.0),
    ],
)
def test_a_wrong_argument_is_named_before_anything_runs(argument: str, value: Any) -> None:
    runtime = RecordingRuntime()
    prompt, decode = logged_grids()
    arguments: dict[str, Any] = {
        "runtime": runtime,
        "prompt_buckets": prompt.buckets,
        "decode_buckets": decode.buckets,
    }
    with pytest.raises(ConfigError, match=argument):
        warm_up(**(arguments | {argument: value}))
    assert not runtime.executed


@pytest.mark.parametrize("free", [None, "80 GiB", float("nan"), float("inf"), [1], True])
def test_free_memory_that_is_no_number_is_named(free: Any) -> None:
    runtime = RecordingRuntime()
    runtime.free = free
    with pytest.raises(InvalidAnswer, match=r"free_memory\(\) of RecordingRuntime returned"):
        warm_up(runtime, (), ())


@pytest.mark.parametrize("sign", [1, -1])
def test_free_memory_and_seconds_have_a_largest_value(sign: int) -> None:
    """Differences of free memory are within 64 bits, and those of times exact to a millisecond."""
    runtime = RecordingRuntime()
    runtime.free = sign << 61
    assert warm_up(runtime, (), (), clock=lambda: sign * 1e12).allocated == 0
    with pytest.raises(InvalidAnswer, match=r"clock\(\) returned"):
        warm_up(runtime, (), (), clock=lambda: sign * 1.001e12)
    runtime.free += sign
    with pytest.raises(InvalidAnswer, match=r"free_memory\(\) of RecordingRuntime returned"):
        warm_up(runtime, (), ())


def test_numbers_of_numpy_are_free_memory_and_seconds() -> None:
    runtime = RecordingRuntime()
    runtime.free = np.int64(1 << 40)  # type: ignore[assignment]
    prompt, _ = logged_grids()
    report = warm_up(runtime, prompt.buckets, (), clock=lambda: np.float32(1.5))
    assert report.allocated == 24 << 20


def test_the_stages_are_timed(graph_device: Any) -> None:
    device = graph_device(lambda *_: 0)

    def defragment() -> None:
        device.now += 3.0

    report = warm_up(device, (), (), defragmenter=defragment, clock=lambda: device.now)
    assert [(stage.name, stage.seconds) for stage in report.stages] == [("Defragmenter", 3.0)]
    assert report.seconds == 3.0


def test_a_stop_that_is_taken_back_ends_the_warm_up_all_the_same(graph_device: Any) -> None:
    device = graph_device(logged_cost, free=int(55.43 * GIB))
    sampler = NoSampler()
    prompt, decode = logged_grids()
    answers = []

    def stop() -> bool:
        """True for one call only, while graphs are captured."""
        answers.append(len(device.ever_captured) == 3 and True not in answers)
        return answers[-1]

    report = warm_up(
        device,
        prompt.buckets,
        decode.buckets,
        memory=PLAN,
        sampler=sampler,
        stop=stop,
    )
    assert not report.complete
    assert not sampler.batches


def test_a_stop_during_the_graphs_releases_those_that_are_above_their_share(
    graph_device: Any,
) -> None:
    def cost(phase: Phase, bucket: Bucket) -> int:
        return 50 if bucket["seq"] == 256 else 1

    device = graph_device(cost, free=1000)
    plan = MemoryPlan(free_after_profile=1000, block_bytes=1, graph_prompt_ratio=0.3)
    grid = BucketGrid({"batch": (1,), "seq": (128, 256)})
    device.free = 200  # 100 for graphs, 30 of them for prompts
    report = warm_up(
        device,
        grid.buckets,
        grid.buckets,
        memory=plan,
        config=WarmupConfig(prompt_strategy="min_tokens"),
        stop=lambda: len(device.ever_captured) == 3,
    )
    assert report.capture is not None
    captured = {(phase, b) for phase in Phase for b in report.capture.captured(phase)}
    assert set(device.graphs) == captured
    assert device.released == [(Phase.PROMPT, Bucket(("batch", "seq"), (1, 256)))]
    assert report.capture.count(Phase.PROMPT, GraphStatus.RELEASED) == 1


def test_graphs_do_not_get_the_memory_that_the_executed_buckets_have_taken(
    graph_device: Any,
) -> None:
    class Growing(graph_device):  # type: ignore[misc]
        def execute(self, phase: Phase, bucket: Bucket) -> None:
            super().execute(phase, bucket)
            self.free -= 10

    device = Growing(lambda *_: 1, free=200)
    plan = MemoryPlan(free_after_profile=1000, block_bytes=1)
    grid = BucketGrid({"batch": (1,), "seq": (128, 256)})
    report = warm_up(device, grid.buckets, (), memory=plan)
    assert report.capture is not None
    assert report.capture.budget == 200 - 20 - 100, "a tenth of the 1,000 stays free"
