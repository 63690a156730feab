"""The front under many streams: its share of a core, and what a stream costs it.

    python benchmarks/front_streams.py [--streams 500] [--rate 20] [--seconds 10]

The HTTP app of the server runs under uvicorn in a process of its own, in front of an engine that
computes nothing: each stream gets ``--rate`` tokens a second, all in the same step, as from a
core. Tokens pass the request streams and the detokenizer of the real front; the messages from the
core's process are left out. Clients read in this process. Prints, of the front's process over
``--seconds`` in which all streams run:

- its share of a core, and its processor time per token;
- how late the event loop runs a task that sleeps for 5 ms, p50, p99 and most;
- tasks, resident memory and Python's own memory (tracemalloc, in a second run) per stream.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator

import attrs
import numpy as np
import psutil
import uvicorn

from trencadis.engine import CompletionDelta, EngineRequest, EngineStats, default_model
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.ipc.messages import NewToken
from trencadis.scheduler import BatchControl, BatchControlResult
from trencadis.server import ServerSettings, create_app

LAG_PERIOD_S = 0.005
MAX_MODEL_LEN = 1 << 16


class TokenSource:
    """An engine whose tokens are random, and come to all streams in steps."""

    def __init__(self, rate: float) -> None:
        self.tokenizer = Tokenizer.load(default_model())
        self.max_model_len = MAX_MODEL_LEN
        self.model_name = "tokens"
        self.stats = EngineStats()
        self.streams: dict[str, RequestStream] = {}
        self.num_tokens = 0
        self._period_s = 1 / rate
        self._rng = random.Random(0)

    async def run(self) -> None:
        """Give each stream a token in each period."""
        next_s = time.monotonic()
        while True:
            for key, stream in tuple(self.streams.items()):
                stream.push(NewToken(key, 0, self._rng.randrange(1000, 40_000), None, 0))
                self.num_tokens += 1
            next_s = max(next_s + self._period_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())

    async def check_health(self) -> None:
        pass

    async def wait_until_failed(self) -> str:
        return await asyncio.Future[str]()

    async def control(self, order: BatchControl) -> BatchControlResult:
        raise NotImplementedError

    async def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        key = request.request_id or f"{len(self.streams)}"
        deltas: asyncio.Queue[CompletionDelta] = asyncio.Queue()
        self.streams[key] = RequestStream(key, request, self.tokenizer, deltas.put_nowait)
        try:
            while True:
                yield await deltas.get()
        finally:
            del self.streams[key]


async def serve(options: argparse.Namespace) -> None:
    """Serve on a free port and print its number; print what was measured once all streams run."""
    if options.traced:
        tracemalloc.start()
    engine = TokenSource(options.rate)
    app = create_app(engine, ServerSettings())
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="on", backlog=2048)
    server = uvicorn.Server(config)
    tasks = [asyncio.create_task(server.serve()), asyncio.create_task(engine.run())]
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event)
        await asyncio.sleep(0.01)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss, len(asyncio.all_tasks()), traced_bytes()
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    while len(engine.streams) < options.streams:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    gc.collect()
    after = process.memory_info().rss, len(asyncio.all_tasks()), traced_bytes()
    num_tokens, processor_s, start_s = engine.num_tokens, time.process_time(), time.monotonic()
    lags = await event_loop_lags(options.seconds)
    processor_s = time.process_time() - processor_s
    num_tokens = engine.num_tokens - num_tokens
    rss, num_tasks, traced = (
        (new - old) / options.streams for old, new in zip(before, after, strict=True)
    )
    figures = {
        "share": processor_s / (time.monotonic() - start_s),
        "us_per_token": processor_s / num_tokens * 1e6,
        "tokens_per_s": num_tokens / (time.monotonic() - start_s),
        "lag_ms": [1e3 * float(np.percentile(lags, q)) for q in (50, 99, 100)],
        "tasks": num_tasks,
        "rss": rss,
        "traced": traced,
    }
    print(json.dumps(figures), flush=True)
    await asyncio.gather(*tasks)


def traced_bytes() -> int:
    return tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0


async def event_loop_lags(seconds: float) -> list[float]:
    """How late each sleep of `LAG_PERIOD_S` ends, in seconds."""
    lags = []
    end_s = time.monotonic() + seconds
    while (begin_s := time.monotonic()) < end_s:
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append(time.monotonic() - begin_s - LAG_PERIOD_S)
    return lags


@attrs.define
class Reader:
    """Reads what the server sends to one stream."""

    port: int
    num_bytes: int = 0
    writer: asyncio.StreamWriter | None = None

    async def read(self) -> None:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "Tell me a long story."}],
                "stream": True,
                "max_tokens": MAX_MODEL_LEN // 2,
            }
        )
        reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            f"application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        while part := await reader.read(1 << 16):
            self.num_bytes += len(part)


async def measure(options: argparse.Namespace, *flags: str) -> dict[str, object]:
    """The figures of a front, in a process of its own."""
    command = [sys.executable, __file__, "--serve", *flags]
    for name in ("streams", "rate", "seconds"):
        command += [f"--{name}", str(getattr(options, name))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            port = int(await asyncio.to_thread(process.stdout.readline))
            tasks = []
            for _ in range(options.streams):  # fewer at once than may wait for the tokenizer
                tasks.append(asyncio.create_task(Reader(port).read()))
                await asyncio.sleep(0.01)
            figures: dict[str, object] = json.loads(
                await asyncio.to_thread(process.stdout.readline)
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return figures
        finally:
            process.kill()


async def compare(options: argparse.Namespace) -> None:
    figures = await measure(options)
    traced = await measure(changed(options, seconds=1.0), "--traced")
    median, p99, most = figures["lag_ms"]  # type: ignore[misc]
    print(f"{options.streams} streams, {figures['tokens_per_s']:.0f} tokens a second in all")
    print(
        f"share of a core      {figures['share']:8.2f}   {figures['us_per_token']:.0f} µs per token"
    )
    print(f"event loop lag       {median:8.1f} ms p50, {p99:.1f} ms p99, {most:.1f} ms at most")
    print(f"tasks per stream     {figures['tasks']:8.1f}")
    print(
        f"memory per stream    {figures['rss'] / 1024:8.1f} KiB resident, "  # type: ignore[operator]
        f"{traced['traced'] / 1024:.1f} KiB of Python objects"  # type: ignore[operator]
    )
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")


def changed(options: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(options) | changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve(options) if options.serve else compare(options))


if __name__ == "__main__":
    main()
