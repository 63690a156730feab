"""The one error of this package: a setting that cannot give a usable bucket, and what to change."""

from __future__ import annotations


class BucketingError(ValueError):
    """A bad setting, file or trace. The message names the thing, its value and the remedy."""
