"""The routes of SGLang by which its users probe a server, and its clients ask what it serves."""

from __future__ import annotations

import httpx
import pytest
from test_bad_input import assert_error

from trencadis.engine import EngineDead, EngineSleeping
from trencadis.server import __version__

pytestmark = pytest.mark.asyncio

MODEL = ("/model_info", "/get_model_info")
SERVER = ("/server_info", "/get_server_info")

MODEL_INFO = {
    "model_path": "stand-in",
    "served_model_name": "stand-in",
    "tokenizer_path": "stand-in",
    "is_generation": True,
    "has_image_understanding": False,
    "has_audio_understanding": False,
}


@pytest.mark.parametrize("path", MODEL)
async def test_the_model_describes_itself(client, engine, path):
    assert (await client.get(path)).json() == MODEL_INFO
    engine.model_name, engine.embedding_size = "vectors", 8
    info = (await client.get(path)).json()
    assert info["model_path"] == "vectors"
    assert info["is_generation"] is False


@pytest.mark.parametrize("path", SERVER)
async def test_the_server_describes_itself(client, path):
    assert (await client.get(path)).json() == MODEL_INFO | {
        "version": __version__,
        "context_length": 256,
        "max_running_requests": 32,
        "max_total_num_tokens": 20 * 16,
        "internal_states": [],
    }


async def counted(client):
    """The requests that have ended, by metrics."""
    lines = (await client.get("/metrics")).text.splitlines()
    return [line for line in lines if line.startswith("vllm:request_success_total")]


@pytest.mark.parametrize("embedding_size", [0, 8])
async def test_a_probe_computes_one_token(client, engine, embedding_size):
    engine.embedding_size = embedding_size
    before = await counted(client)
    response = await client.get("/health_generate")
    assert (response.status_code, response.content) == (200, b"")
    ((prompt, params, _, _),) = engine.requests
    assert len(prompt) == 1
    assert params.max_tokens == 1
    assert not engine.running
    assert await counted(client) == before


@pytest.mark.parametrize(
    "error", [EngineDead("it ended"), EngineSleeping("it sleeps"), RuntimeError("no memory")]
)
async def test_a_probe_tells_that_no_token_can_be_computed(client, engine, error):
    engine.fails_with = error
    response = await client.get("/health_generate")
    assert response.status_code == (500 if isinstance(error, RuntimeError) else 503)
    engine.fails_with, engine.aborts = None, True
    assert_error(await client.get("/health_generate"), 503, None, "request_aborted")


async def test_an_engine_that_is_busy_with_others_is_well(serving, engine):
    """Its token may be late, or have no place in the queue: the engine answers nevertheless."""
    async with (
        serving(health_timeout=0.1) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        engine.delay = 3600.0
        assert (await client.get("/health_generate")).status_code == 200
        assert not engine.running
        assert len(engine.aborted) == 1
        engine.overloaded = True
        assert (await client.get("/health_generate")).status_code == 200
        engine.overloaded, engine.hangs = False, True
        response = await client.get("/health_generate")
        assert_error(response, 503, None, "engine_unresponsive")


@pytest.mark.parametrize("path", ["/health_generate", *MODEL, *SERVER])
async def test_the_routes_need_a_key(serving, path):
    async with serving(api_keys=["secret"]) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get(path)).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert (await client.get(path)).status_code == 200
