"""Any JSON is answered with 200 or an OpenAI error 4xx, and leaves no request running."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from trencadis.server import create_app
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-300, 300)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["text", "user", "auto", "stand-in", "\ud800", "\x00", "REJECT"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]) | JSON, "content": JSON},
        optional={"name": JSON, "tool_calls": JSON},
    ),
    max_size=3,
)
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
}
FIELDS = {
    "/v1/chat/completions": ChatCompletionRequest.model_fields,
    "/v1/completions": CompletionRequest.model_fields,
}


def bodies(path):
    """A good request with a few fields that may be anything, or anything at all."""
    names = st.sampled_from([*FIELDS[path], "tools", "response_format", "suffix", "whatever"])
    spoiled = st.dictionaries(names, JSON, max_size=2).map(lambda fields: GOOD[path] | fields)
    special = {
        "messages": MESSAGES,
        "prompt": st.text(max_size=20) | st.lists(st.integers(-2, 300), max_size=5),
        "n": st.integers(0, 3),
        "stream": st.booleans(),
        "logprobs": st.booleans() | st.integers(-1, 3),
    }
    varied = st.fixed_dictionaries({}, optional=special).map(lambda fields: GOOD[path] | fields)
    return spoiled | varied | JSON


@pytest.fixture(scope="module")
def post():
    loop = asyncio.new_event_loop()

    def send(engine, path, content):
        async def once():
            transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                headers = {"Content-Type": "application/json"}
                return await client.post(path, content=content, headers=headers)

        return loop.run_until_complete(asyncio.wait_for(once(), 10))

    yield send
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(response, engine):
    event(f"status {response.status_code}")
    assert not engine.running
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", GOOD)
@QUICK
@given(data=st.data())
def test_any_body(post, engine, path, data):
    body = data.draw(bodies(path))
    check(post(engine, path, json.dumps(body).encode()), engine)


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(post, engine, content):
    check(post(engine, "/v1/completions", content), engine)
