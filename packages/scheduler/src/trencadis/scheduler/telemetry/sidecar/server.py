"""The sidecar's server: one gRPC method that streams a node's readings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from trencadis.scheduler.clock import Clock
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import MissingExtra, TelemetryError
from trencadis.scheduler.telemetry.sidecar import wire
from trencadis.scheduler.telemetry.sidecar.feed import Feed
from trencadis.scheduler.telemetry.sidecar.generated import temperature_pb2
from trencadis.scheduler.telemetry.sidecar.tls import ServerTls, contents
from trencadis.scheduler.telemetry.source import TemperatureSource

try:
    import grpc
except ModuleNotFoundError as missing:
    raise MissingExtra("grpcio", "sidecar") from missing

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

OPTIONS = (
    # Otherwise Linux lets a second sidecar take the same port and half of the callers.
    ("grpc.so_reuseport", 0),
    # Clients ping a quiet connection every 10 s; the default calls that an attack after two.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""https://github.com/grpc/grpc/blob/master/doc/keepalive.md"""


def _in_range(low: float, high: float, unit: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not low <= value <= high:
            raise ConfigError(
                f"sidecar {attribute.name} must be from {low:g} to {high:g} {unit}, got {value!r}"
            )

    return check


@attrs.frozen(kw_only=True)
class SidecarConfig:
    """``listen``: ``host:port`` (port 0: a free one) or ``unix:path``. ``period_s``: seconds
    between rounds. ``max_streams``: callers served at once; one more is told RESOURCE_EXHAUSTED.

    Without ``tls`` only this machine may call, unless ``allow_insecure``: whoever can put himself
    in the sidecar's place can throttle an engine, or keep it from throttling. Raises `ConfigError`.
    """

    listen: str = "127.0.0.1:50061"
    period_s: float = attrs.field(default=1.0, validator=_in_range(0.01, 3600, "seconds"))
    max_streams: int = attrs.field(default=16, validator=_in_range(1, 1024, "streams"))
    tls: ServerTls | None = None
    allow_insecure: bool = False

    def __attrs_post_init__(self) -> None:
        local = self.listen.startswith("unix:") or self.listen.rpartition(":")[0] in LOOPBACK
        if self.tls is None and not local and not self.allow_insecure:
            raise ConfigError(
                f"listen {self.listen!r} is reachable from other machines and there is no TLS: "
                "give a certificate and key, listen on 127.0.0.1, or allow it with --insecure"
            )


class SidecarServer:
    """Serves ``source``, which it owns, until `stop`. Bounded in streams, threads and memory."""

    def __init__(
        self,
        source: TemperatureSource,
        config: SidecarConfig | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config or SidecarConfig()
        self._clock = clock
        self._feed = Feed(source, self._config.period_s, clock)
        # A stream holds its thread for as long as it lives, so there are as many of each.
        self._threads = ThreadPoolExecutor(
            self._config.max_streams, thread_name_prefix="thermal-stream"
        )
        self._server = grpc.server(
            self._threads, options=OPTIONS, maximum_concurrent_rpcs=self._config.max_streams
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=wire.decode_request,
            response_serializer=wire.encode_round,
        )
        handler = grpc.method_handlers_generic_handler(wire.SERVICE, {wire.WATCH: watch})
        self._server.add_generic_rpc_handlers((handler,))

    def start(self) -> int:
        """Begin to read and to serve; the port. Raises `TelemetryError` if it cannot listen."""
        try:
            port = self._bind()
        except RuntimeError as error:
            self.stop()
            raise TelemetryError(
                f"cannot listen on {self._config.listen}: {error}: choose another port, "
                "or stop what holds this one"
            ) from error
        self._feed.start()
        self._server.start()
        logger.info("Listening on %s (port %d)", self._config.listen, port)
        return port

    def stop(self, grace_s: float = 2.0) -> bool:
        """End every stream, then server and threads; False if a sensor call still hangs."""
        stopped = self._server.stop(grace_s)
        ended = self._feed.close(grace_s)
        stopped.wait(grace_s + 1)
        self._threads.shutdown(wait=False)
        return ended

    def _bind(self) -> int:
        tls = self._config.tls
        if tls is None:
            return int(self._server.add_insecure_port(self._config.listen))
        authority = contents(tls.client_authority) if tls.client_authority else None
        credentials = grpc.ssl_server_credentials(
            [(contents(tls.key), contents(tls.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )
        return int(self._server.add_secure_port(self._config.listen, credentials))

    def _watch(
        self, _: temperature_pb2.WatchRequest, context: Any
    ) -> Iterator[temperature_pb2.Round]:
        context.add_callback(self._feed.wake)  # a caller that goes away frees its thread at once
        number = 0
        while context.is_active() and not self._feed.closed:
            number, latest = self._feed.newer_than(number, timeout_s=self._config.period_s)
            if latest is not None:
                yield wire.to_message(latest, self._clock())
