"""Any JSON is answered with 200 or an error 4xx of the API, and leaves no request running.

The last tests send odd requests of every kind while a well-behaved client asks on. The soak sends
`SOAK_CALLS`; a failure prints its seed and the number of its call, and ``FUZZ_SEED`` repeats it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from trencadis.server import ServerSettings, create_app
from trencadis.server.api.messages import MessagesRequest
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.api.responses import ResponsesRequest

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
ARGUMENTS = JSON | st.sampled_from(["{}", "", "[1]", '{"a": {}}', "{"])
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": JSON}, optional={"arguments": ARGUMENTS})},
    optional={"id": JSON, "type": st.just("function") | JSON},
)
SCHEMAS = JSON | st.fixed_dictionaries(
    {}, optional={"type": st.just("object"), "properties": JSON, "required": JSON, "$defs": JSON}
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c.d"]) | JSON},
    optional={"description": JSON, "parameters": SCHEMAS, "strict": JSON},
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function") | JSON, "function": FUNCTIONS | JSON}),
    max_size=3,
)
CHOICES = st.sampled_from(["none", "auto", "required"]) | st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.just("a") | JSON})}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON, "content": JSON},
        optional={"name": JSON, "tool_calls": JSON | st.lists(CALLS), "tool_call_id": JSON},
    ),
    max_size=3,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "thinking"]) | JSON},
    optional={
        "text": JSON,
        "thinking": JSON,
        "id": JSON,
        "name": st.just("a") | JSON,
        "input": JSON,
        "tool_use_id": JSON,
        "content": JSON,
        "is_error": JSON,
    },
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning"]
            ),
            "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
            "content": JSON | st.lists(PARTS, max_size=3),
            "call_id": st.just("c") | JSON,
            "name": st.just("a") | JSON,
            "arguments": ARGUMENTS,
            "output": JSON | st.lists(PARTS, max_size=2),
            "summary": JSON,
        },
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": JSON | st.lists(PARTS, max_size=3),
        }
    ),
    max_size=3,
)
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}
FIELDS = {
    "/v1/chat/completions": ChatCompletionRequest.model_fields,
    "/v1/completions": CompletionRequest.model_fields,
    "/v1/responses": ResponsesRequest.model_fields,
    "/v1/messages": MessagesRequest.model_fields,
}


def bodies(path):
    """A good request with a few fields that may be anything, or anything at all."""
    names = st.sampled_from([*FIELDS[path], "tools", "response_format", "suffix", "whatever"])
    spoiled = st.dictionaries(names, JSON, max_size=2).map(lambda fields: GOOD[path] | fields)
    special = {
        "messages": MESSAGES | TURNS,
        "input": ITEMS,
        "system": JSON | st.lists(PARTS, max_size=2),
        "thinking": st.fixed_dictionaries({"type": st.just("adaptive") | JSON}),
        "text": st.fixed_dictionaries({"format": JSON}),
        "prompt": st.text(max_size=20) | st.lists(st.integers(-2, 300), max_size=5),
        "n": st.integers(0, 3),
        "stream": st.booleans(),
        "logprobs": st.booleans() | st.integers(-1, 3),
        "tools": TOOLS,
        "tool_choice": CHOICES | JSON,
        "parallel_tool_calls": st.booleans() | JSON,
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

        return loop.run_until_complete(asyncio.wait_for(once(), 60))

    yield send
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


QUICK = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(response, engine):
    event(f"status {response.status_code}")
    assert not engine.running
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        assert set(response.json()) - {"type"} == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [*GOOD][:2])
@QUICK
@given(data=st.data())
def test_any_body(post, engine, path, data):
    body = data.draw(bodies(path))
    check(post(engine, path, json.dumps(body).encode()), engine)


@pytest.mark.parametrize("path", [*GOOD][2:])
@settings(QUICK, max_examples=12)
@given(data=st.data())
def test_any_body_of_the_apis_that_are_translated(post, engine, path, data):
    body = data.draw(bodies(path))
    check(post(engine, path, json.dumps(body).encode()), engine)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*GOOD][2:])
@settings(QUICK, max_examples=250)
@given(data=st.data())
def test_many_bodies_of_the_apis_that_are_translated(post, engine, path, data):
    body = data.draw(bodies(path))
    check(post(engine, path, json.dumps(body).encode()), engine)


LONE = "\ud800"
"""A lone surrogate: JSON allows it, UTF-8 does not, so an error cannot quote it as it is."""


@pytest.mark.asyncio
@pytest.mark.parametrize("path", GOOD)
async def test_a_lone_surrogate_in_any_field_is_an_error_of_the_client(client, engine, path):
    values = (
        *(LONE, [LONE], [[LONE]], {LONE: 1}, [{LONE: 1}], {"a": LONE}, {"type": LONE}),
        *([{"type": LONE}], [{"role": "user", "content": LONE}]),
        {"type": "function", "function": {"name": LONE}},
        {"type": "json_schema", "json_schema": {"name": LONE, "schema": {LONE: 1}}},
    )
    for name in (*FIELDS[path], "whatever"):
        for value in values:
            body = json.dumps(GOOD[path] | {name: value})
            response = await client.post(
                path, content=body, headers={"Content-Type": "application/json"}
            )
            assert response.status_code < 500, (name, value)
    assert not engine.running


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(post, engine, content):
    check(post(engine, "/v1/completions", content), engine)


SEED = int(os.environ.get("FUZZ_SEED", "1"))
SOAK_CALLS = 100_000
CALL_SECONDS = 60

ODD = (
    *(None, True, False, 0, 1, 2, -1, 7, 300, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(
        0.0,
        0.5,
        -1.5,
        1e300,
        float("nan"),
        float("inf"),
        "",
        "END",
        "77",
        "\ud800",
        "\0",
        "x" * 999,
    ),
    *([], [1], [1.5], [None], ["a"], [[1, 2], [3]], [[]], {}, {"7": 1}, {"x": [1]}, [{"role": 1}]),
    *("auto", "stand-in", "REJECT", [{"role": "user", "content": "a"}], {"type": "text"}, "lru"),
)
PATHS = (
    *GOOD,
    "/v1/admin/batch",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/x",
    "/health",
    "/metrics",
    "/v1/x",
    "/",
)
ORDERS = ("max_num_seqs", "force_evict", "target_temp_c", "policy", "dry_run", "whatever")
HEADERS = (
    *({}, {}, {}, {}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}),
    *({"Content-Type": "text/plain"}, {"Content-Length": "7"}, {"Accept": "application/xml"}),
)


def odd_body(rng, path):
    """A request body with odd values, some bytes of it lost or changed."""
    names = list(FIELDS.get(path, ORDERS))
    body = dict(GOOD.get(path, {}))
    body.update({rng.choice(names): rng.choice(ODD) for _ in range(rng.choice((0, 1, 1, 2, 4)))})
    if rng.random() < 0.1:
        return json.dumps(rng.choice(ODD)).encode()
    content = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        del content[rng.randrange(len(content)) :]
    if content and rng.random() < 0.1:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def text_of(response):
    """The answer without what differs from request to request."""
    return [choice["text"] for choice in response.json()["choices"]]


class ServerFuzzer:
    """Odd requests to an app, while a well-behaved client asks again and again."""

    def __init__(self, engine):
        keys = {"api_keys": ["key"], "admin_keys": ["admin"]}
        transport = httpx.ASGITransport(create_app(engine, ServerSettings(**keys)))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")
        self.engine = engine
        self.statuses = {}
        self.answers = 0

    async def run(self, calls):
        expected = await self._answer()
        for number in range(calls):
            odd, answer = await asyncio.wait_for(
                asyncio.gather(self._odd(number), self._answer()), CALL_SECONDS
            )
            try:
                self._check(odd)
                assert answer == expected, "the answer of another client changed"
            except BaseException:
                print(f"seed {SEED}, call {number}: {odd.request.url} {odd.request.content!r:.500}")
                raise
        assert not self.engine.running
        await self.client.aclose()

    async def _answer(self):
        headers = {"Authorization": "Bearer key"}
        body = {"prompt": ["well", "behaved"], "max_tokens": 4, "n": 2}
        response = await self.client.post("/v1/completions", json=body, headers=headers)
        self.answers += 1
        return text_of(response)

    async def _odd(self, number):
        rng = random.Random(f"{SEED} {number}")
        path = rng.choice((*PATHS, *GOOD, *GOOD, *GOOD, "/v1/admin/batch", "/v1/admin/batch"))
        key = "admin" if "admin" in path else "key"
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            **rng.choice(HEADERS),
        }
        method = "POST" if path in (*GOOD, "/v1/admin/batch") else "GET"
        if rng.random() < 0.1:
            method = rng.choice(("POST", "GET", "PUT", "DELETE", "OPTIONS"))
        content = odd_body(rng, path) if method == "POST" or rng.random() < 0.3 else None
        return await self.client.request(method, path, content=content, headers=headers)

    def _check(self, response):
        status = response.status_code
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status == 200 or 400 <= status < 500, response.text
        if status != 200 and response.request.method != "HEAD":
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert len(response.json()["error"]["message"]) <= 600


def test_odd_requests_change_no_answer_of_another_client(engine):
    fuzzer = ServerFuzzer(engine)
    asyncio.run(fuzzer.run(300))
    assert {200, 400, 401, 404, 405} <= set(fuzzer.statuses)
    assert fuzzer.answers == 301


@pytest.mark.soak
def test_odd_requests_for_long(engine):
    asyncio.run(ServerFuzzer(engine).run(SOAK_CALLS))
