"""Warm-up before the server listens: buckets, graphs, sampler, defragmenter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.capture import GraphCapture
from trencadis.warmup.config import WarmupConfig
from trencadis.warmup.errors import WarmupError
from trencadis.warmup.execution import (
    RUNTIME_METHODS,
    execute_bucket,
    read_clock,
    read_free_memory,
)
from trencadis.warmup.log_lines import bucket_line
from trencadis.warmup.memory_plan import MemoryPlan
from trencadis.warmup.progress_bar import track
from trencadis.warmup.progress_log import ProgressLog
from trencadis.warmup.report import BucketTime, CaptureReport, StageTime, WarmupReport
from trencadis.warmup.runtime import GraphRuntime, Phase, Runtime
from trencadis.warmup.sampler import (
    SAMPLER_METHODS,
    SamplerRuntime,
    sampler_batch_sizes,
    warm_up_sampler,
)
from trencadis.warmup.strategies import capture_order
from trencadis.warmup.validators import (
    as_buckets,
    function,
    instance_of,
    require_methods,
    require_phase_replays,
)

logger = logging.getLogger("trencadis.warmup")


def warm_up(
    runtime: Runtime,
    prompt_buckets: Iterable[Bucket],
    decode_buckets: Iterable[Bucket],
    *,
    config: WarmupConfig | None = None,
    memory: MemoryPlan | None = None,
    replays: Mapping[Phase, Mapping[Bucket, float]] | None = None,
    sampler: SamplerRuntime | None = None,
    defragmenter: Callable[[], object] | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> WarmupReport:
    """Execute every bucket once, capture graphs, then warm up sampler and defragmenter (seed 000).

    Args:
        config: None means the defaults.
        memory: the plan whose budget limits the graphs; needs a `GraphRuntime`. None means no
            graphs.
        replays: how often each bucket is expected to run, for the strategy ``traffic``.
        sampler: None means no warm-up of the sampler.
        defragmenter: a call that warms up the defragmenter of the KV cache.
        stop: called before every bucket; True ends the warm-up.
        clock: returns seconds.

    Raises:
        WarmupError: ``memory`` is given and ``runtime`` cannot capture. An error of the runtime
            is passed on.
        ConfigError: an argument is wrong. Nothing has been executed.
        InvalidAnswer: free memory or the clock is not a number.
    """
    require_methods("runtime", runtime, RUNTIME_METHODS)
    config = WarmupConfig() if config is None else config
    instance_of(WarmupConfig).checked("config", config)
    if memory is not None:
        instance_of(MemoryPlan).checked("memory", memory)
    require_phase_replays(replays)
    if sampler is not None:
        require_methods("sampler", sampler, SAMPLER_METHODS)
    if defragmenter is not None:
        function.checked("defragmenter", defragmenter)
    function.checked("stop", stop)
    function.checked("clock", clock)
    buckets = {
        Phase.PROMPT: as_buckets("prompt_buckets", prompt_buckets),
        Phase.DECODE: as_buckets("decode_buckets", decode_buckets),
    }
    session = _Session(runtime, config, stop, clock)
    if session.config.skip:
        logger.info("Skipping warmup...")
        return session.report()
    session.execute(buckets)
    if memory is not None and not session.config.enforce_eager:
        session.capture(buckets, memory, replays)
    if sampler is not None and not session.config.enforce_eager:
        sizes = sampler_batch_sizes(*(buckets[phase] for phase in Phase))
        session.stage("Sampler", lambda: warm_up_sampler(sampler, sizes))
    if defragmenter is not None:
        session.stage("Defragmenter", defragmenter)
    report = session.report()
    logger.info(report.describe())
    return report


def largest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Most tokens first, of as many the longest: the order in which buckets run (seed 000).

    The allocator reserves its largest segments while memory is not fragmented, and smaller shapes
    reuse them.
    """
    return capture_order("min_tokens")(buckets, lambda bucket: 0.0)[::-1]


@attrs.define
class _Session:
    """A warm-up in progress and its results so far."""

    runtime: Runtime
    config: WarmupConfig
    stop: Callable[[], bool]
    clock: Callable[[], float]
    executed: list[BucketTime] = attrs.field(factory=list)
    captured: CaptureReport | None = None
    stages: list[StageTime] = attrs.field(factory=list)
    stopped: bool = False
    started: float = attrs.field(init=False)
    free_at_start: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.started = read_clock(self.clock)
        self.free_at_start = read_free_memory(self.runtime)

    def report(self) -> WarmupReport:
        return WarmupReport(
            executed=tuple(self.executed),
            seconds=read_clock(self.clock) - self.started,
            allocated=self.free_at_start - read_free_memory(self.runtime),
            capture=self.captured,
            stages=tuple(self.stages),
            complete=not self.stopped,
        )

    def execute(self, buckets: Mapping[Phase, Sequence[Bucket]]) -> None:
        steps = (step for phase in Phase for step in self._run(phase, buckets[phase]))
        progress = ProgressLog("buckets", sum(map(len, buckets.values())))
        for step in track(steps, progress.total, "Warm-up"):
            progress.advance(step.seconds)

    def _run(self, phase: Phase, buckets: Sequence[Bucket]) -> Iterator[BucketTime]:
        for position, bucket in enumerate(largest_first(buckets), 1):
            if self._is_stopped():
                return
            free = read_free_memory(self.runtime)
            logger.info(bucket_line(phase.value, position, len(buckets), bucket, free))
            self.executed.append(execute_bucket(self.runtime, phase, bucket, self.clock))
            yield self.executed[-1]

    def capture(
        self,
        buckets: Mapping[Phase, Sequence[Bucket]],
        memory: MemoryPlan,
        replays: Mapping[Phase, Mapping[Bucket, float]] | None,
    ) -> None:
        if self._is_stopped():
            return
        if not isinstance(self.runtime, GraphRuntime):
            raise WarmupError(
                f"{type(self.runtime).__name__} cannot capture graphs: implement capture() and "
                "release(), or pass no memory plan"
            )
        strategies = {
            Phase.PROMPT: self.config.prompt_strategy,
            Phase.DECODE: self.config.decode_strategy,
        }
        expected = replays or {}
        orders = {
            phase: capture_order(strategy, expected.get(phase))
            for phase, strategy in strategies.items()
        }
        budget = memory.graph_budget(read_free_memory(self.runtime))
        capture = GraphCapture(self.runtime, buckets, orders, budget, clock=self.clock)
        progress = ProgressLog("graphs", capture.num_buckets)
        with closing(capture.steps()) as steps:
            for outcome in track(steps, capture.num_buckets, "Graphs"):
                progress.advance(outcome.seconds)
                if self._is_stopped():
                    break
        self.captured = capture.report

    def stage(self, name: str, work: Callable[[], object]) -> None:
        if self._is_stopped():
            return
        before = read_clock(self.clock)
        work()
        self.stages.append(StageTime(name, read_clock(self.clock) - before))

    def _is_stopped(self) -> bool:
        self.stopped = self.stopped or bool(self.stop())
        return self.stopped
