"""The errors that this package raises on purpose, each with what the caller can do about it."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting is out of range, or two settings contradict each other.

    ``field`` names the setting, or is None where no single setting is at fault.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(EngineError):
    """A checkpoint is missing, incomplete, or of an architecture this engine cannot serve."""


class DeviceError(ConfigError):
    """A device or its driver is missing; the message says what to install."""


class GraphError(EngineError, ValueError):
    """A graph was replayed on inputs that it was not recorded for, or after its release."""


class InvalidRequest(EngineError, ValueError):
    """A request cannot be served as asked.

    ``field`` names the offending sampling parameter or input (``"max_tokens"``, ``"prompt"``),
    or is None where no single field is at fault.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineOverloaded(EngineError):
    """The queue of waiting requests is full: try again later, or raise ``max_waiting``."""


class RequestFailed(EngineError):
    """An internal error ended this request, and no other. The log has the traceback."""


class BucketMiss(EngineError):
    """A batch needs a shape that no bucket was warmed up for, and the engine refuses to compile it.

    The message names the shape and the setting.
    """


class EngineDead(EngineError):
    """The engine core stopped; no request can be served until the process is restarted."""


class EngineRestarting(EngineDead):
    """The engine core died and is being restarted: requests are lost, send them again later."""


class EngineUnresponsive(EngineError):
    """The engine core lives and has sent nothing for longer than ``hang_timeout``."""
