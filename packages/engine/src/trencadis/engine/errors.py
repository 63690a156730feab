"""The errors that this package raises on purpose, each with what the caller can do about it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping


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


class CompileError(EngineError):
    """A program could not be compiled: the compiler failed, or the disk is full."""


class GraphError(EngineError, ValueError):
    """A graph was replayed on inputs that it was not recorded for, or after its release."""


class RankError(EngineError):
    """A process of tensor parallelism has ended, hangs, or computes something else than the others.

    All of them were ended, so the engine core cannot go on.
    """


class InvalidRequest(EngineError, ValueError):
    """A request cannot be served as asked.

    ``field`` names the offending sampling parameter or input (``"max_tokens"``, ``"prompt"``),
    or is None where no single field is at fault.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AdapterError(InvalidRequest):
    """An adapter cannot be loaded, unloaded or used. The message names its file or its name."""


class EngineOverloaded(EngineError):
    """The queue of waiting requests is full: try again later, or raise ``max_waiting``."""


class RequestFailed(EngineError):
    """An internal error ended this request, and no other. The log has the traceback."""


class ProcessUnresponsive(RequestFailed):
    """A process that checks or renders requests has not answered in time, and was ended.

    The next request starts another: send this one again later.
    """


class SlowConversation(EngineError):
    """A conversation takes longer than a quick attempt: render it with ``quick=False``."""


class BucketMiss(EngineError):
    """A batch needs a shape that no bucket was warmed up for, and the engine may not compile it.

    The message names the shape and the setting.
    """


class EngineDead(EngineError):
    """The engine core stopped; no request can be served until the process is restarted.

    ``is_refusal``: the core had stopped before the request came, so it was never accepted.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class EngineRestarting(EngineDead):
    """The engine core died and is being restarted: requests are lost, send them again later."""


class EngineUnresponsive(EngineError):
    """The engine core lives and has sent nothing for longer than ``hang_timeout``."""


class EngineSleeping(EngineError):
    """The engine sleeps: wake it up before requests are sent."""


class UnknownModelError(EngineError, LookupError):
    """No configured model has this alias. The message names those that there are."""


class ModelNotActiveError(EngineError):
    """A request is for a configured model that is not the active one: switch to it first."""


class SwitchInProgressError(EngineOverloaded):
    """Another switch of models is under way: try again when it has ended."""


class SwitchFailedError(EngineError):
    """A switch of models failed, and the previous model serves again, or will after a restart.

    ``step`` names the step that failed, ``active`` the alias of the model that serves. With the
    step ``wake`` it sleeps: its memory was taken meanwhile, or a wake-up failed. Wake it up later.
    """

    def __init__(self, message: str, step: str, active: str) -> None:
        super().__init__(message)
        self.step = step
        self.active = active


ENDING_ERRORS: Mapping[str, type[EngineError]] = {
    "internal_error": RequestFailed,
    "bucket_miss": BucketMiss,
}
"""The errors that end a request which was accepted, by their code, in the core's messages and in
the server's responses. Any other error is the first one."""


class _ShortRepr(reprlib.Repr):
    def repr_int(self, x: int, _: int) -> str:
        # Python does not write an integer of more than 4300 digits.
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxstring, _SHORT_REPR.maxother = 3, 200, 200


def shown(value: object) -> str:
    """A value as a message shows it: its repr, shortened. Never raises."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
