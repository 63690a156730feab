"""Shared memory in which the core writes a step once for all ranks, and each rank its digest.

A write to a rank's eventfd says that there is another step, which takes the core a microsecond; a
message to each rank would be copied, and answered, as often as there are ranks. What is not a step,
or too long, goes over the rank's connection, with the number of steps that come before it; a step
has the number of the call that comes before it. Only the core writes steps, and each rank its own
words. Linux alone has these calls (memfd_create(2), eventfd(2)).
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Sequence

import attrs

_NUM_PLACES = 4
"""Steps that there is space for: two are in flight at most, more after interruptions."""

_PLACE_BYTES = 1 << 20
"""Of the memory, only pages that were written are taken."""

_NUM_ANSWERS = 8
"""Steps whose words are kept."""

_WORD = struct.Struct("Q")
_HEAD = struct.Struct("QQ")
"""Before a step: its bytes, and the number of the call that it follows."""
_LOW = (1 << 32) - 1
_STEP, _CALL = 1, 1 << 32
"""What is added to an eventfd for a step, and for a call over the connection."""


@attrs.frozen
class BoardFiles:
    """The descriptors of the memory and of the eventfd of one of ``num_ranks`` ranks."""

    memory: int
    event: int
    num_ranks: int


class StepBoard:
    """The end of the core. ``num_written`` counts steps."""

    def __init__(self, num_ranks: int) -> None:
        self._places = _Places(num_ranks)
        self._memory = os.memfd_create("trencadis-steps")
        os.ftruncate(self._memory, self._places.num_bytes)
        self._shared = mmap.mmap(self._memory, self._places.num_bytes)
        self._events = [os.eventfd(0) for _ in range(num_ranks)]
        self.num_written = 0
        self.close = weakref.finalize(self, _close, [self._memory, *self._events])

    def files_of(self, rank: int) -> BoardFiles:
        """What a rank's process is to inherit."""
        return BoardFiles(self._memory, self._events[rank], len(self._events))

    def write(self, message: bytes, after: int = 0) -> bool:
        """Write a step and tell all ranks; False where there is no space for it.

        ``after``: the number of the last call before it over every connection, 0 for none.
        """
        places = self._places
        if len(message) > _PLACE_BYTES - _HEAD.size:
            return False
        number = self.num_written
        # A rank that has not taken what the place had: only after interruptions.
        if number >= _NUM_PLACES and min(places.taken(self._shared)) <= number - _NUM_PLACES:
            return False
        start = places.of_step(number)
        _HEAD.pack_into(self._shared, start, len(message), after)
        start += _HEAD.size
        self._shared[start : start + len(message)] = message
        self.num_written += 1
        for event in self._events:
            os.eventfd_write(event, _STEP)
        return True

    def words(self, number: int) -> Sequence[int]:
        """The word of each rank for the step of this number, or of another one in its place."""
        return self._places.words(self._shared, number)


class RankBoard:
    """The end of a rank."""

    def __init__(self, files: BoardFiles, rank: int) -> None:
        self._places = _Places(files.num_ranks)
        self._shared = mmap.mmap(files.memory, self._places.num_bytes)
        self.event = files.event
        self._rank = rank
        self.num_read = 0

    def read(self, last_call: int) -> bytes | None:
        """The next step, which was told of; None if it follows a call after ``last_call``."""
        places = self._places
        start = places.of_step(self.num_read)
        length, after = _HEAD.unpack_from(self._shared, start)
        if after > last_call:
            return None
        message = self._shared[start + _HEAD.size : start + _HEAD.size + length]
        self.num_read += 1
        places.set_taken(self._shared, self._rank, self.num_read)
        return message

    def answer(self, number: int, digest: int) -> None:
        """Tell the core the digest of the step of this number, counted from 1."""
        self._places.set_word(self._shared, self._rank, number, word_of(number, digest))

    def tell_of_call(self) -> None:
        """Let `wait` return in another thread."""
        os.eventfd_write(self.event, _CALL)

    def wait(self) -> int:
        """How many steps were told of since the last call; waits for one, or for a call."""
        return os.eventfd_read(self.event) & _LOW


def word_of(number: int, digest: int) -> int:
    """A step's number and its digest, 32 bits of each: memory is written 64 bits at once."""
    return (number & _LOW) << 32 | digest


def is_of(word: int, number: int) -> bool:
    """Whether a word is that of the step of this number."""
    return word >> 32 == number & _LOW


def is_before(word: int, number: int) -> bool:
    """Whether a word is that of an earlier step than the one of this number."""
    return word >> 32 < number & _LOW


class _Places:
    """Where everything is: steps taken by each rank, words by call and rank, steps."""

    def __init__(self, num_ranks: int) -> None:
        self._of_ranks = struct.Struct(f"{num_ranks}Q")
        self._words = self._of_ranks.size
        page = mmap.PAGESIZE
        used = self._words * (1 + _NUM_ANSWERS)
        self._steps = (used + page - 1) // page * page
        self.num_bytes = self._steps + _NUM_PLACES * _PLACE_BYTES

    def of_step(self, number: int) -> int:
        return self._steps + number % _NUM_PLACES * _PLACE_BYTES

    def taken(self, shared: mmap.mmap) -> Sequence[int]:
        return self._of_ranks.unpack_from(shared, 0)

    def set_taken(self, shared: mmap.mmap, rank: int, number: int) -> None:
        _WORD.pack_into(shared, rank * _WORD.size, number)

    def words(self, shared: mmap.mmap, number: int) -> Sequence[int]:
        return self._of_ranks.unpack_from(shared, self._of_answer(number))

    def set_word(self, shared: mmap.mmap, rank: int, number: int, word: int) -> None:
        _WORD.pack_into(shared, self._of_answer(number) + rank * _WORD.size, word)

    def _of_answer(self, number: int) -> int:
        return self._words * (1 + number % _NUM_ANSWERS)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
