"""``/dashboard``: who may see it, what it shows, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import attrs
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_engine import StandInEngine
from switching_engine import SwitchingStandIn

from trencadis.engine import EngineInspection, EngineRestarting, GridUsage, ThermalStats
from trencadis.kvcache import BlockMap
from trencadis.server import ServerSettings, create_app
from trencadis.server.app import end_streams
from trencadis.server.dashboard import feed as feed_module
from trencadis.server.dashboard.feed import MAX_VIEWERS, DashboardFeed
from trencadis.server.metrics.percentiles import RecentPercentiles, quantile

FAST_S = 0.02
EVENTS = "/dashboard/events"
BOSS = {"Authorization": "Bearer boss"}
INSPECTION = EngineInspection(
    BlockMap(20, 1, (1,) * 5 + (0,) * 15, (0,) * 5 + (1,) + (0,) * 14, 1, 5),
    (
        GridUsage(
            "prefill", ("batch", "query"), (1, 2), (8,), True, (1, 1), (1, 0), (0, 0), (7, 0)
        ),
        GridUsage("decode", ("batch", "blocks"), (4,), (8,), True, (1,), (1,), (1,), (9,)),
    ),
)
Watched = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, DashboardFeed]]]


class InspectedStandIn(StandInEngine):
    """Counts how often it is inspected. It answers while ``is_free``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_inspections = 0
        self.answered_s = 0.0
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def inspect(self) -> EngineInspection:
        self.num_inspections += 1
        await self.is_free.wait()
        self.answered_s = time.time()
        return INSPECTION


@pytest.fixture
def engine() -> InspectedStandIn:
    return InspectedStandIn()


@pytest.fixture
def watched(engine: InspectedStandIn, served: Callable[..., Any]) -> Watched:
    """A client of an app on a real socket, whose snapshots follow quickly, and its feed."""

    @asynccontextmanager
    async def start(
        engine: StandInEngine = engine, **settings: Any
    ) -> AsyncIterator[tuple[httpx.AsyncClient, DashboardFeed]]:
        app = create_app(engine, ServerSettings(**settings))
        feed: DashboardFeed = app.state.dashboard
        feed.interval_s = FAST_S
        async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield client, feed

    return start


@asynccontextmanager
async def viewer(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[AsyncIterator[str]]:
    """The texts of the events that a viewer gets."""
    async with client.stream("GET", EVENTS, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")

        async def texts() -> AsyncIterator[str]:
            rest = ""
            async for part in response.aiter_text():
                *whole, rest = (rest + part).split("\n\n")
                for text in whole:
                    yield text

        yield texts()


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    name, content = re.fullmatch(r"event: (\w+)\ndata: (.*)", text).groups()
    return name, json.loads(content)


async def next_snapshot(texts: AsyncIterator[str]) -> dict[str, Any]:
    async for text in texts:
        name, content = parsed(text)
        if name == "snapshot":
            return content
    raise AssertionError("the stream has ended")


async def shown(
    texts: AsyncIterator[str], condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The first snapshot that meets a condition; those before were on their way."""
    for _ in range(500):
        snapshot = await next_snapshot(texts)
        if condition(snapshot):
            return snapshot
    raise AssertionError(f"never shown; the last: {snapshot}")


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(attrs.asdict(value)))


def connect(engine: StandInEngine, **settings: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


# What it shows.


@pytest.mark.asyncio
async def test_a_snapshot_is_the_state_of_the_engine(engine: InspectedStandIn, watched: Watched):
    engine.thermal = ThermalStats(
        hottest_c=81.5, power_w=640.0, policy="two_phase", target_temp_c=85.0
    )
    async with watched() as (client, _), viewer(client) as texts:
        body = {"prompt": "abcd", "max_tokens": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        snapshot = await shown(texts, lambda s: s["latency"]["itl"]["total_count"] == 2)
    assert snapshot["stats"] == as_json(engine.stats)
    assert snapshot["inspection"] == as_json(INSPECTION)
    assert (snapshot["state"], snapshot["reason"]) == ("serving", "")
    assert (snapshot["model"], snapshot["models"]) == ("stand-in", [])
    assert snapshot["latency"]["ttft"]["total_count"] == 1
    assert 0 < snapshot["latency"]["ttft"]["total_p99"] < 60
    point = snapshot["point"]
    assert (point["hottest_c"], point["target_temp_c"], point["power_w"]) == (81.5, 85.0, 640.0)
    assert point["num_waiting_reqs"] == 2 + 6 + 9
    assert point["cache_usage"] == 0.25
    assert abs(point["time_s"] - time.time()) < 60


@pytest.mark.asyncio
async def test_recent_percentiles_forget_what_was_before(watched: Watched):
    async with watched() as (client, _):
        body = {"prompt": "abcd", "max_tokens": 2}
        await client.post("/v1/completions", json=body)
        async with viewer(client) as texts:
            first = (await next_snapshot(texts))["latency"]["ttft"]
            assert (first["count"], first["p50"], first["total_count"]) == (0, None, 1)
            await client.post("/v1/completions", json=body)
            snapshot = await shown(texts, lambda s: s["latency"]["ttft"]["total_count"] == 2)
            second = snapshot["latency"]["ttft"]
    assert (second["count"], second["total_count"]) == (1, 2)
    assert second["p50"] > 0


@pytest.mark.asyncio
async def test_recent_percentiles_begin_again_with_another_page(
    watched: Watched, soon: Callable[..., Any]
):
    async with watched() as (client, feed):
        body = {"prompt": "abcd", "max_tokens": 2}
        async with viewer(client) as texts:
            await next_snapshot(texts)
        await soon(lambda: feed.num_viewers == 0)
        noted = len(feed._history)
        await soon(lambda: len(feed._history) > noted + 2)
        await client.post("/v1/completions", json=body)
        async with viewer(client) as texts:
            first = (await next_snapshot(texts))["latency"]["ttft"]
    assert (first["count"], first["total_count"]) == (0, 1), "nobody watched when it came"


def test_recent_percentiles_of_another_model_begin_with_it():
    metrics = SimpleNamespace(model_name="a", counts_up_to=lambda _: {math.inf: counts})
    recent = RecentPercentiles(metrics, "ttft")
    counts = 0.0
    recent.observe()
    metrics.model_name, counts = "b", 7.0
    assert recent.observe().count == 0
    counts = 9.0
    assert recent.observe().count == 2


@pytest.mark.asyncio
async def test_a_page_that_is_opened_later_shows_what_was_before(
    engine: InspectedStandIn, watched: Watched, soon: Callable[..., Any]
):
    engine.thermal = ThermalStats(hottest_c=60.0)
    async with watched() as (client, feed):
        await soon(lambda: len(feed._history) > 2)
        engine.thermal = ThermalStats(hottest_c=90.0)
        assert engine.num_inspections == 0
        async with viewer(client) as texts:
            name, history = parsed(await anext(texts))
    assert name == "history"
    assert history["hottest_c"][:2] == [60.0, 60.0]
    assert history["time_s"] == sorted(history["time_s"])
    assert {len(column) for column in history.values()} == {len(history["time_s"])}


@pytest.mark.asyncio
async def test_the_history_has_ten_minutes(engine: InspectedStandIn, soon: Callable[..., Any]):
    feed: DashboardFeed = create_app(engine).state.dashboard
    assert feed.interval_s == 1.0
    feed.interval_s = 0.0
    feed.start()
    await soon(lambda: len(feed._history) >= 600)
    first_s = feed._history[0].time_s
    await soon(lambda: feed._history[0].time_s != first_s)
    page = feed.admit()
    _, history = parsed((await anext(page.events)).strip())
    await page.aclose()
    feed.close()
    assert len(history["time_s"]) == 600


@pytest.mark.asyncio
async def test_the_state_is_what_a_new_request_would_get(
    engine: InspectedStandIn, watched: Watched
):
    async with watched(admin_keys=["boss"]) as (client, _), viewer(client, **BOSS) as texts:
        await client.post("/v1/admin/drain", headers=BOSS)
        assert "administrator" in (await shown(texts, lambda s: s["state"] == "draining"))["reason"]
        await client.post("/v1/admin/drain", json={"drain": False}, headers=BOSS)
        engine.health = EngineRestarting("the core ended with exit code 9")
        snapshot = await shown(texts, lambda s: s["state"] == "engine_restarting")
    assert snapshot["reason"] == "the core ended with exit code 9"


@pytest.mark.asyncio
async def test_of_several_models_the_active_one_is_shown(watched: Watched):
    engine = SwitchingStandIn()
    async with watched(engine) as (client, _), viewer(client) as texts:
        first = await next_snapshot(texts)
        engine.active = "b"
        await shown(texts, lambda s: s["model"] == "b")
    assert (first["model"], first["models"]) == ("a", ["a", "b", "c"])
    assert first["inspection"] is None, "an engine without `inspect` is shown without maps"


@pytest.mark.asyncio
async def test_no_prompt_request_id_or_key_is_in_the_events(
    engine: InspectedStandIn, watched: Watched
):
    engine.delay = FAST_S
    keys = {"api_keys": ["key-of-a-client"], "admin_keys": ["boss"]}
    async with watched(**keys) as (client, _), viewer(client, **BOSS) as texts:
        secret = "The secret of the prompt. " * 4
        asked = asyncio.create_task(
            client.post(
                "/v1/completions",
                json={"prompt": secret, "max_tokens": 40, "cache_salt": "salt"},
                headers={"X-Request-Id": "id-9", "Authorization": "Bearer key-of-a-client"},
            )
        )
        seen = "".join([await anext(texts) for _ in range(20)])
        response = await asked
    assert response.status_code == 200, response.text
    ids = {response.json()["id"], "id-9", *engine.aborted, engine.requests[0][2]}
    for private in ("secret", "key-of-a-client", "boss", "salt", *filter(None, ids)):
        assert private not in seen


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_sensor_without_a_value_leaves_the_events_readable(
    engine: InspectedStandIn, watched: Watched, value: float
):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    engine.thermal = ThermalStats(hottest_c=value, power_w=value)
    async with watched() as (client, _), viewer(client) as texts:
        for _ in range(3):
            content = (await anext(texts)).partition("\ndata: ")[2]
            snapshot = json.loads(content, parse_constant=refuse)
    assert snapshot["point"]["hottest_c"] is None
    assert snapshot["stats"]["thermal"]["power_w"] is None


@pytest.mark.asyncio
async def test_maps_of_a_core_that_fails_or_of_another_model_are_not_shown_as_current(
    engine: InspectedStandIn, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    async def failing() -> EngineInspection:
        raise EngineRestarting("the core ended with exit code 9")

    async with watched() as (client, _), viewer(client) as texts:
        await shown(texts, lambda s: s["inspection"] is not None)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "inspect", failing)
            snapshot = await shown(texts, lambda s: s["inspection"] is None)
            assert snapshot["inspection_age_s"] is None
        await shown(texts, lambda s: s["inspection"] is not None)
        engine.is_free.clear()  # the core is busy with the change of the model
        engine.model_name = "another"
        await shown(texts, lambda s: s["model"] == "another" and s["inspection"] is None)
        engine.is_free.set()


@pytest.mark.asyncio
async def test_the_age_of_a_map_begins_when_the_core_has_answered(
    engine: InspectedStandIn, watched: Watched
):
    async with watched() as (client, feed), viewer(client) as texts:
        await next_snapshot(texts)
        feed.interval_s = 0.5  # the answer comes between two snapshots
        await next_snapshot(texts)
        engine.is_free.clear()
        await next_snapshot(texts)
        engine.is_free.set()
        snapshot = await next_snapshot(texts)
        age_s = snapshot["point"]["time_s"] - engine.answered_s  # half a second, or a bit less
        assert snapshot["inspection_age_s"] >= age_s - 0.1


# What it costs.


@pytest.mark.asyncio
async def test_the_core_is_asked_once_for_all_viewers_and_never_without_one(
    engine: InspectedStandIn, watched: Watched, soon: Callable[..., Any]
):
    async with watched() as (client, feed):
        await soon(lambda: len(feed._history) > 5)
        assert engine.num_inspections == 0
        async with viewer(client) as a, viewer(client) as b, viewer(client) as c:
            snapshots = [[await anext(texts) for _ in range(8)][1:] for texts in (a, b, c)]
            assert set.intersection(*map(set, snapshots)), "one text is sent to all"
            asked, noted = engine.num_inspections, len(feed._history)
            assert 7 <= asked <= noted
        await soon(lambda: feed.num_viewers == 0)
        asked, noted = engine.num_inspections, len(feed._history)
        await soon(lambda: len(feed._history) > noted + 5)
        assert engine.num_inspections <= asked + 1


@pytest.mark.asyncio
async def test_a_core_that_compiles_is_asked_once_and_its_last_answer_stays(
    engine: InspectedStandIn, watched: Watched
):
    async with watched() as (client, _), viewer(client) as texts:
        await next_snapshot(texts)
        engine.is_free.clear()
        await next_snapshot(texts)
        asked = engine.num_inspections
        for _ in range(5):
            snapshot = await next_snapshot(texts)
        assert snapshot["inspection"] == as_json(INSPECTION)
        assert snapshot["inspection_age_s"] >= 0
        assert engine.num_inspections <= asked + 1
        engine.is_free.set()


@pytest.mark.asyncio
async def test_more_viewers_than_the_limit_are_refused_until_another_leaves(
    watched: Watched, soon: Callable[..., Any]
):
    async with watched() as (client, feed), contextlib.AsyncExitStack() as stack:
        streams = [viewer(client) for _ in range(MAX_VIEWERS)]
        kept = [await stack.enter_async_context(stream) for stream in streams]
        for texts in kept:
            await anext(texts)
        refused = await client.get(EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
        assert refused.headers["retry-after"]
        await streams[0].__aexit__(None, None, None)
        await soon(lambda: feed.num_viewers < MAX_VIEWERS)
        async with viewer(client) as texts:
            await next_snapshot(texts)


@pytest.mark.asyncio
async def test_of_many_pages_that_open_at_once_no_more_than_the_limit_are_accepted(
    watched: Watched, soon: Callable[..., Any]
):
    async with watched() as (client, feed):
        asked = [client.build_request("GET", EVENTS) for _ in range(5 * MAX_VIEWERS)]
        answers = await asyncio.gather(*(client.send(each, stream=True) for each in asked))
        assert (
            sorted(answer.status_code for answer in answers)
            == [200] * MAX_VIEWERS + [503] * 4 * MAX_VIEWERS
        )
        assert feed.num_viewers == MAX_VIEWERS
        await asyncio.gather(*(answer.aclose() for answer in answers))
        await soon(lambda: feed.num_viewers == 0)


@pytest.mark.asyncio
async def test_a_viewer_that_does_not_read_is_dropped_and_delays_no_other(
    watched: Watched, soon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trencadis.server.routes.dashboard.SLOW_S", 0.2)
    async with watched() as (client, feed):
        with monkeypatch.context() as patch:  # more than the buffers of a connection hold
            patch.setattr(feed, "_columns", lambda: {"filler": "x" * 20_000_000})
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.transport.pause_reading()
            writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            await soon(lambda: feed.num_viewers == 1)
        async with viewer(client) as texts:
            for _ in range(3):
                await next_snapshot(texts)
            await soon(lambda: feed.num_viewers == 1)
            await next_snapshot(texts)
        writer.transport.abort()


@pytest.mark.asyncio
async def test_the_stream_ends_when_the_server_stops(engine: InspectedStandIn, served: Any):
    app = create_app(engine)
    async with served(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with viewer(client) as texts:
            assert parsed(await anext(texts))[0] == "history"
            end_streams(app)
            names = [parsed(text)[0] async for text in texts]
        assert names[-1] == "end"
        refused = await client.get(EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")


@pytest.mark.asyncio
async def test_a_stream_ends_by_itself_after_some_minutes(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(feed_module, "MAX_EVENTS", 3)
    async with watched() as (client, _), viewer(client) as texts:
        names = [parsed(text)[0] async for text in texts]
    assert names == ["history", "snapshot", "snapshot", "snapshot"]


@pytest.mark.asyncio
async def test_an_error_of_the_feed_ends_the_stream_and_the_next_one_works(
    engine: InspectedStandIn, watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    async def broken() -> EngineInspection:
        raise ZeroDivisionError

    async with watched() as (client, _):
        monkeypatch.setattr(engine, "inspect", broken)
        async with viewer(client) as texts:
            names = [parsed(text)[0] async for text in texts]
        assert names[-1] == "end"
        monkeypatch.undo()
        async with viewer(client) as texts:
            assert (await next_snapshot(texts))["state"] == "serving"


@pytest.mark.asyncio
async def test_an_inspection_that_is_cancelled_stops_no_snapshot(
    engine: InspectedStandIn, watched: Watched
):
    async with watched() as (client, feed), viewer(client) as texts:
        engine.is_free.clear()
        await next_snapshot(texts)
        for _ in range(3):
            if feed._asked is not None:
                feed._asked.cancel()
            await asyncio.wait_for(next_snapshot(texts), 60)
        engine.is_free.set()


@pytest.mark.asyncio
async def test_a_cancelled_feed_ends_the_streams_and_the_next_one_works(watched: Watched):
    async with watched() as (client, feed):
        async with viewer(client) as texts:
            await next_snapshot(texts)
            feed._task.cancel()
            names = [parsed(text)[0] async for text in texts]
        assert names[-1] == "end"
        async with viewer(client) as texts:
            assert (await next_snapshot(texts))["state"] == "serving"


# Who may see it.


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "login", "without", "client_key", "admin_key"),
    [
        ({}, "none", 200, 200, 200),
        ({"api_keys": ["user"]}, "none", 200, 200, 200),
        ({"admin_keys": ["boss"]}, "bearer", 401, 401, 200),
        ({"admin_keys": ["boss"], "api_keys": ["user"]}, "bearer", 401, 401, 200),
    ],
)
async def test_events_need_an_admin_key_if_there_is_one_and_the_page_none(
    watched: Watched,
    settings: dict[str, Any],
    login: str,
    without: int,
    client_key: int,
    admin_key: int,
):
    async with watched(**settings) as (client, _):
        page = await client.get("/dashboard")
        assert page.status_code == 200
        assert f'data-login="{login}"' in page.text
        headers = ({}, {"Authorization": "Bearer user"}, BOSS)
        for sent, status in zip(headers, (without, client_key, admin_key), strict=True):
            async with client.stream("GET", EVENTS, headers=sent) as response:
                assert response.status_code == status


@pytest.mark.asyncio
async def test_signed_calls_alone_see_it_where_admin_calls_are_signed(watched: Watched):
    settings = {"admin_keys": ["boss"], "admin_signature_window": 60.0}
    async with watched(**settings, allowed_hosts=["127.0.0.1"]) as (client, _):
        assert 'data-login="signature"' in (await client.get("/dashboard")).text
        refused = await client.get(EVENTS, headers=BOSS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_signature")
        sent = f"{time.time():.3f}"
        text = f"GET\n{client.base_url.netloc.decode()}\n{EVENTS}\n{sent}\n"
        signature = hmac.new(b"boss", text.encode(), hashlib.sha256).hexdigest()
        signed = {"X-Admin-Time": sent, "Authorization": f"Signature {signature}"}
        async with viewer(client, **signed) as texts:
            assert (await next_snapshot(texts))["state"] == "serving"


@pytest.mark.asyncio
async def test_with_an_admin_port_the_page_is_there_alone(engine: InspectedStandIn):
    async with connect(engine, admin_port=81) as client:
        for path in ("/dashboard", "/dashboard/page.js", "/dashboard/page.css"):
            assert (await client.get(f"http://server:80{path}")).status_code == 404
            assert (await client.get(f"http://server:81{path}")).status_code == 200
        assert (await client.get(f"http://server:80{EVENTS}")).status_code == 404


@pytest.mark.asyncio
async def test_a_monitor_may_ask_for_the_head_of_the_page(engine: InspectedStandIn):
    async with connect(engine) as client:
        response = await client.head("/dashboard")
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.asyncio
async def test_a_page_under_another_name_is_refused(engine: InspectedStandIn):
    async with connect(engine, allowed_hosts=["api.example.com"]) as client:
        for path in ("/dashboard", EVENTS):
            response = await client.get(path, headers={"Host": "evil.example"})
            assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://beyond-a-proxy.example"}, 200),
        ({"Origin": "http://HOST"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_web_pages_of_other_origins_hold_no_stream(
    watched: Watched, headers: dict[str, str], status: int
):
    async with watched() as (client, feed):
        host = client.base_url.netloc.decode()
        sent = {name: value.replace("HOST", host) for name, value in headers.items()}
        async with client.stream("GET", EVENTS, headers=sent) as response:
            assert response.status_code == status
            assert status == 200 or feed.num_viewers == 0


@pytest.mark.asyncio
async def test_nothing_is_loaded_from_another_host(engine: InspectedStandIn):
    async with connect(engine) as client:
        for path in ("/dashboard", "/dashboard/page.css", "/dashboard/page.js"):
            response = await client.get(path)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "*" not in policy
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in response.headers
            others = re.findall(r"(?:https?:)?//[a-z][\w.-]*\.\w+[^\"'\s]*", response.text)
            assert set(others) <= {"http://www.w3.org/2000/svg"}, path


def test_the_page_has_no_inline_script_or_style_and_keeps_no_key():
    sources = {
        name: (files("trencadis.server.dashboard") / name).read_text()
        for name in ("page.html", "page.js")
    }
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", sources["page.html"])
    for storage in ("localStorage", "sessionStorage", "document.cookie", "indexedDB", "innerHTML"):
        assert storage not in sources["page.js"]


# Percentiles.


@given(
    values=st.lists(st.floats(0, 20), min_size=1, max_size=60),
    share=st.floats(0.01, 0.99),
)
def test_a_quantile_is_in_the_bucket_of_the_value_that_has_this_rank(
    values: list[float], share: float
):
    bounds = [0.1, 0.5, 1.0, 5.0, 10.0]
    counts = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    counts[math.inf] = float(len(values))
    found = quantile(share, counts)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    above = [bound for bound in bounds if bound >= exact]
    below = [bound for bound in bounds if bound < exact]
    assert (below[-1] if below else 0) <= found + 1e-9
    assert found <= (above[0] if above else bounds[-1]) + 1e-9


def test_there_is_no_quantile_without_observations():
    assert quantile(0.5, {1.0: 0.0, math.inf: 0.0}) is None
    assert quantile(0.5, {}) is None
