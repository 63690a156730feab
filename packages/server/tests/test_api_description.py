"""``/openapi.json`` and ``/docs``: they describe what the server does, and need no other host."""

from __future__ import annotations

import re

import pytest
from switching_engine import SwitchingStandIn

from trencadis.server import ServerSettings, create_app

pytestmark = pytest.mark.asyncio

GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


async def test_errors_have_the_form_that_is_sent(client):
    description = (await client.get("/openapi.json")).json()
    assert "HTTPValidationError" not in description["components"]["schemas"]
    for path, methods in description["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], path
            for status, response in operation["responses"].items():
                if status != "200":
                    (content,) = response["content"].items()
                    name = "MessagesErrorResponse" if "messages" in path else "ErrorResponse"
                    reference = {"$ref": f"#/components/schemas/{name}"}
                    assert content == ("application/json", {"schema": reference}), path
    sent = (await client.post("/v1/completions", json={})).json()
    described = description["components"]["schemas"]
    assert described["ErrorResponse"]["required"] == list(sent)
    assert described["ErrorObject"]["required"] == list(sent["error"])


@pytest.mark.parametrize("path", GENERATION)
async def test_a_stream_and_every_status_of_a_generation_are_described(client, path):
    description = (await client.get("/openapi.json")).json()
    responses = description["paths"][path]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    statuses = {"400", "401", "404", "408", "413", "415", "500", "503"}
    assert statuses <= set(responses)


BODY_ERRORS = "400 401 408 413"
"""Those of what takes a body and a key."""

STATUSES = {
    f"{BODY_ERRORS} 404 415 429 500 503": (
        "POST /invocations",
        "POST /pooling",
        "POST /rerank",
        "POST /score",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/batch",
        "POST /v1/completions",
        "POST /v1/embeddings",
        "POST /v1/messages",
        "POST /v1/rerank",
        "POST /v1/score",
        "POST /v2/embed",
        "POST /v2/rerank",
    ),
    f"{BODY_ERRORS} 404 409 415 429 500 503": ("POST /v1/responses",),
    "400 401 404": (
        "DELETE /v1/files/{file_id}",
        "DELETE /v1/responses/{response_id}",
        "GET /v1/batches",
        "GET /v1/batches/{batch_id}",
        "GET /v1/files",
        "GET /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "GET /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "POST /v1/batches",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/files",
        "POST /v1/responses/{response_id}/cancel",
    ),
    f"{BODY_ERRORS} 404 415 500 503": (
        "POST /detokenize",
        "POST /tokenize",
        "POST /v1/messages/count_tokens",
    ),
    "401": ("GET /model_info", "GET /server_info", "GET /tokenizer_info", "GET /v1/models"),
    "401 404": ("GET /v1/models/{name}",),
    f"{BODY_ERRORS} 403 404 409 415 429 500 503": ("POST /v1/models/switch",),
    "400 401 403 429 500 503": ("GET /is_sleeping", "POST /sleep", "POST /wake_up"),
    f"{BODY_ERRORS} 403 404 415 429 503": (
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
    ),
    f"{BODY_ERRORS} 403 429 503": ("POST /v1/admin/batch", "POST /v1/admin/drain"),
    "401 403 429": ("GET /v1/admin/state",),
    "401 500 503": ("GET /health_generate",),
    "503": ("GET /health", "GET /live", "GET /ping", "GET /ready"),
    "": ("GET /load", "GET /metrics", "GET /version"),
}
"""The errors that the description has for each route, besides the default."""


async def test_each_route_is_described_with_its_errors(tmp_path):
    settings = ServerSettings(
        admin_keys=["boss"],
        batch_directory=str(tmp_path),
        enable_tokenizer_info_endpoint=True,
        lora_directories=[str(tmp_path)],
        responses_store=True,
        server_dev_mode=True,
    )
    paths = create_app(SwitchingStandIn(), settings).openapi()["paths"]
    described = {
        f"{method.upper()} {path}": set(operation["responses"]) - {"200", "default"}
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    assert described == {
        route: set(statuses.split()) for statuses, routes in STATUSES.items() for route in routes
    }


async def test_the_docs_load_nothing_from_another_host(client):
    page = await client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text
    assert not re.search(r"(src|href)=.(https?:)?//", page.text)
    assert (await client.get("/redoc")).status_code == 404


async def test_the_docs_describe_every_path_and_the_range_of_a_field(client):
    page = (await client.get("/docs")).text
    description = (await client.get("/openapi.json")).json()
    assert all(path in page for path in description["paths"])
    assert re.search(r"<code>temperature</code>.*?at least 0.*?at most 2", page)
    assert re.search(r"<code>force_evict</code>.*?preempt", page)
