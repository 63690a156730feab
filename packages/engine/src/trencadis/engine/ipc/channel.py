"""The channel between the front and the engine core: two ZeroMQ sockets that carry msgpack."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trencadis.engine.ipc.messages import FromCore, ToCore

LINGER_MS = 200
"""How long a closing socket tries to deliver queued messages."""


class CoreChannel:
    """The core's end of the channel. Blocking."""

    def __init__(self, to_core: str, from_core: str) -> None:
        self._context = zmq.Context()
        self._inbox = _connect(self._context, zmq.PULL, to_core)
        self._outbox = _connect(self._context, zmq.PUSH, from_core)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)

    def send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))

    def receive(self, timeout_seconds: float) -> list[ToCore]:
        """All queued messages; waits up to ``timeout_seconds`` for the first."""
        messages: list[ToCore] = []
        timeout = int(timeout_seconds * 1000)
        while self._inbox.poll(timeout):
            messages.append(self._decoder.decode(self._inbox.recv()))
            timeout = 0
        return messages

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)


class FrontChannel:
    """The front's end of the channel, for one event loop.

    The endpoints are in a directory that only this user can read.
    """

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="trencadis-")
        self.to_core = f"ipc://{Path(self._directory) / 'to-core'}"
        self.from_core = f"ipc://{Path(self._directory) / 'from-core'}"
        self._context = zmq.asyncio.Context()
        self._inbox = _bind(self._context, zmq.PULL, self.from_core)
        self._outbox = _bind(self._context, zmq.PUSH, self.to_core)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    async def send(self, message: ToCore) -> None:
        await self._outbox.send(self._encoder.encode(message))

    async def receive(self, timeout_seconds: float) -> FromCore | None:
        """The next message, or None after ``timeout_seconds`` without one."""
        if not await self._inbox.poll(int(timeout_seconds * 1000)):
            return None
        message: FromCore = self._decoder.decode(await self._inbox.recv())
        return message

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        shutil.rmtree(self._directory, ignore_errors=True)


def _connect(context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = _unbounded(context.socket(kind))
    socket.connect(address)
    return socket


def _bind(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = _unbounded(context.socket(kind))
    socket.bind(address)
    return socket


def _unbounded(socket: Any) -> Any:
    # The scheduler and each request bound the number of messages; the sockets never drop one.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
