"""Thermal soak: does the policy hold the temperature, and how much throughput does that cost?

    PYTHONPATH=packages/kvcache/src:packages/scheduler/src python benchmarks/thermal.py [--no-plots]

A real `Scheduler` serves an endless queue on a heat model of one board, or of eight boards that
heat each other. A step takes a second. Each event runs for 35 minutes, once without and once with
the proportional policy: normal operation, air that gets warmer in steps, a fan failure, and a hot
neighbour. Writes ``docs/scheduler/thermal_<board>_<event>.png`` and prints the table of
``docs/scheduler/thermal.md``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import Request, Scheduler, SchedulerConfig, ThermalGuard
from trencadis.scheduler.thermal import BOARDS, Board, HeatModel, ProportionalThermalPolicy

STEP_S = 1.0
SECONDS = 2100
SEQUENCES = 192
TARGET_C = 82.0
DWELL_S = 5.0
IMAGES = Path(__file__).parent.parent / "docs" / "scheduler"

Air = Callable[[float], tuple[float, float]]
"""From the time in seconds to the air temperature in degrees C and the share of the air flow."""


def normal(_: float) -> tuple[float, float]:
    return 32.0, 1.0


def warm_air(t: float) -> tuple[float, float]:
    return 32.0 + 4.0 * min(5, int(t // 240)), 1.0


def fan_failure(t: float) -> tuple[float, float]:
    return 32.0, 0.5 if 300 <= t < 1500 else 1.0


EVENTS: dict[str, Air] = {"normal": normal, "warm air": warm_air, "fan failure": fan_failure}
"""Events of one board. `run` adds "hot neighbour", which has eight boards."""


@attrs.define
class Reading:
    """The reading of a sensor, rounded to 1 degree as NVML and HLML do."""

    hottest_c: float
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


@attrs.define
class Trace:
    """One run: times in seconds, degrees C of the hottest chip, caps, running sequences."""

    at_s: list[float] = attrs.field(factory=list)
    chip_c: list[float] = attrs.field(factory=list)
    cap: list[int] = attrs.field(factory=list)
    running: list[int] = attrs.field(factory=list)
    preemptions: int = 0
    tokens: int = 0

    @property
    def hottest_c(self) -> float:
        return max(self.chip_c)

    def reversals(self) -> list[float]:
        """Times in seconds at which the cap began to rise after a fall, or fall after a rise."""
        reversals, direction = [], 0
        for at, (before, after) in zip(self.at_s[1:], itertools.pairwise(self.cap), strict=True):
            now = (after > before) - (after < before)
            if now and direction and now != direction:
                reversals.append(at)
            direction = now or direction
        return reversals

    def worst_reversals(self, window_s: float = DWELL_S) -> int:
        """The most reversals in any window of that length."""
        times = self.reversals()
        return max((sum(t <= u < t + window_s for u in times) for t in times), default=0)


def soak(
    models: list[HeatModel], air: Callable[[float, int], tuple[float, float]], on: bool
) -> Trace:
    """Serve for `SECONDS` with every board running the same batch, as tensor parallelism does."""
    now = 0.0
    reading = Reading(models[0].chip_c)
    policy = ProportionalThermalPolicy(target_temp_c=TARGET_C, dwell_s=DWELL_S)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=2048, max_model_len=2048),
        BlockManager(CacheConfig(num_blocks=8192, block_size=16, num_host_blocks=8192)),
        thermal=ThermalGuard(policy, lambda: reading) if on else None,
        clock=lambda: now,
    )
    trace, names, prompt = Trace(), itertools.count(), tuple(range(40))
    for step in range(int(SECONDS / STEP_S)):
        now = step * STEP_S
        while scheduler.num_waiting < 8:
            name = next(names)
            scheduler.add(
                Request(
                    request_id=f"r{name}",
                    prompt_token_ids=(name, *prompt),
                    max_tokens=20 + 37 * name % 60,
                )
            )
        output = scheduler.schedule()
        sampled = {item.seq_id: 1 for item in (*output.prompts, *output.decodes) if item.samples}
        trace.tokens += len(scheduler.update(output, sampled))
        for index, model in enumerate(models):
            model.ambient_c, model.fan = air(now, index)
            model.step(STEP_S, scheduler.num_running_seqs)
        hottest = max(model.chip_c for model in models)
        reading = Reading(float(round(hottest)))
        trace.at_s.append(now)
        trace.chip_c.append(hottest)
        trace.cap.append(output.max_running_seqs)
        trace.running.append(scheduler.num_running_seqs)
    trace.preemptions = scheduler.num_preemptions
    return trace


def run(board: Board, event: str, on: bool) -> Trace:
    """Run one board through one event, or eight boards next to a hot neighbour."""
    if event != "hot neighbour":
        model = HeatModel(board, *EVENTS[event](0.0))
        return soak([model], lambda t, _: EVENTS[event](t), on)
    models = [HeatModel(board, 32.0) for _ in range(8)]

    def air(t: float, index: int) -> tuple[float, float]:
        # Board 3 gets the warm exhaust of another machine for twenty minutes.
        return 32.0 + (16.0 if index == 3 and 300 <= t < 1500 else 0.0), 1.0

    return soak(models, air, on)


def plot(board: Board, event: str, off: Trace, on: Trace) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415  only for plots

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    above.axhline(board.max_c, color="#b00020", lw=1, ls="--")
    above.axhline(TARGET_C, color="#888888", lw=1, ls=":")
    above.text(5, board.max_c + 0.4, "TjMax", fontsize=8, color="#b00020")
    above.text(5, TARGET_C + 0.4, "target", fontsize=8, color="#666666")
    above.plot(off.at_s, off.chip_c, color="#bbbbbb", label="policy off")
    above.plot(on.at_s, on.chip_c, color="#0b5fa5", label="proportional policy")
    above.set_ylabel("hottest chip, °C")
    above.set_title(f"{board.name}: {event}")
    above.legend(loc="lower right", fontsize=8, frameon=False)
    below.plot(on.at_s, on.cap, color="#e08a00", lw=1, label="cap")
    below.plot(on.at_s, on.running, color="#0b5fa5", lw=0.8, label="running")
    below.set_ylim(0, SEQUENCES * 1.05)
    below.set_ylabel("sequences")
    below.set_xlabel("seconds")
    below.legend(loc="lower right", fontsize=8, frameon=False)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / f"thermal_{board.name}_{event.replace(' ', '_')}.png", dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Thermal soak of the proportional policy")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--boards", nargs="*", default=list(BOARDS))
    arguments = parser.parse_args()
    print("| board, event | off | on | TjMax | reversals in 5 s | preemptions | tokens |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.boards:
        for event in (*EVENTS, "hot neighbour"):
            board = BOARDS[name]
            off, on = run(board, event, False), run(board, event, True)
            print(
                f"| {name}, {event} | {off.hottest_c:.1f} °C | {on.hottest_c:.1f} °C "
                f"| {board.max_c:.0f} °C | {on.worst_reversals()} | {on.preemptions} "
                f"| {on.tokens / off.tokens:.0%} |"
            )
            if not arguments.no_plots:
                plot(board, event, off, on)


if __name__ == "__main__":
    main()
