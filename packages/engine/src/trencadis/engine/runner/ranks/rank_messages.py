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
from trencadis.engine.runner.ranks.step_board import BoardFiles
from trencadis.engine.runner.step import StepInput, StepResult
from trencadis.engine.settings.engine_config import EngineConfig

_LENGTH = struct.Struct("<Q")

_PART_BYTES = 1 << 16
"""What is read at once. Memory of more is taken from the system each time."""


@attrs.frozen
class Start:
    """The first message to a rank, not answered.

    ``store``: the file in which the ranks find each other. ``limit_s``: seconds that a collective
    call may wait for the other ranks. ``log_level``, ``log_format``: those of the core. ``board``:
    what the process has inherited of it. ``sums``: a file in memory, for `Device.join_ranks`.
    """

    config: EngineConfig
    part: RankPart
    records: bool
    store: str
    limit_s: float
    log_level: int
    log_format: str | None
    board: BoardFiles
    sums: int


@attrs.frozen
class Call:
    """A method of the executor to call with these arguments. ``number`` rises by one each time.

    ``num_steps``: how many steps on the board come before it.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    num_steps: int = 0


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


def packed_result(result: StepResult, counters: ExecutorCounters | None) -> tuple[Any, ...]:
    """What rank 0 answers to a step, whose digest is on the board: mostly nothing but tokens.

    ``counters``: None where they are those of the step before.
    """
    others = (result.logprobs, result.embeddings, result.candidates, result.prompt_logprobs)
    if any(others) or result.failed or result.timing is not None:
        return result, counters
    return result.token_ids, counters


def unpacked_result(packed: tuple[Any, ...]) -> tuple[StepResult, ExecutorCounters | None]:
    """What `packed_result` was given."""
    result, counters = packed
    if not isinstance(result, StepResult):
        result = StepResult(token_ids=result)
    return result, counters


def digest_of(step: StepInput, result: StepResult) -> int:
    """A checksum, 32 bits: of a step's number, of which tokens of which sequences it computes, of
    the tokens that were sampled and of the sequences that have failed."""
    tokens = [step.number, *result.token_ids, *result.token_ids.values(), -1, *result.failed]
    for sequences in (step.decodes, step.prompts):
        tokens.append(-1)
        for sequence in sequences:
            tokens += (sequence.seq_id, sequence.start, len(sequence.token_ids))
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
