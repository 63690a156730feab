"""Exporter pages from a real HTTP server on the loopback interface."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import Sensor, SensorError, open_source
from trencadis.scheduler.telemetry import exporter as exporter_module
from trencadis.scheduler.telemetry.exporter import ExporterSource

DCGM_PAGE = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-604ac76c",device="nvidia0",modelName="H100, \\"SXM\\""} 61
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-71bbe2f0",device="nvidia1",modelName="H100"} 74
# HELP DCGM_FI_DEV_MEMORY_TEMP Memory temperature (in C).
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-604ac76c"} 83
DCGM_FI_DEV_MEMORY_TEMP{gpu="1",UUID="GPU-71bbe2f0"} 9223372036854775794
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-604ac76c"} 512.347
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-71bbe2f0"} 140737488355330
DCGM_FI_DEV_XID_ERRORS{gpu="0" this line is broken
"""
"""From the sample in NVIDIA's dcgm-exporter documentation, with its blank values."""

GAUDI_PAGE = """\
# TYPE habanalabs_temperature_onchip gauge
habanalabs_temperature_onchip{Serial="AN1",UUID="01P0",device="AN1",id="0",pod_name=""} 55
habanalabs_temperature_onchip{Serial="AN2",UUID="01P1",device="AN2",id="5",pod_name=""} 57
habanalabs_temperature_onboard{Serial="AN1",UUID="01P0",device="AN1",id="0",pod_name=""} 99
habanalabs_power_mW{Serial="AN1",UUID="01P0",device="AN1",id="0",pod_name=""} 351250
"""
"""Names and labels of Intel's Gaudi metric exporter."""

ROCM_PAGE = """\
amd_gpu_junction_temperature{gpu_id="0",serial_number="692251001124",gpu_partition_id="0"} 66
amd_gpu_junction_temperature{gpu_id="0",serial_number="692251001124",gpu_partition_id="1"} 69
amd_gpu_edge_temperature{gpu_id="0",serial_number="692251001124"} 60
amd_gpu_memory_temperature{gpu_id="0",serial_number="692251001124"} 58
amd_gpu_package_power{gpu_id="0",serial_number="692251001124"} 612
"""
"""Names and labels of AMD's device metrics exporter, under its operator's prefix."""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        self.send_response(server.status)
        self.end_headers()
        for chunk in server.chunks():
            self.wfile.write(chunk)

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


class Exporter:
    def __init__(self, server: Any) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.server_port}/metrics"
        self.shows("")

    def shows(self, page: str, status: int = 200) -> None:
        self.server.chunks = lambda: [page.encode()]
        self.server.status = status


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Exporter(server)
        server.shutdown()
        thread.join()


def test_a_page_with_its_own_authority_is_named_by_a_line(
    exporter: Exporter, tmp_path: Path
) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    certificate, pem = authority.issue_cert("127.0.0.1"), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    exporter.server.socket = context.wrap_socket(exporter.server.socket, server_side=True)
    exporter.shows(DCGM_PAGE)
    line = f"exporter:{exporter.url.replace('http:', 'https:')}"
    assert len(seen(open_source(f"{line}#authority={pem}"))) == 2
    assert len(seen(open_source(f"{line}#authority={pem},sensor=memory"))) == 1
    with pytest.raises(SensorError, match="CERTIFICATE_VERIFY_FAILED"):
        open_source(line).read()


def test_a_page_that_asks_for_a_certificate_gets_that_of_the_line(
    exporter: Exporter, tmp_path: Path
) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    client, pem = authority.issue_cert("engine"), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(pem)
    client.cert_chain_pems[0].write_to_path(tmp_path / "engine.pem")
    client.private_key_pem.write_to_path(tmp_path / "engine.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    context.load_verify_locations(pem)
    context.verify_mode = ssl.CERT_REQUIRED
    exporter.server.socket = context.wrap_socket(exporter.server.socket, server_side=True)
    exporter.shows(DCGM_PAGE)
    line = f"exporter:{exporter.url.replace('http:', 'https:')}#authority={pem}"
    own = f"certificate={tmp_path / 'engine.pem'},key={tmp_path / 'engine.key'}"
    assert len(seen(open_source(f"{line},{own}"))) == 2
    with pytest.raises(SensorError):
        open_source(line).read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("authority=/nowhere.pem", "/nowhere.pem cannot be used"),
        (f"authority={__file__}", "cannot be used as PEM files"),
        ("certificate=a.pem", "needs its key"),
        ("ca=a.pem", "'ca=a.pem' is not NAME=VALUE of authority"),
        ("label=gpu,label=id", "each once"),
        ("label", "'label' is not NAME=VALUE"),
        ("sensor=core", "sensor 'core' is unknown"),
    ],
)
def test_a_wrong_option_is_named(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(f"exporter:https://localhost/metrics#{options}")


def test_certificates_are_for_https_alone() -> None:
    with pytest.raises(ConfigError, match="is not https: leave out authority"):
        open_source("exporter:http://localhost/metrics#authority=ca.pem")


def seen(source: Any) -> list[tuple[int, float, float | None]]:
    return [(r.device, r.temperature_c, r.power_w) for r in source.read()]


def test_dcgm_is_read_and_blank_values_are_skipped(exporter: Exporter) -> None:
    exporter.shows(DCGM_PAGE)
    assert seen(open_source(f"exporter:{exporter.url}")) == [(0, 61.0, 512.347), (1, 74.0, None)]


def test_the_field_names_of_dcgm_4_6_are_read(exporter: Exporter) -> None:
    exporter.shows(
        'DCGM_FI_DEV_GPU_TEMP_CELSIUS{gpu="0"} 61\nDCGM_FI_DEV_BOARD_POWER_WATTS{gpu="0"} 512.5\n'
    )
    assert seen(ExporterSource(exporter.url)) == [(0, 61.0, 512.5)]


def test_a_device_without_the_selected_sensor_is_skipped(exporter: Exporter) -> None:
    exporter.shows(DCGM_PAGE)
    assert [r[:2] for r in seen(ExporterSource(exporter.url, sensor=Sensor.MEMORY))] == [(0, 83.0)]
    hottest = seen(ExporterSource(exporter.url, sensor=Sensor.HOTTEST))
    assert [r[:2] for r in hottest] == [(0, 83.0), (1, 74.0)]


def test_gaudi_is_read_with_power_in_watts(exporter: Exporter) -> None:
    exporter.shows(GAUDI_PAGE)
    assert seen(ExporterSource(exporter.url)) == [(0, 55.0, 351.25), (5, 57.0, None)]


def test_rocm_is_read_with_and_without_its_prefix(exporter: Exporter) -> None:
    exporter.shows(ROCM_PAGE)
    assert seen(ExporterSource(exporter.url)) == [(0, 69.0, 612.0)]
    exporter.shows(ROCM_PAGE.replace("amd_", ""))
    assert seen(ExporterSource(exporter.url)) == [(0, 69.0, 612.0)]
    exporter.shows(ROCM_PAGE.replace("amd_gpu_junction_temperature", "GPU_JUNCTION_TEMPERATURE"))
    assert seen(ExporterSource(exporter.url)) == [(0, 69.0, 612.0)]
    exporter.shows(ROCM_PAGE.replace("junction", "other"))
    assert seen(ExporterSource(exporter.url)) == [(0, 60.0, 612.0)]  # MI2xx has the edge only


def test_a_nan_is_passed_on_to_the_plausibility_check(exporter: Exporter) -> None:
    exporter.shows('DCGM_FI_DEV_GPU_TEMP{gpu="0"} NaN\n')
    (reading,) = ExporterSource(exporter.url).read()
    assert reading.temperature_c != reading.temperature_c


def test_a_label_without_an_index_is_named(exporter: Exporter) -> None:
    exporter.shows('DCGM_FI_DEV_GPU_TEMP{gpu="GPU-604a",slot="2"} 61\n')
    with pytest.raises(SensorError, match="no device index in label 'gpu'"):
        ExporterSource(exporter.url).read()
    assert seen(ExporterSource(exporter.url, label="slot")) == [(2, 61.0, None)]


@pytest.mark.parametrize(
    ("page", "status", "message"),
    [
        ("", 200, "has no temperature of DCGM, Gaudi, ROCm"),
        ("node_load1 0.5\n", 200, "has no temperature"),
        (DCGM_PAGE, 503, "does not answer: Service Unavailable"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0"} warm\n', 200, "not in Prometheus' text format"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0"} 2147483634\n', 200, "has no temperature"),
        ('DCGM_FI_DEV_POWER_USAGE{gpu="0"} 90\n', 200, "has no chip temperature"),
    ],
)
def test_a_page_without_temperatures_is_a_sensor_error(
    exporter: Exporter, page: str, status: int, message: str
) -> None:
    exporter.shows(page, status)
    with pytest.raises(SensorError, match=message):
        ExporterSource(exporter.url).read()


def test_an_exporter_that_is_down_is_a_sensor_error(exporter: Exporter) -> None:
    exporter.server.server_close()
    with pytest.raises(SensorError, match="does not answer"):
        ExporterSource(exporter.url, timeout_s=1.0).read()


def test_a_slow_page_times_out(exporter: Exporter) -> None:
    enough = threading.Event()

    def drip() -> Iterator[bytes]:
        while not enough.wait(0.02):
            yield b"# "

    exporter.server.chunks = drip
    with pytest.raises(SensorError, match=r"not complete after 0\.5 s"):
        ExporterSource(exporter.url, timeout_s=0.5).read()
    enough.set()


def test_a_page_above_the_size_limit_is_an_error(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_module, "MAX_BYTES", 1000)
    exporter.shows("#" * 2000)
    with pytest.raises(SensorError, match="more than 1000 bytes"):
        ExporterSource(exporter.url).read()


@pytest.mark.parametrize("url", ["", "localhost:9400", "file:///etc/hostname", "ftp://host/x"])
def test_only_http_addresses_are_accepted(url: str) -> None:
    with pytest.raises(ConfigError, match="neither http nor https"):
        ExporterSource(url)
