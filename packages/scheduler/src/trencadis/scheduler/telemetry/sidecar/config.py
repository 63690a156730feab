"""Settings of the sidecar. The command line takes its defaults and help texts from here."""

from __future__ import annotations

import attrs

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.sidecar.tls import ServerTls
from trencadis.scheduler.validators import instance_of, integer, number, setting

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@attrs.frozen(kw_only=True)
class SidecarConfig:
    """Address, period and limits of a sidecar.

    Without ``tls`` the sidecar serves this machine only, unless ``allow_insecure`` is set: an
    attacker in its place could throttle an engine, or keep it from throttling. The metadata of each
    field has its ``help`` text. Raises `ConfigError`.
    """

    listen: str = setting(
        "127.0.0.1:50061",
        instance_of(str),
        "Address: HOST:PORT (port 0: any free port) or unix:PATH.",
    )
    period_s: float = setting(
        1.0, number(0.01, 3600), "Time between two rounds of readings, in seconds."
    )
    max_streams: int = setting(
        16, integer(1, 1024), "Maximum number of clients; a further one gets RESOURCE_EXHAUSTED."
    )
    tls: ServerTls | None = attrs.field(
        default=None, metadata={"help": "Certificate and key of the server; None: no TLS."}
    )
    allow_insecure: bool = attrs.field(
        default=False, metadata={"help": "Serve other machines without TLS."}
    )

    def __attrs_post_init__(self) -> None:
        is_local = self.listen.startswith("unix:") or self.listen.rpartition(":")[0] in _LOOPBACK
        if self.tls is None and not is_local and not self.allow_insecure:
            raise ConfigError(
                f"listen {self.listen!r} is reachable from other machines and there is no TLS: "
                "give a certificate and key, listen on 127.0.0.1, or allow it with --insecure"
            )
