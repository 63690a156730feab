"""What hostile clients without an API key keep from others: probes, and the time of streams.

    python benchmarks/hostile_clients.py [--seconds 90] [--streams 100] [--connections 200]

`engine-serve`'s server runs in a process of its own, in front of the engine of `front_streams.py`,
which computes nothing, with an API key and a limit of ``--connections``. Clients are in this
process. Two parts, each of ``--seconds``:

- lock-out: four programs hold as many connections as the limit each, and open another a second
  after one is closed. They send nothing, half a header, a body that is not read, and requests whose
  answers they do not read. A probe a second asks for ``/health`` over a new connection, within 5 s.
- bodies: four clients with a key send requests of 4 MB, one after the other: a million prompts,
  two million stop tokens, 360,000 unknown keys and as many biases. Meanwhile ``--streams`` streams
  get 20 tokens a second each. It prints how late the event loop runs a task that sleeps for 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import numpy as np
from front_streams import TokenSource, event_loop_lags

from trencadis.engine import EngineConfig
from trencadis.server import ServerSettings, launch, serve

KEY = {"Authorization": "Bearer secret"}
PROBE_SECONDS = 5.0
RATE = 20.0
PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n"

PROGRAMS = {
    "silent": (b"", b""),
    "half a header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX:", b"x"),
    "unread body": (f"{HEAD}Content-Length: 1000000\r\n\r\n".encode(), b"x"),
    "unread answers": (b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 20),
}
"""What each program sends first, and then once a second."""


def bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies just below 4 MiB, by what is long in them."""
    size = 4_000_000
    keys = ",".join(f'"{number:06d}":1' for number in range(size // 11))
    yield "prompts", b'{"prompt":[' + b",".join([b"[1]"] * (size // 4)) + b"]}"
    ids = b",".join([b"1"] * (size // 2))
    yield "stop tokens", b'{"prompt":"a","stop_token_ids":[' + ids + b"]}"
    yield "unknown keys", f'{{"prompt":"a",{keys}}}'.encode()
    yield "biases", f'{{"prompt":"a","logit_bias":{{{keys}}}}}'.encode()


class StandIn(TokenSource):
    """What `serve` needs of an engine besides."""

    embedding_size = 0
    scoring = None

    @classmethod
    async def start(cls, *_: Any) -> StandIn:
        engine = cls(RATE)
        engine.running = asyncio.create_task(engine.run())
        return engine

    async def stop(self) -> None:
        self.running.cancel()


async def run_server(connections: int) -> None:
    """Serve; the event loop's lags are printed for each line of the input, with its seconds."""
    launch.AsyncEngine = StandIn  # type: ignore[misc, assignment]
    settings = ServerSettings(
        port=0, api_keys=["secret"], max_connections=connections, access_log=False
    )
    server = asyncio.create_task(serve(EngineConfig(model="tokens"), settings))
    while True:
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            os.kill(os.getpid(), signal.SIGTERM)
            await server
            return
        lags = await event_loop_lags(float(line))
        figures = [1e3 * float(np.percentile(lags, q)) for q in (50, 99, 100)]
        print(json.dumps(figures), flush=True)


async def hold(address: tuple[str, int], first: bytes, then: bytes, counts: Counter[str]) -> None:
    """Hold a connection for ever; open another whenever it is closed."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as client, suppress(OSError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            counts["opened"] += 1
            await loop.sock_sendall(client, first)
            while True:
                await asyncio.sleep(1.0)
                await loop.sock_sendall(client, then)
                if not then and select_readable(client):
                    break
        await asyncio.sleep(1.0)


def select_readable(client: socket.socket) -> bool:
    """Whether the server has closed a connection on which it answers nothing."""
    with suppress(BlockingIOError):
        return client.recv(1, socket.MSG_PEEK) == b""
    return False


async def probe(url: str) -> tuple[str, float]:
    """The status of a probe, and how long it took."""
    begin_s = time.monotonic()
    try:
        async with httpx.AsyncClient(timeout=PROBE_SECONDS) as http:
            status = str((await http.get(f"{url}/health")).status_code)
    except httpx.HTTPError as error:
        status = type(error).__name__
    return status, time.monotonic() - begin_s


async def lock_out(url: str, options: argparse.Namespace) -> None:
    host, port = url.removeprefix("http://").split(":")
    counts = {name: Counter[str]() for name in PROGRAMS}
    held = [
        asyncio.create_task(hold((host, int(port)), first, then, counts[name]))
        for name, (first, then) in PROGRAMS.items()
        for _ in range(options.connections)
    ]
    await asyncio.sleep(2.0)
    probes = []
    for _ in range(round(options.seconds)):
        probes.append(asyncio.create_task(probe(url)))
        await asyncio.sleep(1.0)
    statuses, times = zip(*await asyncio.gather(*probes), strict=True)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    opened = ", ".join(f"{name} {count['opened']}" for name, count in counts.items())
    p50, p99, most = (1e3 * float(np.percentile(times, q)) for q in (50, 99, 100))
    print(f"lock-out: connections opened: {opened}")
    counted = dict(Counter(statuses))
    print(f"  probes: {counted}; p50 {p50:.0f} ms, p99 {p99:.0f} ms, most {most:.0f} ms")


async def stream(url: str) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 60_000, "ignore_eos": True}
    async with (
        httpx.AsyncClient(timeout=600, headers=KEY) as http,
        http.stream("POST", url + PATH, json=body) as response,
    ):
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


async def send(url: str, body: bytes, counts: Counter[str], name: str) -> None:
    headers = {**KEY, "Content-Type": "application/json"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as http:
        while True:
            status = (await http.post(url + PATH, content=body)).status_code
            counts[f"{name} {status}"] += 1


async def send_bodies(url: str, server: subprocess.Popen[str], options: argparse.Namespace) -> None:
    counts: Counter[str] = Counter()
    tasks = [asyncio.create_task(stream(url)) for _ in range(options.streams)]
    await asyncio.sleep(5.0)
    assert server.stdin is not None
    assert server.stdout is not None

    async def lags(name: str) -> None:
        server.stdin.write(f"{options.seconds}\n")
        server.stdin.flush()
        p50, p99, most = json.loads(await asyncio.to_thread(server.stdout.readline))
        print(f"{name}: lag p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.0f} ms", flush=True)

    await lags("streams alone")
    tasks += [asyncio.create_task(send(url, body, counts, name)) for name, body in bodies()]
    await lags("streams and bodies")
    print(f"  answers: {dict(counts)}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running_server(options: argparse.Namespace) -> AsyncGenerator[tuple[str, Any], None]:
    command = [sys.executable, __file__, "--serve", "--connections", str(options.connections)]
    server = subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        while " at http" not in (line := await asyncio.to_thread(server.stdout.readline)):
            if not line:
                raise SystemExit("the server did not start")
        url = line.split(" at ")[1].split()[0]
        # The command to ask it and the address of the dashboard come after.
        for _ in range(2):
            await asyncio.to_thread(server.stdout.readline)
        yield url, server
    finally:
        server.kill()
        server.wait()


async def main(options: argparse.Namespace) -> None:
    async with running_server(options) as (url, server):
        await send_bodies(url, server, options)
    async with running_server(options) as (url, _):
        await lock_out(url, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(run_server(arguments.connections) if arguments.serve else main(arguments))
