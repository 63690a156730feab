"""Random calls of the public API: right ones, and ones with wrong types, odd values, wrong orders.

Only errors of this package leave, a rejected call changes nothing, and right calls work after it.
`Fuzzer(seed).calls(n)` repeats a failure, which names its seed.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from harness import POLICY_SETTINGS

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
)
from trencadis.scheduler import (
    BatchControl,
    BeamSearch,
    Candidate,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerError,
    SchedulerOutput,
    StepTiming,
    ThermalGuard,
)
from trencadis.scheduler.telemetry import (
    ReaderConfig,
    Reading,
    Sensor,
    TemperatureReader,
    TemperatureSource,
    open_source,
)
from trencadis.scheduler.telemetry.exporter import ExporterSource
from trencadis.scheduler.telemetry.recorded import RecordedSource
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.thermal import (
    POLICIES,
    VICTIM_ORDERS,
    PhasePowerModel,
    PowerBudgetPolicy,
    PowerModel,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
    TwoPhaseThermalPolicy,
    load_thermal_policy,
)

NUM_CALLS = 2_000
NUM_SOAK_CALLS = 100_000
CALLS_PER_SEED = 250

SIZE = 2
NUM_BLOCKS = 24
NUM_HOST_BLOCKS = 8
MAX_LEN = 16
MAX_STEPS_TO_FINISH = 2_000


def no_result(*arguments: object) -> None:
    """A callable whose result is of no use."""


def broken(*arguments: object) -> None:
    raise RuntimeError("broken")


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 8, 99, 1 << 31, 10**9, 10**30, -(10**30), 10**400),
    *(0.0, 0.5, 2.5, -1.0, 1e308, math.nan, math.inf, -math.inf, 1j),
    *("", "x", "12", "r1", "lru", "power", "never", b"", b"\x01", bytearray(b"1234")),
    *([], (), {}, set(), frozenset({1}), [1], (1, 2), [[1]], [(1, 2)], [1.5], ["1"], [None]),
    *({1: 2}, {0: "x"}, {0: None}, {0: math.nan}, {1: [(1, 2)]}, {"max_num_seqs": 8}),
    *(range(5), np.int64(1), np.float32(1.5), np.array(2), np.array([1, 2]), np.zeros((2, 2))),
    *(object(), no_result, broken, Candidate(1, -1.0), Candidate("1", None), ..., int),
    *(SchedulerConfig(), StepTiming(), Reading(0, 50.0), ValueError("x")),
)


class StatePickler(pickle.Pickler):
    """Writes out the state of a manager, too, which cannot be pickled to make another."""

    def reducer_override(self, value: Any) -> Any:
        return object.__reduce_ex__(value, 5) if isinstance(value, BlockManager) else NotImplemented


Call = tuple[Callable[..., object], tuple[str, ...], dict[str, str]]
"""A function, and the kinds of its positional and of its named arguments."""

REQUEST = {
    "request_id": "new_id",
    "prompt_token_ids": "tokens",
    "max_tokens": "count",
    "min_tokens": "count",
    "stop_token_ids": "tokens",
    "n": "num_seqs",
    "best_of": "best_of",
    "beam_search": "beam_search",
    "priority": "count",
    "extra_keys": "extra_keys",
    "client": "client",
    "prompt_token_cost": "seconds",
}
BEAM_SEARCH = {"width": "num_seqs", "length_penalty": "seconds", "early_stopping": "flag"}
CONFIG = {
    "max_num_seqs": "count",
    "max_num_batched_tokens": "many",
    "max_prefill_tokens": "count",
    "max_mixed_prefill_tokens": "count",
    "max_model_len": "many",
    "max_chunk_tokens": "count",
    "max_waiting": "many",
    "policy": "queue_policy",
    "lookahead": "count",
    "max_bypasses": "count",
    "force_evict_hold_s": "seconds",
}
CONTROL = {
    "max_num_seqs": "num_seqs",
    "max_prefill_tokens": "many",
    "force_evict": "num_seqs",
    "hold_s": "seconds",
    "target_temp_c": "temperature",
    "policy": "victim_order",
    "dry_run": "flag",
}
TWO_PHASE = {
    "target_temp_c": "temperature",
    "budget_w": "seconds",
    "max_ttft_s": "seconds",
    "max_itl_s": "seconds",
    "dwell_s": "seconds",
    "min_prefill_tokens": "count",
    "min_seqs": "count",
    "victims": "victim_order",
}
PROPORTIONAL = {
    "target_temp_c": "temperature",
    "k_p": "seconds",
    "hysteresis_c": "seconds",
    "dwell_s": "seconds",
    "min_seqs": "count",
    "victims": "victim_order",
}
POWER = {
    "prior_w": "seconds",
    "dwell_s": "seconds",
    "retry_s": "seconds",
    "min_seqs": "count",
    "victims": "victim_order",
}
READER = {field.name: "seconds" for field in attrs.fields(ReaderConfig)}


class OddPolicy(SchedulerThermalPolicy):
    """Answers right, with odd values, or not at all."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def answer(self, right: Any) -> Any:
        return right if self.rng.random() < 0.7 else raised(self.rng.choice(ODD_VALUES))

    def get_max_running_seqs(self, scheduler: object) -> Any:
        return self.answer(self.rng.randint(1, 6))

    def get_max_prefill_tokens(self, scheduler: object) -> Any:
        return self.answer(self.rng.choice([None, 1, 20]))

    def select_victims(self, running: Sequence[Any], num_to_evict: int) -> Any:
        return self.answer(self.rng.sample(list(running), self.rng.randint(0, len(running))))

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self.answer(None)

    def on_power_reading(self, watts: float) -> None:
        self.answer(None)

    def retarget(self, target_temp_c: float) -> Any:
        return self.answer(True)


def raised(value: Any) -> Any:
    """An odd value, or its exception."""
    if isinstance(value, Exception):
        raise value
    return value


@attrs.define
class OddState:
    hottest_c: Any
    power_w: Any
    may_raise_cap: Any
    temperatures_c: Any = attrs.field(factory=dict)


class OddSource(TemperatureSource):
    """Returns what the fuzzer has set."""

    says: Any = ()

    @property
    def name(self) -> str:
        return "odd"

    def read(self) -> Any:
        return raised(self.says)


class Fuzzer:
    """The objects under test, and right arguments for their methods, by the name of the kind."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.now_s = 100.0
        self.names = 0
        self.futures: list[Future[Any]] = []
        self.stale_output: SchedulerOutput | None = None
        self.blocks = self.some_blocks()
        config = SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=12,
            max_model_len=MAX_LEN,
            max_waiting=20,
            policy=rng.choice(("fcfs", "priority")),
            max_bypasses=3,
            force_evict_hold_s=2.0,
        )
        self.guard = ThermalGuard(OddPolicy(rng), self.odd_state, no_result)
        self.scheduler = Scheduler(
            config,
            self.blocks,
            thermal=self.guard if rng.random() < 0.7 else None,
            defragmenter=Defragmenter(self.blocks) if rng.random() < 0.5 else None,
            clock=lambda: self.now_s,
        )
        self.output: SchedulerOutput | None = None
        self.policies = [
            load_thermal_policy(name, **POLICY_SETTINGS.get(name, {}))
            for name in POLICIES
            if name != "none"
        ]
        self.source = OddSource()
        self.reader = TemperatureReader(self.source, clock=lambda: self.now_s)
        self.targets: list[Call] = [*self.scheduler_calls(), *self.other_calls()]

    def scheduler_calls(self) -> list[Call]:
        scheduler = self.scheduler
        results = {name: name for name in ("logprobs", "candidates", "forced", "timing")}
        return [
            *[(self.add, (), REQUEST)] * 8,
            *[(self.step, (), {})] * 12,
            *[(self.schedule, (), {})] * 3,
            *[(self.update, (), {})] * 3,
            *[(scheduler.update, ("output", "sampled"), results)] * 3,
            (scheduler.add, ("request",), {}),
            (scheduler.check_queue, (), {"client": "client", "others": "request_ids"}),
            *[(scheduler.abort, ("request_id",), {})] * 2,
            *[(scheduler.finish, ("seq_id",), {})] * 2,
            (scheduler.abort_and_swap, ("request_ids",), {}),
            *[(self.control, (), CONTROL)] * 3,
            (scheduler.control, ("control",), {}),
            (self.discard_step, (), {}),
            *([(self.abort_admitted, (), {})] if self.rng.random() < 0.2 else []),
            (lambda: [scheduler.num_waiting, scheduler.num_swapped, scheduler.has_work], (), {}),
        ]

    def other_calls(self) -> list[Call]:
        return [
            (lambda **fields: Request(**{**self.right_request(), **fields}), (), REQUEST),
            (lambda width=1, **options: BeamSearch(width=width, **options), (), BEAM_SEARCH),
            (SchedulerConfig, (), CONFIG),
            (BatchControl, (), CONTROL),
            (StepTiming, (), dict.fromkeys(("prompts_s", "swap_out_s", "swap_in_s"), "seconds")),
            (
                PreemptionCosts,
                (),
                dict.fromkeys(("swap_out_s_per_block", "prefill_s_per_token"), "seconds"),
            ),
            (new_scheduler, ("config", "manager"), {"thermal": "guard", "costs": "costs"}),
            (new_scheduler, ("config", "manager"), {"defragmenter": "defragmenter"}),
            (ThermalGuard, ("policy", "callable"), {}),
            (ProportionalThermalPolicy, (), PROPORTIONAL),
            (TwoPhaseThermalPolicy, (), TWO_PHASE),
            (PowerBudgetPolicy, ("seconds",), POWER),
            *[(policy.on_temp_reading, ("count", "temperature"), {}) for policy in self.policies],
            *[(policy.on_power_reading, ("seconds",), {}) for policy in self.policies],
            *[(policy.retarget, ("temperature",), {}) for policy in self.policies],
            (
                lambda: [policy.get_max_running_seqs(self.scheduler) for policy in self.policies],
                (),
                {},
            ),
            (lambda: self.guard.cap(self.scheduler), (), {}),
            (self.retarget, ("temperature",), {}),
            (load_thermal_policy, ("policy_name",), {"min_seqs": "count", "budget_w": "seconds"}),
            (lambda watts: PowerModel().observe(watts, 3), ("seconds",), {}),
            (PhasePowerModel().observe, ("seconds", "seconds", "seconds"), {}),
            *[(self.poll, ("readings",), {})] * 3,
            (lambda: self.reader.state().power_w, (), {}),
            (ReaderConfig, (), READER),
            (TemperatureReader, ("source", "reader_config"), {}),
            (open_source, ("source_name",), {}),
            (Sensor.from_argument, ("sensor_name",), {}),
            (RecordedSource, ("recording",), {"speed": "seconds", "loop": "flag"}),
            (ExporterSource, ("url",), {"sensor": "sensor", "timeout_s": "seconds"}),
            (
                SidecarConfig,
                (),
                {"listen": "url", "period_s": "seconds", "max_streams": "count"},
            ),
        ]

    def calls(self, count: int) -> None:
        for number in range(count):
            try:
                self.call()
            except AssertionError as error:  # noqa: PERF203
                raise AssertionError(f"call {number} of Fuzzer({self.seed}): {error}") from error
        self.check_that_right_calls_work()

    def call(self) -> None:
        function, kinds, keywords = self.rng.choice(self.targets)
        share_odd = self.rng.choice((0.0, 0.0, 0.2, 1.0))
        arguments = [self.argument(kind, share_odd) for kind in kinds]
        named = {
            name: self.argument(kind, share_odd)
            for name, kind in keywords.items()
            if self.rng.random() < 0.5
        }
        self.now_s += self.rng.choice((0.0, 0.1, 3.0))
        before = self.state()
        try:
            function(*arguments, **named)
        except SchedulerError:
            assert self.state() == before, f"{function} with {arguments}, {named} changed the state"
        except Exception as error:
            raise AssertionError(f"{function} with {arguments}, {named}: {error!r}") from error

    def state(self) -> bytes:
        """All that a rejected call must not change."""
        scheduler = self.scheduler
        control, admission = scheduler._control, scheduler._admission
        pickled = io.BytesIO()
        StatePickler(pickled).dump(
            (
                *(scheduler._states, self.blocks, scheduler._in_flight, scheduler._to_finish),
                *(scheduler.costs, scheduler.scheduler_config, scheduler._completion_rate),
                *(admission._num_free_at_refusal, control._to_preempt, len(control._pending)),
                *(self.policies, self.reader._snapshot),
            )
        )
        return pickled.getvalue()

    # ---- calls with more than one step ----

    def add(self, **fields: Any) -> None:
        self.scheduler.add(Request(**{**self.right_request(), **fields}))

    def right_request(self) -> dict[str, Any]:
        return {"request_id": self.some_new_id(), "prompt_token_ids": (1, 2), "max_tokens": 3}

    def schedule(self) -> None:
        self.output = self.scheduler.schedule()

    def update(self) -> None:
        """Right results for the step in flight, if there is one."""
        if self.output is not None and self.scheduler._in_flight == [self.output]:
            output, self.stale_output, self.output = self.output, self.output, None
            ids = [i for item in (*output.prompts, *output.decodes) for i in item.sample_ids]
            self.scheduler.update(
                output,
                {seq_id: self.rng.randint(0, 2) for seq_id in ids},
                logprobs={seq_id: -self.rng.random() for seq_id in ids},
                candidates={
                    seq_id: [Candidate(token, -self.rng.random()) for token in range(4)]
                    for seq_id in ids
                },
            )

    def step(self) -> None:
        self.update()
        self.schedule()
        self.update()

    def discard_step(self) -> None:
        self.scheduler.discard_step()
        self.output = None

    def abort_admitted(self) -> None:
        self.scheduler.abort_admitted()

    def control(self, **fields: Any) -> None:
        self.futures.append(self.scheduler.control(BatchControl(**fields)))

    def retarget(self, target_temp_c: Any) -> None:
        victims = self.rng.choice(("lru", "largest_kv"))
        dry_run = self.rng.random() < 0.5
        self.guard.retarget(target_temp_c, victims, self.scheduler, dry_run=dry_run)

    def poll(self, readings: Any) -> None:
        self.source.says = readings
        self.reader.poll()
        self.reader.state()

    # ---- arguments ----

    def argument(self, kind: str, share_odd: float) -> Any:
        if self.rng.random() < share_odd:
            return self.rng.choice(ODD_VALUES)
        return getattr(self, f"some_{kind}")()

    def odd_state(self) -> Any:
        if self.rng.random() < 0.1:
            return raised(self.rng.choice(ODD_VALUES))
        hottest_c = self.argument("temperature", 0.3)
        return OddState(hottest_c, self.argument("seconds", 0.3), self.argument("flag", 0.1))

    def some_new_id(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def some_request_id(self) -> str:
        return self.rng.choice([*self.scheduler._states.groups, "r1"])

    def some_request_ids(self) -> list[str]:
        return [self.some_request_id() for _ in range(self.rng.randint(0, 3))]

    def some_seq_id(self) -> int:
        return self.rng.choice([*self.scheduler._states.sequences, 3])

    def some_tokens(self) -> tuple[int, ...]:
        return tuple(self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 8)))

    def some_count(self) -> int:
        return self.rng.randint(1, 6)

    def some_many(self) -> int:
        return self.rng.randint(6, 40)

    def some_num_seqs(self) -> int:
        return self.rng.randint(1, 3)

    def some_best_of(self) -> int | None:
        return self.rng.choice((None, 3))

    def some_beam_search(self) -> BeamSearch | None:
        return self.rng.choice((None, None, BeamSearch(width=2)))

    def some_extra_keys(self) -> tuple[Any, ...]:
        return self.rng.choice(((), ("a",), ("a", 1)))

    def some_client(self) -> str:
        return self.rng.choice(("", "a", "b"))

    def some_queue_policy(self) -> str:
        return self.rng.choice(("fcfs", "priority"))

    def some_victim_order(self) -> str:
        return self.rng.choice(tuple(VICTIM_ORDERS))

    def some_seconds(self) -> float:
        return self.rng.choice((0.5, 3.0, 90.0, 300.0))

    def some_temperature(self) -> float:
        return self.rng.uniform(20.0, 90.0)

    def some_flag(self) -> bool:
        return self.rng.random() < 0.5

    def some_request(self) -> Request:
        return Request(request_id=self.some_new_id(), prompt_token_ids=(1, 2), max_tokens=3)

    def some_control(self) -> BatchControl:
        return BatchControl(force_evict=1)

    def some_output(self) -> SchedulerOutput | None:
        return self.rng.choice((self.output, self.stale_output))

    def some_sampled(self) -> dict[int, Any]:
        """Results of some sequences, a few of them odd."""
        return {
            seq_id: self.argument("count", 0.2)
            for seq_id in self.scheduler._states.sequences
            if self.rng.random() < 0.8
        }

    def some_logprobs(self) -> dict[int, Any]:
        return {seq_id: self.argument("seconds", 0.1) for seq_id in self.some_sampled()}

    def some_forced(self) -> dict[int, Any]:
        seq_ids = [*self.scheduler._states.sequences, 3]
        return {seq_id: self.some_tokens() for seq_id in self.rng.sample(seq_ids, 1)}

    def some_candidates(self) -> dict[int, Any]:
        return {
            seq_id: [Candidate(token, self.argument("seconds", 0.1)) for token in range(3)]
            for seq_id in self.some_sampled()
        }

    def some_timing(self) -> StepTiming:
        return StepTiming(prompts_s=self.some_seconds())

    def some_config(self) -> SchedulerConfig:
        return SchedulerConfig()

    def some_blocks(self) -> BlockManager:
        config = CacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=SIZE,
            num_host_blocks=self.rng.choice((0, NUM_HOST_BLOCKS)),
            enable_prefix_caching=self.rng.random() < 0.7,
        )
        governor = BandwidthGovernor(1, 20.0, 0.2) if self.rng.random() < 0.3 else None
        return BlockManager(config, governor=governor)

    def some_manager(self) -> BlockManager:
        return self.some_blocks()

    def some_defragmenter(self) -> Defragmenter:
        return Defragmenter(self.some_blocks(), DefragConfig(threshold=1))

    def some_costs(self) -> PreemptionCosts:
        return PreemptionCosts()

    def some_policy(self) -> SchedulerThermalPolicy:
        return ProportionalThermalPolicy()

    def some_guard(self) -> ThermalGuard:
        return ThermalGuard(ProportionalThermalPolicy(), self.odd_state)

    def some_callable(self) -> Callable[..., Any]:
        return self.odd_state

    def some_policy_name(self) -> str:
        return self.rng.choice((*POLICIES, "builtins:int", "nowhere:X", "trencadis:"))

    def some_readings(self) -> list[Any]:
        return [
            Reading(device, self.argument("temperature", 0.2), self.argument("seconds", 0.2))
            for device in range(self.rng.randint(0, 3))
        ]

    def some_source(self) -> TemperatureSource:
        return OddSource()

    def some_reader_config(self) -> ReaderConfig:
        return ReaderConfig()

    def some_source_name(self) -> str:
        return self.rng.choice(("sensors", "recorded:/nowhere.csv", "exporter:x", "cold", "hlml"))

    def some_sensor_name(self) -> str:
        return self.rng.choice(("", "chip", "memory", "cold"))

    def some_sensor(self) -> Sensor:
        return self.rng.choice(tuple(Sensor))

    def some_recording(self) -> Path:
        return self.rng.choice((RECORDING, RECORDING.parent, RECORDING.parent / "none"))

    def some_url(self) -> str:
        return self.rng.choice(("http://localhost:1/metrics", "localhost:1", "0.0.0.0:1", "ftp:x"))

    # ---- the end ----

    def check_that_right_calls_work(self) -> None:
        """Every request ends, orders are answered, and no block is left."""
        scheduler = self.scheduler
        self.update()
        if scheduler._in_flight:
            scheduler.discard_step()
        for _ in range(MAX_STEPS_TO_FINISH):
            if not scheduler.has_work:
                break
            self.now_s += 1.0
            scheduler.control(BatchControl(max_num_seqs=6))
            self.step()
        context = f"after Fuzzer({self.seed})"
        assert not scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped, context
        assert all(future.done() for future in self.futures), context
        for _ in range(3):
            self.now_s += 10.0
            self.step()
        blocks = self.blocks
        assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks, context
        assert blocks.host_pool.num_free_blocks == blocks.config.num_host_blocks, context


def new_scheduler(config: Any, blocks: Any, **options: Any) -> Scheduler:
    return Scheduler(config, blocks, **options)


RECORDING = Path(tempfile.gettempdir()) / "trencadis-fuzz.csv"


@pytest.fixture(autouse=True)
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "RECORDING", tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("time_s,device,temperature_c,power_w\n0,0,50,\n")
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fuzz(num_calls: int) -> None:
    for seed in range(num_calls // CALLS_PER_SEED):
        Fuzzer(seed).calls(CALLS_PER_SEED)


@pytest.fixture(autouse=True)
def scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random string may be taken as a path, and a file be written there."""
    monkeypatch.chdir(tmp_path)


def test_random_calls_end_well_or_in_a_typed_error_that_changes_nothing() -> None:
    fuzz(NUM_CALLS)


@pytest.mark.soak
def test_100_000_random_calls_end_well_or_in_a_typed_error() -> None:
    fuzz(NUM_SOAK_CALLS)
