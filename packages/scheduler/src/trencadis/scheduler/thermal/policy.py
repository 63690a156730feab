"""The interface of a thermal policy: it limits sequences and prefill, and selects victims.

The interface is that of seed 003, section 6. A policy sees readings and a view of the scheduler. It
never changes queues or blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.thermal.victims import Victim

GROUP_DEVICE = -1
"""Index of the hottest device of a group if that is none of this rank's own devices."""


class SchedulerView(Protocol):
    """What a policy may read from its scheduler."""

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The settings in force; ``max_num_seqs`` follows the administrator's control requests."""

    @property
    def num_running_seqs(self) -> int:
        """Running sequences."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prefill chunks that were scheduled since the scheduler was made."""

    @property
    def longest_wait_s(self) -> float:
        """Seconds since the oldest request without a token came; 0 if none waits for its first."""

    @property
    def now_s(self) -> float:
        """Seconds since the scheduler was made; never runs backwards."""


class ThermalState(Protocol):
    """The telemetry of one step, such as a `TemperatureState` of `trencadis.scheduler.telemetry`.

    ``hottest_c``: the temperature of the hottest device, degrees C; None before the first reading.
    ``temperatures_c``: the temperature of each device by its index, degrees C; empty if only the
    hottest is known.
    ``may_raise_cap``: False while a sensor is stale or failed. ``power_w``: the power of all
    devices together, watts; None if it is not measured.
    """

    @property
    def hottest_c(self) -> float | None: ...

    @property
    def temperatures_c(self) -> Mapping[int, float]: ...

    @property
    def may_raise_cap(self) -> bool: ...

    @property
    def power_w(self) -> float | None: ...


class SchedulerThermalPolicy(ABC):
    """Decides how many sequences may run, which groups are evicted, and how much is prefilled.

    If a policy raises, its last limit stays in force and it is asked again in the next step; see
    `ThermalGuard`.
    """

    @abstractmethod
    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        """The cap on running sequences, at most ``scheduler.scheduler_config.max_num_seqs``."""

    @abstractmethod
    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> Sequence[Victim]:
        """Groups to evict, which have ``num_to_evict`` or more sequences in total."""

    def get_max_prefill_tokens(self, scheduler: SchedulerView) -> int | None:
        """The limit of prefill tokens in a step; None, as here, for no limit.

        Called after `get_max_running_seqs`, in the same step.
        """
        del scheduler
        return None

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:  # noqa: B027  optional
        """Called in every step with the temperature of each device, degrees C, the hottest last.

        So a policy that keeps the last reading acts on the hottest device. ``gpu_idx`` is the index
        of the device; it is `GROUP_DEVICE` for a hotter device of another rank.
        """

    def on_power_reading(self, watts: float) -> None:  # noqa: B027  optional
        """Called in every step with the sum of all devices' power, watts, if it is known."""

    def retarget(self, target_temp_c: float) -> bool:
        """Set a new target temperature, degrees C. Returns False if the policy has no target.

        A control loop with that target then runs beside it.
        """
        del target_temp_c
        return False
