"""The scheduler that schedules a step ahead."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """vLLM's."""
