"""Responses that a client asks for again, continues, or has made in the background."""

from __future__ import annotations

import asyncio

import attrs
import httpx
import openai
import pytest
import pytest_asyncio
from official_client import client_of

from trencadis.server import ServerSettings, create_app
from trencadis.server.generation.response_store import (
    END_BYTES,
    LEAST_BYTES,
    ResponseStore,
    Run,
    StoredResponse,
)
from trencadis.server.routes import stored_responses

NOT_FOUND = r"Response with id .* not found\."


@pytest_asyncio.fixture
async def official(serving):
    async with serving(responses_store=True) as url, client_of(url) as client:
        yield client


def create(client, input="hello", **fields):
    return client.responses.create(model="stand-in", input=input, **fields)


async def pages(client, response, **options):
    """The items of a response's input, of all pages."""
    return [item async for item in client.responses.input_items.list(response.id, **options)]


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
async def test_the_input_of_a_response_is_listed(official, engine):
    """The last item first, as in the OpenAI API; ids follow, so that the client turns pages."""
    engine.script = ["one"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "4"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "r"}]}
    user = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    first = await create(official, [user, reasoning, call, output])
    second = await create(official, "b", previous_response_id=first.id)

    items = await pages(official, first, order="asc", limit=1)
    assert [item.type for item in items] == [
        "message",
        *(i["type"] for i in (reasoning, call, output)),
    ]
    assert items[0].role == "user" and items[0].content[0].text == "a"
    assert (items[1].content[0].text, items[2].arguments, items[3].output) == ("r", "{}", "4")
    assert await pages(official, first) == items[::-1]
    assert len({item.id for item in items}) == 4
    texts = [item.content[0].text for item in (await pages(official, second))[:2]]
    assert texts == ["b", "one"]
    page = await official.responses.input_items.list(second.id, limit=4)
    assert (len(page.data), page.has_more) == (4, True)
    await create(official, [i.model_dump(exclude_none=True) for i in items])  # are input again
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "msg_other"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as refused:
            await official.responses.input_items.list(first.id, **wrong)
        assert refused.value.param in wrong
    with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
        await official.responses.input_items.list("resp_other")


@pytest.mark.asyncio
async def test_a_conversation_is_stored_without_log_probabilities(official, monkeypatch):
    """They are much longer than its texts."""
    kept = []
    put = ResponseStore.put
    monkeypatch.setattr(ResponseStore, "put", lambda *args: kept.append(args[1]) or put(*args))
    response = await create(official, include=["message.output_text.logprobs"], top_logprobs=2)
    assert response.output[0].content[0].logprobs
    assert b"logprob" in kept[0].content and b"logprob" not in kept[0].conversation
    await create(official, previous_response_id=response.id)


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
async def test_a_model_of_embeddings_makes_no_response_in_the_background(serving, engine):
    engine.embedding_size = 4
    async with serving(responses_store=True) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="generates nothing"):
            await create(client, background=True)


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
            pages(second, response),
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
                for background in (True, False):
                    with pytest.raises(openai.RateLimitError, match="in progress"):
                        await create(client, background=background)


@pytest.mark.asyncio
async def test_a_failed_stream_is_not_said_to_be_stored(official, engine):
    engine.dies_after = 1
    events = [event async for event in await create(official, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.store is False


@pytest.mark.asyncio
async def test_a_key_without_a_place_ends_what_it_has(serving, engine, tmp_path, soon):
    keys = tmp_path / "keys"
    keys.write_text("one a-secret\n")
    keys.chmod(0o600)
    engine.delay = 3600
    settings = {"api_key_file": str(keys), "max_requests_per_key": 1}
    async with (
        serving(responses_store=True, **settings) as url,
        client_of(url, "a-secret") as client,
    ):
        queued = await create(client, background=True)
        with pytest.raises(openai.RateLimitError):
            await create(client)
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        await soon(lambda: not engine.running)
        engine.delay = 0.0
        await create(client)


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
        # It is kept as long as it may take: a busy machine has this time to ask for it.
        serving(responses_store=True, responses_store_ttl=2.0) as url,
        client_of(url) as client,
    ):
        queued = await create(client, background=True)
        await soon(lambda: engine.requests and not engine.running)
        response = await client.responses.retrieve(queued.id)
    assert (response.status, response.error.code) == ("failed", "response_timeout")
    assert "2 s" in response.error.message


# one name, many requests


def named(name):
    return {"extra_headers": {"X-Request-Id": name}}


@pytest.mark.asyncio
async def test_a_name_in_progress_is_not_used_again(official, engine, soon):
    """Else runs would go on that no limit counts and no client can cancel."""
    engine.delay = 3600
    first = await create(official, background=True, **named("x"))
    for _ in range(3):
        with pytest.raises(openai.ConflictError, match="is still made") as used:
            await create(official, background=True, **named("x"))
        assert used.value.code == "response_in_progress"
    await soon(lambda: engine.running)
    assert len(engine.running) == 1
    await official.responses.cancel(first.id)
    await soon(lambda: not engine.running)
    engine.delay = 0.0
    again = await create(official, background=True, **named("x"))
    assert again.id == first.id
    assert (await ended(official, again, soon)).status == "completed"


@pytest.mark.asyncio
async def test_a_synchronous_response_does_not_replace_one_that_is_made(official, engine, soon):
    engine.delay = 3600
    queued = await create(official, background=True, **named("x"))
    await soon(lambda: engine.running)
    engine.delay = 0.0
    synchronous = await create(official, **named("x"))
    assert (synchronous.id, synchronous.store) == (queued.id, False)
    assert (await official.responses.retrieve(queued.id)).status == "in_progress"
    await official.responses.cancel(queued.id)
    await soon(lambda: not engine.running)


@pytest.mark.asyncio
@pytest.mark.parametrize("background", [False, True])
async def test_a_stored_response_has_an_id_that_a_path_may_have(official, soon, background):
    for name, is_kept in (("a-b_c.d~1:2", True), ("a/b", False), ("a?b", False), ("a%2Fb", False)):
        response = await create(official, background=background, **named(name))
        assert (response.id == f"resp_{name}") is is_kept
        assert (await ended(official, response, soon)).id == response.id


# what is too large


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_large_is_not_said_to_be_stored(serving, stream):
    async with (
        serving(responses_store=True, responses_store_size=2048) as url,
        client_of(url) as client,
    ):
        large = {"metadata": {f"{number}": "m" * 500 for number in range(4)}}
        if stream:
            events = [event async for event in await create(client, stream=True, **large)]
            assert [event.response.store for event in events[:2]] == [None, None]
            response = events[-1].response
        else:
            response = await create(client, **large)
        assert response.status == "completed" and response.store is False
        with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
            await client.responses.retrieve(response.id)
        assert (await create(client)).store is True


@pytest.mark.asyncio
async def test_what_is_too_large_is_not_made_in_the_background(serving, engine):
    async with (
        serving(responses_store=True, responses_store_size=8192) as url,
        client_of(url) as client,
    ):
        large = {"metadata": {f"{number}": "m" * 500 for number in range(8)}}
        with pytest.raises(openai.BadRequestError, match="responses-store-size") as wrong:
            await create(client, background=True, **large)
        assert wrong.value.param == "background"
    assert not engine.requests


@pytest.mark.asyncio
async def test_an_answer_that_is_too_large_is_the_end_of_its_response(serving, engine, soon):
    engine.script = ["a" * 100_000]
    engine.max_model_len = 200_000
    async with (
        serving(responses_store=True, responses_store_size=8192) as url,
        client_of(url) as client,
    ):
        response = await ended(client, await create(client, background=True), soon)
    assert (response.status, response.output) == ("failed", [])
    assert response.error.code == "response_too_large"
    assert "--responses-store-size" in response.error.message


@pytest.mark.asyncio
async def test_what_is_made_has_a_share_of_the_store(serving, engine):
    engine.delay = 3600
    async with (
        serving(responses_store=True, responses_store_size=8192) as url,
        client_of(url) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="have all bytes") as full:
            for _ in range(8):
                await create(client, background=True)
        assert (full.value.status_code, full.value.code) == (503, "engine_overloaded")


# an end at any moment


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_a_response_ends_at_any_moment(engine, soon, end):
    """A run that goes on for a moment does not bring it back."""
    engine.delay = 0.001
    app = create_app(engine, ServerSettings(responses_store=True))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        left = []
        for number in range(60):
            body = {"input": "hello", "background": True}
            queued = (await client.post("/v1/responses", json=body)).json()
            path = f"/v1/responses/{queued['id']}"
            for _ in range(number):
                await asyncio.sleep(0)
            if end == "delete":
                await client.delete(path)
                status = None
            else:
                cancelled = await client.post(f"{path}/cancel")
                status = "cancelled" if cancelled.status_code == 200 else "completed"
            left.append((path, status))
        await soon(lambda: "_run" not in {each.get_coro().__name__ for each in asyncio.all_tasks()})
        for path, status in left:
            found = await client.get(path)
            assert found.json().get("status") == status, path
            assert found.status_code == (404 if status is None else 200)


@pytest.mark.asyncio
async def test_a_run_that_is_cancelled_says_so(official, engine, monkeypatch, soon):
    """Also where neither a client nor the end of the server did it."""

    async def cancelled(*args):
        raise asyncio.CancelledError

    monkeypatch.setattr(stored_responses, "respond_to_chat", cancelled)
    response = await ended(official, await create(official, background=True), soon)
    assert response.status == "cancelled"


@pytest.mark.asyncio
async def test_two_keys_with_one_name_are_one_client(serving, tmp_path):
    """So that a key can be replaced."""
    keys = tmp_path / "keys"
    keys.write_text("one old-secret\none new-secret\ntwo b-secret\n")
    keys.chmod(0o600)
    async with serving(responses_store=True, api_key_file=str(keys)) as url:
        async with client_of(url, "old-secret") as client:
            response = await create(client)
        async with client_of(url, "new-secret") as client:
            assert (await client.responses.retrieve(response.id)).id == response.id
        async with client_of(url, "b-secret") as client:
            with pytest.raises(openai.NotFoundError, match=NOT_FOUND):
                await client.responses.retrieve(response.id)


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
    store = ResponseStore(4 * LEAST_BYTES, ttl_s=60)
    store.put(stored("a", "made", status="in_progress"))
    for number in range(5):
        store.put(stored("a", f"{number}"))
    assert [each.response_id for each in store.unfinished] == ["made"]
    assert store.get("a", "2") is not None and store.get("a", "1") is None
    store.update(attrs.evolve(store.get("a", "made"), status="completed"))
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
    store.update(stored("a", "made"))
    now_s = 19.0
    assert store.get("a", "made") is not None and store.get("a", "new") is None
    now_s = 20.0
    assert store.get("a", "made") is None and store.num_bytes == 0


def made(owner: str, name: str, size: int = 0) -> StoredResponse:
    return attrs.evolve(stored(owner, name, size, "in_progress"), run=Run())


def test_what_is_made_is_replaced_by_its_own_run_alone():
    store = ResponseStore(20 * LEAST_BYTES, ttl_s=60)
    first = made("a", "x")
    assert store.put(first)
    for other in (stored("a", "x"), made("a", "x")):
        assert not store.put(other)
        assert not store.update(other)
    assert store.get("a", "x").run is first.run
    store.remove("a", "x")
    assert not store.update(attrs.evolve(first, status="completed")), "it is deleted"
    second = made("a", "x")
    assert store.put(second)
    assert not store.update(attrs.evolve(first, status="completed")), "it is another"
    assert store.update(attrs.evolve(second, status="cancelled"))
    assert not store.update(attrs.evolve(second, status="completed")), "it has ended"
    assert store.get("a", "x").status == "cancelled"


def test_what_is_made_leaves_others_their_responses():
    """A key whose responses are all unfinished cannot evict those of other keys."""
    store = ResponseStore(16 * LEAST_BYTES, ttl_s=60)
    for number in range(8):
        assert store.put(stored("small", f"{number}"))
    running = [made("flood", f"{number}") for number in range(20)]
    assert [store.put(each) for each in running] == [True] * 4 + [False] * 16
    assert store.unfinished_room("flood") == 0 and store.unfinished_room("") == 4 * LEAST_BYTES
    for number in range(20):
        store.put(stored("flood", f"end-{number}"))
    assert sum(store.get("small", f"{number}") is not None for number in range(8)) >= 6
    assert store.num_bytes <= 16 * LEAST_BYTES
    assert store.update(attrs.evolve(running[0], status="completed"))
    assert store.unfinished_room("flood") == LEAST_BYTES


def test_a_response_without_a_place_evicts_nothing():
    store = ResponseStore(10 * LEAST_BYTES, ttl_s=60)
    for name in ("1", "2", "3"):
        store.put(stored("a", name))
        store.put(stored("b", name))
    assert not store.put(stored("b", "large", 8 * LEAST_BYTES)), "it alone would be the most"
    assert store.num_bytes == 6 * LEAST_BYTES


def test_the_end_of_a_run_has_a_place():
    store = ResponseStore(2 * LEAST_BYTES, ttl_s=60)
    response = made("", "x", LEAST_BYTES - END_BYTES - 2)
    assert store.put(response) and store.put(stored("b", "other"))
    large = attrs.evolve(response, status="completed", content=b"c" * 2 * LEAST_BYTES)
    assert not store.update(large)
    end = attrs.evolve(response, status="failed", content=response.content + b"e" * END_BYTES)
    assert store.update(end)
    assert store.get("b", "other") is not None
