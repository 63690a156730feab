"""``/openapi.json`` and ``/docs``: they describe what the server does, and need no other host."""

from __future__ import annotations

import re

import pytest

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
