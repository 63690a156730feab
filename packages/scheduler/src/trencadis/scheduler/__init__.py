"""Continuous batching for LLM serving: which sequences run in the next step.

Thermal policies are in `trencadis.scheduler.thermal`, temperature sources in
`trencadis.scheduler.telemetry`.
"""

from typing import TYPE_CHECKING

from trencadis.scheduler.batch_limiter import BatchLimiter, BatchLimits
from trencadis.scheduler.beams import Candidate
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.control import BatchControl, BatchControlResult
from trencadis.scheduler.errors import (
    CannotCopy,
    ConfigError,
    ControlError,
    DuplicateRequest,
    HostError,
    IllegalTransition,
    InvalidResults,
    QueueFull,
    SchedulerError,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.group import Sequence, SequenceGroup, SequenceStatus
from trencadis.scheduler.output import (
    PENDING_TOKEN,
    FailedRequest,
    ScheduledSequence,
    SchedulerOutput,
    SequenceUpdate,
)
from trencadis.scheduler.preemption_costs import PreemptionCosts, StepTiming
from trencadis.scheduler.request import BeamSearch, FinishReason, Request
from trencadis.scheduler.running_limit import BatchHost
from trencadis.scheduler.scheduler import Scheduler
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.victims import Victim

__all__ = [
    "PENDING_TOKEN",
    "BatchControl",
    "BatchControlResult",
    "BatchHost",
    "BatchLimiter",
    "BatchLimits",
    "BeamSearch",
    "Candidate",
    "CannotCopy",
    "ConfigError",
    "ControlError",
    "DuplicateRequest",
    "FailedRequest",
    "FinishReason",
    "HostError",
    "IllegalTransition",
    "InvalidResults",
    "PreemptionCosts",
    "QueueFull",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerOutput",
    "Sequence",
    "SequenceGroup",
    "SequenceStatus",
    "SequenceUpdate",
    "StepOrderError",
    "StepTiming",
    "ThermalGuard",
    "UnservableRequest",
    "Victim",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Looks the version up on first use: ``importlib.metadata`` takes 30 ms to import."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415

            return version("trencadis-scheduler")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
