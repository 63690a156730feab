"""Streams, clients that vanish, and a core that is killed and stopped: nothing wrong, nothing left.

Every answer that ends is the one that a quiet server gives, every other one ends with an error that
says what happened, and afterwards the server has what it had before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import attrs
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, cores_of, save_tiny_model

NUM_REQUESTS = 2_000
"""Of the soak. The slow test has a twentieth of them."""

CLIENTS_PER_REQUEST = 10
"""One client at a time for so many requests: 200 streams in the soak."""

VANISHING = 0.2
FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)
"""What happens to the core, at equal distances."""

ERRORS = {"engine_restarting", "engine_unresponsive"}
"""What a client is told while the core is gone."""

START_SECONDS = 600.0
PROMPTS = tuple(f"{letter} {number}" for letter in "abcde" for number in range(2))
MAX_TOKENS = (8, 32, 96)

MIB = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        *(str(save_tiny_model(tmp_path / "model")), "--dtype", "float32", "--warmup", "none"),
        *("--block-size", "8", "--num-gpu-blocks-override", "600", "--max-num-seqs", "32"),
        *("--engine-restarts", str(len(FAULTS)), "--no-enable-prefix-caching"),
        *("--hang-timeout", "6", "--hang-restart-timeout", "8", "--disable-access-log"),
    )
    try:
        server.url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        yield server
    finally:
        server.kill()


@attrs.frozen
class Order:
    """A request: which prompt, how many tokens, and after how many events its client vanishes."""

    prompt: str
    max_tokens: int
    vanishes_after: int | None = None

    @property
    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@attrs.define
class Answer:
    """What a client received. ``error`` is the code of the error that ended it."""

    text: str = ""
    num_tokens: int | None = None
    error: str | None = None


Results = list[tuple[Order, Answer | None]]
Expected = dict[tuple[str, int], Answer]
"""The right answers, by prompt and number of tokens."""


async def ask(http: httpx.AsyncClient, order: Order) -> Answer | None:
    """The answer to a request; None for a client that vanished."""
    answer = Answer()
    num_events = 0
    async with http.stream("POST", "/v1/completions", json=order.body) as response:
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]["code"]
            return answer
        async for line in response.aiter_lines():
            if not line:
                continue
            content = line.removeprefix("data: ")
            if content == "[DONE]":
                return answer
            event = json.loads(content)
            if "error" in event:
                answer.error = event["error"]["code"]
                continue
            for choice in event["choices"]:
                answer.text += choice["text"]
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            num_events += 1
            if num_events == order.vanishes_after:
                return None
    answer.error = "the stream broke off"
    return answer


def orders(count: int, rng: random.Random) -> list[Order]:
    return [
        Order(
            rng.choice(PROMPTS),
            rng.choice(MAX_TOKENS),
            rng.randrange(1, 8) if rng.random() < VANISHING else None,
        )
        for _ in range(count)
    ]


async def answers_of_a_quiet_server(http: httpx.AsyncClient) -> Expected:
    expected: Expected = {}
    for prompt in PROMPTS:
        for max_tokens in MAX_TOKENS:
            answer = await ask(http, Order(prompt, max_tokens))
            assert answer is not None
            assert (answer.error, answer.num_tokens) == (None, max_tokens)
            expected[prompt, max_tokens] = answer
    return expected


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    with anyio.fail_after(seconds):
        while not await condition():  # noqa: ASYNC110  another process makes it true
            await anyio.sleep(0.05)


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/ready")).status_code == 200


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@attrs.frozen
class Resources:
    """What the server process has, without its core."""

    num_threads: int
    num_descriptors: int
    rss_mib: float

    @classmethod
    def of(cls, server: ServerProcess) -> Resources:
        process = psutil.Process(server.process.pid)
        rss_mib = process.memory_info().rss / MIB
        return cls(process.num_threads(), process.num_fds(), round(rss_mib, 1))


async def is_idle(http: httpx.AsyncClient) -> bool:
    now = await metrics(http)
    waiting = ("vllm:num_requests_running", "vllm:num_requests_waiting", "trencadis:kv_blocks_used")
    return not any(now[name] for name in waiting)


async def serve_through_faults(
    server: ServerProcess, http: httpx.AsyncClient, todo: list[Order], num_clients: int
) -> Results:
    """Send all requests, ``num_clients`` at a time, while the core meets its faults.

    A client that got an error waits until the server is ready, as behind a load balancer. A fault
    comes after each quarter of the requests, once the server has recovered from the one before.
    """
    results: Results = []
    left = iter(todo)
    asking = asyncio.Lock()  # one client asks for all, so that probes do not fill the server

    async def client() -> None:
        for order in left:
            answer = await ask(http, order)
            results.append((order, answer))
            if answer is not None and answer.error is not None:
                async with asking:
                    await until(lambda: is_ready(http), START_SECONDS)

    async def disturb() -> None:
        for number, fault in enumerate(FAULTS, 1):
            share = number * len(todo) // (len(FAULTS) + 1)

            async def is_due(share: int = share) -> bool:
                return len(results) >= share and await is_ready(http)

            await until(is_due, 600)
            (core,) = cores_of(server)
            os.kill(core, fault)

            async def has_restarted(number: int = number) -> bool:
                restarts = (await metrics(http))["trencadis:core_restarts_total"]
                return restarts == number and await is_ready(http)

            await until(has_restarted, START_SECONDS)

    async with anyio.create_task_group() as group:
        group.start_soon(disturb)
        for _ in range(num_clients):
            group.start_soon(client)
    return results


def check(results: Results, expected: Expected) -> Counter[str]:
    """Compare every answer with that of the quiet server; returns what became of the requests."""
    outcomes: Counter[str] = Counter()
    for order, answer in results:
        right = expected[order.prompt, order.max_tokens]
        if answer is None:
            outcomes["vanished"] += 1
        elif answer.error is None:
            assert answer == right, order
            outcomes["answered"] += 1
        else:
            assert answer.error in ERRORS, (order, answer)
            assert right.text.startswith(answer.text), order
            outcomes[answer.error] += 1
    return outcomes


async def resources_of_an_idle_server(server: ServerProcess) -> Resources:
    """After the connections of its clients have been closed."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await until(lambda: is_idle(http), 120)

    async def is_alone() -> bool:
        connections = psutil.Process(server.process.pid).net_connections("tcp")
        return not any(each.status in ("ESTABLISHED", "CLOSE_WAIT") for each in connections)

    await until(is_alone, 120)
    return Resources.of(server)


async def run(server: ServerProcess, num_requests: int) -> None:
    num_clients = num_requests // CLIENTS_PER_REQUEST
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def connect() -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)

    async with connect() as http:
        expected = await answers_of_a_quiet_server(http)
        # What a full server needs, such as threads, is there before it is measured.
        full = [attrs.evolve(order, vanishes_after=None) for order in orders(num_clients, rng)]

        async def send(order: Order) -> tuple[Order, Answer | None]:
            return order, await ask(http, order)

        warm = await asyncio.gather(*map(send, full))
        assert set(check(list(warm), expected)) == {"answered"}
    before = await resources_of_an_idle_server(server)
    async with connect() as http:
        results = await serve_through_faults(server, http, orders(num_requests, rng), num_clients)
    outcomes = check(results, expected)
    async with connect() as http:
        assert await answers_of_a_quiet_server(http) == expected
    after = await resources_of_an_idle_server(server)
    print(f"{dict(outcomes)}; before: {before}, after: {after}")
    assert sum(outcomes.values()) == num_requests
    assert outcomes["answered"] > num_requests / 3
    assert outcomes["engine_restarting"] > 0
    assert after.num_threads <= before.num_threads + 2
    assert after.num_descriptors <= before.num_descriptors + 4
    assert after.rss_mib <= before.rss_mib + 64
    assert len(cores_of(server)) == 1
    assert server.end() == 0


@pytest.mark.slow
def test_a_core_that_is_killed_twice_and_stopped_once_costs_no_right_answer(
    server: ServerProcess,
) -> None:
    asyncio.run(run(server, NUM_REQUESTS // 20))


@pytest.mark.soak
def test_two_thousand_requests_survive_vanishing_clients_and_a_dying_core(
    server: ServerProcess,
) -> None:
    asyncio.run(run(server, NUM_REQUESTS))
