"""The errors of this package."""

from __future__ import annotations

import reprlib


class BucketingError(ValueError):
    """A setting, file or trace that cannot be used. The message has its value and the remedy.

    ``field`` names the setting or argument, where it is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownAxis(BucketingError, KeyError):
    """An axis that a bucket or a grid does not have."""

    __str__ = BucketingError.__str__  # that of KeyError would quote the message


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
