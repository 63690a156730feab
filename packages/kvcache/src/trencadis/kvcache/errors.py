"""The errors that this package raises on purpose; each names the thing, its value and the remedy.

Every operation checks before it changes anything: after one of these errors the state is what it
was before the call.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidSetting(KVCacheError, ValueError):
    """A setting or an argument is out of range."""


class UnknownSequence(KVCacheError, LookupError):
    """No sequence of this id is known: it was never allocated, or it was freed already."""


class DuplicateSequence(KVCacheError, ValueError):
    """A sequence of this id already holds blocks."""


class InvalidBlock(KVCacheError, ValueError):
    """A block id lies outside the pool, is the padding block, or is not in use (double free)."""


class OutOfBlocks(KVCacheError):
    """Fewer free device blocks than the operation needs."""


class OutOfHostBlocks(KVCacheError):
    """Fewer free host blocks than a swap out needs."""


class NotComputed(KVCacheError):
    """The sequence has reserved slots that are not computed yet, so it cannot be forked."""


class NotResident(KVCacheError):
    """The sequence is swapped out, or on its way: swap it in before it is extended or forked."""


class NotSwapped(KVCacheError):
    """The sequence is not swapped out, so there is nothing to swap in."""


class UnsupportedLayer(KVCacheError, ValueError):
    """A layer keeps a state that a paged block copy would corrupt (sliding window, state space)."""
