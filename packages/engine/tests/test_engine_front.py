"""The front of an engine, with a core that a test answers for: requests, orders, switches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.engine import (
    AsyncEngine,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    EngineSleeping,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    ModelEntry,
    ModelNotActiveError,
    MultiModelEngine,
    PoolingRequest,
    RequestFailed,
    SamplingParams,
    StructuredOutput,
    SwitchFailedError,
    SwitchInProgressError,
    SwitchReport,
    Tokenizer,
    UnknownModelError,
)
from trencadis.engine.api.inspection import AdapterInfo
from trencadis.engine.errors import AdapterError, EngineError, ModelError
from trencadis.engine.front import async_engine
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.open_requests import OpenRequest, OpenRequests
from trencadis.engine.front.prepared_models import PreparedModels
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.ipc.messages import (
    Abort,
    AdaptersChanged,
    Add,
    Busy,
    CheckModel,
    Control,
    Controlled,
    Finish,
    Inspect,
    Inspected,
    LoadAdapter,
    ModelChecked,
    NewToken,
    Preempt,
    Preempted,
    Ready,
    Reconfigure,
    Reconfigured,
    ReconfigureFailed,
    Rejected,
    RequestError,
    Sleep,
    Slept,
    StepDone,
    Stop,
    UnloadAdapter,
    WakeUp,
)
from trencadis.scheduler import BatchControl, BatchControlResult

READY = Ready(64, 9, 8, "float32", "cpu", 5, 1.5)
OTHER = Ready(32, 7, 4, "bfloat16", "cpu", 6, 2.5)
ADAPTER = AdapterInfo("one", "/adapters/one", 8, 100, "digest of one")


class Core:
    """Keeps what it is sent, and answers by ``script``: messages by the type of what it is sent."""

    def __init__(self) -> None:
        self.is_alive = True
        self.stopped_s = 0.0
        self.sent: list[Any] = []
        self.ended_within: list[float] = []
        self.script: dict[type, Callable[[Any], Sequence[Any]]] = {}
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        for answer in self.script.get(type(message), lambda _: ())(message):
            self.says(answer)

    def says(self, message: Any) -> None:
        self._messages.put_nowait(message)

    def dies(self, reason: str) -> None:
        self.is_alive = False
        self.says(EngineDead(reason))

    async def receive(self, *limits: float) -> Any:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def end(self, timeout_s: float = 0.0) -> None:
        self.ended_within.append(timeout_s)
        self.is_alive = False


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


def config_of(model: object = "m", **changes: object) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", **changes)


@contextlib.asynccontextmanager
async def fronted(
    tokenizer: Tokenizer, ready: Ready = READY, **changes: object
) -> AsyncIterator[tuple[Core, AsyncEngine]]:
    core = Core()
    supervisor = CoreSupervisor(config_of(**changes), core, ready, LogSettings())
    engine = AsyncEngine(tokenizer, supervisor)
    try:
        yield core, engine
    finally:
        await engine.stop()


def limited(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60))


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def step(key: str, token_id: int, ends: str | None = None, index: int = 0) -> StepDone:
    return StepDone((NewToken(key, index, token_id, ends, 0),), None)


def spelling(tokenizer: Tokenizer, text: str) -> Callable[[Add], Sequence[StepDone]]:
    """A script for `Add`: the letters of a text, the last with a reason."""

    def steps(message: Add) -> Sequence[StepDone]:
        ids = letters(tokenizer, text)
        ends = [None] * (len(ids) - 1) + ["length"]
        return [step(message.key, *each) for each in zip(ids, ends, strict=True)]

    return steps


async def text_of(engine: AsyncEngine, **fields: Any) -> str:
    request = GenerateRequest((1, 2), SamplingParams(max_tokens=9), **fields)
    return "".join([delta.text async for delta in engine.generate(request)])


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# Requests.


def test_a_request_is_sent_once_under_a_key_of_its_own(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Add] = spelling(tokenizer, "abc")
            assert await text_of(engine) == "abc"
            assert await text_of(engine, request_id="mine") == "abc"
            assert await text_of(engine, request_id="mine") == "abc"
            assert [message.key for message in core.sent] == ["request-0/0", "mine/1", "mine/2"]
            assert not engine._requests.unfinished()

    limited(body)


def test_a_generator_that_is_closed_aborts_its_request(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Add] = lambda message: [step(message.key, 97)]
            stream = engine.generate(GenerateRequest((1,), SamplingParams(max_tokens=9)))
            await anext(stream)
            await stream.aclose()
            assert core.sent[1:] == [Abort(("request-0/0",))]
            core.says(step("request-0/0", 98))  # it was on its way
            core.script[Add] = spelling(tokenizer, "b")
            assert await text_of(engine) == "b"

    limited(body)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda key: Rejected(key, "full", overloaded=True), EngineOverloaded),
        (lambda key: Rejected(key, "asleep", sleeping=True), EngineSleeping),
        (lambda key: Rejected(key, "too long", "prompt"), InvalidRequest),
        (lambda key: RequestError(key, "broken"), RequestFailed),
    ],
)
def test_what_the_core_says_of_a_request_ends_it_alone(tokenizer, answer, error):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Add] = lambda message: [answer(message.key)]
            with pytest.raises(error) as raised:
                await text_of(engine)
            assert type(raised.value) is error
            if error is InvalidRequest:
                assert raised.value.field == "prompt"
            core.script[Add] = spelling(tokenizer, "ok")
            assert await text_of(engine) == "ok"
            assert not any(isinstance(message, Abort) for message in core.sent)

    limited(body)


def test_requests_of_another_model_or_to_a_sleeping_engine_are_refused(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer, served_model_name="us") as (core, engine):
            core.script |= {
                Add: spelling(tokenizer, "a"),
                Sleep: lambda message: [Slept(message.number, 123)],
                WakeUp: lambda message: [Reconfigured(message.number, OTHER)],
            }
            assert await text_of(engine, model="us") == "a"
            with pytest.raises(ModelNotActiveError, match="them is not active, us is"):
                await text_of(engine, model="them")
            assert not engine.is_sleeping
            assert await engine.sleep(2) == 123
            assert core.sent[-1].level == 2
            assert engine.is_sleeping
            with pytest.raises(EngineSleeping):
                await text_of(engine)
            await engine.wake_up()
            assert not engine.is_sleeping
            assert (engine.max_model_len, engine.info["num_blocks"]) == (32, 7)
            num_sent = len(core.sent)
            await engine.wake_up()
            assert len(core.sent) == num_sent, "it is awake"
            with pytest.raises(InvalidRequest, match="level"):
                await engine.sleep(3)

    limited(body)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda engine: setattr(engine._changes, "is_sleeping", True), EngineSleeping),
        (
            lambda engine: setattr(engine._changes, "switching", "it switches"),
            SwitchInProgressError,
        ),
        (lambda engine: setattr(engine._changes, "num_models", 1), SwitchInProgressError),
        (lambda engine: engine._fail("planted"), EngineDead),
        (lambda engine: None, None),
    ],
)
def test_what_changes_while_a_grammar_is_checked_is_told(tokenizer, monkeypatch, change, error):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            checked = []

            async def check(form: StructuredOutput, client: str | None) -> None:
                checked.append((form, client))
                change(engine)

            monkeypatch.setattr(engine._grammars, "check", check)
            core.script[Add] = spelling(tokenizer, "a")
            form = StructuredOutput(regex="a")
            params = SamplingParams(max_tokens=9, structured_output=form)
            stream = engine.generate(GenerateRequest((1,), params, client="me"))
            if error is None:
                assert (await anext(stream)).text == "a"
            else:
                with pytest.raises(error):
                    await anext(stream)
                assert not sent_of(core, Add)
            assert checked == [(form, "me")]
            await stream.aclose()

    limited(body)


def test_an_adapter_that_a_request_names_is_remembered_by_its_content(tokenizer):
    async def body() -> None:
        adapters = (ADAPTER, attrs.evolve(ADAPTER, name="two", digest="digest of two"))
        ready = Ready(64, 9, 8, "float32", "cpu", 5, 1.5, adapters=adapters)
        async with fronted(tokenizer, ready, enable_lora=True) as (core, engine):
            core.script[Add] = lambda message: [step(message.key, 97)]
            found = []
            for lora in ("two", "one", None, "none"):
                stream = engine.generate(GenerateRequest((1,), SamplingParams(), lora=lora))
                await anext(stream)
                found += [each.lora_digest for each in engine._requests.unfinished()]
                await stream.aclose()
            assert found == ["digest of two", "digest of one", "", ""]

    limited(body)


def test_an_aborted_request_yields_its_end_and_others_go_on(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Add] = lambda message: [step(message.key, 97)]
            streams = [
                engine.generate(GenerateRequest((1,), SamplingParams(), request_id=name))
                for name in "xy"
            ]
            for stream in streams:
                await anext(stream)
            await engine.abort("unknown")
            await engine.abort("x")
            assert core.sent[2:] == [Abort(("x/0",))]
            assert [delta.finish_reason async for delta in streams[0]] == ["abort"]
            core.says(step("y/1", 98, "length"))
            assert (await anext(streams[1])).finish_reason == "length"
            with pytest.raises(InvalidRequest):
                await engine.abort(7)  # type: ignore[arg-type]

    limited(body)


def test_a_core_that_says_what_it_is_busy_with_has_begun_it(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            for busy in (True, False):
                core.script |= {
                    Sleep: lambda message: [Slept(message.number, 1)],
                    WakeUp: lambda message, busy=busy: [
                        Busy("it warms up", number=message.number if busy else None),
                        Reconfigured(message.number, READY),
                    ],
                }
                await engine.sleep()
                await engine.wake_up()
                assert engine._changes.has_begun is busy

    limited(body)


# Orders.


def test_preempted_requests_are_named_once(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script |= {
                Add: lambda message: [step(message.key, 97)],
                Preempt: lambda message: [Preempted(message.number, (*message.keys[:1],) * 2)],
            }
            stream = engine.generate(GenerateRequest((1,), SamplingParams(), request_id="a/b"))
            await anext(stream)
            assert await engine.abort_and_swap(["a/b", "other"]) == ("a/b",)
            assert core.sent[-1].keys == ("a/b/0",)
            for wrong, name in (("a/b", "request_ids"), (7, "request_ids"), ([7], "request_id")):
                with pytest.raises(InvalidRequest) as refusal:
                    await engine.abort_and_swap(wrong)
                assert refusal.value.field == name
            await stream.aclose()

    limited(body)


RESULT = BatchControlResult(
    previous_running=3,
    new_running=1,
    evicted_request_ids=("a/b/0", "a/b/1", "c/2"),
    estimated_watts_saved=0.5,
    new_max_num_seqs=1,
    new_max_prefill_tokens=8,
)


def test_an_order_names_requests_as_their_clients_do(tokenizer, monkeypatch):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            order = BatchControl(max_num_seqs=1)
            core.script[Control] = lambda message: [Controlled(message.number, RESULT)]
            found = await engine.control(order)
            assert found == attrs.evolve(RESULT, evicted_request_ids=("a/b", "c"))
            assert core.sent[-1].order == order
            refused = {"message": "not so", "field": "max_num_seqs"}
            core.script[Control] = lambda message: [Controlled(message.number, **refused)]
            with pytest.raises(InvalidRequest, match="not so") as refusal:
                await engine.control(order)
            assert refusal.value.field == "max_num_seqs"
            with pytest.raises(InvalidRequest, match="BatchControl"):
                await engine.control({"max_num_seqs": 1})  # type: ignore[arg-type]
            core.script.clear()
            monkeypatch.setattr(async_engine, "_ORDER_SECONDS", 0.001)
            with pytest.raises(EngineOverloaded, match="was not carried out within 0 s"):
                await engine.control(order)
            core.says(Controlled(core.sent[-1].number, RESULT))  # too late
            await settled()
            assert engine.is_alive
            assert engine._answers == {}

    limited(body)


def test_an_inspection_or_why_there_is_none(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Inspect] = lambda message: [Inspected(message.number, "seen")]
            assert await engine.inspect() == "seen"
            core.script[Inspect] = lambda message: [Inspected(message.number, None, "busy")]
            with pytest.raises(RequestFailed, match="busy"):
                await engine.inspect()

    limited(body)


def test_adapters_are_loaded_and_unloaded_by_name(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script |= {
                LoadAdapter: lambda message: [AdaptersChanged(message.number, (ADAPTER,))],
                UnloadAdapter: lambda message: [AdaptersChanged(message.number)],
            }
            await engine.load_adapter("one", Path("/adapters/one"), ["/adapters"])
            sent = core.sent[-1]
            assert (sent.name, sent.path, sent.within) == ("one", "/adapters/one", ("/adapters",))
            assert engine.adapters == (ADAPTER,)
            failed = {"error": "taken", "field": "lora_name"}
            for internal, kind in ((False, AdapterError), (True, RequestFailed)):
                core.script[LoadAdapter] = lambda message, internal=internal: [
                    AdaptersChanged(message.number, **failed, is_internal=internal)
                ]
                with pytest.raises(kind, match="taken"):
                    await engine.load_adapter("one", "/adapters/one")
                assert core.sent[-1].within == ()
                assert engine.adapters == (ADAPTER,), "nothing has changed"
            await engine.unload_adapter("one")
            assert engine.adapters == ()
            for path, within, field in (
                ("", (), "lora_path"),
                (7, (), "lora_path"),
                ("p", 7, "within"),
                ("p", "text", "within"),
                ("p", [7], "within"),
            ):
                with pytest.raises(InvalidRequest) as refusal:
                    await engine.load_adapter("two", path, within)
                assert refusal.value.field == field
            for change in (engine.unload_adapter(""), engine.load_adapter("", "p")):
                with pytest.raises(InvalidRequest) as refusal:
                    await change
                assert refusal.value.field == "lora_name"
            engine._changes.switching = "it switches"
            for change in (engine.unload_adapter("one"), engine.load_adapter("one", "p")):
                with pytest.raises(SwitchInProgressError, match="it switches"):
                    await change

    limited(body)


def test_an_engine_tells_what_it_serves(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer, served_model_name="us") as (_, engine):
            assert engine.info == {
                **{"device": "cpu", "dtype": "float32", "num_blocks": 9, "block_size": 8},
                **{"num_buckets": 5, "warmup_seconds": 1.5},
            }
            assert (engine.max_model_len, engine.embedding_size) == (64, 0)
            assert (engine.scoring, engine.model_name) == (None, "us")
            assert engine.is_alive
            assert 0 <= engine.silence_s < 60
            for pooled in (
                engine.embed(PoolingRequest((1, 2))),
                engine.score("query", "document"),
            ):
                with pytest.raises(EngineError):
                    await pooled

    limited(body)


def test_requests_and_calls_end_when_the_engine_is_stopped(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer) as (core, engine):
            core.script[Add] = lambda message: [step(message.key, 97)]
            stream = engine.generate(GenerateRequest((1,), SamplingParams()))
            await anext(stream)
            order = asyncio.create_task(engine.inspect())
            waking = asyncio.create_task(engine.sleep())
            await settled()
            await engine.stop()
            for ended in (order, waking):
                with pytest.raises(EngineDead, match="the engine was stopped"):
                    await ended
            assert [delta.finish_reason async for delta in stream] == ["abort"], (
                "as it falls asleep"
            )
            assert core.sent[-1] == Stop()
            assert core.ended_within == [10.0]
            assert await engine.wait_until_failed() == "the engine was stopped"
            with pytest.raises(EngineDead, match="the engine was stopped"):
                await engine.check_health()

    limited(body)


def test_a_core_that_dies_for_good_ends_every_request_once(tokenizer):
    async def body() -> None:
        async with fronted(tokenizer, engine_restarts=0) as (core, engine):
            core.script[Add] = lambda message: [step(message.key, 97)]
            params = SamplingParams(n=2, best_of=2)
            stream = engine.generate(GenerateRequest((1,), params))
            await anext(stream)
            core.dies("planted")
            with pytest.raises(EngineDead, match="planted: restart the server"):
                await anext(stream)
            assert await engine.wait_until_failed() == "planted: restart the server"
            with pytest.raises(EngineDead):
                await engine.wait_until_recovered()
            assert not engine.is_alive

    limited(body)


def test_an_engine_is_used_in_its_own_loop_and_stopped_from_any(tokenizer):
    core = Core()

    async def start() -> AsyncEngine:
        supervisor = CoreSupervisor(config_of(), core, READY, LogSettings())
        return AsyncEngine(tokenizer, supervisor)

    engine = asyncio.run(start())
    with pytest.raises(EngineError, match="another event loop"):
        asyncio.run(engine.check_health())
    asyncio.run(engine.stop())
    assert core.ended_within == [0.0]
    assert core.sent == []


# What is open.


@pytest.mark.parametrize(
    ("params", "sample", "goes_on"),
    [
        ({"n": 3, "seed": 5}, 2, {"n": 1, "seed": 7}),
        ({"n": 3, "seed": 5}, 0, {"n": 1, "seed": 5}),
        ({"n": 2, "seed": None}, 1, {"n": 1, "seed": None}),
        ({"n": 1, "best_of": 2, "seed": 5}, 1, {"n": 1, "seed": 6}),
        ({"n": 3, "seed": 5}, None, {"n": 3, "seed": 5}),
        ({"n": 1, "seed": 5}, 0, {"n": 1, "seed": 5}),
        ({"n": 1, "seed": 5}, None, {"n": 1, "seed": 5}),
    ],
)
def test_a_sample_goes_on_alone_with_its_own_seed(tokenizer, params, sample, goes_on):
    request = GenerateRequest((1, 2), SamplingParams(**params), output_token_ids=(3,))
    stream = RequestStream("a", request, tokenizer, lambda _: None)
    resumed = OpenRequest(stream, asyncio.Queue(), {}, "digest").resumption(sample, (4, 5))
    found = {name: getattr(resumed.params, name) for name in goes_on}
    assert found == goes_on
    if sample is not None:
        assert resumed.params.num_seqs == 1
    assert resumed.output_token_ids == (3, 4, 5)
    assert (resumed.lora_digest, resumed.is_resumed) == ("digest", True)


def test_an_embedding_begins_again(tokenizer):
    request = PoolingRequest((1, 2))
    stream = RequestStream("a", request, tokenizer, lambda _: None)
    resumed = OpenRequest(stream, asyncio.Queue(), {}, "digest").resumption(None, ())
    assert resumed == attrs.evolve(request, is_resumed=True)


def opened(tokenizer: Tokenizer, core: Core) -> tuple[OpenRequests, dict[str, OpenRequest]]:
    supervisor = CoreSupervisor(config_of(), core, READY, LogSettings())
    requests = OpenRequests(supervisor, itertools.count(7))
    made = {}
    for name in ("a", "b"):
        queue: asyncio.Queue[Any] = asyncio.Queue()
        request = GenerateRequest((1, 2), SamplingParams(max_tokens=9, stop="#"))
        stream = RequestStream(name, request, tokenizer, queue.put_nowait)
        made[name] = requests.begin(f"{name}/0", stream, queue)
    return requests, made


def test_open_requests_are_known_by_name_and_aborted_once(tokenizer):
    async def body() -> None:
        core = Core()
        requests, made = opened(tokenizer, core)
        a, b = made.values()
        assert requests.unfinished() == [a, b]
        assert requests.keys_of(["b", "none"]) == ("b/0",)
        await requests.abort(a)
        await requests.abort(a)
        assert core.sent == [Abort(("a/0",))]
        assert (requests.unfinished(), a.keys) == ([b], {})
        core.is_alive = False
        await requests.abort(b)
        assert core.sent == [Abort(("a/0",))], "a dead core is not told"
        assert await requests.drain(0.0) == 0

    limited(body)


def test_parked_requests_are_last_and_resume_under_new_keys(tokenizer):
    async def body() -> None:
        core = Core()
        requests, made = opened(tokenizer, core)
        a, b = made.values()
        await requests.abort(b)
        assert requests.park() == [a]
        c = requests.begin("c/0", b.stream, b.queue)
        assert requests.unfinished() == [c, a]
        assert requests.park() == [c]
        assert await requests.drain(0.0) == 0
        assert await requests.resume([a, a]) == 2
        assert core.sent[-1].key == "a/8"
        assert await requests.resume([a]) == 0, "it is not parked any more"
        requests.end_parked(EngineDead("planted"))
        assert isinstance(c.queue.get_nowait(), EngineDead)
        assert a.queue.empty()
        requests.end_all(EngineDead("planted"))
        assert isinstance(a.queue.get_nowait(), EngineDead)
        assert requests.unfinished() == []
        assert a.keys == {}

    limited(body)


def test_a_request_whose_core_is_gone_ends_with_its_error(tokenizer):
    async def body() -> None:
        core = Core()
        requests, made = opened(tokenizer, core)
        parked = requests.park()
        core.is_alive = False
        assert await requests.resume(parked) == 0
        assert all(isinstance(each.queue.get_nowait(), EngineDead) for each in made.values())
        assert requests.unfinished() == []

    limited(body)


def test_a_stop_string_ends_a_sample_in_the_core(tokenizer):
    async def body() -> None:
        core = Core()
        requests, made = opened(tokenizer, core)
        for letter in letters(tokenizer, "x#"):
            await requests.deliver(step("a/0", letter))
        await requests.deliver(step("unknown", 97))
        assert core.sent == [Finish("a/0", 0)]
        assert requests.unfinished() == [made["b"]]
        assert made["a"].keys == {}
        requests.end_with("unknown", EngineDead("no"))
        requests.end_with("b/0", EngineDead("yes"))
        assert str(made["b"].queue.get_nowait()) == "yes"
        assert made["b"].keys == {}

    limited(body)


def test_a_token_that_cannot_be_used_ends_its_request_alone(tokenizer, monkeypatch):
    async def body() -> None:
        core = Core()
        requests, made = opened(tokenizer, core)

        def raising(token: object) -> bool:
            raise ValueError("planted")

        monkeypatch.setattr(made["a"].stream, "push", raising)
        (letter,) = letters(tokenizer, "b")
        both = (NewToken("a/0", 0, 97, None, 0), NewToken("b/0", 0, letter, None, 0))
        await requests.deliver(StepDone(both, None))
        error = made["a"].queue.get_nowait()
        assert isinstance(error, RequestFailed)
        assert str(error) == "request a failed: ValueError: planted"
        assert core.sent == [Abort(("a/0",))]
        assert made["b"].queue.get_nowait().text == "b"

    limited(body)


# Several models.


@contextlib.asynccontextmanager
async def several(
    tokenizer: Tokenizer, model: Path, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> AsyncIterator[tuple[Core, MultiModelEngine]]:
    """Two models of one checkpoint; the core switches at once."""
    monkeypatch.setattr(Tokenizer, "start_renderer", lambda _: None)
    entries = [ModelEntry(name, config_of(model, **changes)) for name in ("first", "second")]
    prepared = PreparedModels(entries)
    core = Core()
    core.script |= {
        Add: lambda message: [step(message.key, 97)],
        CheckModel: lambda message: [ModelChecked(message.number)],
        Reconfigure: lambda message: [
            Reconfigured(message.number, OTHER, 1.0, 2.0, 3.0, 40, 50, from_stash=True)
        ],
    }
    supervisor = CoreSupervisor(prepared.config_of("first"), core, READY, LogSettings())
    prepared.add("first", tokenizer)
    engine = MultiModelEngine(tokenizer, supervisor, prepared, 1 << 20)
    try:
        yield core, engine
    finally:
        await engine.stop()


def sent_of(core: Core, kind: type) -> list[Any]:
    return [message for message in core.sent if isinstance(message, kind)]


async def until_sent(core: Core, kind: type) -> None:
    has_come = asyncio.Event()
    core.script[kind] = lambda _: has_come.set() or ()
    await has_come.wait()


def test_a_switch_checks_the_model_and_reports_what_it_did(tokenizer, tiny_model, monkeypatch):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            assert (engine.active, engine.aliases) == ("first", ("first", "second"))
            assert engine.entry.alias == "first"
            assert await engine.switch_model("first") == SwitchReport(
                previous="first", active="first"
            )
            assert core.sent == []
            assert await engine.prepare_model("second") >= 0
            report = await engine.switch_model("second")
            assert [type(message) for message in core.sent] == [CheckModel, Reconfigure]
            assert core.sent[1].stash_bytes == 1 << 20
            times = dict.fromkeys(("prepare_s", "drain_s", "total_s"), 0.0)
            assert min(report.prepare_s, report.drain_s, report.total_s) >= 0
            assert report.total_s >= report.prepare_s + report.drain_s
            assert attrs.evolve(report, **times) == SwitchReport(
                **{"previous": "first", "active": "second", "from_stash": True},
                **{"unload_s": 1.0, "load_s": 2.0, "warmup_s": 3.0},
                **{"memory_before_bytes": 40, "memory_after_bytes": 50},
            )
            assert (engine.active, engine.max_model_len) == ("second", 32)
            assert engine.tokenizer is await engine.tokenizer_of("second")
            assert not engine.is_switching
            assert engine.totals_of("first").num_running_seqs == 0
            for call in (engine.totals_of, engine.entry_of):
                with pytest.raises(UnknownModelError, match="first, second"):
                    call("third")
            for wrong in (engine.switch_model("third"), engine.prepare_model("third")):
                with pytest.raises(UnknownModelError):
                    await wrong
            with pytest.raises(UnknownModelError):
                await text_of(engine, model="third")
            with pytest.raises(ModelNotActiveError):
                await text_of(engine, model="first")

    limited(body)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"running": "kill"}, "running"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s"),
        ({"drain_timeout_s": 86_401.0}, "drain_timeout_s"),
    ],
)
def test_wrong_arguments_of_a_switch_are_named(
    tokenizer, tiny_model, monkeypatch, arguments, field
):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            with pytest.raises(InvalidRequest) as refusal:
                await engine.switch_model("second", **arguments)
            assert refusal.value.field == field
            assert core.sent == []
            await engine.switch_model("second", drain_timeout_s=86_400.0)

    limited(body)


async def begun(engine: AsyncEngine) -> Any:
    stream = engine.generate(GenerateRequest((1,), SamplingParams(max_tokens=3), request_id="r"))
    await anext(stream)
    return stream


def test_requests_that_run_are_waited_for_aborted_or_parked(tokenizer, tiny_model, monkeypatch):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            stream = await begun(engine)
            with pytest.raises(
                SwitchFailedError, match="1 requests still run after 0 s"
            ) as failure:
                await engine.switch_model("second", drain_timeout_s=0.0)
            assert (failure.value.step, failure.value.active) == ("drain", "first")
            assert not sent_of(core, Reconfigure)
            report = await engine.switch_model("second", running="abort", drain_timeout_s=0.0)
            assert (report.aborted, report.parked, report.resumed) == (1, 0, 0)
            assert [delta.finish_reason async for delta in stream] == ["abort"]
            stream = await begun(engine)
            report = await engine.switch_model("first", running="park", drain_timeout_s=0.0)
            assert (report.aborted, report.parked, report.resumed) == (0, 1, 0)
            num_added = len(sent_of(core, Add))
            report = await engine.switch_model("second", running="park", drain_timeout_s=0.0)
            assert (report.aborted, report.parked, report.resumed) == (0, 0, 1)
            [resumed] = sent_of(core, Add)[num_added:]
            assert resumed.request.output_token_ids == (97,)
            core.says(step(resumed.key, 98, "length"))
            assert [delta.finish_reason async for delta in stream][-1] == "length"

    limited(body)


@pytest.mark.parametrize("failing", ["load", "wake"])
def test_a_switch_that_fails_leaves_the_model_and_its_requests(
    tokenizer, tiny_model, monkeypatch, failing
):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            stream = await begun(engine)
            core.script[Reconfigure] = lambda message: [
                ReconfigureFailed(message.number, failing, "no memory")
            ]
            core.script[WakeUp] = lambda message: [Reconfigured(message.number, READY)]
            said = "first sleeps" if failing == "wake" else "first is still active"
            said += f": the switch to second failed in step {failing}: no memory"
            with pytest.raises(SwitchFailedError, match=said) as failure:
                await engine.switch_model("second", running="park", drain_timeout_s=0.0)
            assert (failure.value.step, failure.value.active) == (failing, "first")
            assert engine.active == "first"
            assert engine.is_sleeping == (failing == "wake")
            assert len(sent_of(core, Add)) == (1 if failing == "wake" else 2)
            if failing == "wake":
                await engine.wake_up()
            resumed = sent_of(core, Add)[1]
            core.says(step(resumed.key, 98, "length"))
            assert [delta.finish_reason async for delta in stream][-1] == "length"

    limited(body)


@pytest.mark.parametrize("error", [ModelError("not there"), OSError("no disk")])
def test_a_model_that_cannot_be_prepared_changes_nothing(tokenizer, tiny_model, monkeypatch, error):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):

            async def prepare(alias: str) -> Tokenizer:
                raise error

            monkeypatch.setattr(engine._models, "prepare", prepare)
            for call in (engine.prepare_model, engine.switch_model):
                with pytest.raises(SwitchFailedError, match="first is still active: no") as failure:
                    await call("second")
                assert (failure.value.step, failure.value.active) == ("prepare", "first")
            assert not engine.is_switching
            assert core.sent == []

    limited(body)


def test_a_model_that_the_core_cannot_serve_is_refused_before_requests_are_drained(
    tokenizer, tiny_model, monkeypatch
):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            core.script[CheckModel] = lambda message: [ModelChecked(message.number, "too large")]
            with pytest.raises(SwitchFailedError, match="too large") as failure:
                await engine.switch_model("second")
            assert failure.value.step == "prepare"
            assert [type(message) for message in core.sent] == [CheckModel]

    limited(body)


def test_one_switch_runs_at_a_time_and_requests_are_told(tokenizer, tiny_model, monkeypatch):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (core, engine):
            answer = core.script.pop(Reconfigure)
            first = asyncio.create_task(engine.switch_model("second"))
            await until_sent(core, Reconfigure)
            assert engine.is_switching
            with pytest.raises(SwitchInProgressError, match="another switch of models"):
                await engine.switch_model("first", wait_for_turn=False)
            with pytest.raises(SwitchInProgressError, match="switches from first to second"):
                await text_of(engine)
            second = asyncio.create_task(engine.switch_model("first"))
            first.cancel()
            await settled()
            core.script[Reconfigure] = answer
            core.says(answer(sent_of(core, Reconfigure)[0])[0])
            assert (await second).previous == "second", "a cancelled switch goes on"
            assert engine.active == "first"

    limited(body)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_core_that_dies_in_a_switch_says_whether_it_had_begun(
    tokenizer, tiny_model, monkeypatch, has_begun
):
    async def body() -> None:
        async with several(tokenizer, tiny_model, monkeypatch) as (_, engine):

            async def reconfigure(*given: object) -> Reconfigured:
                engine._changes.has_begun = has_begun
                raise EngineDead("planted")

            recovered = []

            async def recover() -> None:
                recovered.append(True)

            monkeypatch.setattr(engine._changes, "reconfigure", reconfigure)
            monkeypatch.setattr(engine, "wait_until_recovered", recover)
            if has_begun:
                said = r"first is active again: the engine core died .* second \(planted\)"
                with pytest.raises(SwitchFailedError, match=said) as failure:
                    await engine.switch_model("second")
                assert (failure.value.step, failure.value.active) == ("core", "first")
            else:
                with pytest.raises(EngineDead, match=r"^planted$"):
                    await engine.switch_model("second")
            assert recovered == [True]
            assert not engine.is_switching

    limited(body)
