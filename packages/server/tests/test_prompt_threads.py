"""Requests that wait until their prompt is rendered and tokenised do not wait for slow ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import httpx
import pytest

from trencadis.engine import FairThread, ProcessUnresponsive, SlowConversation


def said(text):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@pytest.mark.asyncio
async def test_a_conversation_that_takes_long_to_render_delays_no_other(
    client, engine, monkeypatch, soon
):
    render, may_end, slow_calls = engine.tokenizer.render_chat, threading.Event(), []

    def slow(messages, *, quick, **options):
        if messages[0]["content"] == "slow":
            slow_calls.append(quick)
            if quick:
                raise SlowConversation("it takes too long")
            assert may_end.wait(30)
        return render(messages, **options)

    monkeypatch.setattr(engine.tokenizer, "render_chat", slow)
    path = "/v1/chat/completions"
    waiting = [asyncio.create_task(client.post(path, json=said("slow"))) for _ in range(2)]
    try:
        await soon(lambda: len(slow_calls) == 3)
        for _ in range(3):
            assert (await client.post(path, json=said("usual"))).status_code == 200
        assert not any(task.done() for task in waiting)
    finally:
        may_end.set()
    assert [(await task).status_code for task in waiting] == [200, 200]
    assert sorted(slow_calls) == [False, False, True, True]


@pytest.mark.asyncio
async def test_a_stopped_template_process_delays_no_completion(client, engine, monkeypatch, soon):
    began, may_end = threading.Event(), threading.Event()

    def stopped(messages, **options):
        began.set()
        assert may_end.wait(30)
        raise ProcessUnresponsive("the process has sent no answer within 10 s and was ended")

    monkeypatch.setattr(engine.tokenizer, "render_chat", stopped)
    waiting = asyncio.create_task(client.post("/v1/chat/completions", json=said("usual")))
    try:
        await soon(began.is_set)
        for prompt in ("short", "long" * 20_000):
            request = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert (await asyncio.wait_for(request, 20)).status_code in (200, 400)
        assert not waiting.done()
    finally:
        may_end.set()
    response = await waiting
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "process_unresponsive"


@pytest.mark.asyncio
@pytest.mark.parametrize("embedding_size", [0, 8])
async def test_a_request_counts_while_its_prompt_is_encoded(
    serving, engine, monkeypatch, soon, embedding_size
):
    """For balancers, and for a drain: it was accepted."""
    engine.embedding_size = embedding_size
    encode, began, may_end = engine.tokenizer.encode, threading.Event(), threading.Event()

    def slow(text, add_special_tokens=True):
        began.set()
        assert may_end.wait(30)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    path, body = "/v1/completions", {"prompt": "ab"}
    if embedding_size:
        path, body = "/v1/embeddings", {"input": "ab"}
    async with (
        serving(admin_keys=["boss"]) as url,
        httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer boss"}) as client,
    ):
        waiting = asyncio.create_task(client.post(path, json=body))
        try:
            await soon(began.is_set)
            assert (await client.get("/load")).json() == {"server_load": 1}
            state = (await client.get("/v1/admin/state")).json()
            assert state["num_active_requests"] == 1
            drained = await client.post("/v1/admin/drain", json={"wait_s": 0.01})
            assert drained.json()["num_active_requests"] == 1
        finally:
            may_end.set()
        drained = await client.post("/v1/admin/drain", json={"wait_s": 60})
        assert drained.json()["num_active_requests"] == 0
        assert (await waiting).status_code == 200


@pytest.fixture
def thread():
    thread = FairThread("test")
    yield thread
    thread.close()


@pytest.mark.asyncio
async def test_the_threads_of_prompts_end_with_the_server(engine, serving, soon):
    def threads():
        names = ("tokenizer", "tokenizer-long", "template")
        running = threading.enumerate()
        return {thread for thread in running if thread.name.partition("_")[0] in names}

    before = threads()  # those of other tests may end meanwhile
    async with serving() as url, httpx.AsyncClient(base_url=url) as client:
        for prompt in ("a", "a" * 200_000):
            await client.post("/tokenize", json={"prompt": prompt})
        await client.post("/v1/chat/completions", json=said("hello"))
        assert len(threads() - before) == 3
    await soon(lambda: not threads() - before)


def test_clients_are_served_in_rotation_whatever_one_of_them_has_sent(thread):
    served, begun, may_begin = [], threading.Event(), threading.Event()
    thread.submit("flood", lambda: (begun.set(), may_begin.wait(30)))
    assert begun.wait(30)
    sent = ["flood"] * 50 + ["a", "b", "a", "c"]
    futures = [thread.submit(name, lambda name=name: served.append(name)) for name in sent]
    may_begin.set()
    for future in futures:
        future.result(timeout=30)
    assert served[:8] == ["flood", "a", "b", "c", "flood", "a", "flood", "flood"]
    assert sorted(served) == sorted(sent)


def test_the_error_of_a_piece_of_work_is_that_of_its_request_alone(thread):
    failing = thread.submit("", lambda: 1 // 0)
    assert thread.submit("", lambda: 7).result(timeout=30) == 7
    with pytest.raises(ZeroDivisionError):
        failing.result(timeout=30)


def test_a_request_that_was_cancelled_is_not_worked_for(thread):
    done, may_begin = [], threading.Event()
    thread.submit("a", lambda: may_begin.wait(30))
    cancelled = thread.submit("a", lambda: done.append("cancelled"))
    last = thread.submit("b", lambda: done.append("b"))
    assert cancelled.cancel()
    may_begin.set()
    last.result(timeout=30)
    thread.submit("a", lambda: None).result(timeout=30)
    assert done == ["b"]


def test_what_waits_is_cancelled_when_the_thread_closes(thread):
    begun, may_end = threading.Event(), threading.Event()

    def work():
        begun.set()
        return may_end.wait(30)

    running = thread.submit("a", work)
    waiting = [thread.submit(name, lambda: None) for name in ("a", "b")]
    assert begun.wait(30)
    thread.close()
    may_end.set()
    assert running.result(timeout=30)
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(timeout=30)
    with pytest.raises(RuntimeError):
        thread.submit("a", lambda: None)
