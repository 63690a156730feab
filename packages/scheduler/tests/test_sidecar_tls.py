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
from trencadis.scheduler.telemetry import Reading, SensorError, TemperatureSource
from trencadis.scheduler.telemetry.sidecar.backoff import Backoff
from trencadis.scheduler.telemetry.sidecar.client import SidecarSource
from trencadis.scheduler.telemetry.sidecar.server import SidecarConfig, SidecarServer
from trencadis.scheduler.telemetry.sidecar.tls import ClientTls, ServerTls


class SteadySource(TemperatureSource):
    @property
    def name(self) -> str:
        return "steady"

    def read(self) -> list[Reading]:
        return [Reading(0, 60.0)]


class Papers:
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
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("theirs"))


@contextmanager
def sidecar(papers: Papers, mutual: bool) -> Iterator[int]:
    tls = ServerTls(
        certificate=papers.server[0],
        key=papers.server[1],
        client_authority=papers.authority if mutual else None,
    )
    config = SidecarConfig(listen="127.0.0.1:0", period_s=0.01, tls=tls)
    server = SidecarServer(SteadySource(), config)
    try:
        yield server.start()
    finally:
        server.stop()


def answer(port: int, tls: ClientTls | None, until: Callable[[str], bool]) -> str:
    """What a client hears: "readings", or the reason why not."""
    backoff = Backoff(initial_s=0.02, max_s=0.1)
    source = SidecarSource(f"localhost:{port}", tls=tls, backoff=backoff)
    deadline_s = time.monotonic() + 20.0
    try:
        while True:
            try:
                source.read()
                heard = "readings"
            except SensorError as error:
                heard = str(error)
            if until(heard):
                return heard
            assert time.monotonic() < deadline_s, heard
            time.sleep(0.005)
    finally:
        source.close()


def served(heard: str) -> bool:
    return heard == "readings"


def refused(heard: str) -> bool:
    assert heard != "readings"
    return "unavailable" in heard


def test_tls_serves_whoever_knows_the_authority(papers: Papers) -> None:
    with sidecar(papers, mutual=False) as port:
        assert answer(port, ClientTls(authority=papers.authority), served)


def test_a_certificate_of_another_name_is_taken_only_when_told(papers: Papers) -> None:
    with sidecar(papers, mutual=False) as port:
        tls = ClientTls(authority=papers.authority, server_name="elsewhere")
        assert answer(port, tls, refused)
        tls = ClientTls(authority=papers.authority, server_name="localhost")
        assert answer(port, tls, served)


def test_a_sidecar_of_another_authority_is_not_believed(papers: Papers, strangers: Papers) -> None:
    with sidecar(strangers, mutual=False) as port:
        assert answer(port, ClientTls(authority=papers.authority), refused)


def test_plain_text_gets_nothing_from_tls(papers: Papers) -> None:
    with sidecar(papers, mutual=False) as port:
        assert answer(port, None, refused)


def test_mutual_tls_serves_only_clients_of_its_authority(papers: Papers, strangers: Papers) -> None:
    with sidecar(papers, mutual=True) as port:
        ours = ClientTls(
            authority=papers.authority, certificate=papers.client[0], key=papers.client[1]
        )
        assert answer(port, ours, served)
        theirs = ClientTls(
            authority=papers.authority, certificate=strangers.client[0], key=strangers.client[1]
        )
        assert answer(port, theirs, refused)
        assert answer(port, ClientTls(authority=papers.authority), refused)


def test_missing_files_and_half_a_pair_are_settings(papers: Papers, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"certificate '.*nowhere\.pem' is no file"):
        ServerTls(certificate=tmp_path / "nowhere.pem", key=papers.server[1])
    with pytest.raises(ConfigError, match="needs its key"):
        ClientTls(certificate=papers.client[0])
