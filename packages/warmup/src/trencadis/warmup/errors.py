"""The errors of this package. Each message names the thing, its value and the remedy."""

from __future__ import annotations


class WarmupError(Exception):
    """Base of every error that warm-up raises. Errors of the runtime are passed on."""


class ConfigError(WarmupError, ValueError):
    """A setting or an argument is wrong, or device memory does not suffice for the settings.

    ``field`` names the setting or argument, where it is a single one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidAnswer(WarmupError, ValueError):
    """A callable of the host returned something unusable: free memory, seconds or an order."""
