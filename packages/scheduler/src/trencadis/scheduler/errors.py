"""The errors that this package raises on purpose."""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of every error that the scheduler raises on purpose."""


class ConfigError(SchedulerError, ValueError):
    """A scheduler setting is out of range or contradicts another."""


class UnservableRequest(SchedulerError, ValueError):
    """A request that could never run: empty, or longer than the model or the cache allows."""


class DuplicateRequest(SchedulerError, ValueError):
    """A request id that is already waiting or running."""


class QueueFull(SchedulerError):
    """The queue of waiting requests is at its bound: try again later."""


class StepOrderError(SchedulerError):
    """``schedule()`` and ``update()`` were not called in turn, or with each other's values."""


class IllegalTransition(SchedulerError):
    """A group was to change its status along an arrow that the state diagram does not have."""


class ControlError(SchedulerError):
    """A control event asks for what this scheduler cannot do."""
