"""The errors of this package. Each message names the thing, its value and the remedy.

Every operation checks before it changes anything, so an operation that raises changes nothing.
"""

from __future__ import annotations

import reprlib


class KVCacheError(Exception):
    """Base class of the errors that this package defines."""


class InvalidSetting(KVCacheError, ValueError):
    """A setting or an argument, ``field``, is out of range or of a wrong type."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class OutOfMemory(KVCacheError, MemoryError):
    """The memory of the cache cannot be allocated."""


class MissingExtra(KVCacheError, ImportError):
    """A module needs a library that an extra of this package installs."""


class CannotCopy(KVCacheError, TypeError):
    """An object that alone keeps a state, such as who has which block, cannot be copied."""


class UnknownSequence(KVCacheError, LookupError):
    """No sequence has this id: it was never allocated, or it was freed already."""


class DuplicateSequence(KVCacheError, ValueError):
    """A sequence with this id already has blocks, or a call names one sequence twice."""


class InvalidBlock(KVCacheError, ValueError):
    """A block id is outside the pool, is the padding block, or is not in use (double free)."""


class OutOfBlocks(KVCacheError):
    """An operation needs more device blocks than are free."""


class OutOfHostBlocks(KVCacheError):
    """A swap out needs more host blocks than are free."""


class OutOfSlots(KVCacheError):
    """An operation needs more slots of states, on the device or on the host, than are free."""


class NotComputed(KVCacheError):
    """The sequence has slots that are not computed yet, so it cannot be forked."""


class NotResident(KVCacheError):
    """The sequence is not on the device: it is swapped out, or its swap in is not complete."""


class NotSwapped(KVCacheError):
    """The sequence cannot be swapped in: it is on the device, or its swap out is not complete."""


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, _: int) -> str:
        # Python does not write an integer of more than 4300 digits.
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxstring, _SHORT_REPR.maxother = 3, 200, 200


def shown(value: object) -> str:
    """A value as a message shows it: its repr, shortened. Never raises."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
