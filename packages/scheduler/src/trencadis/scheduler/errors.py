"""The errors of this package."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of the errors of this package."""


class ConfigError(SchedulerError, ValueError):
    """A setting is out of range or contradicts another setting."""


class UnservableRequest(SchedulerError, ValueError):
    """A request that can never run: invalid, or too large for the model or the KV cache."""


class DuplicateRequest(SchedulerError, ValueError):
    """A request id that is already in the scheduler."""


class QueueFull(SchedulerError):
    """The waiting queue has reached ``max_waiting`` requests: try again later."""


class StepOrderError(SchedulerError):
    """``schedule()`` and ``update()`` did not alternate."""


class InvalidResults(SchedulerError, ValueError):
    """``update()`` got results that are missing or invalid; it can be called again."""


class IllegalTransition(SchedulerError):
    """A status change that the state diagram of sequence groups does not have."""


class ControlError(SchedulerError, ValueError):
    """An order that this scheduler cannot carry out. ``field`` names the field of the order."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
