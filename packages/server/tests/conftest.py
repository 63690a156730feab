"""A stand-in engine, and clients of an app that serves it.

The tests are about the HTTP layer. The stand-in answers with the bytes of the prompt; a test sets
its delays and its errors.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from trencadis.server import ServerSettings, create_app

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules of these tests

from stand_in_engine import StandInEngine


@pytest.fixture
def engine() -> StandInEngine:
    return StandInEngine()


@pytest_asyncio.fixture
async def client(engine: StandInEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with default settings, without a network."""
    transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The URL of an app on a real socket, where clients can really leave."""
    config = uvicorn.Config(
        app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    try:
        for _ in range(6000):
            if server.started:
                break
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 60)


@pytest_asyncio.fixture
async def url(engine: StandInEngine) -> AsyncIterator[str]:
    """The URL of an app with default settings, on a real socket."""
    async with listening(create_app(engine)) as url:
        yield url


@pytest.fixture
def serving(engine: StandInEngine) -> Callable[..., Any]:
    """``async with serving(max_body_size=10) as url``: an app with other settings."""

    def start(**settings: Any) -> Any:
        return listening(create_app(engine, ServerSettings(**settings)))

    return start


@pytest.fixture
def served() -> Callable[..., Any]:
    """``async with served(app) as url``: an app that the test has made."""
    return listening


@pytest.fixture
def soon() -> Iterator[Callable[..., Any]]:
    """``await soon(condition)``: wait until another task makes it true, on a slow machine, too.

    A condition may be a coroutine function.
    """

    async def wait(condition: Callable[[], Any]) -> None:
        for _ in range(6000):
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)
        pytest.fail("did not happen within a minute")

    yield wait
