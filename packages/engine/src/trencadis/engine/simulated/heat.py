"""The temperature and power sensors of a simulated board."""

from __future__ import annotations

import random

from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.scheduler.telemetry import Reading, TemperatureSource
from trencadis.scheduler.thermal import Board, HeatModel

_NOISE_C = 0.05
_NOISE_W = 0.5
"""Standard deviation of the sensor noise. Without noise, the reader would take the constant
readings of an idle board for a frozen sensor."""


class SimulatedHeat(TemperatureSource):
    """Integrates the heat model over simulated time. `read` adds noise from ``seed``."""

    def __init__(self, board: Board, clock: SimulatedClock, ambient_c: float, seed: int) -> None:
        self.model = HeatModel(board, ambient_c)
        self.hottest_c = self.model.chip_c
        self.joules = 0.0
        self._clock = clock
        self._since_s = clock()
        self._mean_w = self.model.power_w
        self._unread_joules = self._unread_s = 0.0
        self._noise = random.Random(seed)

    @property
    def name(self) -> str:
        return "simulated"

    def follow(self, busy_s: float, joules: float) -> None:
        """Advance the heat model to the clock's time.

        ``busy_s`` and ``joules``: seconds of forward passes since the last call, and their energy.
        The board idles during the others.
        """
        now_s = self._clock()
        seconds, self._since_s = now_s - self._since_s, now_s
        if seconds <= 0:
            return
        joules += max(0.0, seconds - busy_s) * self.model.board.idle_w
        self.model.advance(seconds, joules / seconds)
        self.joules += self.model.power_w * seconds
        self._unread_joules += self.model.power_w * seconds
        self._unread_s += seconds
        self.hottest_c = max(self.hottest_c, self.model.chip_c)

    def reset(self) -> None:
        """Restart the totals: energy and highest temperature."""
        self.hottest_c, self.joules = self.model.chip_c, 0.0

    def read(self) -> list[Reading]:
        """The temperature now, and the mean power since the last reading."""
        if self._unread_s > 0:
            self._mean_w = self._unread_joules / self._unread_s
            self._unread_joules = self._unread_s = 0.0
        return [
            Reading(
                device=0,
                temperature_c=self.model.chip_c + self._noise.gauss(0.0, _NOISE_C),
                power_w=self._mean_w + self._noise.gauss(0.0, _NOISE_W),
            )
        ]
