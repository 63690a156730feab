"""The sidecar behind TLS and mutual TLS, with certificates made here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")
pytest.importorskip("trustme")

import trustme

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import Reading, SensorError, TemperatureSource, open_source
from trencadis.scheduler.telemetry.sidecar.backoff import Backoff
from trencadis.scheduler.telemetry.sidecar.client import SidecarSource
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.telemetry.sidecar.server import SidecarServer
from trencadis.scheduler.telemetry.sidecar.tls import ClientTls, ServerTls


class SteadySource(TemperatureSource):
    @property
    def name(self) -> str:
        return "steady"

    def read(self) -> list[Reading]:
        return [Reading(0, 60.0)]


class Certificates:
    """An authority with a certificate for the sidecar and one for a client, as PEM files."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.authority = directory / "authority.pem"
        authority.cert_pem.write_to_path(self.authority)
        self.server = self._issue(authority, directory, "localhost")
        self.client = self._issue(authority, directory, "engine")

    @staticmethod
    def _issue(authority: Any, directory: Path, name: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(name)
        certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
        for blob in issued.cert_chain_pems:
            blob.write_to_path(certificate, append=certificate.exists())
        issued.private_key_pem.write_to_path(key)
        return certificate, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("other"))


@contextmanager
def sidecar(certificates: Certificates, mutual: bool) -> Iterator[int]:
    tls = ServerTls(
        certificate=certificates.server[0],
        key=certificates.server[1],
        client_authority=certificates.authority if mutual else None,
    )
    config = SidecarConfig(listen="127.0.0.1:0", period_s=0.01, tls=tls)
    server = SidecarServer(SteadySource(), config)
    try:
        yield server.start()
    finally:
        server.stop()


def answer(port: int, tls: ClientTls | None, until: Callable[[str], bool]) -> str:
    """The first result of a client that satisfies ``until``: "readings", or a fault."""
    backoff = Backoff(initial_s=0.02, max_s=0.1)
    return result_of(SidecarSource(f"localhost:{port}", tls=tls, backoff=backoff), until)


def result_of(source: TemperatureSource, until: Callable[[str], bool]) -> str:
    """The first result of a source that satisfies ``until``; the source is closed."""
    deadline_s = time.monotonic() + 120.0
    try:
        while True:
            try:
                source.read()
                result = "readings"
            except SensorError as error:
                result = str(error)
            if until(result):
                return result
            assert time.monotonic() < deadline_s, result
            time.sleep(0.005)
    finally:
        source.close()


def served(result: str) -> bool:
    return result == "readings"


def refused(result: str) -> bool:
    assert result != "readings"
    return "unavailable" in result


def test_tls_serves_clients_that_trust_the_authority(certificates: Certificates) -> None:
    with sidecar(certificates, mutual=False) as port:
        assert answer(port, ClientTls(authority=certificates.authority), served)


def test_a_certificate_of_another_name_needs_server_name(certificates: Certificates) -> None:
    with sidecar(certificates, mutual=False) as port:
        tls = ClientTls(authority=certificates.authority, server_name="elsewhere")
        assert answer(port, tls, refused)
        tls = ClientTls(authority=certificates.authority, server_name="localhost")
        assert answer(port, tls, served)


def test_a_sidecar_of_another_authority_is_refused(
    certificates: Certificates, other_certificates: Certificates
) -> None:
    with sidecar(other_certificates, mutual=False) as port:
        assert answer(port, ClientTls(authority=certificates.authority), refused)


def test_a_client_without_tls_is_refused(certificates: Certificates) -> None:
    with sidecar(certificates, mutual=False) as port:
        assert answer(port, None, refused)


def test_mutual_tls_serves_only_clients_of_its_authority(
    certificates: Certificates, other_certificates: Certificates
) -> None:
    with sidecar(certificates, mutual=True) as port:
        own = ClientTls(
            authority=certificates.authority,
            certificate=certificates.client[0],
            key=certificates.client[1],
        )
        assert answer(port, own, served)
        other = ClientTls(
            authority=certificates.authority,
            certificate=other_certificates.client[0],
            key=other_certificates.client[1],
        )
        assert answer(port, other, refused)
        assert answer(port, ClientTls(authority=certificates.authority), refused)


def test_a_sidecar_with_mutual_tls_is_named_by_a_line(
    certificates: Certificates, other_certificates: Certificates
) -> None:
    with sidecar(certificates, mutual=True) as port:
        certificate, key = certificates.client
        line = f"sidecar:localhost:{port}#authority={certificates.authority},"
        line += f"certificate={certificate},key={key}"
        assert result_of(open_source(line), served)
        other = line.replace(str(certificates.authority), str(other_certificates.authority))
        assert result_of(open_source(other), refused)
        with pytest.raises(ConfigError, match=r"'ca=x' is not NAME=VALUE of authority, cert"):
            open_source(f"sidecar:localhost:{port}#ca=x")


def test_missing_files_and_a_certificate_without_key_are_errors(
    certificates: Certificates, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"certificate '.*nowhere\.pem' is not a file"):
        ServerTls(certificate=tmp_path / "nowhere.pem", key=certificates.server[1])
    with pytest.raises(ConfigError, match="needs its key"):
        ClientTls(certificate=certificates.client[0])
