"""Time of a scheduler step, which does not depend on the number of waiting requests.

    export PYTHONPATH=packages/kvcache/src:packages/scheduler/src
    python benchmarks/scheduler_step.py [--width N]

256 sequences decode with blocks of 16 tokens, while 0 to 200,000 requests wait: of one sequence,
or with ``--width N`` of N sequences. With ``--width`` a control request has lowered the running
limit to N - 1 before, and N - 2 sequences decode: a step looks for groups that fit and finds none.

All loads are measured in turns, so that they share the machine's fast and slow phases. Figures are
medians over 400 steps. The 256 sequences have the same length, so every 16th step
allocates 256 blocks and publishes 256 to the prefix cache; this makes the mean differ from the
median. vLLM 0.32 takes 1.87 ms for schedule and 0.79 ms for update with 2,000 requests waiting,
measured on two Zen 4 cores.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Collection, Mapping

import attrs

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import BatchControl, Request, Scheduler, SchedulerConfig, ThermalGuard
from trencadis.scheduler.thermal import NoThermalPolicy, ProportionalThermalPolicy

RUNNING = 256
STEPS = 400
STEPS_PER_TURN = 16
"""All sequences begin a block in the same step, every 16 steps."""


@attrs.define
class Cool:
    """A temperature reading that is always cool."""

    hottest_c: float | None = 45.0
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


@attrs.define
class Case:
    """A scheduler under load, and the seconds that its steps took."""

    scheduler: Scheduler
    running: int
    schedules: list[float] = attrs.field(factory=list)
    updates: list[float] = attrs.field(factory=list)

    @classmethod
    def of(cls, waiting: int, *, width: int = 1, thermal: ThermalGuard | None = None) -> Case:
        running = RUNNING if width == 1 else width - 2
        blocks = BlockManager(CacheConfig(num_blocks=20_000, block_size=16))
        config = SchedulerConfig(
            max_num_seqs=max(running, width),
            max_num_batched_tokens=8192,
            max_model_len=8192,
            max_waiting=waiting + running,
        )
        scheduler = Scheduler(config, blocks, thermal=thermal)
        if width > 1:
            scheduler.control(BatchControl(max_num_seqs=width - 1))
        for i in range(running + waiting):
            prompt = (i, *range(63))
            n = 1 if i < running else width
            scheduler.add(
                Request(request_id=f"r{i}", prompt_token_ids=prompt, max_tokens=2000, n=n)
            )
        return cls(scheduler, running)

    def step(self) -> None:
        start = time.perf_counter()
        output = self.scheduler.schedule()
        middle = time.perf_counter()
        sampled = {item.seq_id: 5 for item in (*output.prompts, *output.decodes) if item.samples}
        resumed = time.perf_counter()
        self.scheduler.update(output, sampled)
        end = time.perf_counter()
        if len(output.decodes) == self.running:
            self.schedules.append(middle - start)
            self.updates.append(end - resumed)

    def seconds(self) -> tuple[float, float, float, float]:
        """The medians of schedule and of update, the mean and the p99 of their sum."""
        sums = sorted(a + b for a, b in zip(self.schedules, self.updates, strict=True))
        return (
            statistics.median(self.schedules),
            statistics.median(self.updates),
            statistics.mean(sums),
            sums[int(0.99 * len(sums))],
        )


def run_in_turns(cases: Collection[Case]) -> None:
    """Step all cases, a few steps of each in turn: then a slower clock slows all of them."""
    gc.collect()
    gc.freeze()
    while any(len(case.schedules) < STEPS for case in cases):
        for case in cases:
            for _ in range(STEPS_PER_TURN):
                case.step()


def show(name: str, *seconds: float) -> None:
    print(f"{name:36}", *(f"{value * 1e3:6.3f} ms" for value in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--width", type=int, default=1, help="Sequences of each waiting request: 1, or 3 and more."
    )
    width = parser.parse_args().width
    cases = {
        f"{waiting:,} waiting": Case.of(waiting, width=width)
        for waiting in (0, 200, 2_000, 20_000, 200_000)
    }
    if width == 1:
        policies = {"no-op": NoThermalPolicy(), "proportional, idle": ProportionalThermalPolicy()}
        for name, policy in policies.items():
            guard = ThermalGuard(policy, Cool)
            cases[f"2,000 waiting, {name}"] = Case.of(2_000, thermal=guard)
    run_in_turns(cases.values())
    print(" " * 37 + "schedule  update    mean sum  p99 of it")
    for name, case in cases.items():
        show(name, *case.seconds())


if __name__ == "__main__":
    main()
