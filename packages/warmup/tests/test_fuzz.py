"""Random calls of the public API: right ones, and ones with wrong types, odd values, wrong orders.

The host's callables answer wrongly or raise now and then. Only errors of this package and those of
the host leave; a rejected call changes nothing; the report has every graph that stays captured; and
right calls work afterwards. `Fuzzer(seed).calls(n)` repeats a failure, which names its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.bucketing import Bucket, BucketGrid, TrafficRecorder
from trencadis.warmup import (
    SAMPLER_CONFIGS,
    BackgroundWarmup,
    BucketTime,
    GraphBudget,
    GraphCapture,
    GraphOutcome,
    GraphStatus,
    MemoryPlan,
    MemoryUse,
    Phase,
    StageTime,
    WarmupConfig,
    WarmupError,
    WarmupReport,
    capture_order,
    expected_replays,
    sampler_batch_sizes,
    warm_up,
    warm_up_sampler,
)

NUM_CALLS = 3_000
NUM_SOAK_CALLS = 100_000
CALLS_PER_SEED = 250

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 99, 10**9, 10**30, -(10**30), 10**400),
    *(0.0, 0.5, 2.5, -1.0, 1e308, float("nan"), float("inf"), -float("inf"), 1j),
    *("", "x", "12", "max_bs", "traffic", b"", b"x"),
    *([], (), {}, set(), [1], (1, 2), [[1]], [None], {1: 2}, {"Prompt": {}}, range(10**30)),
    *({Phase.PROMPT: 5}, {Phase.PROMPT: []}, {Phase.PROMPT: {1: 2}}, Phase.PROMPT, "Prompt"),
    *(np.int64(1), np.float32(1.5), np.array(2), np.array([1, 2]), np.zeros((2, 2)), object()),
    *(ValueError("x"), ..., NotImplemented, Bucket(("batch",), (1,)), WarmupConfig(skip=True)),
    *([Bucket(("batch",), (1,)), Bucket(("batch", "seq"), (1, 2))], lambda *_: None),
)

PROMPTS = BucketGrid({"batch": (1, 2), "seq": (4, 8)})
DECODES = BucketGrid({"batch": (1, 2, 4), "seq": (1,)})


class HostError(Exception):
    """What the host raises."""


class Host:
    """A device with graphs, and a sampler. Its methods fail or answer wrongly at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.share_wrong = rng.choice((0.0, 0.0, 0.02, 0.2))
        self.noise = (0, 0, 0, 25)
        self.graphs: dict[tuple[Phase, Bucket], int] = {}
        self.now = 0.0
        self.batch_is_open = False

    def fail(self) -> None:
        if self.rng.random() < self.share_wrong / 2:
            raise HostError

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        self.fail()
        self.now += 1.0

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        self.fail()
        assert (phase, bucket) not in self.graphs, "a graph is captured twice"
        self.graphs[phase, bucket] = self.rng.randint(0, 60)

    def release(self, phase: Phase, bucket: Bucket) -> None:
        self.fail()
        del self.graphs[phase, bucket]

    def synchronize(self) -> None:
        self.fail()

    def free_memory(self) -> int:
        self.fail()
        free = 1000 - sum(self.graphs.values()) + self.rng.choice(self.noise)
        return self.rng.choice(ODD_VALUES) if self.rng.random() < self.share_wrong else free

    def clock(self) -> float:
        self.fail()
        return self.rng.choice(ODD_VALUES) if self.rng.random() < self.share_wrong else self.now

    def order(self, buckets: Any, cost: Any) -> list[Bucket]:
        self.fail()
        right = sorted(buckets, key=cost)
        return self.rng.choice(ODD_VALUES) if self.rng.random() < self.share_wrong else right

    def open_batch(self, batch_size: int, requests: object) -> None:
        self.fail()
        assert not self.batch_is_open
        self.batch_is_open = True

    def sample(self, config: object) -> None:
        self.fail()

    def reset(self) -> None:
        self.fail()

    def close_batch(self) -> None:
        self.batch_is_open = False


Call = tuple[Callable[..., object], tuple[str, ...], dict[str, str]]
"""A function, and the kinds of its positional and of its named arguments."""


class Fuzzer:
    """The objects under test, and right arguments for their methods, by the name of the kind."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.directory = directory
        self.right_host = Host(random.Random(seed))
        self.right_host.share_wrong, self.right_host.noise = 0.0, (0,)
        self.background = BackgroundWarmup(
            self.right_host, PROMPTS.buckets, DECODES.buckets, clock=self.right_host.clock
        )
        keywords = {"config": "config", "memory": "plan", "replays": "replays", "clock": "clock"}
        keywords |= {"sampler": "host", "defragmenter": "callable", "stop": "stop"}
        background = self.background
        self.targets: list[Call] = [
            (warm_up, ("host", "prompts", "decodes"), keywords),
            (self.capture, ("host", "buckets", "orders", "budget"), {"clock": "clock"}),
            (self.warm_up_in_background, ("host", "prompts", "decodes"), {"replays": "replays"}),
            (background.is_ready, ("phase", "bucket"), {}),
            (background.record_miss, ("phase", "bucket"), {}),
            (background.mark_ready, ("phase", "bucket"), {}),
            (background.next_bucket, (), {}),
            (background.advance, (), {}),
            (warm_up_sampler, ("host", "sizes"), {"configs": "sampler_configs"}),
            (sampler_batch_sizes, ("decodes",), {}),
            (self.sort, ("strategy",), {"replays": "bucket_replays"}),
            (expected_replays, ("grid", "traffic"), {}),
            (new_plan, (), PLAN),
            (plan_from_profile, ("bytes", "share", "bytes"), {}),
            (new_plan().graph_budget, ("bytes",), {}),
            (new_budget, (), {"total": "bytes", "free": "bytes", "prompt_ratio": "share"}),
            (WarmupConfig, (), CONFIG),
            (WarmupConfig.from_env, ("environ",), {}),
            (read_memory, (), {"device_free": "bytes", "device_total": "bytes"}),
            (MemoryUse(device_used=1, device_total=2).since, ("use", "text"), {}),
            (BucketTime, ("phase", "bucket", "share"), {}),
            (StageTime, ("text", "share"), {}),
            (GraphOutcome, ("phase", "bucket", "status", "bytes", "bytes", "share"), {}),
            (self.save_and_load, ("share", "bytes"), {}),
        ]

    # ---- calls with a law of their own ----

    def capture(self, host: Any, *arguments: Any, **named: Any) -> None:
        capture = GraphCapture(host, *arguments, **named)
        count = self.rng.randint(0, 8)
        steps = capture.steps()
        try:
            for _, _ in zip(range(count), steps, strict=False):
                pass
            steps.close()
        finally:
            if isinstance(host, Host):
                captured = {(phase, b) for phase in Phase for b in capture.report.captured(phase)}
                assert set(host.graphs) == captured, "the report lacks a graph, or has one too many"
                host.graphs.clear()

    def warm_up_in_background(self, host: Any, *arguments: Any, **named: Any) -> None:
        clock = host.clock if isinstance(host, Host) else self.right_host.clock
        warmup = BackgroundWarmup(host, *arguments, **named, clock=clock)
        for _ in range(20):
            done = warmup.progress.done
            selected = warmup.next_bucket()
            try:
                measured = warmup.advance()
            except (WarmupError, HostError):
                assert warmup.progress.done == done
                assert warmup.next_bucket() == selected, "a bucket that failed stays cold"
                continue
            assert warmup.progress.done == done + (measured is not None)
            if measured is None:
                break

    def sort(self, strategy: Any, **named: Any) -> None:
        order = capture_order(strategy, **named)
        assert set(order(PROMPTS.buckets, lambda _: 1.0)) == set(PROMPTS.buckets)

    def save_and_load(self, seconds: Any, allocated: Any) -> None:
        report = WarmupReport((), seconds, allocated)
        report.save(self.directory / "report.json")
        assert WarmupReport.load(self.directory / "report.json").describe() == report.describe()
        report.table()

    # ---- the law of every call ----

    def calls(self, count: int) -> None:
        for number in range(count):
            try:
                self.call()
            except AssertionError as error:  # noqa: PERF203
                raise AssertionError(f"call {number} of Fuzzer({self.seed}): {error}") from error
        self.check_that_right_calls_work()

    def call(self) -> None:
        function, kinds, keywords = self.rng.choice(self.targets)
        share_odd = self.rng.choice((0.0, 0.0, 0.3, 1.0))
        arguments = [self.argument(kind, share_odd) for kind in kinds]
        named = {
            name: self.argument(kind, share_odd)
            for name, kind in keywords.items()
            if self.rng.random() < 0.5
        }
        before = self.state()
        try:
            function(*arguments, **named)
        except (WarmupError, HostError):
            assert self.state() == before, f"{function} with {arguments}, {named} changed the state"
        except Exception as error:
            raise AssertionError(f"{function} with {arguments}, {named}: {error!r}") from error

    def state(self) -> object:
        warmup = self.background
        cold = [warmup.is_ready(*key) for key in warmup._all]
        ranks = [(key, rank.replays, rank.position) for key, rank in warmup._cold.items()]
        return cold, ranks, warmup.progress, warmup.report, warmup.ready

    def argument(self, kind: str, share_odd: float) -> Any:
        if self.rng.random() < share_odd:
            return self.rng.choice(ODD_VALUES)
        return getattr(self, f"some_{kind}")()

    def check_that_right_calls_work(self) -> None:
        host, warmup = self.right_host, self.background
        while warmup.advance() is not None:
            pass
        assert warmup.ready
        assert warmup.report.complete
        plan = MemoryPlan(free_after_profile=1000, block_bytes=1, graph_reserved_mem=0.5)
        report = warm_up(host, PROMPTS, DECODES, memory=plan, sampler=host, clock=host.clock)
        assert len(report.executed) == len(PROMPTS) + len(DECODES)
        assert report.capture is not None
        assert len(report.capture.outcomes) == len(report.executed)
        host.graphs.clear()

    # ---- right arguments ----

    def some_host(self) -> Host:
        return Host(random.Random(self.rng.random()))

    def some_prompts(self) -> Any:
        return self.rng.choice((PROMPTS, PROMPTS.buckets, (), PROMPTS.buckets * 2))

    def some_decodes(self) -> Any:
        return self.rng.choice((DECODES, iter(DECODES), ()))

    def some_buckets(self) -> Any:
        return {Phase.PROMPT: self.some_prompts(), Phase.DECODE: self.some_decodes()}

    def some_orders(self) -> Any:
        host = self.some_host()
        names = ("min_tokens", "max_bs", "traffic")
        return {phase: self.rng.choice((host.order, capture_order(names[2]))) for phase in Phase}

    def some_budget(self) -> GraphBudget:
        return GraphBudget(total=self.rng.randint(0, 200), free=999, prompt_ratio=self.rng.random())

    def some_plan(self) -> MemoryPlan:
        return MemoryPlan(free_after_profile=1000, block_bytes=1, graph_reserved_mem=0.2)

    def some_config(self) -> WarmupConfig:
        return WarmupConfig(enforce_eager=self.some_flag(), prompt_strategy=self.some_strategy())

    def some_replays(self) -> Any:
        return self.rng.choice(({}, {Phase.PROMPT: self.some_bucket_replays()}))

    def some_bucket_replays(self) -> Any:
        return {self.some_bucket(): self.rng.choice((0, 1, 2.5))}

    def some_phase(self) -> Phase:
        return self.rng.choice(list(Phase))

    def some_bucket(self) -> Bucket:
        return self.rng.choice((*PROMPTS, *DECODES))

    def some_status(self) -> GraphStatus:
        return self.rng.choice(list(GraphStatus))

    def some_clock(self) -> Callable[[], float]:
        return self.rng.choice((self.some_host().clock, self.right_host.clock))

    def some_stop(self) -> Callable[[], bool]:
        return lambda: self.rng.random() < 0.1

    def some_callable(self) -> Callable[..., object]:
        return self.rng.choice((self.some_host().fail, print_nothing))

    def some_sizes(self) -> Any:
        return self.rng.choice(((0, 1, 4), [3], ()))

    def some_sampler_configs(self) -> Any:
        return SAMPLER_CONFIGS[: self.rng.randint(0, 3)]

    def some_strategy(self) -> str:
        return self.rng.choice(("min_tokens", "max_bs", "traffic"))

    def some_grid(self) -> BucketGrid:
        return PROMPTS

    def some_traffic(self) -> TrafficRecorder:
        traffic = TrafficRecorder(PROMPTS.axes)
        traffic.record((1, 3), count=self.rng.randint(1, 5))
        return traffic

    def some_bytes(self) -> int:
        return self.rng.choice((0, 1, 100, 1 << 40))

    def some_share(self) -> float:
        return self.rng.random()

    def some_flag(self) -> bool:
        return self.rng.random() < 0.5

    def some_text(self) -> str:
        return "Loading"

    def some_use(self) -> MemoryUse:
        return MemoryUse(device_used=1, device_total=2)

    def some_environ(self) -> dict[str, str]:
        names = ("VLLM_SKIP_WARMUP", "VLLM_GRAPH_RESERVED_MEM", "VLLM_GRAPH_PROMPT_STRATEGY")
        return {self.rng.choice(names): self.rng.choice(("", "1", "nan", "max_bs", "9" * 5000))}


PLAN = {
    "free_after_profile": "bytes",
    "block_bytes": "bytes",
    "gpu_memory_utilization": "share",
    "graph_reserved_mem": "share",
}
CONFIG = {
    "skip": "flag",
    "enforce_eager": "flag",
    "graph_prompt_ratio": "share",
    "prompt_strategy": "strategy",
}


def new_plan(**changes: Any) -> MemoryPlan:
    plan = MemoryPlan(**{"free_after_profile": 1000, "block_bytes": 1, **changes})
    plan.describe()
    return plan


def plan_from_profile(free: Any, utilization: Any, block_bytes: Any) -> MemoryPlan:
    return MemoryPlan.from_profile(free, utilization, block_bytes=block_bytes)


def new_budget(**changes: Any) -> GraphBudget:
    budget = GraphBudget(**{"total": 1, "free": 1, **changes})
    budget.describe()
    return budget


def read_memory(**changes: Any) -> MemoryUse:
    return MemoryUse.read(**{"device_free": 1, "device_total": 2, **changes})


def print_nothing(*arguments: object) -> None:
    """A callable whose result is of no use."""


def fuzz(num_calls: int, directory: Path) -> None:
    for seed in range(num_calls // CALLS_PER_SEED):
        Fuzzer(seed, directory).calls(CALLS_PER_SEED)


@pytest.fixture(autouse=True)
def scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random string may be taken as a path, and a file be written there."""
    monkeypatch.chdir(tmp_path)


def test_random_calls_end_well_or_in_a_typed_error_that_changes_nothing(tmp_path: Path) -> None:
    fuzz(NUM_CALLS, tmp_path)


@pytest.mark.soak
def test_100_000_random_calls_end_well_or_in_a_typed_error(tmp_path: Path) -> None:
    fuzz(NUM_SOAK_CALLS, tmp_path)
