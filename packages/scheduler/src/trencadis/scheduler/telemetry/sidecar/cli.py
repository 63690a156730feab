"""``thermal-sidecar``: serves this node's temperatures until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from trencadis.scheduler import __version__
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import TelemetryError
from trencadis.scheduler.telemetry.opening import open_source
from trencadis.scheduler.telemetry.sidecar.tls import ServerTls

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after SIGTERM or SIGINT, 2 for a setting or a library that is wrong."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Blocked before any thread starts, so that only `sigwait` below ever sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _serve(options)
    except (ConfigError, TelemetryError) as error:
        sys.stderr.write(f"thermal-sidecar: {error}\n")
        return 2


def _serve(options: argparse.Namespace) -> int:
    from trencadis.scheduler.telemetry.sidecar.server import (  # noqa: PLC0415  --help needs no gRPC
        SidecarConfig,
        SidecarServer,
    )

    config = SidecarConfig(
        listen=options.listen,
        period_s=options.period_s,
        max_streams=options.max_streams,
        tls=_tls(options),
        allow_insecure=options.insecure,
    )
    server = SidecarServer(open_source(options.source), config)
    server.start()
    received = signal.sigwait(STOP_SIGNALS)
    logger.info("%s: stopping", signal.Signals(received).name)
    server.stop()
    return 0


def _tls(options: argparse.Namespace) -> ServerTls | None:
    certificate, key, authority = (
        options.tls_certificate,
        options.tls_key,
        options.tls_client_authority,
    )
    if certificate and key:
        return ServerTls(certificate=certificate, key=key, client_authority=authority)
    if certificate or key or authority:
        raise ConfigError("TLS needs both --tls-certificate and --tls-key: give both, or neither")
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="thermal-sidecar", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--source",
        required=True,
        help="nvml, hlml, sensors, exporter:URL, recorded:FILE or sidecar:HOST:PORT",
    )
    parser.add_argument("--listen", default="127.0.0.1:50061", help="HOST:PORT or unix:PATH")
    parser.add_argument("--period-s", type=float, default=1.0, help="seconds between readings")
    parser.add_argument("--max-streams", type=int, default=16, help="callers served at once")
    parser.add_argument("--tls-certificate", metavar="PEM", help="this server's certificate chain")
    parser.add_argument("--tls-key", metavar="PEM", help="its private key")
    parser.add_argument(
        "--tls-client-authority",
        metavar="PEM",
        help="serve only clients with a certificate that this authority signed (mutual TLS)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen to other machines without TLS"
    )
    return parser
