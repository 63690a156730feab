"""The life of a server: bind the port, start the engine, listen, drain, stop.

The port is bound first, so that a conflict shows before the model is loaded. The server listens
last, so that every connection is answered. The engine's core process always ends with the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import uvicorn

from trencadis.engine import (
    AsyncEngine,
    EngineConfig,
    EngineDead,
    LogSettings,
    MultiModelConfig,
    MultiModelEngine,
)
from trencadis.server.app import create_app, end_streams
from trencadis.server.engine_protocol import as_switching
from trencadis.server.http.connections import (
    ConnectionLimits,
    LimitedProtocol,
    default_connection_limit,
    quiet_accept_errors,
    raise_descriptor_limit,
)
from trencadis.server.http.tls import LoggedHandshake, TlsHandshake
from trencadis.server.settings import ServerSettings

logger = logging.getLogger("trencadis.server")

T = TypeVar("T")

BACKLOG = 2048
"""Connections that the system keeps for the server."""

ACCEPTED_AT_ONCE = 32
"""How many the event loop accepts before it reads from those that it has accepted."""

ANSWER_TIMEOUT = 1.0
"""Longest wait, in seconds, until the requests that were cancelled have been answered."""

STOP_TIMEOUT = 30.0
"""Longest wait, in seconds, for the engine to end its core process."""


class LaunchError(Exception):
    """The server cannot listen on its host and port, or on its Unix socket."""


async def serve(
    config: EngineConfig | MultiModelConfig,
    settings: ServerSettings,
    *,
    log: LogSettings | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve a model, or several one at a time, until SIGINT or SIGTERM.

    On a signal it stops listening, gives running requests ``shutdown_timeout`` seconds, answers
    those that are left with 503, and stops the engine. A second signal ends the wait. ``announce``
    is called once with a text that says where the server listens; by default the text is printed.
    Raises `LaunchError` where the port is taken, the errors of `AsyncEngine.start`, and
    `EngineDead` once the engine can serve no request any more, so that the process ends.
    """
    stop_signals = _StopSignals()
    with _bound_sockets(settings) as listeners, stop_signals.handled():
        engine = await stop_signals.cancelling(start_engine(config, settings, log))
        if engine is None:
            logger.info("Stopped by a signal during the start")
            return
        try:
            if settings.admin_port is not None:
                settings = attrs.evolve(settings, admin_port=_port(listeners[1]))
            greeting = _greeting(engine, settings, listeners[0])
            server = _Server(engine, settings, lambda: (announce or _print)(greeting))
            failure = asyncio.ensure_future(_stop_after_failure(engine, server))
            try:
                await stop_signals.calling(server.stop, server.serve(sockets=listeners))
                if failure.done():
                    raise EngineDead(failure.result())
            finally:
                failure.cancel()
        finally:
            await _stop(engine)


async def start_engine(
    config: EngineConfig | MultiModelConfig,
    settings: ServerSettings,
    log: LogSettings | None = None,
) -> AsyncEngine | MultiModelEngine:
    """Start the engine of one model or of several. Raises the errors of `AsyncEngine.start`."""
    if isinstance(config, EngineConfig):
        return await AsyncEngine.start(config, log)
    return await MultiModelEngine.start(
        config.models, active=config.active, model_stash_gib=settings.model_stash_gib, log=log
    )


def check_address(settings: ServerSettings) -> None:
    """Raise `LaunchError` where an address is taken, or a certificate cannot be used.

    A cheap check before a model is prepared.
    """
    with _bound_sockets(settings):
        pass
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one
        raise LaunchError(
            f"the certificates of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs cannot be used: "
            f"{error}"
        ) from None


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # not buffered, even into a pipe
    except OSError as error:  # the disk is full, or what reads the pipe has ended
        logger.warning("The standard output cannot be written (%s): %s", error, text)
        with suppress(OSError, ValueError):  # so that Python does not try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _stop_after_failure(engine: AsyncEngine | MultiModelEngine, server: _Server) -> str:
    """Stop the server once the engine can serve no request any more; returns why."""
    reason = await engine.wait_until_failed()
    server.stop()
    return reason


async def _stop(engine: AsyncEngine | MultiModelEngine) -> None:
    try:
        await asyncio.wait_for(engine.stop(), STOP_TIMEOUT)
    except asyncio.TimeoutError:
        logger.error("The engine did not stop within %.0f seconds", STOP_TIMEOUT)


class _StopSignals:
    """SIGINT and SIGTERM: they cancel the start of the engine, and later stop the server."""

    def __init__(self) -> None:
        self._received = asyncio.Event()
        self._on_signal: Callable[[], None] | None = None

    @contextmanager
    def handled(self) -> Generator[None, None, None]:
        """Handle the signals inside the block."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._receive)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def cancelling(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``, or None when a signal cancelled it."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(self._received.wait())
        try:
            await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            signalled.cancel()
            await asyncio.gather(task, signalled, return_exceptions=True)

    async def calling(self, on_signal: Callable[[], None], work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, and call ``on_signal`` on each signal. Skips it after an earlier signal."""
        self._on_signal = on_signal
        if self._received.is_set():
            work.close()
        else:
            await work

    def _receive(self) -> None:
        self._received.set()
        if self._on_signal is not None:
            self._on_signal()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a callback once it listens."""

    def __init__(
        self,
        engine: AsyncEngine | MultiModelEngine,
        settings: ServerSettings,
        on_listening: Callable[[], None],
    ) -> None:
        limit = settings.max_connections or default_connection_limit(raise_descriptor_limit())
        self._limits = ConnectionLimits(
            limit,
            settings.header_timeout,
            settings.body_timeout,
            settings.send_timeout,
            settings.retry_after,
        )
        self._app = create_app(engine, settings)
        config = uvicorn.Config(
            self._app,
            http=partial(LimitedProtocol, limits=self._limits),  # type: ignore[arg-type]
            ws="none",  # no route has WebSockets, and they would leave these limits
            log_config=None,
            access_log=settings.access_log,
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
        )
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (context := self.config.ssl) is not None:
            context.sslobject_class = LoggedHandshake
            self.config.ssl = None  # uvicorn listens for TCP, and `TlsHandshake` does the rest
            self.config.http_protocol_class = partial(  # type: ignore[assignment]
                TlsHandshake, limits=self._limits, context=context
            )
        # A full collection visits all that was imported, and the event loop waits for it: 0.3 s and
        # more, in the middle of a long body. What is there now stays.
        gc.collect()
        gc.freeze()
        # How long the event loop waits for another thread that works in Python; by default 5 ms,
        # after each call of the system.
        sys.setswitchinterval(0.001)
        try:
            await super().startup(sockets)
        except OSError as error:  # another process took the port while the model was loading
            raise LaunchError(f"cannot listen: {error.strerror}") from None
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has one number for both
        handler = quiet_accept_errors(logger.error)
        asyncio.get_running_loop().set_exception_handler(handler)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        LoggedHandshake.log_unlogged()
        # uvicorn cancels requests without waiting for their answers, after a second signal not even
        # that.
        tasks = list(self.server_state.tasks)
        if self.force_exit:
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_TIMEOUT)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        """Stop listening and drain. A second call ends the drain too."""
        end_streams(self._app)
        self.force_exit = self.should_exit
        self.should_exit = True


@contextmanager
def _bound_sockets(settings: ServerSettings) -> Generator[list[socket.socket], None, None]:
    """The socket of the server, and that of the admin API if it has its own."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(_bound_by(settings))]
        if settings.admin_port is not None:
            host = settings.admin_host or settings.host
            sockets.append(stack.enter_context(_bound_socket(host, settings.admin_port)))
        yield sockets


def _bound_by(settings: ServerSettings) -> AbstractContextManager[socket.socket]:
    if settings.uds is not None:
        return _bound_file(Path(settings.uds))
    return _bound_socket(settings.host, settings.port)


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@contextmanager
def _bound_socket(host: str, port: int) -> Generator[socket.socket, None, None]:
    """A socket that holds the address without listening: connections are still rejected."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise LaunchError(f"--host {host!r} is not an address of this machine: {error}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {host} port {port} ({error.strerror}): "
                "stop the process that uses it, or choose another with --host and --port"
            ) from None
        yield listener


@contextmanager
def _bound_file(path: Path) -> Generator[socket.socket, None, None]:
    """A Unix socket that holds ``path`` without listening. Its file is removed at the end.

    The file of a server that was killed is replaced.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if _is_left_over(path):
                path.unlink()
            listener.bind(str(path))
        except OSError as error:
            # A path that is too long has no `strerror`.
            raise LaunchError(
                f"cannot listen on the Unix socket {path} ({error.strerror or error}): stop the "
                "process that uses it, or choose another path with --uds"
            ) from None
        bound = path.stat()
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(path.stat(), bound):
                    path.unlink()


def _is_left_over(path: Path) -> bool:
    """Whether a Unix socket is there that no process listens on."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:  # its backlog is full
            return False
    return False


def _greeting(
    engine: AsyncEngine | MultiModelEngine, settings: ServerSettings, listener: socket.socket
) -> str:
    url = _url(settings, listener)
    question, path = "What is the capital of France?", "/v1/chat/completions"
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    if engine.embedding_size:
        path, fields = "/v1/embeddings", {"input": question}
    elif engine.scoring is not None:
        documents = ["Paris is the capital of France.", "Bread is baked."]
        path, fields = "/v1/rerank", {"query": question, "documents": documents}
    body = json.dumps({"model": engine.model_name, **fields}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if settings.has_api_keys else ""
    dashboard = "" if settings.uds is not None else f"\nDashboard: {url}/dashboard"
    admin = ""
    if (switching := as_switching(engine)) is not None:
        others = ", ".join(alias for alias in switching.aliases if alias != switching.active)
        admin = f"\nOther models: {others or 'none'}"
    if settings.admin_port is not None:
        dashboard = f"\nDashboard on port {settings.admin_port}: /dashboard"
        admin += f"\nAdmin API on port {settings.admin_port}"
    through, place = "", url
    if settings.uds is not None:
        through, place = f" --unix-socket {shlex.quote(settings.uds)}", f"unix:{settings.uds}"
    curl = f"curl{through} {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    served = f"Serving {engine.model_name} at {place} (stop with Ctrl-C). Ask it:"
    return f"{served}\n  {curl}{dashboard}{admin}"


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
