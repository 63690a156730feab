"""The channel between the front and the engine core: two ZeroMQ sockets that carry msgpack."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import msgspec
import zmq
import zmq.asyncio

from trencadis.engine.errors import EngineDead, InvalidRequest
from trencadis.engine.ipc.messages import FromCore, ToCore
from trencadis.engine.validators import plain_number

logger = logging.getLogger("trencadis.engine")

LINGER_MS = 200
"""How long a closing socket tries to deliver queued messages."""


@attrs.frozen
class Undecodable:
    """A message that could not be decoded.

    ``key`` is that of the request which the message was about, ``number`` that of the order; both
    are None where neither can be read.
    """

    reason: str
    key: str | None = None
    number: int | None = None


class CoreChannel:
    """The core's end of the channel. Blocking.

    ``num_undecodable`` counts the messages that could not be decoded.
    """

    def __init__(self, to_core: str, from_core: str) -> None:
        self._context = zmq.Context()
        self._inbox = _connect(self._context, zmq.PULL, to_core)
        self._outbox = _connect(self._context, zmq.PUSH, from_core)
        self._encoder = _encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self.num_undecodable = 0

    def send(self, message: FromCore) -> None:
        """Queue a message for the front. Characters that UTF-8 cannot encode are replaced."""
        try:
            content = self._encoder.encode(message)
        except UnicodeEncodeError:  # such as the name of a file in a sensor's error
            content = self._encoder.encode(_with_encodable_text(msgspec.to_builtins(message)))
        self._outbox.send(content)

    def receive(self, timeout_seconds: float) -> list[ToCore | Undecodable]:
        """All queued messages; waits up to ``timeout_seconds`` for the first.

        What the front sent together is received together.
        """
        messages: list[ToCore | Undecodable] = []
        timeout = int(timeout_seconds * 1000)
        while self._inbox.poll(timeout):
            messages.extend(map(self._decode, self._inbox.recv_multipart()))
            timeout = 0
        return messages

    def _decode(self, content: bytes) -> ToCore | Undecodable:
        try:
            message: ToCore = self._decoder.decode(content)
        except (ValueError, TypeError, RecursionError) as error:
            self.num_undecodable += 1
            logger.warning(
                "A message to the core cannot be decoded (%d so far): %s",
                self.num_undecodable,
                error,
            )
            return _undecodable(content, str(error))
        return message

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)


class FrontChannel:
    """The front's end of the channel, for one event loop.

    The endpoints are in a directory that only this user can read. Messages of tasks that run in the
    same iteration of the loop are sent together, as the parts of one: the core then adds all
    prompts of an API request before its next step, and computes them in one batch.
    """

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="trencadis-")
        self.to_core = f"ipc://{Path(self._directory) / 'to-core'}"
        self.from_core = f"ipc://{Path(self._directory) / 'from-core'}"
        self._context = zmq.asyncio.Context()
        try:
            self._inbox = _bind(self._context, zmq.PULL, self.from_core)
            self._outbox = _bind(self._context, zmq.PUSH, self.to_core)
        except BaseException:
            self.close()
            raise
        self._encoder = _encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._queued: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    async def send(self, message: ToCore) -> None:
        """Queue a message for the core.

        Raises `InvalidRequest` where it cannot be encoded, and `EngineDead` once the channel is
        closed.
        """
        try:
            content = self._encoder.encode(message)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"this cannot be sent to the engine core: {error}") from error
        self._queued.append(content)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_queued())
        await asyncio.shield(self._sending)  # a caller that gives up ends no other's message

    async def _send_queued(self) -> None:
        """Send what was queued until now. Runs in the iteration of the loop after the first."""
        contents, self._queued, self._sending = self._queued, [], None
        try:
            await self._outbox.send_multipart(contents)
        except (zmq.ZMQError, asyncio.CancelledError) as error:
            if not self._context.closed:
                raise
            # Closing the channel cancels what waits for the core to read.
            raise EngineDead("the engine core ended before it was asked") from error

    async def receive(self, timeout_seconds: float) -> FromCore | None:
        """The next message, or None after ``timeout_seconds`` without one."""
        if not await self._inbox.poll(int(timeout_seconds * 1000)):
            return None
        message: FromCore = self._decoder.decode(await self._inbox.recv())
        return message

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        shutil.rmtree(self._directory, ignore_errors=True)


def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_as_builtin)


def _as_builtin(value: Any) -> Any:
    """NumPy's numbers and subclasses of str, which msgpack does not know."""
    if isinstance(value, str):
        return str.__str__(value)
    number = int(value) if isinstance(value, int) else plain_number(value)
    if type(number) not in (int, float):
        raise TypeError(f"a {type(value).__name__} is not part of a message")
    return number


def _undecodable(content: bytes, reason: str) -> Undecodable:
    try:
        fields = msgspec.msgpack.decode(content)
    except (ValueError, TypeError, RecursionError):
        return Undecodable(reason)
    if not isinstance(fields, dict):
        return Undecodable(reason)
    key, number = fields.get("key"), fields.get("number")
    return Undecodable(
        reason,
        key if isinstance(key, str) else None,
        number if isinstance(number, int) else None,
    )


def _with_encodable_text(value: Any) -> Any:
    """``value``, made of dicts and lists, with ``?`` for characters that UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _with_encodable_text(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_encodable_text(item) for item in value]
    return value


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
