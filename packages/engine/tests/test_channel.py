"""The channel between front and core: what cannot be encoded or decoded ends neither."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from trencadis.engine import (
    BatchControl,
    EngineDead,
    EngineError,
    EngineStats,
    GenerateRequest,
    InvalidRequest,
    PoolingRequest,
    PositionLogprobs,
    RequestFailed,
    SamplingParams,
    ThermalStats,
    TokenLogprob,
)
from trencadis.engine.errors import ENDING_ERRORS
from trencadis.engine.ipc.channel import CoreChannel, FrontChannel, Undecodable
from trencadis.engine.ipc.messages import (
    Abort,
    Add,
    AddPooling,
    Control,
    NewToken,
    Rejected,
    RequestError,
    StepDone,
    ToCore,
)

GOOD = Add("good", GenerateRequest((1, 2), SamplingParams(max_tokens=3), client="a"))
POOLED = AddPooling("pooled", PoolingRequest((1, 2), cache_salt="s"))


@pytest.mark.parametrize("kind", ENDING_ERRORS.values(), ids=ENDING_ERRORS)
def test_an_error_that_ends_a_request_arrives_as_what_it_was(kind: type[EngineError]) -> None:
    error = RequestError.of("key", kind("why")).to_error("a")
    assert type(error) is kind
    assert str(error).startswith("a: ")
    assert str(error).endswith("why")
    assert type(RequestError.of("key", OSError("why")).to_error()) is RequestFailed


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[FrontChannel, CoreChannel]]:
    front = FrontChannel()
    core = CoreChannel(front.to_core, front.from_core)
    try:
        yield front, core
    finally:
        core.close()
        front.close()


async def received(core: CoreChannel, count: int) -> list[ToCore | Undecodable]:
    messages: list[ToCore | Undecodable] = []
    while len(messages) < count:
        found = await asyncio.to_thread(core.receive, 60.0)
        assert found, f"{len(messages)} of {count} messages came within a minute"
        messages += found
    return messages


ENCODED = msgspec.msgpack.encode
REFUSED = {**msgspec.to_builtins(GOOD.request), "cache_salt": ""}
"""A request that only the checks of its fields reject."""


@pytest.mark.parametrize(
    ("content", "key", "number"),
    [
        (b"", None, None),
        (b"\xc1", None, None),
        (b"\x81\xa3abc", None, None),
        (ENCODED([1, 2]), None, None),
        (ENCODED({"type": "Nonsense", "key": "a"}), "a", None),
        (ENCODED({"type": "Add", "key": "a", "request": {"priority": "high"}}), "a", None),
        (ENCODED({"type": "Add", "key": "a", "request": REFUSED}), "a", None),
        (ENCODED({"type": "Add", "key": 7}), None, None),
        (ENCODED({"type": "Control", "number": 7, "order": None}), None, 7),
        (ENCODED({"type": "Control", "number": "x"}), None, None),
        (b"\x91" * 10_000, None, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_message_that_cannot_be_decoded_is_told_with_its_id_and_the_next_one_is_read(
    content: bytes, key: str | None, number: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with both_ends() as (front, core):
            await front._outbox.send(content)
            await front.send(GOOD)
            broken, good = await received(core, 2)
            assert isinstance(broken, Undecodable)
            assert (broken.key, broken.number) == (key, number)
            assert broken.reason
            assert good == GOOD
            assert core.num_undecodable == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(body())
    assert "cannot be decoded (1 so far)" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        Abort(("\ud800",)),
        Abort((object(),)),  # type: ignore[arg-type]
        Add("a", object()),  # type: ignore[arg-type]
        Control(1, object()),  # type: ignore[arg-type]
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_cannot_be_encoded_is_the_senders_error(message: ToCore) -> None:
    async def body() -> None:
        async with both_ends() as (front, core):
            with pytest.raises(InvalidRequest, match="cannot be sent"):
                await front.send(message)
            await front.send(GOOD)
            assert await received(core, 1) == [GOOD]

    asyncio.run(body())


def test_a_request_of_either_kind_arrives_whole() -> None:
    async def body() -> None:
        async with both_ends() as (front, core):
            for message in (GOOD, POOLED):
                await front.send(message)
            assert await received(core, 2) == [GOOD, POOLED]

    asyncio.run(body())


def test_numbers_of_numpy_and_subclasses_of_text_are_carried() -> None:
    class Name(str):
        def __str__(self) -> str:
            return "another text"

    async def body() -> None:
        async with both_ends() as (front, core):
            order: Any = BatchControl(max_num_seqs=np.int64(4), target_temp_c=np.float64(80.5))
            await front.send(Control(1, order))
            await front.send(Abort((Name("a"),)))
            found, abort = await received(core, 2)
            assert found == Control(1, BatchControl(max_num_seqs=4, target_temp_c=80.5))
            assert abort == Abort(("a",))

    asyncio.run(body())


def test_text_of_the_core_that_utf_8_cannot_encode_reaches_the_front() -> None:
    """An error names a file whose name is not UTF-8."""
    token = NewToken("a", 0, 7, None, 0, PositionLogprobs(TokenLogprob(7, -1.0)))
    stats = EngineStats(thermal=ThermalStats(fault="no file /sensor-\udcff"))

    async def body() -> None:
        async with both_ends() as (front, core):
            core.send(StepDone((token,), stats))
            core.send(Rejected("a", "no file \udcff", field="prompt"))
            done = await front.receive(60.0)
            assert isinstance(done, StepDone)
            assert done.tokens == (token,)
            assert done.stats is not None
            assert done.stats.thermal == ThermalStats(fault="no file /sensor-?")
            assert await front.receive(60.0) == Rejected("a", "no file ?", field="prompt")

    asyncio.run(body())


@pytest.mark.asyncio
@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_message_to_a_core_that_has_ended_is_an_error(ends_first: bool) -> None:
    """Without a reader a message waits, and closing the channel cancels it."""
    front = FrontChannel()
    if ends_first:
        front.close()
    sending = asyncio.ensure_future(front.send(GOOD))
    await asyncio.sleep(0.01)
    if not ends_first:
        front.close()
    with pytest.raises(EngineDead, match="core ended"):
        await asyncio.wait_for(sending, 60)


@pytest.mark.asyncio
async def test_messages_of_one_iteration_of_the_loop_are_received_together_in_their_order() -> None:
    """Also where the sender of the first gives up."""
    async with both_ends() as (front, core):
        for number in range(20):
            messages = [*(Abort((f"{number}/{i}",)) for i in range(30)), GOOD, POOLED]
            receiving = asyncio.create_task(asyncio.to_thread(core.receive, 60.0))
            await asyncio.sleep(0.01)
            sending = [asyncio.create_task(front.send(message)) for message in messages]
            await asyncio.sleep(0)
            sending[0].cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            assert await receiving == messages
