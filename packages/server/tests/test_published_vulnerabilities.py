"""Attacks that were published for other servers and libraries of this field, as real requests.

Each test is named after what the attacker would get; its docstring has the CVE.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq
from server_process import save_tiny_model

from trencadis.engine import LLM, AsyncEngine, EngineConfig, ModelError
from trencadis.engine.ipc.channel import CoreChannel, FrontChannel, Undecodable
from trencadis.engine.models.gguf import convert_gguf
from trencadis.server import ServerSettings, create_app

LIMIT_SECONDS = 300


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
            hang_timeout=3600,  # nobody reads the core's messages between two requests
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
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    served = Served(str(tiny_model))
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


def assert_served(served: Served) -> None:
    """Another client is served, and sees nothing of the attack."""
    answer = served.client()("POST", "/v1/completions", json={"prompt": "hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_code_in_a_message_to_the_core(tmp_path: Path) -> None:
    """CVE-2025-32444, CVE-2026-3059: sockets whose messages are unpickled."""
    to_core, from_core = (f"ipc://{tmp_path / name}" for name in ("to", "from"))
    attack = pickle.dumps(Payload(tmp_path / "mark"))
    context = zmq.Context()
    try:
        socket = context.socket(zmq.PUSH)
        socket.bind(to_core)
        core = CoreChannel(to_core, from_core)
        socket.send(attack)
        (message,) = core.receive(60)
        assert isinstance(message, Undecodable)
        core.close()
    finally:
        context.destroy(linger=0)
    assert not (tmp_path / "mark").exists()
    pickle.loads(attack)  # noqa: S301  (the attack is one)
    assert (tmp_path / "mark").exists()


def test_the_sockets_of_the_core_from_another_machine_or_user(served: Served) -> None:
    """CVE-2025-32444, CVE-2026-3059: the sockets were bound to all addresses."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # of an earlier test
            assert not [each for each in child.net_connections() if each.status == "LISTEN"]

    async def mode() -> int:
        channel = FrontChannel()
        directory = Path(channel.to_core.removeprefix("ipc://")).parent
        try:
            return stat.S_IMODE(directory.stat().st_mode)
        finally:
            channel.close()

    assert served.run(mode()) == 0o700


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/completions", {"prompt": "a", "n": 10**6}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 10**6}, "best_of"),
        ("/v1/completions", {"prompt": ["a"] * 1000, "n": 100}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 10**6}, "n"),
    ],
)
def test_memory_by_a_number_of_answers(
    served: Served, path: str, fields: dict[str, Any], name: str
) -> None:
    """CVE-2026-34756: ``n`` had no limit."""
    assert error_of(served.client()("POST", path, json=fields))["param"] == name
    assert_served(served)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "something"}},
        {"guided_json": '{"type": '},
        {"guided_json": {"properties": {"a": {"pattern": "("}}}},
        {"guided_json": {"$ref": "#/definitions/missing"}},
        {"guided_regex": "("},
        {"guided_regex": "(?:a{5000}){5000}"},
        {"guided_regex": "a?" * 20_000},
        {"guided_grammar": "start: ("},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "["}},
            }
        },
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_the_end_of_the_core_by_a_schema_or_a_regex(served: Served, fields: dict[str, Any]) -> None:
    """CVE-2025-48942, CVE-2025-48943, CVE-2025-48944: the compiler of grammars ended the server."""
    pytest.importorskip("llguidance")
    body = {"prompt": "a", "max_tokens": 4, **fields}
    error = error_of(served.client()("POST", "/v1/completions", json=body))
    assert error["param"].split(".")[0] == next(iter(fields))
    assert_served(served)


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_of_a_checkpoint(tiny_model: Path, tmp_path: Path, model_type: str) -> None:
    """CVE-2025-66448, CVE-2026-22807: ``auto_map`` was followed without trust_remote_code."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    mark = tmp_path / "mark"
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    for name, changes in (
        ("config.json", {"auto_map": classes, "model_type": model_type}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}),
    ):
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    settings = {"device": "cpu", "num_blocks": 20, "max_num_seqs": 1, "warmup": "none"}
    if model_type == "llama":
        LLM(model, block_size=8, max_model_len=64, **settings)
    else:
        with pytest.raises(ModelError):
            LLM(model, block_size=8, max_model_len=64, **settings)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("path", "host"),
    [
        *(("/v1/models", host) for host in ("x/health?", "x/health#", "a@b/", "", "/health", "\\")),
        *((path, "server") for path in ("//v1/models", "/v1//models", "/health/../v1/models")),
        *(
            (path, "server")
            for path in ("/v1%2fmodels", "/V1/models", "/v1/models%00", "/v1;/models")
        ),
        *(("/v1/admin/state", host) for host in ("x/health?", "127.0.0.1/../health")),
    ],
)
def test_the_api_without_a_key(served: Served, path: str, host: str) -> None:
    """CVE-2026-48746: the path that was checked was made from the Host header."""
    send = served.client(api_keys=["secret"], admin_keys=["boss"])
    response = send("GET", path, headers={"Host": host})
    assert response.status_code in (401, 404), response.text
    assert response.status_code == 401 or "data" not in response.text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "AAAA"}]}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": "x", "logit_bias": {"a": []}},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [None]}},
        {"messages": [{"role": "user", "content": "a"}], "stop": {"a": 1}},
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_addresses_of_memory_in_an_error(served: Served, body: dict[str, Any]) -> None:
    """CVE-2026-22778: the error for a wrong image held the address of an object."""
    response = served.client()("POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert not re.search(r"0x[0-9a-f]{6,}", response.text)


@pytest.mark.asyncio
async def test_addresses_of_memory_in_an_internal_error(client: Any, engine: Any) -> None:
    """CVE-2026-22778: what an unexpected exception says is for the log alone."""
    engine.fails_with = RuntimeError(f"cannot identify {object()!r}")
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert "0x" not in response.text


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
TENSOR = text("token_embd.weight") + struct.pack("<I", 2)
HOSTILE_GGUF = {
    "counts": struct.pack("<QQ", 2**60, 2**60),
    "name": struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**62) + b"a",
    "array": struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**61),
    "tensor past the end": struct.pack("<QQ", 1, 1)
    + ARCHITECTURE
    + TENSOR
    + struct.pack("<QQIQ", 2**20, 2**20, 0, 2**40),
    "size that overflows": struct.pack("<QQ", 1, 1)
    + ARCHITECTURE
    + TENSOR
    + struct.pack("<QQIQ", 2**40, 2**40, 0, 0),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_memory_behind_the_end_of_a_gguf_file(tmp_path: Path, name: str) -> None:
    """CVE-2026-7482: sizes in the file were believed."""
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + HOSTILE_GGUF[name])
    began = time.monotonic()
    with pytest.raises(ModelError, match="cannot be read as a GGUF model"):
        convert_gguf(file, cache=tmp_path / "cache")
    assert time.monotonic() - began < LIMIT_SECONDS
    assert list((tmp_path / "cache").iterdir()) == []


ESCAPES = (
    "{{ cycler.__init__.__globals__.os.mkdir(mark) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir(mark) }}",
    "{{ lipsum.__globals__['os'].mkdir(mark) }}",
    "{{ (''|attr('__class__')).__base__.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{% set f = '{0.__class__.__mro__}'.format %}{{ [messages] | map('attr', '__class__') | list }}"
    "{{ f(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.mkdir(mark) }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_code_in_a_chat_template(served: Served, tmp_path: Path, template: str) -> None:
    """CVE-2026-5760: the template of a GGUF file was rendered outside of a sandbox."""
    mark = tmp_path / "mark"
    tokenizer = served.engine.tokenizer._tokenizer
    tokenizer.chat_template = template
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"mark": str(mark)},
    }
    try:
        error_of(served.client()("POST", "/v1/chat/completions", json=body))
    finally:
        tokenizer.chat_template = None
    assert not mark.exists()
    assert_served(served)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 7 * 7 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_a_chat_template_of_a_client(served: Served, fields: dict[str, Any]) -> None:
    """CVE-2025-61620: a client's template kept the server busy."""
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    error = error_of(served.client()("POST", "/v1/chat/completions", json=body))
    assert error["param"] == next(iter(fields))
