"""The errors that this package raises on purpose."""

from __future__ import annotations


class WarmupError(Exception):
    """Base of every error that warm-up raises on purpose."""


class ConfigError(WarmupError, ValueError):
    """A setting is out of range, or the memory does not suffice for what was asked."""
