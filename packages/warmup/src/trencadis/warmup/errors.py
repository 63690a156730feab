"""The errors of this package."""

from __future__ import annotations


class WarmupError(Exception):
    """Base of every error that warm-up raises."""


class ConfigError(WarmupError, ValueError):
    """A setting is out of range, or device memory does not suffice for the settings."""
