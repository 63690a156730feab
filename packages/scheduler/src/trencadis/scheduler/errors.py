"""The errors of this package."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of the errors of this package."""


class CannotCopy(SchedulerError, TypeError):
    """A scheduler cannot be copied: two would schedule the same requests and blocks."""


class InvalidValue(SchedulerError, ValueError):
    """A wrong setting, argument or result. ``field`` names it, where it is a single one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(InvalidValue):
    """A setting is out of range or contradicts another setting."""


class UnservableRequest(InvalidValue):
    """A request that can never run: invalid, or too large for the model or the KV cache."""


class DuplicateRequest(SchedulerError, ValueError):
    """A request id that is already in the scheduler."""


class QueueFull(SchedulerError):
    """The waiting queue has reached ``max_waiting`` requests: try again later."""


class StepOrderError(SchedulerError):
    """``schedule()`` and ``update()`` did not alternate, or one of them is still running."""


class InvalidResults(InvalidValue):
    """``update()`` got results that are missing or invalid; it can be called again."""


class HostError(SchedulerError):
    """A host of a `BatchLimiter` does not do what its protocol says."""


class IllegalTransition(SchedulerError):
    """A status change that the state diagram of sequence groups does not have."""


class ControlError(InvalidValue):
    """An order that this scheduler cannot carry out."""
