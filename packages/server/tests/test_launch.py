"""Start, listen, drain, stop: the life of a server around a stand-in engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from switching_engine import SwitchingStandIn

from trencadis.engine import EngineConfig, EngineDead, ModelError
from trencadis.server import LaunchError, ServerSettings, launch, serve
from trencadis.server.http.connections import (
    MAX_CONNECTIONS,
    PROBE_CONNECTIONS,
    default_connection_limit,
    quiet_accept_errors,
)
from trencadis.server.http.tls import LoggedHandshake

pytestmark = pytest.mark.asyncio

CONFIG = EngineConfig(model="stand-in")


@pytest.fixture
def starting(monkeypatch, engine):
    """The stand-in as what `AsyncEngine.start` gives, with a log of what happens to it."""

    class Starting:
        events: ClassVar[list[str]] = []
        may_end = asyncio.Event()
        error: Exception | None = None

        @classmethod
        async def start(cls, config, log=None):
            cls.events.append("start")
            if cls.error is not None:
                raise cls.error
            try:
                await cls.may_end.wait()
            except asyncio.CancelledError:
                cls.events.append("start cancelled")
                raise
            cls.events.append("started")
            return engine

    async def stop():
        Starting.events.append("stop")

    Starting.events = []
    Starting.may_end.set()
    engine.stop = stop
    monkeypatch.setattr(launch, "AsyncEngine", Starting)
    return Starting


class Run:
    """A running `serve`, and where it can be reached once it said so."""

    def __init__(self, **settings):
        self.said: list[str] = []
        self.task = asyncio.create_task(
            serve(CONFIG, ServerSettings(port=0, **settings), announce=self.said.append)
        )

    async def url(self):
        for _ in range(6000):
            if self.said or self.task.done():
                break
            await asyncio.sleep(0.01)
        return self.said[0].split(" at ")[1].split()[0]

    async def end(self, number=signal.SIGTERM):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(self.task, 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_and_the_engine(starting, number):
    run = Run()
    url = await run.url()
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
    await run.end(number)
    assert starting.events == ["start", "started", "stop"]
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(base_url=url) as client:
            await client.get("/health")


async def test_a_dashboard_that_is_watched_does_not_delay_the_end(starting):
    run = Run(shutdown_timeout=600)
    url = await run.url()
    assert f"Dashboard: {url}/dashboard" in run.said[0].splitlines()
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("GET", "/dashboard/events") as response,
    ):
        parts = response.aiter_text()
        await anext(parts)
        await run.end()  # waits less than the server does for running requests
        assert "event: end" in "".join([part async for part in parts])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_greeting_can_be_pasted_into_a_shell(starting, engine):
    engine.model_name = "it's"
    run = Run(host="127.0.0.1")
    await run.url()
    command = run.said[0].splitlines()[1].strip()
    process = await asyncio.create_subprocess_shell(
        f"{command} --silent --max-time 60", stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 60)
    await run.end()
    assert b"capital of France" in answer, answer


@pytest.mark.parametrize("engine", [SwitchingStandIn()])
async def test_the_greeting_names_the_other_models(starting, engine):
    run = Run()
    await run.url()
    await run.end()
    assert run.said[0].startswith("Serving a at ")
    assert run.said[0].endswith("\nOther models: b, c")


async def served_at(run, path):
    """The status of the server behind a Unix socket."""
    for _ in range(6000):
        if run.said or run.task.done():
            break
        await asyncio.sleep(0.01)
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return (await client.get("/health")).status_code


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_it_listens_on_a_unix_socket(starting, tmp_path):
    path = tmp_path / "it's.sock"
    run = Run(uds=str(path))
    assert await served_at(run, path) == 200
    assert f" at unix:{path} " in run.said[0]
    assert "http://localhost:" not in run.said[0] and "Dashboard" not in run.said[0]
    process = await asyncio.create_subprocess_shell(
        f"{run.said[0].splitlines()[1].strip()} --silent --max-time 60",
        stdout=asyncio.subprocess.PIPE,
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 60)
    await run.end()
    assert b"capital of France" in answer, answer
    assert not path.exists()


async def test_the_admin_api_has_a_port_beside_a_unix_socket(starting, tmp_path):
    path = tmp_path / "server.sock"
    run = Run(uds=str(path), admin_port=0, admin_keys=["secret"])
    assert await served_at(run, path) == 200
    port = re.search(r"Admin API on port (\d+)", run.said[0])[1]
    headers = {"Authorization": "Bearer secret"}
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as admin,
        httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client,
    ):
        for path, there in (("/v1/admin/state", admin), ("/v1/models", client)):
            for each in (admin, client):
                assert (await each.get(path)).status_code == (200 if each is there else 404)
    await run.end()


async def test_the_unix_socket_of_a_killed_server_is_replaced(starting, tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    run = Run(uds=str(path))
    assert await served_at(run, path) == 200
    with pytest.raises(LaunchError, match=r"server\.sock"):  # in use
        await Run(uds=str(path)).task
    assert await served_at(run, path) == 200
    await run.end()


async def test_what_is_no_unix_socket_is_not_replaced(starting, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("kept")
    too_long = tmp_path / ("a" * 200)
    for wrong in (path, too_long, tmp_path / "missing" / "server.sock", ""):
        with pytest.raises(LaunchError, match=f"{getattr(wrong, 'name', wrong)}.*--uds"):
            await Run(uds=str(wrong)).task
    assert path.read_text() == "kept"
    assert starting.events == []


async def test_the_end_of_a_server_leaves_the_unix_socket_of_another(starting, tmp_path):
    path = tmp_path / "server.sock"
    first = Run(uds=str(path))
    assert await served_at(first, path) == 200
    path.unlink()
    path.write_text("another's")
    await first.end()
    assert path.read_text() == "another's"


async def test_the_greeting_never_shows_a_key(starting):
    run = Run(api_keys=["hush"])
    await run.url()
    await run.end()
    assert "hush" not in run.said[0]
    assert "$VLLM_API_KEY" in run.said[0]


async def test_nobody_can_connect_before_the_engine_is_ready(starting, soon):
    starting.may_end.clear()
    said = []
    with socket.socket() as holder:  # bound, so that no other process gets the port meanwhile
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        task = asyncio.create_task(serve(CONFIG, ServerSettings(port=port), announce=said.append))
        await soon(lambda: starting.events == ["start"])
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass
        starting.may_end.set()
        await soon(lambda: said)
        with socket.create_connection(("127.0.0.1", port)):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 60)


async def test_a_signal_while_starting_cancels_the_start(starting, soon):
    starting.may_end.clear()
    run = Run()
    await soon(lambda: starting.events == ["start"])
    await run.end(signal.SIGINT)
    assert starting.events == ["start", "start cancelled"]
    assert not run.said


async def test_an_engine_that_cannot_start_is_its_callers_matter(starting):
    starting.error = ModelError("no model there")
    with pytest.raises(ModelError, match="no model there"):
        await Run().task


async def test_a_running_request_is_finished_first(starting, engine, soon):
    engine.delay = 0.02
    run = Run(shutdown_timeout=60)
    async with httpx.AsyncClient(base_url=await run.url(), timeout=60) as client:
        body = {"prompt": "x" * 40, "max_tokens": 40}
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await soon(lambda: engine.running)
        await run.end()
        assert (await request).json()["choices"][0]["text"] == "x" * 40


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_requests_that_are_left_when_the_server_stops_end_with_an_error(
    starting, engine, soon, signals
):
    engine.delay = 0.4  # seconds per token
    run = Run(shutdown_timeout=1 if signals == 1 else 600, admin_keys=["boss"])
    url = await run.url()
    body = {"prompt": "x" * 100, "max_tokens": 100}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body)
        stream = client.post("/v1/completions", json=body | {"stream": True})
        drain = client.post(
            "/v1/admin/drain", json={"wait_s": 60}, headers={"Authorization": "Bearer boss"}
        )
        message = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 100}
        message = client.post("/v1/messages", json=message | {"stream": True})
        requests = [asyncio.create_task(each) for each in (whole, stream, message)]
        reader, writer = await connection(url)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        await soon(lambda: len(engine.running) == 3)
        await asyncio.sleep(0.6)  # for the first token of each
        requests.append(asyncio.create_task(drain))

        async def is_draining():
            return (await client.get("/ready")).status_code == 503

        await soon(is_draining)
        for _ in range(signals - 1):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
        await run.end()
        whole, stream, message, drain = await asyncio.gather(*requests)
    half_sent = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert half_sent.startswith(b"HTTP/1.1 503")
    assert b"server_stopping" in half_sent
    for answer in (whole, drain):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_stopping"
        assert answer.headers["retry-after"] == "1"
    *_, error, done, end = stream.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert (done, end) == ("data: [DONE]", "")
    *_, error, end = message.text.split("\n\n")
    assert error.startswith("event: error\n")
    assert json.loads(error.partition("data: ")[2])["error"]["code"] == "server_stopping"
    assert end == ""
    assert not engine.running
    assert starting.events[-1] == "stop"


async def test_a_port_taken_while_the_model_loaded_is_explained(starting, soon):
    starting.may_end.clear()
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))
        port = rival.getsockname()[1]
        task = asyncio.create_task(serve(CONFIG, ServerSettings(port=port)))
        await soon(lambda: starting.events == ["start"])
        rival.listen()
        starting.may_end.set()
        with pytest.raises(LaunchError, match="listen"):
            await asyncio.wait_for(task, 60)
    assert starting.events[-1] == "stop"


async def connection(url):
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
async def test_a_client_that_sends_no_whole_headers_is_disconnected(starting, sent):
    run = Run(header_timeout=0.3)
    reader, writer = await connection(await run.url())

    async def drip():  # more bytes do not extend the time
        while True:
            writer.write(sent + b"x" if sent else b"")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    dripping.cancel()
    writer.close()
    await run.end()


async def test_a_second_request_of_a_connection_has_the_same_limit(starting):
    run = Run(header_timeout=0.3)
    reader, writer = await connection(await run.url())
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        await asyncio.sleep(0.4)  # the limit is of headers, not of the pause before them
        assert not reader.at_eof()
    writer.write(b"GET /health")
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await run.end()


async def test_silent_connections_keep_nobody_out(starting, caplog):
    run = Run(max_connections=2)
    url = await run.url()
    silent = [await connection(url) for _ in range(5)]
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
    assert await asyncio.wait_for(silent[0][0].read(), 60) == b"", "the oldest is closed"
    for _, writer in silent:
        writer.close()
    await run.end()
    assert caplog.text.count("connections are open") == 1


UNREAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
"""Headers without an API key, of a body that the server need not read."""


async def test_a_body_that_nobody_reads_has_a_time_limit(starting):
    run = Run(api_keys=["secret"], body_timeout=0.3)
    reader, writer = await connection(await run.url())
    writer.write(UNREAD)
    assert b"401" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)

    async def drip():  # more bytes do not extend the time
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 60)
    dripping.cancel()
    writer.close()
    await run.end()


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_a_client_that_reads_no_answers_is_disconnected(starting, path):
    run = Run(send_timeout=0.3)
    host, port = (await run.url()).removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()

        async def flood():
            while True:
                await loop.sock_sendall(client, request * 100)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), 60)
    await run.end()


async def test_a_client_that_reads_slowly_gets_its_whole_answer(starting, engine, monkeypatch):
    engine.model_name = "m" * 8_000_000  # of which the system buffers some
    run = Run(send_timeout=0.2)
    reader, writer = await connection(await run.url())
    writer.transport.set_write_buffer_limits(0)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    received = 0
    while part := await asyncio.wait_for(reader.read(400_000), 60):
        received += len(part)
        await asyncio.sleep(0.02)
    assert received > 8_000_000
    writer.close()
    await run.end()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:", UNREAD])
async def test_clients_that_do_nothing_keep_nobody_out(starting, sent):
    run = Run(max_connections=3, api_keys=["secret"])
    url = await run.url()
    idle = [await connection(url) for _ in range(6)]
    for _, writer in idle:
        writer.write(sent)
    await asyncio.sleep(0.1)
    key = {"Authorization": "Bearer secret"}
    for path in ("/health", "/v1/models"):
        async with httpx.AsyncClient(base_url=url, headers=key) as client:
            assert (await client.get(path)).status_code == 200
    for _, writer in idle:
        writer.close()
    await run.end()


async def test_requests_that_come_at_once_close_none_of_each_other(starting):
    run = Run(max_connections=4)
    url = await run.url()
    silent = [await connection(url) for _ in range(4)]
    host, port = url.removeprefix("http://").split(":")
    clients = [socket.create_connection((host, int(port))) for _ in range(16)]
    for client in clients:  # all of them are sent before the server accepts the first
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    for client in clients:
        reader, writer = await asyncio.open_connection(sock=client)
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
    for _, writer in silent:
        writer.close()
    await run.end()


async def test_connections_above_the_limit_are_for_probes_until_one_closes(starting, engine, soon):
    engine.delay = 300.0
    run = Run(max_connections=2)
    url = await run.url()
    busy = [await connection(url) for _ in range(2)]
    for _, writer in busy:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 15\r\n\r\n"
            b'{"prompt": "a"}'
        )
    await soon(lambda: len(engine.running) == 2)
    async with httpx.AsyncClient(base_url=url) as client:
        refused = await client.get("/v1/models")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert "too many connections" in refused.json()["error"]["message"]
        silent = [await connection(url) for _ in range(200)]
        for path in ("/health", "/ready", "/live", "/metrics"):
            probe = await client.get(path)
            assert probe.status_code == 200
            assert probe.headers["connection"] == "close"
        for _, writer in silent:
            writer.close()
        busy[0][1].close()
        await busy[0][1].wait_closed()
        for _ in range(3000):
            if (await client.get("/v1/models")).status_code == 200:
                break
            await asyncio.sleep(0.02)
        assert (await client.get("/v1/models")).status_code == 200
    assert len(engine.running) == 1
    busy[1][1].close()
    await run.end()


async def test_what_is_not_http_after_the_answer_leaves_no_traceback(starting, caplog):
    run = Run(api_keys=["secret"])
    reader, writer = await connection(await run.url())
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert b"401" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    writer.write(b"not a chunk\r\n")
    await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await run.end()
    assert [r.message for r in caplog.records if r.exc_info or r.levelname == "ERROR"] == []


async def test_an_output_that_cannot_be_written_does_not_end_the_server(
    starting, monkeypatch, caplog, soon
):
    with Path("/dev/full").open("w") as full:  # noqa: ASYNC230  a device
        monkeypatch.setattr("sys.stdout", full)
        task = asyncio.create_task(serve(CONFIG, ServerSettings(port=0)))
        await soon(lambda: "cannot be written" in caplog.text or task.done())
        url = re.search(r" at (http://\S+) ", caplog.text)[1]
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 60)


async def test_a_lack_of_descriptors_is_one_log_line_and_other_errors_stay_whole(caplog):
    loop, lines = asyncio.get_running_loop(), []
    handle = quiet_accept_errors(lines.append)
    for _ in range(100):
        handle(loop, {"message": "socket.accept() out of system resource", "exception": OSError()})
    assert len(lines) == 1
    handle(loop, {"message": "another error"})
    assert "another error" in caplog.text


async def test_the_default_number_of_connections_leaves_descriptors_for_the_server():
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  with that of the list
    limit = default_connection_limit(1000)
    assert limit == 1000 - num_open - 48 - PROBE_CONNECTIONS
    with Path("/dev/null").open(), Path("/dev/null").open():  # noqa: ASYNC230  a device
        assert default_connection_limit(1000) == limit - 2
    assert default_connection_limit(10) == 1
    assert default_connection_limit(1 << 30) == MAX_CONNECTIONS
    assert default_connection_limit(resource.RLIM_INFINITY) == MAX_CONNECTIONS


async def test_the_admin_api_has_a_port_of_its_own(starting):
    run = Run(admin_keys=["boss"], admin_port=0)
    url = await run.url()
    port = run.said[0].rpartition("Admin API on port ")[2]
    key = {"Authorization": "Bearer boss"}
    async with httpx.AsyncClient(headers=key) as client:
        codes = {
            (where, path): (await client.get(f"{base}{path}")).status_code
            for where, base in (("here", url), ("there", f"http://127.0.0.1:{port}"))
            for path in ("/v1/models", "/v1/admin/state", "/health")
        }
    await run.end()
    assert codes == {
        ("here", "/v1/models"): 200,
        ("here", "/v1/admin/state"): 404,
        ("here", "/health"): 200,
        ("there", "/v1/models"): 404,
        ("there", "/v1/admin/state"): 200,
        ("there", "/health"): 200,
    }


@pytest.fixture
def certificate(tmp_path):
    """A certificate of this server, and the authority that signed it, as files."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "server.pem"
    )
    return tmp_path / "server.pem", tmp_path / "authority.pem"


async def tcp_connection(url):
    return await connection(url.replace("https", "http"))


async def test_tls_handshakes_have_a_time_limit(starting, certificate):
    run = Run(ssl_certfile=str(certificate[0]), header_timeout=0.3)
    reader, writer = await tcp_connection(await run.url())
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    await run.end()


async def test_tls_handshakes_count_as_connections_and_keep_nobody_out(starting, certificate, soon):
    # So long a time that a handshake is ended by the limit of connections alone.
    run = Run(ssl_certfile=str(certificate[0]), max_connections=3, header_timeout=600)
    url = await run.url()
    silent = [await tcp_connection(url) for _ in range(8)]
    context = ssl.create_default_context(cafile=certificate[1])
    async with httpx.AsyncClient(base_url=url, verify=context) as client:
        assert (await client.get("/health")).status_code == 200
        posted = await client.post("/v1/completions", json={"prompt": "a" * 200})
        assert posted.status_code == 200
    for reader, writer in silent[:5]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
    await run.end()


async def test_a_right_key_without_a_client_certificate_is_refused_and_logged(
    starting, engine, tmp_path, caplog
):
    trustme = pytest.importorskip("trustme")
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "server.pem"
    )
    for name, signer in (("operator", authority), ("stranger", stranger)):
        certificate = signer.issue_cert(f"{name}@example.org").private_key_and_cert_chain_pem
        certificate.write_to_path(tmp_path / f"{name}.pem")
    run = Run(
        admin_keys=["boss"],
        ssl_certfile=str(tmp_path / "server.pem"),
        ssl_ca_certs=str(tmp_path / "authority.pem"),
        ssl_cert_reqs=2,
    )
    url = await run.url()

    async def call(certificate):
        context = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        if certificate is not None:
            context.load_cert_chain(tmp_path / certificate)
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            headers = {"Authorization": "Bearer boss"}
            return await client.post("/v1/admin/batch", json={"max_num_seqs": 3}, headers=headers)

    caplog.set_level("INFO")
    for certificate, reason in ((None, "did not return a certificate"), ("stranger.pem", "verify")):
        LoggedHandshake.log_unlogged()  # as if a second had passed
        with pytest.raises(httpx.TransportError):
            await call(certificate)
        lines = [record.message for record in caplog.records if "TLS client" in record.message]
        assert len(lines) == 1
        assert re.search(reason, lines[0])
        caplog.clear()
    assert engine.orders == []
    assert (await call("operator.pem")).status_code == 200
    assert len(engine.orders) == 1
    assert not [record for record in caplog.records if "TLS client" in record.message]
    LoggedHandshake.log_unlogged()
    for _ in range(8):
        with pytest.raises(httpx.TransportError):
            await call(None)
    await run.end()
    lines = [record.message for record in caplog.records if "TLS client" in record.message]
    more = [int(line.split()[0]) for line in lines if "more TLS clients are rejected" in line]
    assert len(lines) - len(more) + sum(more) == 8, "each is in a line, or counted"


async def test_an_engine_that_fails_for_good_ends_the_server_with_its_reason(starting, engine):
    run = Run()
    await run.url()
    engine.failed.set()
    with pytest.raises(EngineDead, match="exit code 9"):
        await asyncio.wait_for(run.task, 60)
    assert starting.events == ["start", "started", "stop"]
