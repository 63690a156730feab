"""API keys with names: a file of keys, metrics and limits of each key, and fair shares."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from switching_engine import SwitchingStandIn

from trencadis.engine import (
    ConfigError,
    EngineRestarting,
    EngineSleeping,
    EngineUnresponsive,
)
from trencadis.server import ServerSettings, create_app
from trencadis.server.cli import main

KEYS = {"ann": "sk-secret-of-ann", "bob": "sk-secret-of-bob"}
BODY = {"prompt": "abc"}


@pytest.fixture
def key_file(tmp_path):
    """``key_file(text, mode)``: the path of a file of keys."""

    def write(text: str | None = None, mode: int = 0o600) -> str:
        path = tmp_path / "keys"
        lines = [f"{name} {key}" for name, key in KEYS.items()]
        path.write_text("\n".join(["# keys", "", *lines]) if text is None else text)
        path.chmod(mode)
        return str(path)

    return write


def connect(engine, **settings):
    app = create_app(engine, ServerSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def key_counters(client) -> dict[tuple[str, str], float]:
    """The metrics of API keys, by their name without a prefix and the key's name."""
    text = (await client.get("/metrics")).text
    return {
        (sample.name.removeprefix("trencadis:key_"), sample.labels["api_key"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("trencadis:key_") and sample.name.endswith("_total")
    }


@pytest.mark.asyncio
async def test_metrics_have_the_names_of_keys_and_never_a_key(engine, key_file):
    async with connect(engine, api_key_file=key_file()) as client:
        for key in KEYS.values():
            assert (
                await client.post("/v1/completions", json=BODY, headers=bearer(key))
            ).status_code == 200
        with_header = {"x-api-key": KEYS["bob"]}
        prompts = {"prompt": ["abc", "d"], "n": 2}
        await client.post("/v1/completions", json=prompts, headers=with_header)
        assert (
            await client.post("/v1/completions", json=BODY, headers=bearer("sk-secret"))
        ).status_code == 401
        counters = await key_counters(client)
        text = (await client.get("/metrics")).text
    assert counters["requests_total", "ann"] == 1
    assert counters["prompt_tokens_total", "ann"] == 4
    assert counters["generation_tokens_total", "ann"] == 3
    assert counters["requests_total", "bob"] == 3
    assert counters["prompt_tokens_total", "bob"] == 4 + 4 + 2
    assert counters["generation_tokens_total", "bob"] == 3 + 2 * (3 + 1)
    assert counters["requests_refused_total", "bob"] == 0
    assert "secret" not in text
    assert not any("secret" in client for client in engine.clients)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "count"),
    [
        (EngineSleeping("asleep"), 0),
        (EngineUnresponsive("hangs"), 0),
        (EngineRestarting("is being restarted", is_refusal=True), 0),
        (EngineRestarting("has died"), 1),
    ],
)
async def test_a_key_is_not_charged_for_a_request_that_the_engine_did_not_accept(
    engine, key_file, error, count
):
    engine.fails_with = error
    async with connect(engine, api_key_file=key_file()) as client:
        response = await client.post("/v1/completions", json=BODY, headers=bearer(KEYS["ann"]))
        assert response.status_code == 503
        counters = await key_counters(client)
        text = (await client.get("/metrics")).text
    assert counters.get(("requests_total", "ann"), 0) == count
    assert counters.get(("prompt_tokens_total", "ann"), 0) == 4 * count
    (errors,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
        and sample.labels["finished_reason"] == "error"
    ]
    assert errors == count


@pytest.mark.asyncio
async def test_a_key_of_the_command_line_is_named_by_its_number(engine):
    """The metrics are open: a digest there would tell who guesses a weak key that it is right."""
    async with connect(engine, api_keys=["hush", "silence"]) as client:
        await client.post("/v1/completions", json=BODY, headers=bearer("silence"))
        assert (await key_counters(client))["requests_total", "key-2"] == 1
        text = (await client.get("/metrics")).text
    assert hashlib.sha256(b"silence").hexdigest()[:8] not in text


@pytest.mark.asyncio
async def test_a_key_without_requests_has_no_metrics(engine, key_file):
    """A scrape of thousands of keys for each of several models would stop the event loop."""
    async with connect(engine, api_key_file=key_file()) as client:
        await client.post("/v1/completions", json=BODY, headers=bearer(KEYS["ann"]))
        assert {name for _, name in await key_counters(client)} == {"ann"}


@pytest.mark.asyncio
async def test_keys_of_the_file_and_of_the_command_line_are_accepted_together(engine, key_file):
    async with connect(engine, api_keys=["hush"], api_key_file=key_file()) as client:
        for key in ("hush", *KEYS.values()):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        for key in ("ann", "# keys", "", "sk-secret-of-ann sk-secret-of-bob"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 401


@pytest.mark.asyncio
async def test_without_keys_there_are_no_metrics_of_keys(client):
    await client.post("/v1/completions", json=BODY)
    assert await key_counters(client) == {}


def test_a_key_of_the_file_and_of_the_command_line_is_refused(engine, key_file):
    """Its name would be lost, and with it the metrics and the share of that name."""
    settings = ServerSettings(api_keys=["hush", KEYS["bob"]], api_key_file=key_file())
    with pytest.raises(ConfigError, match="under the name bob a key of --api-key") as caught:
        create_app(engine, settings)
    assert caught.value.field == "api_key_file"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660])
def test_a_file_that_others_may_read_or_change_is_refused(engine, key_file, mode):
    with pytest.raises(ConfigError, match=f"the mode {mode:04o}.*chmod 600") as caught:
        create_app(engine, ServerSettings(api_key_file=key_file(mode=mode)))
    assert caught.value.field == "api_key_file"


def test_what_is_no_file_is_refused(engine):
    with pytest.raises(ConfigError, match="api_key_file /dev/null is not a regular file"):
        create_app(engine, ServerSettings(api_key_file="/dev/null"))


def test_a_group_may_read_the_file_as_in_a_container(engine, key_file):
    create_app(engine, ServerSettings(api_key_file=key_file(mode=0o440)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("# nothing\n", "has no keys"),
        ("sk-secret-of-ann\n", "line 1 must have a name and a key"),
        ("\nann sk-secret of-ann\n", "line 2 must have a name and a key"),
        ("ann sk-secret\nbob sk-secret\n", "line 2: the key is in an earlier line"),
        ('a"b sk-secret\n', "line 1: a name has"),
        (f"{'a' * 65} sk-secret\n", "line 1: a name has"),
    ],
)
def test_an_invalid_file_is_refused_by_its_line_and_no_key_is_shown(
    engine, key_file, text, message
):
    with pytest.raises(ConfigError, match=message) as caught:
        create_app(engine, ServerSettings(api_key_file=key_file(text)))
    assert "secret" not in str(caught.value)
    assert '"' not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"ann \xff\xfe", "not text in UTF-8"), (b"#" * 2_000_000, "bytes")]
)
def test_a_file_of_something_else_is_refused(engine, tmp_path, content, message):
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        create_app(engine, ServerSettings(api_key_file=str(path)))


def test_a_file_of_keys_has_a_megabyte_at_most(engine, key_file):
    key = "ann sk-secret\n"
    create_app(engine, ServerSettings(api_key_file=key_file(key.ljust(1 << 20, "#"))))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        create_app(engine, ServerSettings(api_key_file=key_file(key.ljust((1 << 20) + 1, "#"))))


@pytest.mark.parametrize("name", ["a" * 64, "a", "A-b_c.d@e", "7"])
@pytest.mark.asyncio
async def test_a_name_has_up_to_64_letters_and_digits(engine, key_file, name):
    path = key_file(f"\n  # a comment\n {name}\t sk-key \n\n")
    async with connect(engine, api_key_file=path, fair_share="key") as client:
        answer = await client.post("/v1/completions", json=BODY, headers=bearer("sk-key"))
    assert answer.status_code == 200
    assert engine.clients == [name]


def test_a_missing_file_is_one_line_before_the_model_is_loaded(capsys, tmp_path):
    assert main(["m", "--api-key-file", str(tmp_path / "none"), "--port", "0"]) == 1
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert main(["m", "--api-key-file", str(tmp_path), "--port", "0"]) == 1
    assert "cannot be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"fair_share": "key"}, {"max_requests_per_key": 4}, {"prefix_cache_per_key": True}],
)
def test_a_setting_of_keys_needs_keys(settings, key_file):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name} needs API keys"):
        ServerSettings(**settings)
    ServerSettings(**settings, api_keys=["a"])
    ServerSettings(**settings, api_key_file=key_file())


@pytest.mark.asyncio
async def test_a_fair_share_gives_the_engine_the_names_of_keys(engine, key_file):
    """Two keys of one name are one client, as while a key is replaced."""
    path = key_file("ann old-key\nann new-key\nbob other-key\n")
    async with connect(engine, api_key_file=path, fair_share="key") as client:
        for key in ("old-key", "other-key", "new-key"):
            await client.post("/v1/completions", json=BODY, headers=bearer(key))
    assert engine.clients == ["ann", "bob", "ann"]


@pytest.mark.asyncio
async def test_a_key_fills_half_of_the_places_before_the_tokenizer_at_most(
    engine, key_file, monkeypatch, soon
):
    encode, may_encode = engine.tokenizer.encode, threading.Event()

    def slow(*args):
        assert may_encode.wait(30)
        return encode(*args)

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    turn = {"messages": [{"role": "user", "content": "hi"}]}
    settings = {"fair_share": "key", "max_pending_prompts": 4}
    async with connect(engine, api_key_file=key_file(), **settings) as client:

        def post(name, path="/v1/completions", body=BODY):
            return asyncio.create_task(client.post(path, json=body, headers=bearer(KEYS[name])))

        try:
            flood = [post("ann") for _ in range(3)]
            # Two have the places, whichever came first.
            await soon(lambda: sum(task.done() for task in flood) == 1)
            flood.append(post("ann", "/v1/messages", {**turn, "max_tokens": 4}))
            flood.append(post("ann", "/v1/messages/count_tokens", turn))
            await soon(lambda: sum(task.done() for task in flood) == 3)
            other = post("bob")
            await asyncio.sleep(0.05)
            assert not other.done()
        finally:
            may_encode.set()
        assert sorted([(await task).status_code for task in flood[:3]]) == [200, 200, 503]
        assert [(await task).status_code for task in flood[3:]] == [503, 503]
        for task in flood:
            assert task.result().is_success or "prompts of this API key" in task.result().text
        assert (await other).status_code == 200


@pytest.mark.asyncio
async def test_a_client_cannot_name_another_in_its_request(engine, key_file):
    async with connect(engine, api_key_file=key_file(), fair_share="key") as client:
        for body in (BODY, {**BODY, "client": "bob"}, {**BODY, "client": 7}):
            answer = await client.post("/v1/completions", json=body, headers=bearer(KEYS["ann"]))
            assert answer.status_code == 200
    assert engine.clients == ["ann"] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "clients"),
    [
        ({}, ["ann", "bob"]),
        ({"fair_share": "none"}, ["", ""]),
        ({"api_key_file": None, "api_keys": tuple(KEYS.values())}, ["", ""]),
    ],
)
async def test_a_fair_share_is_the_default_of_named_keys(engine, key_file, settings, clients):
    async with connect(engine, **{"api_key_file": key_file(), **settings}) as client:
        for key in KEYS.values():
            response = await client.post("/v1/completions", json=BODY, headers=bearer(key))
            assert response.status_code == 200
    assert engine.clients == clients


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_every_route_of_generation_tells_the_client(engine, key_file, path):
    turn = [{"role": "user", "content": "hi"}]
    body = {"input": "hi"} if path.endswith("responses") else {"messages": turn, "max_tokens": 4}
    async with connect(engine, api_key_file=key_file(), fair_share="key") as client:
        response = await client.post(path, json=body, headers=bearer(KEYS["bob"]))
    assert response.status_code == 200
    assert engine.clients == ["bob"]


@pytest.mark.asyncio
async def test_an_engine_of_several_models_gets_the_client_too(key_file):
    engine = SwitchingStandIn()
    async with connect(engine, api_key_file=key_file(), fair_share="key") as client:
        response = await client.post("/v1/completions", json=BODY, headers=bearer(KEYS["ann"]))
    assert response.status_code == 200
    assert engine.clients == ["ann"]


@pytest.mark.asyncio
async def test_a_key_has_a_limited_number_of_requests_in_progress(
    engine, key_file, serving, soon, caplog
):
    """A stream is in progress until it ends, and other keys are served meanwhile."""
    engine.delay = 0.1
    settings = {"api_key_file": key_file(), "max_requests_per_key": 2, "retry_after": 7}
    body = {"prompt": "a" * 120, "stream": True, "max_tokens": 120}
    ann, bob = bearer(KEYS["ann"]), bearer(KEYS["bob"])
    with caplog.at_level(logging.WARNING, "trencadis.server"):
        async with (
            serving(**settings) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):

            async def stream() -> int:
                async with client.stream(
                    "POST", "/v1/completions", json=body, headers=ann
                ) as response:
                    return len(await response.aread())

            streams = [asyncio.create_task(stream()) for _ in range(2)]
            await soon(lambda: len(engine.running) == 2)
            for path in ("/v1/completions", "/v1/messages"):
                refused = await client.post(path, json=BODY, headers=ann)
                assert refused.status_code == 429
                assert refused.headers["Retry-After"] == "7"
                error = refused.json()["error"]
                assert error["code"] == "rate_limit_exceeded"
                assert "2 requests of this API key are in progress" in error["message"]
            assert (await client.get("/v1/models", headers=ann)).status_code == 200
            served = await client.post("/v1/completions", json=BODY, headers=bob)
            assert served.status_code == 200
            engine.delay = 0.0
            assert all(await asyncio.gather(*streams))
            again = await client.post("/v1/completions", json=BODY, headers=ann)
            assert again.status_code == 200
            assert (await key_counters(client))["requests_refused_total", "ann"] == 2
    (message,) = [record.getMessage() for record in caplog.records if "rejected" in record.msg]
    assert message.startswith("The API key ann has 2 requests in progress")
    assert "secret" not in caplog.text


@pytest.mark.asyncio
async def test_requests_that_are_refused_or_given_up_leave_no_place_taken(
    engine, key_file, serving, soon
):
    settings = {"api_key_file": key_file(), "max_requests_per_key": 1}
    ann = bearer(KEYS["ann"])
    async with serving(**settings) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for body in ({"prompt": []}, {"prompt": "a", "temperature": -1}):
            refused = await client.post("/v1/completions", json=body, headers=ann)
            assert refused.status_code == 400
        engine.delay = 0.1
        body = {"prompt": "a" * 100, "max_tokens": 100}
        left = asyncio.create_task(client.post("/v1/completions", json=body, headers=ann))
        await soon(lambda: engine.running)
        left.cancel()
        await soon(lambda: not engine.running)
        engine.delay = 0.0
        assert (await client.post("/v1/completions", json=BODY, headers=ann)).status_code == 200
