"""What a thermal policy reads of a scheduler, also after the engine has made a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trencadis.scheduler.thermal.policy import SchedulerView


class ContinuedView:
    """Lets time and totals go on where those of earlier schedulers ended.

    A policy outlives a scheduler: for another model, or after a sleep, an engine makes a new one,
    whose clock and totals begin at 0, on a device that is as hot as before. The time between two
    schedulers does not count.
    """

    def __init__(self) -> None:
        self._before_s = self._last_s = 0.0
        self._before_tokens = self._last_tokens = 0
        self._scheduler: Any = None

    def of(self, scheduler: SchedulerView) -> SchedulerView:
        """This view of ``scheduler``; a step back of its clock or its total means a new one."""
        now_s, num_tokens = scheduler.now_s, scheduler.num_prefill_tokens
        if now_s < self._last_s or num_tokens < self._last_tokens:
            self._before_s += self._last_s
            self._before_tokens += self._last_tokens
        self._last_s, self._last_tokens = now_s, num_tokens
        self._scheduler = scheduler
        is_first = not (self._before_s or self._before_tokens)
        return scheduler if is_first else cast("SchedulerView", self)

    @property
    def now_s(self) -> float:
        """Seconds that schedulers have run."""
        return self._before_s + self._last_s

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prefill chunks that schedulers have scheduled."""
        return self._before_tokens + self._last_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
