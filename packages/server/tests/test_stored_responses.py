"""Responses that a client asks for again, continues, or has made in the background."""

from __future__ import annotations

from contextlib import asynccontextmanager

import attrs
import openai
import pytest
import pytest_asyncio

from trencadis.server.generation.response_store import LEAST_BYTES, ResponseStore, StoredResponse
from trencadis.server.routes import stored_responses

NOT_FOUND = r"Response with id .* not found\."


@asynccontextmanager
async def client_of(url: str, key: str = "none"):
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest_asyncio.fixture
async def official(serving):
    async with serving(responses_store=True) as url, client_of(url) as client:
        yield client


def create(client, input="hello", **fields):
    return client.responses.create(model="stand-in", input=input, **fields)


async def ended(client, response, soon):
    """The response when it is not made any more."""
    found = response

    async def is_ended() -> bool:
        nonlocal found
        found = await client.responses.retrieve(response.id)
        return found.status not in ("queued", "in_progress")

    await soon(is_ended)
    return found


@pytest.mark.asyncio
async def test_nothing_is_stored_unless_the_server_is_told_to(url):
    """As in vLLM; OpenAI's clients may send its default."""
    async with client_of(url) as client:
        response = await create(client, store=True)
        assert response.store is False
        with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
            await client.responses.retrieve(response.id)
        for fields in ({"background": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.BadRequestError, match="VLLM_ENABLE_RESPONSES_API_STORE=1"):
                await create(client, **fields)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_stored_until_it_is_deleted(official, stream):
    if stream:
        events = [event async for event in await create(official, stream=True)]
        response = events[-1].response
    else:
        response = await create(official)
    assert response.store is True
    assert await official.responses.retrieve(response.id) == response
    await official.responses.delete(response.id)
    for again in (official.responses.retrieve, official.responses.delete):
        with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
            await again(response.id)


@pytest.mark.asyncio
async def test_a_client_may_want_nothing_to_be_stored(official):
    response = await create(official, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
        await official.responses.retrieve(response.id)


@pytest.mark.asyncio
async def test_a_conversation_goes_on_from_any_of_its_responses(official, engine):
    """Without the earlier instructions, as in the OpenAI API."""
    engine.script = ["one"]
    first = await create(official, "a", instructions="Be brief.")
    engine.script = ["two"]
    second = await create(official, "b", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    for previous, turns in ((second, "a one b two c"), (first, "a one c")):
        await create(official, "c", previous_response_id=previous.id, instructions="Now!")
        messages, _ = engine.tokenizer.rendered[-1]
        assert [message["content"] for message in messages] == ["Now!", *turns.split()]
        roles = ["user", "assistant"] * len(turns.split())
        assert [message["role"] for message in messages[1:]] == roles[: len(messages) - 1]
    with pytest.raises(openai.NotFoundError, match=NOT_FOUND) as missing:
        await create(official, previous_response_id="resp_other")
    assert missing.value.code == "response_not_found"


@pytest.mark.asyncio
async def test_a_conversation_has_an_end(official, monkeypatch):
    monkeypatch.setattr("trencadis.server.api.responses.MAX_MESSAGES", 3)
    first = await create(official)
    await create(official, previous_response_id=first.id)
    two = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(openai.BadRequestError, match="has 2 items, with those of input at most 3"):
        await create(official, two, previous_response_id=first.id)


@pytest.mark.asyncio
async def test_a_response_is_made_in_the_background(official, soon):
    queued = await create(official, background=True, metadata={"a": "b"})
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    response = await ended(official, queued, soon)
    assert (response.status, response.metadata) == ("completed", {"a": "b"})
    assert response.output_text == "[user]hello[assistant]"
    assert response.id == queued.id
    with pytest.raises(openai.BadRequestError, match="has ended: it is completed"):
        await official.responses.cancel(response.id)
    synchronous = await create(official, previous_response_id=queued.id)
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
        await official.responses.cancel(synchronous.id)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_a_response_in_the_background_is_cancelled(official, engine, soon, end):
    engine.delay = 3600
    queued = await create(official, background=True)
    await soon(lambda: engine.running)
    assert (await official.responses.retrieve(queued.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        await create(official, previous_response_id=queued.id)
    await getattr(official.responses, end)(queued.id)
    await soon(lambda: not engine.running)
    if end == "cancel":
        for again in (official.responses.retrieve, official.responses.cancel):
            assert (await again(queued.id)).status == "cancelled"


@pytest.mark.asyncio
async def test_a_response_in_the_background_may_fail(official, engine, soon):
    for field, value, code in (
        ("overloaded", True, "engine_overloaded"),
        ("fails_with", RuntimeError("a bug"), "internal_error"),
    ):
        setattr(engine, field, value)
        response = await ended(official, await create(official, background=True), soon)
        assert (response.status, response.error.code) == ("failed", code)
        with pytest.raises(openai.BadRequestError, match="is failed"):
            await create(official, previous_response_id=response.id)
        setattr(engine, field, None)
    too_long = await ended(official, await create(official, "a" * 300, background=True), soon)
    assert too_long.error.code == "context_length_exceeded"
    assert too_long.error.message.startswith("input")


@pytest.mark.asyncio
async def test_an_error_of_the_request_comes_at_once(official, engine):
    for fields, param in (({"temperature": 9}, "temperature"), ({"stream": True}, "stream")):
        with pytest.raises(openai.BadRequestError) as wrong:
            await create(official, background=True, **fields)
        assert wrong.value.param == param
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        await official.responses.create(model="other", input="a", background=True)
    assert not engine.requests


@pytest.mark.asyncio
async def test_a_key_has_responses_of_its_own(serving):
    async with (
        serving(responses_store=True, api_keys=["a", "b"]) as url,
        client_of(url, "a") as first,
        client_of(url, "b") as second,
    ):
        response = await create(first)
        for use in (
            second.responses.retrieve(response.id),
            second.responses.delete(response.id),
            second.responses.cancel(response.id),
            create(second, previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
                await use
        assert (await first.responses.retrieve(response.id)).id == response.id


@pytest.mark.asyncio
async def test_few_are_made_in_the_background(official, engine, monkeypatch, soon):
    monkeypatch.setattr(stored_responses, "MAX_BACKGROUND", 2)
    engine.delay = 3600
    running = [await create(official, background=True) for _ in range(2)]
    with pytest.raises(openai.InternalServerError) as full:
        await create(official, background=True)
    assert (full.value.status_code, full.value.code) == (503, "engine_overloaded")
    await official.responses.cancel(running[0].id)
    await create(official, background=True)


@pytest.mark.asyncio
async def test_a_key_has_few_in_the_background(serving, engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one a-secret\ntwo b-secret\n")
    keys.chmod(0o600)
    engine.delay = 3600
    async with serving(responses_store=True, api_key_file=str(keys), max_requests_per_key=1) as url:
        for key in ("a-secret", "b-secret"):
            async with client_of(url, key) as client:
                await create(client, background=True)
                with pytest.raises(openai.RateLimitError, match="made in the background"):
                    await create(client, background=True)


@pytest.mark.asyncio
async def test_the_end_of_the_server_ends_them(serving, engine, soon):
    engine.delay = 3600
    async with serving(responses_store=True) as url, client_of(url) as client:
        await create(client, background=True)
        await soon(lambda: engine.running)
    assert not engine.running


@pytest.mark.asyncio
async def test_a_response_in_the_background_takes_no_longer_than_it_would_be_stored(
    serving, engine, soon
):
    engine.delay = 3600
    async with (
        serving(responses_store=True, responses_store_ttl=0.2) as url,
        client_of(url) as client,
    ):
        await create(client, background=True)
        await soon(lambda: engine.requests and not engine.running)


# the store


def stored(owner: str, name: str, size: int = 0, status: str = "completed") -> StoredResponse:
    return StoredResponse(owner, name, status, b"c" * size)


def test_the_owner_of_the_most_bytes_loses_the_oldest_responses():
    store = ResponseStore(10 * LEAST_BYTES, ttl_s=60)
    store.put(stored("small", "s"))
    for number in range(12):
        store.put(stored("large", f"{number}"))
    assert store.num_bytes == 10 * LEAST_BYTES
    kept = [number for number in range(12) if store.get("large", f"{number}")]
    assert kept == list(range(3, 12))
    assert store.get("small", "s") is not None
    store.put(stored("huge", "h", 10 * LEAST_BYTES + 1))
    assert store.get("huge", "h") is None and store.num_bytes == 10 * LEAST_BYTES
    store.put(stored("large", "11", 3 * LEAST_BYTES - len(b"[]")))
    assert store.num_bytes == 10 * LEAST_BYTES, "it replaces that of the same id"


def test_what_is_still_made_stays():
    store = ResponseStore(2 * LEAST_BYTES, ttl_s=60)
    store.put(stored("a", "made", status="in_progress"))
    for number in range(5):
        store.put(stored("a", f"{number}"))
    assert [each.response_id for each in store.unfinished] == ["made"]
    assert store.get("a", "4") is not None and store.get("a", "3") is None
    store.put(attrs.evolve(store.get("a", "made"), status="completed"))
    assert store.unfinished == ()


def test_responses_expire_after_their_end():
    now_s = 0.0
    store = ResponseStore(100 * LEAST_BYTES, ttl_s=10, clock=lambda: now_s)
    store.put(stored("a", "made", status="queued"))
    store.put(stored("a", "old"))
    store.put(stored("b", "old"))
    now_s = 6.0
    store.put(stored("a", "new"))
    now_s = 10.0
    assert store.get("a", "old") is store.get("b", "old") is None
    assert store.get("a", "new") is not None and store.get("a", "made") is not None
    assert store.num_bytes == 2 * LEAST_BYTES
    store.put(stored("a", "made"))
    now_s = 19.0
    assert store.get("a", "made") is not None and store.get("a", "new") is None
    now_s = 20.0
    assert store.get("a", "made") is None and store.num_bytes == 0
