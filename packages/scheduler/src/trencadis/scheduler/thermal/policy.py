"""What a thermal policy is: it caps the running sequences and names who goes when there are more.

The interface is that of seed 003, section 6. A policy sees readings and a view of the scheduler;
it never touches queues or blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import SequenceGroup


class SchedulerView(Protocol):
    """What a policy may ask of the scheduler that it serves."""

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in force; ``max_num_seqs`` follows the operator's control events."""

    @property
    def num_running_seqs(self) -> int:
        """Running sequences."""

    @property
    def now_s(self) -> float:
        """Seconds since the scheduler was made; never runs backwards."""


class ThermalState(Protocol):
    """The telemetry that a step acts on; `trencadis.scheduler.telemetry` has one.

    ``hottest_c`` is None while nothing has been read yet; ``may_raise_cap`` is False while a
    sensor is stale or failing. ``power_w`` is the sum over the devices, None if not measured.
    """

    @property
    def hottest_c(self) -> float | None: ...

    @property
    def may_raise_cap(self) -> bool: ...

    @property
    def power_w(self) -> float | None: ...


class SchedulerThermalPolicy(ABC):
    """Decides how many sequences may run, and which of them are evicted.

    A policy that raises is taken out of service with an alert; see `ThermalGuard`.
    """

    @abstractmethod
    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        """The cap on running sequences, at most ``scheduler.scheduler_config.max_num_seqs``."""

    @abstractmethod
    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        """Groups to evict, with ``num_to_evict`` sequences between them."""

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:  # noqa: B027  optional
        """Called in every step with the hottest device's temperature, degrees C, as device 0."""

    def on_power_reading(self, watts: float) -> None:  # noqa: B027  optional
        """Called in every step in which all devices' power is known, with the sum in watts."""

    def retarget(self, target_temp_c: float) -> bool:
        """Take a new target in degrees C; False from a policy that has none."""
        del target_temp_c
        return False
