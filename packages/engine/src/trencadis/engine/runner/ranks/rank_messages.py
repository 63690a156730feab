"""What goes between the core and a rank: values, encoded by pickle, over a socket.

Both ends are of one program on one machine, and no other process has the socket. A message is its
length in 8 bytes, then its bytes.
"""

from __future__ import annotations

import pickle
import socket
import struct
import zlib
from typing import Any

import attrs
import numpy as np

from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.executor import ExecutorCounters
from trencadis.engine.runner.step import StepResult
from trencadis.engine.settings.engine_config import EngineConfig

_LENGTH = struct.Struct("<Q")

_PART_BYTES = 1 << 20


@attrs.frozen
class Start:
    """The first message to a rank, not answered.

    ``store``: the file in which the ranks find each other. ``limit_s``: seconds that a collective
    call may wait for the other ranks. ``log_level``, ``log_format``: those of the core.
    """

    config: EngineConfig
    part: RankPart
    records: bool
    store: str
    limit_s: float
    log_level: int
    log_format: str | None


@attrs.frozen
class Call:
    """A method of the executor to call with these arguments. ``number`` rises by one each time."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()


@attrs.frozen
class Answer:
    """What the call with this number returned, or the error that it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@attrs.frozen
class Cold:
    """Sent during the call with this number: a forward pass in live traffic may compile first.

    ``shape``: its shape, in words.
    """

    number: int
    shape: str


@attrs.frozen
class StepAnswer:
    """What a rank answers to a step. Its ``digest`` is that of every other rank.

    ``result`` and ``counters`` are those of rank 0; None from another rank.
    """

    digest: int
    result: StepResult | None
    counters: ExecutorCounters | None


def digest_of(number: int, result: StepResult) -> int:
    """A checksum of a step's number, of its tokens and of the sequences that have failed."""
    tokens = [number, *result.token_ids, *result.token_ids.values(), -1, *result.failed]
    for beam, candidates in result.candidates.items():
        tokens += [-1, beam, *(candidate.token_id for candidate in candidates)]
    return zlib.crc32(np.array(tokens, np.int64).tobytes())


def encode(message: object) -> bytes:
    """A message with its length. Raises what ``pickle`` raises for what it cannot encode."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """The messages that arrive at a socket. An interrupted call loses no part of them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    @property
    def has_message(self) -> bool:
        """Whether a whole message has arrived, so that `receive` does not wait."""
        head = _LENGTH.size
        if len(self._received) < head:
            return False
        return len(self._received) >= head + int(_LENGTH.unpack_from(self._received)[0])

    def receive(self) -> Any:
        """The next message. Blocks for as long as the socket's timeout for each part of it.

        Raises `EOFError` where the other end was closed, `TimeoutError`, and `OSError`.
        """
        while not self.has_message:
            part = self._connection.recv(_PART_BYTES)
            if not part:
                raise EOFError("the other end of the connection was closed")
            self._received += part
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return pickle.loads(body)  # noqa: S301  (of this program, see above)
