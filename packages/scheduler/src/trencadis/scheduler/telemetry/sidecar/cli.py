"""``thermal-sidecar``: serves the temperatures of this node until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

import attrs

from trencadis.scheduler import __version__
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import TelemetryError
from trencadis.scheduler.telemetry.registry import SOURCES, open_source
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.telemetry.sidecar.tls import ServerTls

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a wrong setting or a missing library."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Blocked before any thread starts, so that only `sigwait` below receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _serve(options)
    except (ConfigError, TelemetryError) as error:
        sys.stderr.write(f"thermal-sidecar: {error}\n")
        return 2


def _serve(options: argparse.Namespace) -> int:
    # --help needs no gRPC.
    from trencadis.scheduler.telemetry.sidecar.server import SidecarServer  # noqa: PLC0415

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
    parser = argparse.ArgumentParser(
        prog="thermal-sidecar", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--source",
        required=True,
        help="Source of the temperatures: KIND or KIND:ARGUMENT, for example "
        "exporter:http://localhost:9400/metrics. "
        f"Kinds: {', '.join(SOURCES)}. Required.",
    )
    for name in ("listen", "period_s", "max_streams"):
        field = attrs.fields_dict(SidecarConfig)[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=f"{field.metadata['help']} Default: %(default)s.",
        )
    for field in attrs.fields(ServerTls):
        parser.add_argument(
            f"--tls-{field.name.replace('_', '-')}",
            metavar="PEM",
            help=f"{field.metadata['help']} Default: none.",
        )
    insecure = attrs.fields_dict(SidecarConfig)["allow_insecure"]
    parser.add_argument(
        "--insecure", action="store_true", help=f"{insecure.metadata['help']} Default: off."
    )
    return parser
