"""The gRPC server of the sidecar: one method, which streams the readings of a node."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trencadis.scheduler.clock import Clock
from trencadis.scheduler.telemetry.errors import MissingExtra, TelemetryError
from trencadis.scheduler.telemetry.sidecar import wire
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.telemetry.sidecar.feed import Feed
from trencadis.scheduler.telemetry.sidecar.generated import temperature_pb2
from trencadis.scheduler.telemetry.sidecar.tls import read_pem
from trencadis.scheduler.telemetry.source import TemperatureSource

try:
    import grpc
except ModuleNotFoundError as missing:
    raise MissingExtra("grpcio", "sidecar") from missing

logger = logging.getLogger(__name__)

SERVER_OPTIONS = (
    # Otherwise Linux lets a second sidecar use the same port and serve half of the clients.
    ("grpc.so_reuseport", 0),
    # Clients ping an idle connection every 10 s; by default the server closes it after two pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""https://github.com/grpc/grpc/blob/master/doc/keepalive.md"""


class SidecarServer:
    """Serves the readings of ``source`` until `stop`, which also closes the source.

    Streams, threads and memory are bounded. ``clock`` returns seconds.
    """

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
        # Each stream occupies a thread, so there are as many threads as streams.
        self._threads = ThreadPoolExecutor(
            self._config.max_streams, thread_name_prefix="thermal-stream"
        )
        self._server = grpc.server(
            self._threads, options=SERVER_OPTIONS, maximum_concurrent_rpcs=self._config.max_streams
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=temperature_pb2.WatchRequest.FromString,
            response_serializer=temperature_pb2.Round.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(wire.SERVICE, {wire.WATCH: watch})
        self._server.add_generic_rpc_handlers((handler,))

    def start(self) -> int:
        """Start reading and serving. Returns the port. Raises `TelemetryError` if that fails."""
        try:
            port = self._bind()
        except RuntimeError as error:
            self.stop()
            raise TelemetryError(
                f"cannot listen on {self._config.listen}: {error}: choose another port, "
                "or stop the process that uses this one"
            ) from error
        self._feed.start()
        self._server.start()
        logger.info("Listening on %s (port %d)", self._config.listen, port)
        return port

    def stop(self, grace_s: float = 2.0) -> bool:
        """End all streams, then server and threads. False if a sensor call still hangs."""
        stopped = self._server.stop(grace_s)
        ended = self._feed.close(grace_s)
        stopped.wait(grace_s + 1)
        self._threads.shutdown(wait=False)
        return ended

    def _bind(self) -> int:
        tls = self._config.tls
        if tls is None:
            return int(self._server.add_insecure_port(self._config.listen))
        authority = read_pem(tls.client_authority) if tls.client_authority else None
        credentials = grpc.ssl_server_credentials(
            [(read_pem(tls.key), read_pem(tls.certificate))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )
        return int(self._server.add_secure_port(self._config.listen, credentials))

    def _watch(
        self, _: temperature_pb2.WatchRequest, context: Any
    ) -> Iterator[temperature_pb2.Round]:
        context.add_callback(self._feed.wake)  # a client that disconnects frees its thread at once
        number = 0
        while context.is_active() and not self._feed.closed:
            number, latest = self._feed.wait_for_newer(number, timeout_s=self._config.period_s)
            if latest is not None:
                yield wire.to_message(latest, self._clock())
