"""Our limits on vLLM's schedulers, called as its core does.

``vllm_host`` has the few names of vLLM that the module imports. vLLM itself runs it in
``interop/test_vllm.py``.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from stand_in_hosts import imported_beside

from trencadis.scheduler import BatchControl, ConfigError, ControlError
from trencadis.scheduler.thermal import NoThermalPolicy, SchedulerView


@pytest.fixture(scope="module")
def host() -> Iterator[ModuleType]:
    """The module under test, imported beside vLLM's names."""
    with imported_beside("vllm") as module:
        yield module


def request(name: str, **fields: Any) -> Any:
    return importlib.import_module("vllm.v1.core.sched.scheduler").Request(name, **fields)


def serving(scheduler: Any, count: int, **fields: Any) -> list[Any]:
    """Requests that run, one millisecond after the other in their arrival."""
    requests = [request(f"r{i}", arrival_time=0.001 * i, **fields) for i in range(count)]
    scheduler.waiting += requests
    for _ in range(2):
        scheduler.schedule()
    assert not scheduler.waiting
    return requests


def names(requests: list[Any]) -> list[str]:
    return [each.request_id for each in requests]


class Seeing(NoThermalPolicy):
    """Keeps what a policy reads of the scheduler in each step."""

    seen: list[tuple[int, float, int]]

    def __init__(self) -> None:
        type(self).seen = []

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self.seen.append(
            (scheduler.num_prefill_tokens, scheduler.longest_wait_s, scheduler.num_running_seqs)
        )
        return super().get_max_running_seqs(scheduler)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "heat.csv"
    file.write_text("time_s,device,temperature_c,power_w\n0,0,50,\n1000,0,50,\n")
    return {"temperature_source": f"recorded:{file}", "thermal_policy": f"{__name__}:Seeing"}


def test_an_order_lowers_the_batch_at_once_and_it_grows_again_with_the_next(
    host: ModuleType,
) -> None:
    scheduler = host.ThermalScheduler()
    serving(scheduler, 8)
    answer = scheduler.control(BatchControl(max_num_seqs=3, policy="lowest_priority"))
    scheduler.schedule()
    assert names(scheduler.running) == ["r0", "r1", "r2"]
    assert scheduler.max_num_running_reqs == 3
    assert [name for name, _ in scheduler.preempted] == ["r7", "r6", "r5", "r4", "r3"]
    assert answer.result(timeout=0).evicted_request_ids == ("r7", "r6", "r5", "r4", "r3")
    for _ in range(3):
        scheduler.schedule()
        assert names(scheduler.running) == ["r0", "r1", "r2"]
    scheduler.control(BatchControl(max_num_seqs=8))
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.max_num_running_reqs == 8
    assert len(scheduler.running) == 8


def test_an_order_above_the_limit_of_the_server_is_rejected(host: ModuleType) -> None:
    scheduler = host.ThermalScheduler()
    answer = scheduler.control(BatchControl(max_num_seqs=9))
    scheduler.schedule()
    with pytest.raises(ControlError, match="max_num_seqs 9 is above the 8 sequences"):
        answer.result(timeout=0)


@pytest.mark.parametrize(
    ("policy", "fields", "victim"),
    [
        ("largest_kv", {"num_output_tokens": 9}, "r1"),
        ("longest_remaining", {"max_tokens": 101}, "r1"),
        ("longest_remaining", {"num_output_tokens": 9}, "r3"),
        ("lowest_priority", {"priority": 1}, "r1"),
        ("lowest_priority", {"priority": -1}, "r3"),
        ("cheapest", {"num_computed_tokens": 5}, "r3"),
    ],
)
def test_a_request_of_vllm_is_a_victim_with_its_values(
    host: ModuleType, policy: str, fields: dict[str, int], victim: str
) -> None:
    scheduler = host.ThermalScheduler()
    requests = serving(scheduler, 4)
    for name, value in fields.items():
        setattr(requests[1], name, value)
    answer = scheduler.control(BatchControl(force_evict=1, policy=policy))
    scheduler.schedule()
    assert answer.result(timeout=0).evicted_request_ids == (victim,)


def test_the_least_recently_scheduled_request_is_evicted_first(host: ModuleType) -> None:
    scheduler = host.ThermalScheduler()
    serving(scheduler, 4)
    for number, name in enumerate(("r2", "r0", "r3", "r1")):
        scheduler.begin_step()
        scheduler.end_step({name: 1, "unknown": 1})
        assert len(scheduler.running) == 4, number
    answer = scheduler.control(BatchControl(force_evict=3))
    scheduler.schedule()
    assert answer.result(timeout=0).evicted_request_ids == ("r2", "r0", "r3")


def test_a_request_that_runs_again_is_the_last_to_be_evicted_again(host: ModuleType) -> None:
    scheduler = host.ThermalScheduler()
    serving(scheduler, 3)
    for expected in (("r0",), ("r1",), ("r2",), ("r0",)):
        answer = scheduler.control(BatchControl(force_evict=1, hold_s=0))
        scheduler.schedule()
        assert answer.result(timeout=0).evicted_request_ids == expected
        for _ in range(2):
            scheduler.schedule()
        assert len(scheduler.running) == 3


@pytest.mark.parametrize(
    "attributes", [(), ("max_num_active_reqs",), ("max_num_active_reqs", "max_num_seqs")]
)
def test_each_limit_of_admission_that_a_version_has_is_set(
    host: ModuleType, attributes: tuple[str, ...]
) -> None:
    scheduler = host.ThermalScheduler(names=attributes)
    scheduler.control(BatchControl(max_num_seqs=5))
    scheduler.schedule()
    scheduler.schedule()
    for name in ("max_num_running_reqs", "max_num_active_reqs"):
        expected = 5 if name == "max_num_running_reqs" or name in attributes else None
        assert getattr(scheduler, name, None) == expected
    assert getattr(scheduler, "max_num_seqs", 8) == 8


@pytest.mark.parametrize("num_spec_tokens", [0, 2])
def test_a_prefill_limit_leaves_the_tokens_of_decodes(
    host: ModuleType, num_spec_tokens: int
) -> None:
    scheduler = host.ThermalScheduler(num_spec_tokens=num_spec_tokens)
    serving(scheduler, 2)
    long = request("long", num_prompt_tokens=90)
    scheduler.running.insert(0, long)
    scheduler.begin_step()
    assert names(scheduler.running) == ["long", "r0", "r1"], "as vLLM has them"
    scheduler.control(BatchControl(max_prefill_tokens=7))
    output = scheduler.schedule()
    per_decode = 1 + num_spec_tokens
    assert scheduler.max_num_scheduled_tokens == 2 * per_decode + 7
    assert names(scheduler.running) == ["r0", "r1", "long"]
    expected = {"r0": per_decode, "r1": per_decode, "long": 7}
    assert output.num_scheduled_tokens == expected
    scheduler.control(BatchControl(max_prefill_tokens=31))
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.max_num_scheduled_tokens == min(32, 2 * per_decode + 31)
    scheduler.control(BatchControl(max_prefill_tokens=32))
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.max_num_scheduled_tokens == 32


def test_without_chunked_prefill_a_prefill_limit_would_stop_a_prompt_and_is_none(
    host: ModuleType,
) -> None:
    scheduler = host.ThermalScheduler(enable_chunked_prefill=False)
    serving(scheduler, 2)
    scheduler.control(BatchControl(max_prefill_tokens=7))
    scheduler.schedule()
    assert scheduler.max_num_scheduled_tokens == 32


def test_a_step_may_have_fewer_tokens_than_requests(host: ModuleType) -> None:
    scheduler = host.ThermalScheduler(max_num_scheduled_tokens=4)
    answer = scheduler.control(BatchControl(max_num_seqs=8))
    scheduler.schedule()
    assert answer.result(timeout=0).new_max_num_seqs == 8
    assert scheduler.max_num_scheduled_tokens == 4


@pytest.mark.parametrize("delivers", [None, False, True])
def test_a_connector_that_delivers_the_cache_keeps_no_stale_output(
    host: ModuleType, delivers: bool | None
) -> None:
    scheduler = host.ThermalScheduler()
    if delivers is not None:
        scheduler.requires_kv_delivery = delivers
    serving(scheduler, 2)
    scheduler.control(BatchControl(max_num_seqs=1))
    scheduler.schedule()
    assert scheduler.preempted == [("r0", {"drop_stale_output": True} if delivers else {})]


def test_a_policy_reads_prefill_tokens_and_the_longest_wait(
    host: ModuleType, settings: dict[str, Any]
) -> None:
    scheduler = host.ThermalScheduler(settings={"trencadis": settings}, num_spec_tokens=1)
    try:
        now = time.time()
        scheduler.schedule()
        scheduler.waiting += [
            request("old", num_prompt_tokens=20, arrival_time=now - 50, num_output_tokens=3),
            request("a", num_prompt_tokens=30, arrival_time=now - 100),
            request("b", num_prompt_tokens=2, arrival_time=now - 200),
        ]
        scheduler.schedule()
        assert scheduler.waiting
        for _ in range(3):
            scheduler.schedule()
        tokens, waits, running = zip(*Seeing.seen, strict=True)
        # Of b two tokens, which might be a decode with a speculated one.
        assert tokens == (0, 0, 32, 32 + 18, 32 + 18)
        assert running == (0, 0, 2, 3, 3)
        assert waits[0] == 0.0
        assert [round(wait, -1) for wait in waits[1:]] == [100, 200, 0, 0]
    finally:
        scheduler.shutdown()


def test_a_clock_that_stepped_back_makes_no_negative_wait(
    host: ModuleType, settings: dict[str, Any]
) -> None:
    scheduler = host.ThermalScheduler(settings={"trencadis": settings})
    scheduler.waiting.append(request("later", arrival_time=time.time() + 1000))
    scheduler.schedule()
    scheduler.shutdown()
    assert Seeing.seen[0][1] == 0.0


def test_an_order_alone_is_work(host: ModuleType) -> None:
    scheduler = host.ThermalScheduler()
    assert scheduler.has_requests() is False
    scheduler.control(BatchControl(max_num_seqs=2))
    assert scheduler.has_requests() is True
    scheduler.schedule()
    assert scheduler.has_requests() is False
    scheduler.waiting.append(request("a"))
    assert scheduler.has_requests() is True


def test_a_client_of_the_core_sends_an_order_by_name(host: ModuleType) -> None:
    scheduler = host.ThermalAsyncScheduler(async_scheduling=True)
    core = importlib.import_module("vllm.v1.engine.core").EngineCore(scheduler)
    answers = [core.batch_control({"max_num_seqs": size}) for size in (2, 9)]
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer"):
        core.batch_control({"max_num_seqs": 0})
    for _ in range(3):
        scheduler.schedule()
    assert answers[0].result(timeout=0)["new_max_num_seqs"] == 2
    with pytest.raises(ControlError, match="max_num_seqs 9 is above the 8 sequences"):
        answers[1].result(timeout=0)


def test_a_scheduler_of_the_other_kind_is_rejected(host: ModuleType) -> None:
    with pytest.raises(ConfigError, match="ThermalScheduler schedules no step ahead"):
        host.ThermalScheduler(async_scheduling=True)
    assert host.ThermalAsyncScheduler(async_scheduling=True).has_requests() is False
    assert host.ThermalAsyncScheduler().has_requests() is False
    assert host.ThermalScheduler(async_scheduling=None).has_requests() is False, "older versions"


@pytest.mark.parametrize("wrong", [[], {"temperature": "nvml"}, {"thermal_policy": "proportional"}])
def test_wrong_settings_end_the_start(host: ModuleType, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"additional_config trencadis has|needs temperature_sou"):
        host.ThermalScheduler(settings={"trencadis": wrong})
    assert host.ThermalScheduler(settings={}).has_requests() is False


def test_the_reader_begins_and_ends_with_the_scheduler(
    host: ModuleType, settings: dict[str, Any]
) -> None:
    def readers() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "temperature-recorded"]

    scheduler = host.ThermalScheduler(settings={"trencadis": settings})
    assert readers()
    scheduler.shutdown()
    assert not readers()
    assert scheduler.is_shut_down
    plain = host.ThermalScheduler()
    plain.shutdown()
    assert plain.is_shut_down
