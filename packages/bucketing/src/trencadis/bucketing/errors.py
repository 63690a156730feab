"""The error of this package."""

from __future__ import annotations


class BucketingError(ValueError):
    """A setting, file or trace that cannot be used. The message has its value and the remedy."""
