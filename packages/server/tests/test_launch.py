"""Start, listen, drain, stop: the life of a server around a stand-in engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from typing import ClassVar

import httpx
import pytest

from trencadis.engine import EngineConfig, EngineDead, ModelError
from trencadis.server import LaunchError, ServerSettings, launch, serve

pytestmark = pytest.mark.asyncio

CONFIG = EngineConfig(model="stand-in")


@pytest.fixture
def starting(monkeypatch, engine):
    """The stand-in as what `AsyncEngine.start` gives, with a log of what happens to it."""

    class Starting:
        events: ClassVar[list[str]] = []
        start_delay = 0.0
        error: Exception | None = None

        @classmethod
        async def start(cls, config, log=None):
            cls.events.append("start")
            if cls.error is not None:
                raise cls.error
            try:
                await asyncio.sleep(cls.start_delay)
            except asyncio.CancelledError:
                cls.events.append("start cancelled")
                raise
            cls.events.append("started")
            return engine

    async def stop():
        Starting.events.append("stop")

    Starting.events = []
    engine.stop = stop
    monkeypatch.setattr(launch, "AsyncEngine", Starting)
    return Starting


class Run:
    """A running `serve`, and where it can be reached once it said so."""

    def __init__(self, **settings):
        self.said: list[str] = []
        self.task = asyncio.create_task(
            serve(CONFIG, ServerSettings(port=0, **settings), announce=self.said.append)
        )

    async def url(self):
        for _ in range(500):
            if self.said or self.task.done():
                break
            await asyncio.sleep(0.01)
        return self.said[0].split(" at ")[1].split()[0]

    async def end(self, number=signal.SIGTERM):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(self.task, 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_and_the_engine(starting, number):
    run = Run()
    url = await run.url()
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
    await run.end(number)
    assert starting.events == ["start", "started", "stop"]
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(base_url=url) as client:
            await client.get("/health")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_greeting_can_be_pasted_into_a_shell(starting, engine):
    engine.model_name = "it's"
    run = Run(host="127.0.0.1")
    await run.url()
    command = run.said[0].splitlines()[1].strip()
    process = await asyncio.create_subprocess_shell(
        f"{command} --silent --max-time 10", stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 20)
    await run.end()
    assert b"capital of France" in answer, answer


async def test_the_greeting_never_shows_a_key(starting):
    run = Run(api_keys=["hush"])
    await run.url()
    await run.end()
    assert "hush" not in run.said[0]
    assert "$VLLM_API_KEY" in run.said[0]


async def test_nobody_can_connect_before_the_engine_is_ready(starting):
    starting.start_delay = 0.5
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = asyncio.create_task(serve(CONFIG, ServerSettings(port=port), announce=lambda _: None))
    await asyncio.sleep(0.2)
    assert starting.events == ["start"]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
    await asyncio.sleep(0.6)
    with socket.create_connection(("127.0.0.1", port)):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)


async def test_a_signal_while_starting_cancels_the_start(starting):
    starting.start_delay = 60.0
    run = Run()
    await asyncio.sleep(0.1)
    await run.end(signal.SIGINT)
    assert starting.events == ["start", "start cancelled"]
    assert not run.said


async def test_an_engine_that_cannot_start_is_its_callers_matter(starting):
    starting.error = ModelError("no model there")
    with pytest.raises(ModelError, match="no model there"):
        await Run().task


async def test_a_running_request_is_finished_first(starting, engine):
    engine.delay = 0.02
    run = Run(shutdown_timeout=10)
    async with httpx.AsyncClient(base_url=await run.url()) as client:
        body = {"prompt": "x" * 40, "max_tokens": 40}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.2)
        assert engine.running
        await run.end()
        assert (await request).json()["choices"][0]["text"] == "x" * 40


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_request_that_does_not_finish_is_given_up(starting, engine, signals):
    engine.delay = 1.0  # seconds per token
    run = Run(shutdown_timeout=1 if signals == 1 else 60)
    async with httpx.AsyncClient(base_url=await run.url()) as client:
        body = {"prompt": "x" * 100, "max_tokens": 100}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.sleep(0.2)
        for _ in range(signals - 1):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
        await run.end()
        request.cancel()
        (answer,) = await asyncio.gather(request, return_exceptions=True)
        assert isinstance(answer, BaseException), "the server did not wait for all 100 seconds"
    assert starting.events[-1] == "stop"


async def test_a_port_taken_while_the_model_loaded_is_explained(starting, engine):
    starting.start_delay = 0.5
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        port = rival.getsockname()[1]
        task = asyncio.create_task(serve(CONFIG, ServerSettings(port=port)))
        await asyncio.sleep(0.2)
        rival.listen()
        with pytest.raises(LaunchError, match="listen"):
            await asyncio.wait_for(task, 10)
    assert starting.events[-1] == "stop"


async def test_the_admin_api_has_a_port_of_its_own(starting):
    run = Run(admin_keys=["boss"], admin_port=0)
    url = await run.url()
    port = run.said[0].rpartition("Admin API on port ")[2]
    key = {"Authorization": "Bearer boss"}
    async with httpx.AsyncClient(headers=key) as client:
        codes = {
            (where, path): (await client.get(f"{base}{path}")).status_code
            for where, base in (("here", url), ("there", f"http://127.0.0.1:{port}"))
            for path in ("/v1/models", "/v1/admin/state", "/health")
        }
    await run.end()
    assert codes == {
        ("here", "/v1/models"): 200,
        ("here", "/v1/admin/state"): 404,
        ("here", "/health"): 200,
        ("there", "/v1/models"): 404,
        ("there", "/v1/admin/state"): 200,
        ("there", "/health"): 200,
    }


async def test_an_engine_that_fails_for_good_ends_the_server_with_its_reason(starting, engine):
    run = Run()
    await run.url()
    engine.failed.set()
    with pytest.raises(EngineDead, match="exit code 9"):
        await asyncio.wait_for(run.task, 10)
    assert starting.events == ["start", "started", "stop"]
