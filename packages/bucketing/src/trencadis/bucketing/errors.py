"""The errors of this package."""

from __future__ import annotations


class BucketingError(ValueError):
    """A setting, file or trace that cannot be used. The message has its value and the remedy."""


class UnknownAxis(BucketingError, KeyError):
    """An axis that a bucket or a grid does not have."""

    __str__ = BucketingError.__str__  # that of KeyError would quote the message
