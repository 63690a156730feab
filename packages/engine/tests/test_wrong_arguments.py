"""Wrong arguments are the error of the caller who gives them: the engine serves all others."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.engine import (
    AsyncEngine,
    BatchControl,
    CompletionDelta,
    ConfigError,
    EngineConfig,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    RequestFailed,
    SamplingParams,
)
from trencadis.engine.front import async_engine
from trencadis.engine.front.detokenizer import IncrementalDetokenizer
from trencadis.engine.ipc.messages import Add

LIMIT_SECONDS = 300.0
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
Served = Callable[[Callable[[AsyncEngine], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Generator[Served, None, None]:
    """Runs a function of an engine, the same one for the whole module, in its event loop."""
    loop = asyncio.new_event_loop()
    config = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=80,
        warmup="none",
        hang_timeout=3600,  # nobody reads the core's messages between two tests
    )
    engine = loop.run_until_complete(AsyncEngine.start(config, LogSettings(level=logging.CRITICAL)))

    def run(body: Callable[[AsyncEngine], Awaitable[None]]) -> None:
        loop.run_until_complete(asyncio.wait_for(body(engine), LIMIT_SECONDS))

    yield run
    loop.run_until_complete(engine.stop())
    loop.close()


@pytest.mark.parametrize("size", [10**12, 10**30])
def test_a_list_that_no_memory_holds_is_refused(size: int) -> None:
    for prompt in (range(size), (token for token in range(size))):
        with pytest.raises(InvalidRequest, match="at most 16777216 token ids") as refusal:
            GenerateRequest(prompt, SHORT)
        assert refusal.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=range(size))
    with pytest.raises(ConfigError, match="thermal_devices"):
        EngineConfig(model="m", thermal_devices=range(size))


async def collect(engine: AsyncEngine, prompt: list[int], **params) -> list[CompletionDelta]:
    return [
        delta async for delta in engine.generate(GenerateRequest(prompt, SamplingParams(**params)))
    ]


async def settled(engine: AsyncEngine) -> None:
    """Wait, for a bounded time, until the core has nothing left to serve."""
    for _ in range(2000):
        stats = engine.stats
        if stats.num_running_seqs == stats.num_waiting_reqs == stats.num_used_blocks == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still busy: {engine.stats}")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt_token_ids": "hello"}, "prompt"),
        ({"prompt_token_ids": b"hello"}, "prompt"),
        ({"prompt_token_ids": 5}, "prompt"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"prompt_token_ids": [1.5]}, "prompt"),
        ({"prompt_token_ids": [True]}, "prompt"),
        ({"prompt_token_ids": [[1]]}, "prompt"),
        ({"prompt_token_ids": [1, None]}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"prompt_token_ids": [2**64]}, "prompt"),
        ({"params": None}, "params"),
        ({"params": {"max_tokens": 3}}, "params"),
        ({"priority": None}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"client": 7}, "client"),
        ({"client": "x" * 257}, "client"),
        ({"model": 7}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"is_resumed": 1}, "is_resumed"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": "\ud800"}, "request_id"),
    ],
    ids=str,
)
def test_a_mistyped_argument_is_the_error_of_its_caller_alone(
    served: Served, arguments: dict[str, Any], field: str
) -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match=field) as refusal:
            fields = {"prompt_token_ids": [1, 2], "params": SHORT, **arguments}
            async for _ in engine.generate(GenerateRequest(**fields)):
                pass
        assert refusal.value.field == field
        assert len(await collect(engine, [1, 2], max_tokens=3, ignore_eos=True)) == 3

    served(body)


@pytest.mark.parametrize("request_", [None, 7, "text", {"prompt_token_ids": [1]}], ids=str)
def test_what_is_no_request_is_refused(served: Served, request_: Any) -> None:
    async def body(engine: AsyncEngine) -> None:
        for answer in (engine.embed(request_), anext(engine.generate(request_))):
            with pytest.raises(InvalidRequest, match="GenerateRequest") as refusal:
                await answer
            assert refusal.value.field == "request"

    served(body)


@pytest.mark.parametrize("request_id", [None, 7, "\ud800", np.ones(2)], ids=repr)
def test_what_names_no_request_cannot_be_aborted(served: Served, request_id: Any) -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="request_id must be a text"):
            await engine.abort(request_id)
        await engine.abort("a request that has ended")

    served(body)


@pytest.mark.parametrize("order", [None, 4, {"max_num_seqs": 1}, BatchControl], ids=str)
def test_what_is_no_order_is_refused(served: Served, order: Any) -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="BatchControl"):
            await engine.control(order)
        assert (await engine.control(BatchControl(dry_run=True))).new_max_num_seqs == 4

    served(body)


def test_numbers_of_numpy_are_accepted(served: Served) -> None:
    async def body(engine: AsyncEngine) -> None:
        prompt = np.array([1, 2, 3])
        params = {
            "temperature": np.float64(0.0),
            "max_tokens": 3,
            "stop_token_ids": np.array([70, 71]),
            "logit_bias": {np.int64(7): np.float32(-1.5)},
        }
        expected = await collect(
            engine,
            [1, 2, 3],
            temperature=0.0,
            max_tokens=3,
            stop_token_ids=[70, 71],
            logit_bias={7: -1.5},
        )
        found = await collect(engine, prompt, **params)
        assert [delta.token_ids for delta in found] == [delta.token_ids for delta in expected]
        order = BatchControl(max_num_seqs=np.int64(4), dry_run=True)
        assert (await engine.control(order)).new_max_num_seqs == 4

    served(body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", "high"), ("prompt_token_ids", (1.5,)), ("params", None), ("params", [])),
        *(("cache_salt", 5), ("client", 5)),
    ],
    ids=str,
)
def test_a_message_that_the_core_cannot_read_is_answered_and_the_core_serves_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """As if the checks of the request had a gap."""

    def add_message(key: str, request: GenerateRequest) -> Add:
        wrong = copy.copy(request)
        object.__setattr__(wrong, name, value)
        return Add(key, wrong)

    async def body(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(async_engine, "add_message", add_message)
            with pytest.raises(InvalidRequest, match="core"):
                await collect(engine, [1, 2])
        assert len(await collect(engine, [1, 2], max_tokens=3, ignore_eos=True)) == 3

    served(body)


def test_an_order_that_the_core_cannot_read_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: AsyncEngine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(async_engine, "check_order", lambda _: None)
            with pytest.raises(InvalidRequest, match="core"):
                await engine.control("a banana")  # type: ignore[arg-type]
        assert engine.is_alive
        assert (await engine.control(BatchControl(dry_run=True))).new_max_num_seqs == 4

    served(body)


def test_an_error_in_detokenization_ends_one_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = IncrementalDetokenizer.push

    def push(self: IncrementalDetokenizer, token_id: int) -> tuple[str, str | None]:
        if self._stop == ("fail",):
            raise RuntimeError("no such byte")
        return step(self, token_id)

    async def body(engine: AsyncEngine) -> None:
        monkeypatch.setattr(IncrementalDetokenizer, "push", push)
        params = {"max_tokens": 20, "ignore_eos": True}
        failing = asyncio.create_task(collect(engine, [1, 2, 3], stop="fail", n=2, **params))
        other = await collect(engine, [1, 2, 3], **params)
        assert sum(len(delta.token_ids) for delta in other) == 20
        with pytest.raises(RequestFailed, match="no such byte"):
            await failing
        await settled(engine)

    served(body)
