"""Streams over a real socket: timing of events, clients that disconnect, engines that die."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import suppress

import httpx
import pytest

pytestmark = pytest.mark.asyncio

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "x" * 100}]}


async def test_events_are_sent_when_they_are_generated(url, engine):
    """A token is generated once the event before it has arrived: one that is kept back stays so."""
    generate, arrivals = engine.generate, asyncio.Semaphore(1)

    async def one_by_one(*args, **fields):
        async for delta in generate(*args, **fields):
            await arrivals.acquire()
            yield delta

    engine.generate = one_by_one
    num_events = 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": True, "max_tokens": 6}) as response,
    ):
        assert response.headers["cache-control"] == "no-cache"
        async for line in response.aiter_lines():
            if line:
                num_events += 1
                arrivals.release()
    assert num_events == 8


@pytest.mark.parametrize(
    ("path", "logprobs"), [(CHAT, {"logprobs": True}), ("/v1/completions", {"logprobs": 1})]
)
async def test_a_token_without_text_is_sent_for_what_is_asked_of_it_alone(
    client, engine, path, logprobs
):
    engine.script = ["a", "", "b"]
    prompt = {"prompt": "x"} if path != CHAT else HELLO
    for fields, field, num_sent in (
        (logprobs, "logprobs", 3),
        ({"return_token_ids": True}, "token_ids", 3),
        (logprobs | {"return_token_ids": True}, "logprobs", 3),
        ({}, None, 2),
    ):
        answer = await client.post(path, json={**prompt, **fields, "stream": True})
        chunks = [json.loads(each[6:]) for each in answer.text.split("\n\n")[:-2]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        opening = int(path == CHAT)  # a chunk with the role
        assert len(choices) == num_sent + opening
        if field is not None:
            assert all(choice[field] for choice in choices[opening:])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("reason", ["END", 77, None])
async def test_a_choice_tells_what_stopped_it_as_in_vllm_and_sglang(client, engine, path, reason):
    engine.stop_reason = reason
    body = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    body["return_token_ids"] = True
    (choice,) = (await client.post(path, json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    end = choice["token_ids"][-1] if reason is None else reason
    assert choice["matched_stop"] == end
    streamed = await client.post(path, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    *first, last = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)
    assert last["matched_stop"] == end
    assert not any("stop_reason" in choice or "matched_stop" in choice for choice in first)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_client_that_disconnects_from_a_stream_aborts_its_request(
    url, engine, soon, path, prompts
):
    engine.delay = 0.1  # nine seconds for an answer
    body = HELLO if path == CHAT else {"prompt": ["x" * 100] * prompts, "max_tokens": 90}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
            assert len(engine.running) == (prompts if path != CHAT else 1)
        await soon(lambda: not engine.running)
        assert len(engine.aborted) == len(engine.requests)
        metrics = (await client.get("/metrics")).text
        assert (
            f'finished_reason="abort",model_name="stand-in"}} {len(engine.requests)}.0' in metrics
        )


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_before_the_answer_aborts_its_request(
    url, engine, soon, path, stream
):
    engine.delay = 300.0  # nothing is sent yet when the client leaves
    body = HELLO if path == CHAT else {"prompt": "x" * 100}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        request = asyncio.create_task(client.post(path, json={**body, "stream": stream}))
        await soon(lambda: engine.running)
        request.cancel()
        await asyncio.wait([request])
    await soon(lambda: not engine.running)
    assert engine.aborted


async def test_clients_that_disconnect_at_random_times_leave_no_request_running(url, engine, soon):
    engine.delay = 0.1

    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

        async def visit(number: int) -> bool:
            body = {**HELLO, "stream": number % 2 == 0}
            request = asyncio.create_task(client.post(CHAT, json=body))
            if number >= 40:  # a third leaves while the engine serves, on a slow machine, too
                await soon(lambda: len(engine.requests) > 10)
            with suppress(asyncio.TimeoutError, httpx.HTTPError):
                await asyncio.wait_for(request, 0.04 * (number % 40))
                return True  # stayed after all: a cancellation can be lost on the client's side
            return False

        stayed = sum(await asyncio.gather(*(visit(number) for number in range(60))))
        await soon(lambda: not engine.running)
        assert len(engine.aborted) + stayed == len(engine.requests)
        assert len(engine.aborted) > 10
        metrics = (await client.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="stand-in"} 0.0' in metrics


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_an_engine_that_dies_ends_the_stream_with_an_error_event(url, engine, path):
    engine.dies_after = 3
    body = HELLO if path == CHAT else {"prompt": "x" * 100}
    async with httpx.AsyncClient(base_url=url) as client:
        response = await client.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        *_, error, done = (line for line in response.text.split("\n\n") if line)
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"] == {
            "message": "the core ended with exit code 9: restart the server",
            "type": "server_error",
            "param": None,
            "code": "engine_dead",
        }
        assert (await client.get("/health")).status_code == 503


async def test_a_client_that_does_not_read_is_disconnected(serving, engine, soon):
    # an endless answer, of which the client never takes a byte
    engine.max_model_len = 10_000_000
    async with serving(send_timeout=0.3) as url:
        prompt = [120] * 300_000
        body = json.dumps(
            {"prompt": prompt, "max_tokens": 299_999, "stream": True, "add_special_tokens": False}
        ).encode()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            await asyncio.to_thread(slow.sendall, head + body)
            await soon(lambda: engine.running)
            await soon(lambda: not engine.running)
    assert engine.aborted


async def test_the_time_between_tokens_is_not_that_of_a_client_that_does_not_read(serving, engine):
    engine.delay = 0.5
    async with serving(send_timeout=0.1) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "abcd", "stream": True}
        response = await client.post("/v1/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    assert "error" not in response.text


async def test_a_long_prompt_does_not_delay_other_requests(url, engine):
    encode = engine.tokenizer.encode
    started, release = threading.Event(), threading.Event()

    def slowly(text, add_special_tokens=True):
        if text.startswith("slow"):
            started.set()
            assert release.wait(60)
        return encode(text, add_special_tokens)

    engine.tokenizer.encode = slowly
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        slow = asyncio.create_task(client.post("/v1/completions", json={"prompt": "slow"}))
        assert await asyncio.to_thread(started.wait, 60)
        # Its prompt is being encoded until the event is set, after the other request is answered.
        assert (await client.get("/health")).status_code == 200
        release.set()
        assert (await slow).status_code == 200


async def test_prompts_past_the_bound_are_refused(serving, engine):
    release = threading.Event()
    engine.tokenizer.encode = lambda text, special: release.wait(60) and [1, 2]
    async with (
        serving(max_pending_prompts=2) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        body = {"prompt": "a"}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "abc"]
        try:
            # The one of the three that comes last is rejected; no other ends before the release.
            (task,), waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            release.set()
        refused = task.result()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_overloaded"
        assert refused.headers["retry-after"]
        assert [(await task).status_code for task in waiting] == [200, 200]
