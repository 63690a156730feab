"""The client of a sidecar: a source that keeps the last round it has received."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Any

import attrs

from trencadis.scheduler.clock import Clock
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import MissingExtra, SensorError
from trencadis.scheduler.telemetry.sidecar import wire
from trencadis.scheduler.telemetry.sidecar.backoff import Backoff
from trencadis.scheduler.telemetry.sidecar.generated import temperature_pb2
from trencadis.scheduler.telemetry.sidecar.tls import ClientTls, read_pem
from trencadis.scheduler.telemetry.source import Reading, TemperatureSource, split_options

try:
    import grpc
except ModuleNotFoundError as missing:
    raise MissingExtra("grpcio", "sidecar") from missing

logger = logging.getLogger(__name__)

CHANNEL_OPTIONS = (
    # A node that loses power does not close the stream: without pings it would wait forever.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # By default, channels to one address share a connection with a long backoff, see
    # https://github.com/grpc/grpc/issues/21240. Here `Backoff` applies.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class SidecarSource(TemperatureSource):
    """The devices of a node with a sidecar at ``address``: ``host:port`` or ``unix:path``.

    A thread holds one stream, and reconnects with ``backoff`` when it ends. ``read`` returns the
    last round and never waits for the network. ``tls`` None: no TLS. Raises `ConfigError` for an
    invalid address and for a certificate that cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: ClientTls | None = None,
        backoff: Backoff | None = None,
        rng: random.Random | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if not address.partition(":")[2]:
            raise ConfigError(
                f"sidecar address {address!r} has no port: give host:port or unix:path"
            )
        self._address = address
        self._options, self._credentials = _credentials(tls)
        self._backoff = backoff or Backoff()
        self._rng = rng or random.Random()
        self._clock = clock
        self._latest: wire.Round | None = None
        self._fault = "not connected yet"
        self._lock = threading.Lock()  # guards _stream and _closed
        self._stream: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thermal-sidecar", daemon=True)
        self._thread.start()

    @classmethod
    def from_argument(cls, argument: str) -> SidecarSource:
        """The source ``sidecar:address#name=value,...``. The options are the fields of `ClientTls`.

        With any of them the connection has TLS: with ``server_name`` alone, for a certificate that
        the system's authorities have signed.
        """
        address, options = split_options(argument, attrs.fields_dict(ClientTls))
        return cls(address, tls=ClientTls(**options) if options else None)

    @property
    def name(self) -> str:
        return "sidecar"

    def read(self) -> list[Reading]:
        """The last round with its age. Raises `SensorError` while there is no connection."""
        latest, fault = self._latest, self._fault
        if fault or latest is None:
            raise SensorError(f"sidecar {self._address}: {fault}")
        if latest.fault:
            raise SensorError(f"sidecar {self._address}, source {latest.source}: {latest.fault}")
        return latest.aged(self._clock())

    def close(self) -> None:
        """End the stream and the thread, within seconds."""
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            before = self._latest
            reason = self._receive()
            if self._closed.is_set():
                break
            failures = 1 if self._latest is not before else failures + 1
            delay_s = self._backoff.delay_s(failures, self._rng)
            self._fault = f"{reason}; attempt {failures + 1} in {delay_s:.1f} s"
            if failures == 1:
                logger.warning("Sidecar %s is lost: %s", self._address, reason)
            self._closed.wait(delay_s)

    def _receive(self) -> str:
        """Receive rounds until the stream ends. Returns the reason of the end."""
        with self._channel() as channel:
            watch = channel.unary_stream(
                wire.WATCH_PATH,
                request_serializer=temperature_pb2.WatchRequest.SerializeToString,
                response_deserializer=temperature_pb2.Round.FromString,
            )
            with self._lock:
                if self._closed.is_set():
                    return "closed"
                stream = self._stream = watch(temperature_pb2.WatchRequest())
            try:
                for message in stream:
                    self._latest = wire.from_message(message, self._clock())
                    if self._fault:
                        logger.info("Sidecar %s sends readings", self._address)
                    self._fault = ""
            except grpc.RpcError as error:
                return _reason(error)
            finally:
                self._stream = None
        return "the sidecar ended the stream"

    def _channel(self) -> Any:
        if self._credentials is None:
            return grpc.insecure_channel(self._address, options=self._options)
        return grpc.secure_channel(self._address, self._credentials, options=self._options)


def _credentials(tls: ClientTls | None) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Channel options, and credentials or None. Reads the files once, so that errors show early."""
    if tls is None:
        return CHANNEL_OPTIONS, None
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read_pem(tls.authority) if tls.authority else None,
        private_key=read_pem(tls.key) if tls.key else None,
        certificate_chain=read_pem(tls.certificate) if tls.certificate else None,
    )
    if tls.server_name is None:
        return CHANNEL_OPTIONS, credentials
    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name)), credentials


def _reason(error: Any) -> str:
    code, details = error.code(), error.details()
    return f"{code.name.lower()}: {details}" if details else str(code.name.lower())
