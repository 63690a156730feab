"""The temperature of a simulated board, as a sensor sees it."""

from __future__ import annotations

import random

from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.scheduler.telemetry import Reading, TemperatureSource
from trencadis.scheduler.thermal import Board, HeatModel

_NOISE_C = 0.05
_NOISE_W = 0.5
"""Of the sensors, standard deviations. Without any, an idle board would look like a frozen one."""


class SimulatedHeat(TemperatureSource):
    """Follows a clock; ``read`` adds a sensor's noise, which depends on ``seed`` alone."""

    def __init__(self, board: Board, clock: SimulatedClock, ambient_c: float, seed: int) -> None:
        self.model = HeatModel(board, ambient_c)
        self.hottest_c = self.model.chip_c
        self.joules = 0.0
        self._clock = clock
        self._since_s = clock()
        self._noise = random.Random(seed)

    @property
    def name(self) -> str:
        return "simulated"

    def follow(self, num_running: int) -> None:
        """So many sequences have been running since the last call."""
        now_s = self._clock()
        seconds, self._since_s = now_s - self._since_s, now_s
        self.model.step(seconds, num_running)
        self.joules += self.model.power_w * seconds
        self.hottest_c = max(self.hottest_c, self.model.chip_c)

    def reset(self) -> None:
        """Forget what has been drawn and how hot it was until now."""
        self.hottest_c, self.joules = self.model.chip_c, 0.0

    def read(self) -> list[Reading]:
        return [
            Reading(
                device=0,
                temperature_c=self.model.chip_c + self._noise.gauss(0.0, _NOISE_C),
                power_w=self.model.power_w + self._noise.gauss(0.0, _NOISE_W),
            )
        ]
