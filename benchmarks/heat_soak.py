"""Heat soak: how many tokens and how much latency does each thermal policy cost?

    python benchmarks/heat_soak.py [--devices h200 gaudi3] [--policies none ...] [--plot DIRECTORY]
    python benchmarks/heat_soak.py --search     # minutes: finds the settings

The simulator serves the Azure conversation trace of 2023 (`benchmarks/data`) with Llama 3.1 70B in
FP8 on one accelerator while something makes it hot: the air gets warmer in steps, half of the fans
fail, or the exhaust of a neighbour reaches it. Each policy serves the same ten minutes.

The events are those of `benchmarks/thermal.py`, whose queue never ends and whose power does not
tell prefill from decode. Here requests come as in the trace, so a policy that only delays loses
nothing, and the load is what the board just serves without a limit.

Policies are compared at equal peak temperature: `SETTINGS` has the highest target, or budget, of
each that keeps the hottest chip at or below `PEAK_C`. Power by phase: 137 to 300 W for decode on an
H200 (Ma et al., arXiv 2605.11999); prefill draws up to the board's limit where it is bound by
compute (`heat_model.Board`). Tokens are those generated within the ten minutes; requests that wait
at their end count with their wait so far in TTFT.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.engine.simulated import (
    ModelShape,
    Simulation,
    SimulationConfig,
    Workload,
    find_hardware,
)

SECONDS = 600.0
PEAK_C = 84.0
"""The highest temperature of a chip that a policy may reach; TjMax is 90."""

DWELL_S = 5.0
"""The dwell time of every policy, its default."""

RATE_SCALE = {"h200": 0.65, "gaudi3": 0.5}
"""Arrivals relative to the trace's 5.5 requests a second: about the most at which the p99 of TTFT
stays below 4 s without a limit."""

DATA = Path(__file__).parent / "data" / "azure_2023.npz"

LLAMA_70B = ModelShape(
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    tied=False,
    dtype_bytes=2,
    max_position_embeddings=131072,
)

Air = Callable[[float], tuple[float, float]]
"""From the time in seconds to the air temperature in degrees C and the share of the air flow."""


def warm_air(at_s: float) -> tuple[float, float]:
    return 32.0 + 4.0 * min(5, int(at_s // 80)), 1.0


def fan_failure(at_s: float) -> tuple[float, float]:
    return 32.0, 0.5 if 120 <= at_s < 480 else 1.0


def hot_neighbour(at_s: float) -> tuple[float, float]:
    return 32.0 + (16.0 if 120 <= at_s < 480 else 0.0), 1.0


SCENARIOS: Mapping[str, Air] = {
    "warm air": warm_air,
    "fan failure": fan_failure,
    "hot neighbour": hot_neighbour,
}

TARGETS_C = tuple(83.5 - 0.5 * i for i in range(36))
"""Targets that are tried, the highest first."""

BUDGET_SHARES = tuple(0.98 - 0.02 * i for i in range(32))
"""Budgets that are tried, as shares of the board's limit, the highest first."""

SETTINGS: dict[tuple[str, str, str], float] = {
    ("h200", "warm air", "proportional"): 75.5,
    ("h200", "warm air", "power"): 600.0,
    ("h200", "warm air", "two_phase"): 79.5,
    ("h200", "fan failure", "proportional"): 78.0,
    ("h200", "fan failure", "power"): 665.0,
    ("h200", "fan failure", "two_phase"): 80.5,
    ("h200", "hot neighbour", "proportional"): 77.5,
    ("h200", "hot neighbour", "power"): 646.0,
    ("h200", "hot neighbour", "two_phase"): 79.0,
    ("gaudi3", "warm air", "proportional"): 76.5,
    ("gaudi3", "warm air", "power"): 802.0,
    ("gaudi3", "warm air", "two_phase"): 80.0,
    ("gaudi3", "fan failure", "proportional"): 82.0,
    ("gaudi3", "fan failure", "power"): 840.0,
    ("gaudi3", "fan failure", "two_phase"): 82.0,
    ("gaudi3", "hot neighbour", "proportional"): 80.0,
    ("gaudi3", "hot neighbour", "power"): 840.0,
    ("gaudi3", "hot neighbour", "two_phase"): 81.0,
}
"""The highest target or budget of each policy that keeps the chip at or below `PEAK_C`, as
``--search`` finds it."""


@attrs.define
class Run:
    """One policy in one scenario. Latencies in seconds, temperatures in degrees C."""

    policy: str
    setting: float | None
    tokens: int
    hottest_c: float
    ttft_p99_s: float
    itl_p99_s: float
    preemptions: int
    reversals: int
    """The most reversals of a limit's direction in any `DWELL_S` seconds."""
    at_s: list[float] = attrs.field(factory=list, repr=False)
    chip_c: list[float] = attrs.field(factory=list, repr=False)
    power_w: list[float] = attrs.field(factory=list, repr=False)
    running: list[int] = attrs.field(factory=list, repr=False)
    prefill_limit: list[int] = attrs.field(factory=list, repr=False)


def workload(seconds: float, rate_scale: float) -> Workload:
    """The conversations of the trace, as many as arrive within ``seconds``."""
    with np.load(DATA) as arrays:
        arrivals = arrays["conv_arrivals_ms"] / 1000 / rate_scale
        count = int(np.searchsorted(arrivals, seconds))
        prompts = arrays["conv_lengths"][:count].astype(np.int64)
        outputs = np.maximum(arrays["conv_outputs"][:count].astype(np.int64), 1)
    return Workload(arrivals[:count], np.minimum(prompts, 6000), np.minimum(outputs, 1000))


def serve(
    device: str,
    air: Air,
    policy: str,
    options: Mapping[str, Any],
    requests: Workload,
    seconds: float = SECONDS,
) -> Run:
    """Serve ``requests`` for ``seconds`` under a policy while ``air`` cools the board."""
    config = SimulationConfig(
        device=device,
        quantization="fp8",
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        max_model_len=7168,
        thermal_policy=policy,
        thermal_options=options,
        ambient_c=air(0.0)[0],
    )
    simulation = Simulation(config, LLAMA_70B, requests)
    simulation.warm_up()
    watch = _Watch(simulation, air)
    for _ in watch.steps(simulation.serve(), seconds):
        pass
    records = simulation.records
    between = np.asarray(records.between_tokens_s)
    return Run(
        policy,
        next(iter(options.values()), None),
        records.generated_tokens,
        simulation.heat.hottest_c,
        float(np.percentile(records.waits_s(simulation.clock()), 99)),
        float(np.percentile(between, 99)),
        simulation.scheduler.num_preemptions,
        max(worst_reversals(watch.at_s, limits) for limits in (watch.limits, watch.prefill_limits)),
        [sample.at_s for sample in records.samples],
        [sample.temperature_c for sample in records.samples],
        [sample.power_w for sample in records.samples],
        [sample.running for sample in records.samples],
        [sample.prefill_limit for sample in records.samples],
    )


@attrs.define
class _Watch:
    """Changes the air while a simulation runs, and records the limits of each step."""

    simulation: Simulation
    air: Air
    at_s: list[float] = attrs.field(factory=list)
    limits: list[int] = attrs.field(factory=list)
    prefill_limits: list[int] = attrs.field(factory=list)

    def steps(self, serving: Iterator[None], seconds: float) -> Iterator[None]:
        simulation, schedule = self.simulation, self.simulation.scheduler.schedule

        def watched_schedule() -> Any:
            at_s = simulation.clock() - simulation.started_s
            simulation.heat.model.ambient_c, simulation.heat.model.fan = self.air(at_s)
            output = schedule()
            self.at_s.append(at_s)
            self.limits.append(output.max_running_seqs)
            self.prefill_limits.append(output.max_prefill_tokens)
            return output

        simulation.scheduler.schedule = watched_schedule  # type: ignore[method-assign]
        for _ in serving:
            if simulation.clock() - simulation.started_s >= seconds:
                return
            yield


def worst_reversals(at_s: Sequence[float], limits: Sequence[int], window_s: float = DWELL_S) -> int:
    """The most reversals of the direction of ``limits`` in any window of that length."""
    times, direction = [], 0
    for at, (before, after) in zip(at_s[1:], itertools.pairwise(limits), strict=True):
        now = (after > before) - (after < before)
        if now and direction and now != direction:
            times.append(at)
        direction = now or direction
    return max((sum(t <= u < t + window_s for u in times) for t in times), default=0)


def options_of(policy: str, setting: float | None) -> dict[str, Any]:
    if setting is None:
        return {}
    return {"budget_w" if policy == "power" else "target_temp_c": setting}


def found_setting(device: str, scenario: str, policy: str, requests: Workload) -> float:
    """The least strict of the tried settings under which the chip stays at or below `PEAK_C`.

    By bisection: a stricter setting is assumed to be cooler.
    """
    limit_w = find_hardware(device).board.limit_w
    budgets = [round(share * limit_w) for share in BUDGET_SHARES]
    tried: Sequence[float] = budgets if policy == "power" else TARGETS_C
    low, high = 0, len(tried) - 1
    while low < high:
        middle = (low + high) // 2
        options = options_of(policy, tried[middle])
        run = serve(device, SCENARIOS[scenario], policy, options, requests)
        low, high = (low, middle) if run.hottest_c <= PEAK_C else (middle + 1, high)
    return tried[low]


def compare(device: str, scenario: str, policies: Sequence[str], *, search: bool) -> list[Run]:
    """A run of each policy at equal peak temperature; of ``none``, whatever it reaches."""
    requests = workload(SECONDS, RATE_SCALE[device])
    runs = []
    for policy in policies:
        setting = None
        if policy != "none":
            if search:
                setting = found_setting(device, scenario, policy, requests)
            else:
                setting = SETTINGS[device, scenario, policy]
        options = options_of(policy, setting)
        runs.append(serve(device, SCENARIOS[scenario], policy, options, requests))
    return runs


def main() -> None:
    options = _options()
    began = time.process_time()
    print("| board, event | policy | setting | peak | tokens | TTFT p99 | ITL p99 | ", end="")
    print("preemptions | reversals in 5 s |\n|---|---|---|---|---|---|---|---|---|")
    for device, scenario in itertools.product(options.devices, options.scenarios):
        runs = compare(device, scenario, options.policies, search=options.search)
        for run in runs:
            unit = "W" if run.policy == "power" else "°C"
            setting = "" if run.setting is None else f"{run.setting:g} {unit}"
            print(
                f"| {device}, {scenario} | {run.policy} | {setting} | {run.hottest_c:.1f} °C "
                f"| {run.tokens / runs[0].tokens:.1%} | {run.ttft_p99_s:.1f} s "
                f"| {run.itl_p99_s * 1000:.0f} ms | {run.preemptions} | {run.reversals} |",
                flush=True,
            )
        if options.plot is not None:
            plot(device, scenario, runs, options.plot)
    print(f"\n{time.process_time() - began:.0f} s of CPU")


def plot(device: str, scenario: str, runs: Sequence[Run], directory: Path) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415  only for plots

    colours = {"none": "#bbbbbb", "proportional": "#e08a00", "power": "#6aa84f"}
    figure, axes = plt.subplots(3, 1, figsize=(8, 7), sharex=True)
    axes[0].axhline(PEAK_C, color="#888888", lw=1, ls=":")
    for run in runs:
        colour = colours.get(run.policy, "#0b5fa5")
        for axis, values in zip(axes, (run.chip_c, run.running, run.prefill_limit), strict=True):
            axis.plot(run.at_s, values, color=colour, lw=1, label=run.policy)
    for axis, label in zip(
        axes, ("hottest chip, °C", "running sequences", "prefill limit, tokens"), strict=True
    ):
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(f"{device}: {scenario}")
    axes[0].legend(loc="lower right", fontsize=8, frameon=False)
    axes[2].set_xlabel("seconds")
    figure.tight_layout()
    directory.mkdir(exist_ok=True)
    figure.savefig(directory / f"heat_soak_{device}_{scenario.replace(' ', '_')}.png", dpi=80)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="*", default=["h200", "gaudi3"], choices=RATE_SCALE)
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument(
        "--policies", nargs="*", default=["none", "proportional", "power", "two_phase"]
    )
    parser.add_argument("--search", action="store_true", help="find the settings of each policy")
    parser.add_argument("--plot", type=Path, help="write a drawing of each scenario here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
