"""thermal-sidecar and its client, over real gRPC on the loopback interface."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

import attrs
import grpc

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import (
    Health,
    ReaderConfig,
    Reading,
    SensorError,
    TelemetryError,
    TemperatureReader,
    TemperatureSource,
    open_source,
)
from trencadis.scheduler.telemetry.sidecar import cli, wire
from trencadis.scheduler.telemetry.sidecar.backoff import Backoff
from trencadis.scheduler.telemetry.sidecar.client import SidecarSource
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.telemetry.sidecar.generated import temperature_pb2
from trencadis.scheduler.telemetry.sidecar.server import SidecarServer
from trencadis.scheduler.telemetry.sidecar.tls import ClientTls, ServerTls

QUICK = Backoff(initial_s=0.02, max_s=0.1)


class ScriptedSource(TemperatureSource):
    def __init__(self, *readings: Reading) -> None:
        self.says: list[Reading] | Exception = list(readings)
        self.closed = threading.Event()

    @property
    def name(self) -> str:
        return "scripted"

    def read(self) -> list[Reading]:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def close(self) -> None:
        self.closed.set()


def eventually(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait until ``condition`` is true and return its value. A `SensorError` counts as false."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            if value := condition():
                return value
        except SensorError:
            pass
        time.sleep(0.005)
    raise AssertionError("the condition did not become true in time")


def fault_of(client: TemperatureSource) -> str:
    try:
        client.read()
    except SensorError as error:
        return str(error)
    return ""


def sidecar_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thermal-")]


@contextmanager
def sidecar(source: TemperatureSource, **settings: Any) -> Iterator[int]:
    settings = {"listen": "127.0.0.1:0", "period_s": 0.01, **settings}
    server = SidecarServer(source, SidecarConfig(**settings))
    port = server.start()
    try:
        yield port
    finally:
        assert server.stop()


@contextmanager
def client(port: int, **options: Any) -> Iterator[SidecarSource]:
    source = SidecarSource(f"127.0.0.1:{port}", backoff=QUICK, rng=random.Random(5), **options)
    try:
        yield source
    finally:
        source.close()


def test_readings_arrive_unchanged_and_with_their_age() -> None:
    sent = [Reading(0, 61.5, 350.25, age_s=2.0), Reading(7, float("nan"), None)]
    with sidecar(ScriptedSource(*sent)) as port, client(port) as source:
        first, second = eventually(source.read)
    assert (first.device, first.temperature_c, first.power_w) == (0, 61.5, 350.25)
    assert first.age_s >= 2.0
    assert (second.device, second.power_w) == (7, None)
    assert second.temperature_c != second.temperature_c
    assert eventually(lambda: sidecar_threads() == [])


def test_a_fault_of_the_sidecars_source_reaches_the_client() -> None:
    sensor = ScriptedSource(Reading(0, 60.0))
    with sidecar(sensor) as port, client(port) as source:
        eventually(source.read)
        sensor.says = SensorError("GPU is lost")
        assert eventually(lambda: "source scripted: GPU is lost" in fault_of(source))
        sensor.says = ZeroDivisionError("bug")
        assert eventually(lambda: "ZeroDivisionError: bug" in fault_of(source))
        sensor.says = [Reading(0, 62.0)]
        assert eventually(source.read)[0].temperature_c == 62.0


def test_a_client_started_before_the_sidecar_connects_later() -> None:
    with held_port() as port, client(port) as source:
        assert "unavailable" in eventually(
            lambda: (fault := fault_of(source)) and "attempt" in fault and fault
        )
        with sidecar(ScriptedSource(Reading(0, 60.0)), listen=f"127.0.0.1:{port}"):
            assert eventually(source.read)[0].temperature_c == 60.0


def test_a_sidecar_that_stays_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with held_port() as port, client(port) as source:
        assert eventually(lambda: re.search(r"attempt ([4-9]|\d\d)", fault_of(source) or ""))
        assert caplog.text.count(f"Sidecar 127.0.0.1:{port} is lost: ") == 1


def test_a_policy_sees_a_sidecar_die_and_come_back() -> None:
    config = ReaderConfig(period_s=0.01, stale_after_s=0.1, failed_after_s=0.3)
    with (
        held_port() as port,
        client(port) as source,
        TemperatureReader(source, config) as reader,
    ):
        with sidecar(ScriptedSource(Reading(0, 60.0)), listen=f"127.0.0.1:{port}"):
            assert eventually(lambda: reader.state().health is Health.FRESH)
        assert eventually(lambda: reader.state().health is Health.FAILED)
        assert reader.state().hottest_c == 95.0
        with sidecar(ScriptedSource(Reading(0, 64.0)), listen=f"127.0.0.1:{port}"):
            # Both of one state: the next one may be stale where this thread had to wait.
            assert eventually(
                lambda: (state := reader.state()).health is Health.FRESH and state.hottest_c == 64.0
            )


def test_a_client_above_the_limit_is_refused_until_another_disconnects() -> None:
    with sidecar(ScriptedSource(Reading(0, 60.0)), max_streams=1) as port:
        with client(port) as served:
            eventually(served.read)
            with client(port) as refused:
                assert eventually(lambda: "resource_exhausted" in fault_of(refused))
            assert served.read()
        with client(port) as later:
            assert eventually(later.read)


def test_a_client_that_disconnects_frees_its_stream_at_once() -> None:
    with sidecar(ScriptedSource(Reading(0, 60.0)), max_streams=1, period_s=3600.0) as port:
        for _ in range(3):
            with client(port) as source:
                assert eventually(source.read)


def test_the_age_of_a_round_grows() -> None:
    waiting = wire.Round((Reading(0, 60.0, age_s=1.0),), "", "nvml", taken_at_s=10.0)
    assert waiting.aged(14.0) == [Reading(0, 60.0, age_s=5.0)]
    received = wire.from_message(wire.to_message(waiting, 14.0), now_s=100.0)
    assert received.aged(102.0) == [Reading(0, 60.0, age_s=7.0)]


def test_a_stopped_server_leaves_no_stream_thread_or_source_open() -> None:
    sensor = ScriptedSource(Reading(0, 60.0))
    with sidecar(sensor) as port, client(port) as source:
        eventually(source.read)
    assert sensor.closed.wait(120.0)
    assert eventually(lambda: sidecar_threads() == [])


def test_a_slow_stream_gets_the_newest_round() -> None:
    sensor = ScriptedSource(Reading(0, 60.0))
    with sidecar(sensor) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = channel.unary_stream(
            wire.WATCH_PATH,
            request_serializer=lambda _: b"",
            response_deserializer=temperature_pb2.Round.FromString,
        )
        stream = watch(None, timeout=120.0)
        assert next(stream).readings[0].temperature_c == 60.0
        sensor.says = [Reading(0, 70.0)]
        assert eventually(lambda: next(stream).readings[0].temperature_c == 70.0)
        stream.cancel()


def test_two_sidecars_cannot_use_the_same_port() -> None:
    with sidecar(ScriptedSource()) as port:
        source = ScriptedSource()
        second = SidecarServer(source, SidecarConfig(listen=f"127.0.0.1:{port}"))
        with pytest.raises(TelemetryError, match="cannot listen on"):
            second.start()
        assert source.closed.is_set()


def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'thermal.sock'}"
    with sidecar(ScriptedSource(Reading(0, 60.0)), listen=address):
        source = open_source(f"sidecar:{address}")
        assert eventually(source.read)[0].temperature_c == 60.0
        source.close()


def test_backoff_grows_to_its_bound() -> None:
    plain = Backoff(initial_s=1.0, factor=2.0, max_s=10.0, jitter=0.0)
    rng = random.Random(0)
    assert [plain.delay_s(n, rng) for n in (1, 2, 3, 4, 5, 10**9)] == [1, 2, 4, 8, 10, 10]
    delays = [attrs.evolve(Backoff(), jitter=0.0).delay_s(n, rng) for n in (1, 2, 99)]
    assert delays == [0.5, 0.8, 15.0]
    jittered = [Backoff(max_s=10.0).delay_s(n, rng) for n in range(1, 200)]
    assert max(jittered) <= 12.0
    assert min(jittered) >= 0.4
    assert len(set(jittered[20:])) > 100


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SidecarConfig(listen="0.0.0.0:50061"), "no TLS"),
        (
            lambda: SidecarConfig(period_s=0),
            "period_s must be a finite number from 0.01 to 3600, got 0",
        ),
        (lambda: SidecarConfig(max_streams=0), "max_streams must be .* from 1 to 1024, got 0"),
        (lambda: SidecarSource("node7"), "'node7' has no port"),
        (lambda: open_source("sidecar:"), "has no port"),
        (lambda: Backoff(initial_s=0), "initial_s must be .* above 0, got 0"),
        (lambda: Backoff(jitter=1.0), "jitter must be .*, got 1.0"),
    ],
)
def test_an_invalid_setting_is_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


@contextmanager
def held_port() -> Iterator[int]:
    """A port where a sidecar can listen, and that no other process gets meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


class Process:
    """The sidecar in its own process, with a recording as source."""

    def __init__(self, recording: Path, port: int) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trencadis.scheduler.telemetry.sidecar"),
                *("--source", f"recorded:{recording}"),
                *("--listen", f"127.0.0.1:{port}", "--period-s", "0.02"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=120)
        return self.process.returncode, log


def recording(tmp_path: Path, celsius: float) -> Path:
    path = tmp_path / f"{celsius}.csv"
    path.write_text(f"time_s,device,temperature_c\n0,0,{celsius}\n86400,0,{celsius}\n")
    return path


def test_the_client_reconnects_to_a_restarted_sidecar(tmp_path: Path) -> None:
    with held_port() as port, client(port) as source:
        first = Process(recording(tmp_path, 61.0), port)
        assert eventually(source.read)[0].temperature_c == 61.0
        first.end(signal.SIGKILL)
        assert eventually(lambda: fault_of(source))
        second = Process(recording(tmp_path, 67.0), port)
        assert eventually(lambda: source.read()[0].temperature_c == 67.0)
        status, log = second.end(signal.SIGTERM)
    assert status == 0
    assert "SIGTERM: stopping" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "thermometer"], "temperature source 'thermometer' is unknown"),
        (["--source", "nvml", "--listen", "0.0.0.0:0"], "there is no TLS"),
        (["--source", "nvml", "--tls-key", "key.pem"], "give both, or neither"),
        (["--source", "nvml", "--max-streams", "0"], "max_streams"),
    ],
)
def test_a_wrong_flag_ends_the_sidecar_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: None)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_flag_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--source", "nvml", "--max-streams", "0", "--insec"])
    assert "unrecognized arguments: --insec" in capsys.readouterr().err


def test_every_flag_has_the_default_of_its_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    settings = attrs.fields_dict(SidecarConfig)
    for name in ("listen", "period_s", "max_streams"):
        assert f"{settings[name].metadata['help']} Default: {settings[name].default}." in text
    options = re.split(r" (?=--[a-z])", text.split("options:")[1])[3:]
    assert len(options) == len(cli._parser()._actions) - 2
    for option in options:
        assert re.search(r" (Default: .+|Required)\.$", option.strip()), option


@pytest.mark.parametrize("settings", [SidecarConfig, Backoff, ServerTls, ClientTls])
def test_every_setting_has_a_help_sentence(settings: type) -> None:
    for field in attrs.fields(settings):
        assert field.metadata["help"].endswith("."), field.name
