"""Continuous batching for LLM serving: who runs in the next step."""

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.errors import (
    ConfigError,
    DuplicateRequest,
    QueueFull,
    SchedulerError,
    StepOrderError,
    UnservableRequest,
)
from trencadis.scheduler.output import ScheduledSequence, SchedulerOutput, SequenceUpdate
from trencadis.scheduler.request import FinishReason, Request, Sequence, SequenceStatus
from trencadis.scheduler.scheduler import Scheduler

__all__ = [
    "ConfigError",
    "DuplicateRequest",
    "FinishReason",
    "QueueFull",
    "Request",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerOutput",
    "Sequence",
    "SequenceStatus",
    "SequenceUpdate",
    "StepOrderError",
    "UnservableRequest",
]
