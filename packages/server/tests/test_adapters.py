"""Adapters over HTTP: named as models, loaded and unloaded under an admin key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from stand_in_engine import StandInEngine

from trencadis.engine import AdapterInfo, RequestFailed
from trencadis.server import ServerSettings, create_app

pytestmark = pytest.mark.asyncio

BOSS = {"Authorization": "Bearer boss"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two adapters in a directory that is allowed, and one beside it."""
    for name in ("allowed/sql", "allowed/deep/er", "other/sql"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest_asyncio.fixture
async def api(engine: StandInEngine, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServerSettings(
        admin_keys=["boss"],
        api_keys=["client"],
        lora_directories=[str(folder / "allowed")],
        admin_rate_limit=1e6,
    )
    transport = httpx.ASGITransport(create_app(engine, settings))
    headers = {"Authorization": "Bearer client"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=headers
    ) as client:
        yield client


async def load(api: httpx.AsyncClient, name: str, path: object, **kwargs: object):
    order = {"lora_name": name, "lora_path": str(path)}
    return await api.post(LOAD, json=order, **{"headers": BOSS, **kwargs})


async def test_an_adapter_is_a_model_until_it_is_unloaded(api, engine, folder) -> None:
    loaded = await load(api, "sql", folder / "allowed/sql")
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
    base, adapter = (await api.get("/v1/models")).json()["data"]
    assert base["id"] == "stand-in"
    assert base["parent"] is None
    assert adapter["id"] == "sql"
    assert adapter["parent"] == "stand-in"
    assert adapter["root"] == str(folder / "allowed/sql")
    assert (await api.get("/v1/models/sql")).json() == adapter
    for model in ("sql", "stand-in", None):
        body = {"prompt": "hello", "max_tokens": 3, **({"model": model} if model else {})}
        answer = (await api.post("/v1/completions", json=body)).json()
        assert answer["model"] == (model or "stand-in")
    assert engine.loras == ["sql", None, None]
    assert engine.allowed == (str(folder / "allowed"),)
    unloaded = await api.post(UNLOAD, json={"lora_name": "sql"}, headers=BOSS)
    assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
    assert len((await api.get("/v1/models")).json()["data"]) == 1
    refused = await api.post("/v1/completions", json={"prompt": "hello", "model": "sql"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}),
    ],
)
async def test_every_api_serves_it(api, engine, path: str, body, stream: bool) -> None:
    engine.adapters = (AdapterInfo("sql", "/adapters/sql", 4, 100),)
    answer = await api.post(path, json={"model": "sql", "stream": stream, **body})
    assert answer.status_code == 200
    assert '"model":"sql"' in re.sub(r'"model":\s+', '"model":', answer.text)
    assert engine.loras == ["sql"]


async def test_its_prompts_are_counted(api, engine) -> None:
    engine.adapters = (AdapterInfo("sql", "/adapters/sql", 4, 100),)
    counted = [
        (await api.post("/tokenize", json={"model": model, "prompt": "hello"})).json()["count"]
        for model in ("sql", "stand-in")
    ]
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_they_need_an_admin_key(api, engine, folder, path: str) -> None:
    order = {"lora_name": "sql"} | ({"lora_path": "x"} if path == LOAD else {})
    for headers in ({}, {"Authorization": "Bearer client"}, {"Authorization": "Bearer x"}):
        answer = await api.post(path, json=order, headers=headers)
        assert answer.status_code == 401
    without_keys = httpx.ASGITransport(create_app(engine, ServerSettings()))
    async with httpx.AsyncClient(transport=without_keys, base_url="http://test") as client:
        answer = await client.post(path, json=order)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "admin_api_disabled"
    assert engine.adapters == ()


async def test_directories_that_are_not_allowed(api, engine, folder) -> None:
    (folder / "allowed/link").symlink_to(folder / "other/sql")
    (folder / "allowed/loop").symlink_to(folder / "allowed/loop")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / f"allowed/with-{name}").mkdir()
        (folder / f"allowed/with-{name}" / name).symlink_to(
            folder / "other/sql/adapter_config.json"
        )
    for path in (
        folder / "other/sql",
        folder / "allowed/../other/sql",
        folder / "allowed/link",
        folder / "allowed/loop/x",
        folder / "allowed/with-adapter_config.json",
        folder / "allowed/with-adapter_model.safetensors",
        f"{folder}/allowed-too",
        "/",
        "/etc",
        "sql",
        "~/sql",
        "",
        "\0",
        "x" * 10_000,
    ):
        answer = await load(api, "sql", path)
        assert answer.status_code == 403, path
        assert answer.json()["error"]["code"] == "directory_not_allowed"
        assert str(folder) not in answer.text
    assert engine.adapters == ()
    (folder / "allowed/inner").symlink_to(folder / "allowed/deep/er")
    assert (await load(api, "sql", folder / "allowed/inner")).status_code == 200
    (loaded,) = engine.adapters
    assert loaded.path == str(folder / "allowed/deep/er"), "the link cannot be changed afterwards"


async def test_without_directories_none_are_loaded(engine, folder) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerSettings(admin_keys=["boss"])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await load(client, "sql", folder / "allowed/sql")
    assert answer.status_code == 403


async def test_what_cannot_be_loaded_is_named(api, engine, folder) -> None:
    path = folder / "allowed/sql"
    assert (await load(api, "stand-in", path)).status_code == 400
    assert (await load(api, "sql", path)).status_code == 200
    again = await load(api, "sql", path)
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "lora_name"
    for name in ("nowhere", "sql/adapter_config.json", "x" * 5000):
        missing = await load(api, "other", folder / "allowed" / name)
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "adapter_not_found"
    (folder / "allowed/empty").mkdir()
    empty = await load(api, "other", folder / "allowed/empty")
    assert empty.status_code == 400
    assert "cannot be read" in empty.json()["error"]["message"]
    unknown = await api.post(UNLOAD, json={"lora_name": "other"}, headers=BOSS)
    assert unknown.status_code == 404
    for body in ({}, {"lora_name": 3, "lora_path": "x"}, {"lora_name": "a", "lora_path": None}, []):
        assert (await api.post(LOAD, json=body, headers=BOSS)).status_code in (400, 422)
    assert [adapter.name for adapter in engine.adapters] == ["sql"]


async def test_an_error_of_the_engine_is_not_one_of_the_client(
    api, engine, folder, monkeypatch
) -> None:
    async def fail(*_: object) -> None:
        raise RequestFailed("OSError: no threads")

    monkeypatch.setattr(engine, "load_adapter", fail)
    answer = await load(api, "sql", folder / "allowed/sql")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


async def test_an_engine_without_adapters_says_so(engine, folder, monkeypatch) -> None:
    monkeypatch.delattr(StandInEngine, "load_adapter")
    settings = ServerSettings(admin_keys=["boss"], lora_directories=[str(folder)])
    transport = httpx.ASGITransport(create_app(engine, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await load(client, "sql", folder / "allowed/sql")
        assert answer.status_code == 400
        assert "no adapters" in answer.json()["error"]["message"]
        assert len((await client.get("/v1/models")).json()["data"]) == 1


async def test_metrics_name_them(api) -> None:
    text = (await api.get("/metrics")).text
    (labels,) = re.findall(r"^vllm:lora_requests_info{(.*)} 1.0$", text, re.MULTILINE)
    assert 'max_lora="4"' in labels
    assert 'running_lora_adapters="a,b"' in labels
    assert 'waiting_lora_adapters="c"' in labels
