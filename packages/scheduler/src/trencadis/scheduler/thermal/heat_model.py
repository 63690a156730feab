"""A lumped-capacitance thermal model of a board, for tests and for the simulated device.

Two RC stages: the chip heats its heat sink, and the sink heats the air. Units: temperatures in
degrees C, thermal resistances in K/W, heat capacities in J/K, power in W.
"""

from __future__ import annotations

import math

import attrs

FULL_DECODE_SEQS = 128
"""Sequences of a decode pass that draws the most. An assumption: the source gives the range."""


@attrs.frozen(kw_only=True)
class Board:
    """Power and cooling of one accelerator board.

    ``idle_w``: power with nothing running. ``sequence_w``: additional power of each running decode
    sequence, where prefill is not modelled. ``first_decode_w``, ``decode_w``: power during a
    decode pass of a single sequence, and of `FULL_DECODE_SEQS` or more. ``limit_w``: power limit.
    ``chip_k_per_w``: resistance from chip to sink.
    ``sink_k_per_w``: resistance from sink to air at full fan speed. ``max_c``: TjMax, which a
    policy must not exceed.
    """

    name: str
    idle_w: float
    limit_w: float
    sequence_w: float
    first_decode_w: float
    decode_w: float
    chip_k_per_w: float
    chip_j_per_k: float
    sink_k_per_w: float
    sink_j_per_k: float
    max_c: float

    def decode_pass_w(self, num_sequences: int) -> float:
        """Watts during a decode pass: it is bound by memory, whatever the number of sequences."""
        share = min(1.0, num_sequences / FULL_DECODE_SEQS)
        return self.first_decode_w + share * (self.decode_w - self.first_decode_w)

    def prefill_pass_w(self, compute_share: float) -> float:
        """Watts during a prefill pass, of which ``compute_share`` is bound by compute, 0 to 1.

        At 1 it draws the power limit: the figures of the decode pass are bound by memory.
        """
        return self.decode_w + compute_share * (self.limit_w - self.decode_w)


# Limit: 700 W, as commonly given for SXM5 (data sheet not checked). Watts per sequence:
# seed 003. Idle power and resistances are chosen so that full power in air of 35 degrees
# settles at 78 degrees. Heat capacities: 0.12 kg and 1.1 kg of copper (385 J/kg K).
_H100 = Board(
    name="h100",
    idle_w=110.0,
    limit_w=700.0,
    sequence_w=3.2,
    first_decode_w=137.0,
    decode_w=300.0,
    chip_k_per_w=0.022,
    chip_j_per_k=46.0,
    sink_k_per_w=0.040,
    sink_j_per_k=420.0,
    max_c=90.0,
)

BOARDS = {
    board.name: board
    for board in (
        _H100,
        # Limit: 700 W (mlcommons/inference_results_v4.1, closed/NVIDIA, H200-SXM-141GBx8).
        # Decode passes: 137 to 300 W (Ma et al., arXiv 2605.11999, abstract). The other values are
        # those of the H100, which has the same chip and is assumed to decode with the same power.
        attrs.evolve(_H100, name="h200"),
        # Limit: OAM, 600 W (Kaplan, Hot Chips 2024, table). The other values as above, with the
        # larger sink of an air-cooled OAM board, and watts per sequence and of decode passes in
        # proportion to the limit: no measurement by phase is published for Gaudi.
        Board(
            name="gaudi2",
            idle_w=100.0,
            limit_w=600.0,
            sequence_w=2.7,
            first_decode_w=117.0,
            decode_w=257.0,
            chip_k_per_w=0.024,
            chip_j_per_k=46.0,
            sink_k_per_w=0.047,
            sink_j_per_k=480.0,
            max_c=90.0,
        ),
        # Limit: Intel Gaudi 3 (Kaplan, Hot Chips 2024), OAM, 900 W with air.
        Board(
            name="gaudi3",
            idle_w=150.0,
            limit_w=900.0,
            sequence_w=4.1,
            first_decode_w=176.0,
            decode_w=386.0,
            chip_k_per_w=0.017,
            chip_j_per_k=90.0,
            sink_k_per_w=0.031,
            sink_j_per_k=700.0,
            max_c=90.0,
        ),
    )
}


class HeatModel:
    """The temperatures of one board over time.

    ``ambient_c`` and ``fan`` (1: all fans; 0.5: half of the air flow) may be set at any time. Hot
    neighbours are modelled as warmer air. The resistance of the sink scales with the air flow to
    the power of -0.8, as for turbulent flow along plates.
    """

    def __init__(self, board: Board, ambient_c: float = 30.0, fan: float = 1.0) -> None:
        self.board = board
        self.ambient_c = ambient_c
        self.fan = fan
        self.chip_c = self.sink_c = ambient_c
        self.power_w = board.idle_w
        self.settle(0)

    def settle(self, num_running: int) -> None:
        """Set the steady state of ``num_running`` sequences."""
        self.power_w = self._power(num_running)
        self.sink_c = self.ambient_c + self.power_w * self._sink_k_per_w()
        self.chip_c = self.sink_c + self.power_w * self.board.chip_k_per_w

    def step(self, seconds: float, num_running: int) -> float:
        """Advance the model by ``seconds``. Returns the temperature of the chip, degrees C."""
        return self.advance(seconds, self._power(num_running))

    def advance(self, seconds: float, watts: float) -> float:
        """`step` with the power itself, at most the board's limit."""
        board = self.board
        self.power_w = min(watts, board.limit_w)
        # Well below the smaller time constant, so that the explicit Euler steps are stable.
        shortest_s = board.chip_k_per_w * board.chip_j_per_k / 5
        parts = max(1, math.ceil(seconds / shortest_s))
        for _ in range(parts):
            to_sink_w = (self.chip_c - self.sink_c) / board.chip_k_per_w
            to_air_w = (self.sink_c - self.ambient_c) / self._sink_k_per_w()
            self.chip_c += seconds / parts * (self.power_w - to_sink_w) / board.chip_j_per_k
            self.sink_c += seconds / parts * (to_sink_w - to_air_w) / board.sink_j_per_k
        return self.chip_c

    def _power(self, num_running: int) -> float:
        return min(self.board.limit_w, self.board.idle_w + num_running * self.board.sequence_w)

    def _sink_k_per_w(self) -> float:
        return float(self.board.sink_k_per_w * max(self.fan, 0.05) ** -0.8)
