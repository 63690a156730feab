"""Attacks that were published for other servers and libraries of this field, as real requests.

Each test is named after what the attacker would get; its docstring has the CVE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from server_process import save_tiny_model

from trencadis.engine import AsyncEngine, EngineConfig
from trencadis.server import ServerSettings, create_app

LIMIT_SECONDS = 60


class Served:
    """A tiny model behind the app, on an event loop that runs while a request is served."""

    def __init__(self, model: str) -> None:
        self.loop = asyncio.new_event_loop()
        config = EngineConfig(
            model=model,
            device="cpu",
            dtype="float32",
            block_size=8,
            num_blocks=200,
            max_num_seqs=4,
            warmup="none",
        )
        self.engine = self.run(AsyncEngine.start(config))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT_SECONDS))

    def client(self, **settings: Any) -> Callable[..., httpx.Response]:
        """``client()("POST", path, json=...)`` sends one request to an app of these settings."""
        transport = httpx.ASGITransport(create_app(self.engine, ServerSettings(**settings)))

        async def send(method: str, path: str, **request: Any) -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **request)

        return lambda *args, **request: self.run(send(*args, **request))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))))
    yield served
    served.run(served.engine.stop())
    served.loop.run_until_complete(served.loop.shutdown_default_executor())
    served.loop.close()


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_whether_another_key_has_sent_a_prompt(served: Served) -> None:
    """CVE-2025-46570: the time to the first token tells which prefixes are cached."""
    send = served.client(api_keys=["ann", "bob"], prefix_cache_per_key=True)

    def ask(key: str, **fields: Any) -> int:
        body = {"prompt": "the secret plan of the company", "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        return cached_tokens(send("POST", "/v1/completions", json=body, headers=headers))

    assert ask("ann") == 0
    assert ask("bob") == 0
    assert ask("ann") == ask("bob") > 0
    assert ask("ann", cache_salt="s") == 0
    assert ask("bob", cache_salt="s") == 0, "a salt that another key has is of no use"
    assert ask("ann", cache_salt="s") > 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "what only one client of a shared key may know"}),
        ("/v1/completions", {"prompt": "the same with a form of answer", "guided_choice": ["a"]}),
    ],
    ids=["completions", "structured"],
)
def test_whether_a_client_of_another_salt_has_sent_a_prompt(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    """CVE-2025-46570, for clients that share an API key."""
    if "guided_choice" in fields:
        pytest.importorskip("llguidance")
    send = served.client()

    def ask(salt: str) -> int:
        body = {**fields, "max_tokens": 1, "cache_salt": salt}
        return cached_tokens(send("POST", path, json=body))

    assert [ask("mine"), ask("yours")] == [0, 0]
    assert ask("mine") > 0
