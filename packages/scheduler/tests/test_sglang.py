"""Our limits on SGLang's scheduler, called as its event loop does.

``sglang_host`` has the few names of SGLang that the module imports. SGLang itself runs it in
``interop/test_sglang.py``.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_in_hosts import imported_beside

from trencadis.scheduler import ConfigError
from trencadis.scheduler.runtime_settings import OF_SGLANG
from trencadis.scheduler.thermal import NoThermalPolicy, SchedulerView


@pytest.fixture(scope="module")
def host() -> Iterator[ModuleType]:
    """The module under test, imported beside SGLang's names."""
    with imported_beside("sglang") as module:
        yield module


@pytest.fixture(autouse=True)
def orders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OF_SGLANG, "{}")


def of_sglang(name: str) -> Any:
    return getattr(importlib.import_module("sglang.srt.managers.scheduler"), name)


def request(rid: str, **fields: Any) -> Any:
    return of_sglang("Req")(rid, **fields)


class Server:
    """The event loop of SGLang."""

    def __init__(self, host: ModuleType, **settings: Any) -> None:
        self.scheduler = host.ThermalScheduler(**settings)
        self.running = of_sglang("Batch")([])
        self.last: Any = None

    def step(self) -> Any:
        plan = self.scheduler.get_next_batch_to_run(
            running_batch=self.running, last_batch=self.last
        )
        self.last = plan.batch_to_run
        return self.last

    def serve(self, count: int, **fields: Any) -> list[Any]:
        """Requests that run, one millisecond after the other in their arrival."""
        requests = [
            request(f"r{i}", **{"created_time": 1.0 + 0.001 * i, **fields}) for i in range(count)
        ]
        self.scheduler.waiting_queue += requests
        self.step()
        self.step()
        assert self.names() == [each.rid for each in requests]
        return requests

    def names(self) -> list[str]:
        return [each.rid for each in self.running.reqs]


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
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "heat.csv"
    file.write_text("time_s,device,temperature_c,power_w\n0,0,50,\n1000,0,50,\n")
    settings = {"temperature_source": f"recorded:{file}", "thermal_policy": f"{__name__}:Seeing"}
    monkeypatch.setenv(OF_SGLANG, json.dumps(settings))


def test_an_order_lowers_the_batch_and_it_grows_again_with_the_next(host: ModuleType) -> None:
    server = Server(host)
    server.serve(8)
    server.scheduler.batch_control(max_num_seqs=3, policy="lowest_priority")
    server.step()
    assert server.names() == ["r0", "r1", "r2"]
    assert server.scheduler.retracted == ["r3", "r4", "r5", "r6", "r7"]
    assert server.running.released == [(index, 3) for index in (3, 4, 5, 6, 7)]
    for _ in range(4):
        server.step()
        assert server.names() == ["r0", "r1", "r2"]
    assert server.running.batch_is_full
    server.scheduler.batch_control(max_num_seqs=6)
    for _ in range(3):
        server.step()
    assert server.names() == ["r0", "r1", "r2", "r3", "r4", "r5"]


@pytest.mark.parametrize(
    ("policy", "fields", "low_first", "victim"),
    [
        ("largest_kv", {"num_output_tokens": 20}, False, "r1"),
        ("largest_kv", {"num_prompt_tokens": 24}, False, "r1"),
        ("largest_kv", {"num_prompt_tokens": 3}, False, "r3"),
        ("longest_remaining", {"max_new_tokens": 110}, False, "r1"),
        ("longest_remaining", {"num_output_tokens": 20}, False, "r3"),
        ("lowest_priority", {"priority": 1}, False, "r3"),
        ("lowest_priority", {"priority": -1}, False, "r1"),
        ("lowest_priority", {"priority": 1}, True, "r1"),
        ("lowest_priority", {"priority": -1}, True, "r3"),
    ],
)
def test_a_request_of_sglang_is_a_victim_with_its_values(
    host: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    fields: dict[str, int],
    low_first: bool,
    victim: str,
) -> None:
    schedule = importlib.import_module("sglang.srt.runtime_context").SCHEDULE
    monkeypatch.setattr(schedule, "schedule_low_priority_values_first", low_first)
    server = Server(host)
    server.scheduler.waiting_queue += [
        request(f"r{i}", created_time=1 + 0.001 * i, **(fields if i == 1 else {})) for i in range(4)
    ]
    for _ in range(3):
        server.step()
    server.scheduler.batch_control(force_evict=1, policy=policy)
    server.step()
    assert server.scheduler.retracted == [victim]


def test_the_least_recently_computed_request_is_retracted_first(host: ModuleType) -> None:
    server = Server(host)
    requests = server.serve(4)
    batch_of = of_sglang("Batch")
    for number in (2, 0, 3, 1):
        server.scheduler.begin_step(server.running, None)
        server.scheduler.end_step(batch_of([requests[number], request("unknown")]))
    server.scheduler.batch_control(force_evict=3)
    server.step()
    assert sorted(server.scheduler.retracted) == ["r0", "r2", "r3"]


def test_what_finishes_or_has_finished_is_not_retracted(host: ModuleType) -> None:
    server = Server(host)
    requests = server.serve(4)
    server.scheduler.finishing = [requests[2]]
    server.scheduler.batch_control(max_num_seqs=1, policy="lowest_priority")
    server.scheduler.begin_step(server.running, None)
    requests[3].is_finished = True
    server.scheduler.update_running_batch(server.running)
    assert server.names() == ["r0", "r2", "r3"]
    assert server.scheduler.retracted == ["r1"]
    server.scheduler.finishing = []
    server.scheduler.update_running_batch(server.running)
    assert server.scheduler.retracted == ["r1"], "the next step decides anew"


def test_a_full_batch_is_tried_again_only_where_the_limit_has_risen(host: ModuleType) -> None:
    server = Server(host)
    for order, is_full in ((None, True), (4, True), (None, False), (None, True)):
        if order is not None:
            server.scheduler.batch_control(max_num_seqs=order)  # its step starts nothing
        server.running.batch_is_full = True
        server.step()
        assert server.running.batch_is_full is is_full


def test_nothing_is_retracted_where_all_that_leave_finish(host: ModuleType) -> None:
    server = Server(host)
    server.scheduler.finishing = server.serve(2)
    server.running.batch_is_full = True
    server.scheduler.batch_control(max_num_seqs=1)
    server.scheduler.begin_step(server.running, None)
    server.scheduler.update_running_batch(server.running)
    assert server.names() == ["r0", "r1"]
    assert server.running.batch_is_full
    assert server.running.released == []


def test_offloaded_blocks_are_drained_before_a_retraction_alone(host: ModuleType) -> None:
    server = Server(host)
    server.serve(2)
    drained: list[list[str]] = []
    server.scheduler.decode_offload_manager = SimpleNamespace(
        drain_before_retraction=lambda: drained.append(server.names())
    )
    server.step()
    assert drained == []
    server.scheduler.batch_control(max_num_seqs=1)
    server.step()
    assert drained == [["r0", "r1"]]
    assert server.names() == ["r1"]


def test_a_prompt_in_chunks_and_a_beam_search_are_not_counted(host: ModuleType) -> None:
    server = Server(host)
    requests = server.serve(4)
    server.scheduler.chunked_req = requests[0]
    requests[1].beam_group = object()
    requests[2].is_finished = True
    server.scheduler.batch_control(max_num_seqs=1)
    server.step()
    assert server.names() == ["r0", "r1", "r2", "r3"]
    assert server.scheduler.retracted == []


def test_prompts_of_the_last_step_run_too(host: ModuleType) -> None:
    server = Server(host)
    server.scheduler.waiting_queue += [request(f"r{i}", created_time=float(i)) for i in range(3)]
    last = server.step()
    assert server.names() == []
    server.scheduler.batch_control(max_num_seqs=1, policy="lowest_priority")
    server.step()
    assert server.names() == ["r0"]
    assert server.scheduler.retracted == ["r1", "r2"]
    # Where data parallel ranks wait for each other, it is the running batch itself.
    merged = of_sglang("Batch")(last.reqs[:1], is_extend=True)
    server.scheduler.begin_step(merged, merged)
    assert [each.request_id for each in server.scheduler._requests.running] == ["r0"]


@pytest.mark.parametrize(
    ("limit", "page_size", "size"),
    [(None, 4, 32), (31, 4, 28), (8, 4, 8), (3, 4, 4), (7, 1, 7), (32, 4, 32)],
)
def test_chunks_are_whole_pages_within_the_prefill_limit(
    host: ModuleType, limit: int | None, page_size: int, size: int
) -> None:
    server = Server(host, page_size=page_size)
    if limit is not None:
        server.scheduler.batch_control(max_prefill_tokens=limit)
    server.step()
    assert server.scheduler.chunked_prefill_size == size


def test_without_chunks_a_prefill_limit_changes_nothing(host: ModuleType) -> None:
    server = Server(host, chunked_prefill_size=None)
    server.scheduler.batch_control(max_prefill_tokens=8)
    server.step()
    assert server.scheduler.chunked_prefill_size is None


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 32),
        ({"chunked_prefill_size": None}, 64),
        ({"chunked_prefill_size": 4}, 8),
    ],
)
def test_the_tokens_of_a_step_are_those_of_a_chunk_and_no_fewer_than_requests(
    host: ModuleType, settings: dict[str, Any], most: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(host, **settings)
    server.scheduler.batch_control(max_num_seqs=8)
    with caplog.at_level(logging.INFO):
        server.step()
    (line,) = caplog.messages
    assert line.startswith("Order carried out: ")
    assert f"new_max_prefill_tokens={most})" in line


def test_an_order_that_cannot_be_carried_out_is_logged(
    host: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(host)
    server.scheduler.batch_control(max_num_seqs=9)
    server.step()
    (line,) = caplog.messages
    assert line.startswith("Order rejected: max_num_seqs 9 is above the 8 sequences")
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer"):
        server.scheduler.batch_control(max_num_seqs=0)


def test_no_more_requests_are_admitted_than_the_limit_leaves(host: ModuleType) -> None:
    server = Server(host)
    assert server.scheduler.get_num_allocatable_reqs(3) == 5
    server.scheduler.batch_control(max_num_seqs=4)
    server.step()
    server.step()
    assert server.scheduler.get_num_allocatable_reqs(3) == 1
    assert server.scheduler.get_num_allocatable_reqs(8) == -4


@pytest.mark.usefixtures("reads")
def test_a_policy_reads_prefill_tokens_and_the_longest_wait(host: ModuleType) -> None:
    server = Server(host)
    try:
        now = time.perf_counter()
        server.step()
        server.scheduler.waiting_queue += [
            request("old", created_time=now - 50, num_output_tokens=3),
            request("a", num_prompt_tokens=30, created_time=now - 100),
            request("b", num_prompt_tokens=2, created_time=now - 200),
        ]
        server.step()
        for _ in range(2):
            server.step()
        assert [tokens for tokens, _, _ in Seeing.seen] == [0, 0, 36, 36]
        assert [running for _, _, running in Seeing.seen] == [0, 0, 3, 3]
        assert [round(wait, -1) for _, wait, _ in Seeing.seen] == [0, 100, 0, 0]
        for each in server.running.reqs:
            each.output_ids.clear()
        server.running.reqs[2].time_stats.created_time = 0.0  # not known
        server.scheduler.begin_step(server.running, None)
        assert round(Seeing.seen[-1][1], -1) == 100
        server.running.reqs[:] = [request("later", created_time=time.perf_counter() + 100)]
        server.scheduler.begin_step(server.running, None)
        assert Seeing.seen[-1][1] == 0.0
    finally:
        server.scheduler.handle_shutdown(None)


@pytest.mark.usefixtures("reads")
def test_the_decodes_of_a_mixed_step_are_no_prefill_tokens(host: ModuleType) -> None:
    server = Server(host)
    batch = of_sglang("Batch")([], is_extend=True)
    for num_tokens, decoding in ((10, ["x", "y", "z"]), (10, None), (2, ["x"] * 9), (None, None)):
        batch.extend_num_tokens, batch.decoding_reqs = num_tokens, decoding
        server.scheduler.end_step(batch)
        server.scheduler.begin_step(server.running, None)
    server.scheduler.end_step(None)
    server.scheduler.begin_step(server.running, None)
    server.scheduler.handle_shutdown(None)
    assert [tokens for tokens, _, _ in Seeing.seen] == [7, 17, 17, 17, 17]


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("PARALLEL", "tp_size", 2),
        ("PARALLEL", "pp_size", 2),
        ("PARALLEL", "dp_size", 2),
        ("DISAGG", "disaggregation_mode", "prefill"),
    ],
)
def test_several_ranks_and_prefill_apart_are_rejected(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, place: str, name: str, value: Any
) -> None:
    context = importlib.import_module("sglang.srt.runtime_context")
    monkeypatch.setattr(getattr(context, place), name, value, raising=False)
    with pytest.raises(ConfigError, match=f"TRENCADIS_SGLANG is set, and .*{value}.* use one rank"):
        Server(host)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TRENCADIS_SGLANG is not JSON: "),
        ("[]", r"TRENCADIS_SGLANG has \[\]: give an object"),
        ('{"thermal_policy": "proportional"}', "needs temperature_source"),
    ],
)
def test_wrong_settings_end_the_start(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv(OF_SGLANG, text)
    with pytest.raises(ConfigError, match=message):
        Server(host)


@pytest.mark.usefixtures("reads")
def test_the_reader_begins_and_ends_with_the_scheduler(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readers() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "temperature-recorded"]

    scheduler = Server(host).scheduler
    assert readers()
    assert scheduler.handle_shutdown("now") == "ended"
    assert scheduler.shut_down_with == "now"
    assert not readers()
    monkeypatch.setenv(OF_SGLANG, "{}")
    assert Server(host).scheduler.handle_shutdown("now") == "ended"


def test_the_plugin_replaces_the_scheduler_of_a_process_that_asks_for_it(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[tuple[object, ...]] = []
    registry = SimpleNamespace(register=lambda *given: registered.append(given))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(REPLACE="replace"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    plugin = importlib.import_module("trencadis.scheduler.sglang_plugin")
    plugin.install()
    target = "sglang.srt.managers.scheduler.Scheduler"
    assert registered == [(target, host.ThermalScheduler, "replace")]
    monkeypatch.delenv(OF_SGLANG)
    plugin.install()
    assert len(registered) == 1
