"""Routing by heat: eight boards in unequal air behind one router.

    python benchmarks/heat_routing.py [--seconds 400] [--rates 0.4 0.45 0.5]

The simulator serves the Azure conversation trace of 2023 (`benchmarks/data`) with Llama 3.1 70B in
FP8 on eight Gaudi 3, each with a server of its own under the policy `two_phase`. Each board gets
air of another temperature, as where the rear boards of a chassis get the air of those in front.
The same requests are sent in three ways:

- ``round robin``: to one server after the other;
- ``least queue``: to a server with the fewest waiting requests;
- ``queue and headroom``: to the server with the highest sum of llm-d's queue score and of
  `EngineStats.headroom`, as in `deploy/llm-d/endpoint-picker.yaml`.

Metrics are read every `SCRAPE_S`; among equals the router chooses at random. A rate of 1 is that
of the trace for each board. Tokens are those generated within the time; requests that wait at its
end count with their wait so far.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from heat_soak import LLAMA_70B, workload

from trencadis.engine import EngineStats, ThermalStats
from trencadis.engine.simulated import Simulation, SimulationConfig, Workload

AIR_C = (26.0, 30.0, 34.0, 38.0, 42.0, 46.0, 50.0, 54.0)
"""Temperature of the air of each board, degrees C."""

TARGET_C = 80.0
SCRAPE_S = 0.05
"""llm-d's least interval between two readings of the metrics (`pkg/epp/server/options.go`)."""

Scores = Callable[[Sequence[EngineStats]], list[float]]
"""How good each server is for the next request; higher is better."""


def queue_scores(servers: Sequence[EngineStats]) -> list[float]:
    """llm-d's ``queue-scorer``: 1 for the shortest queue, 0 for the longest."""
    queues = [stats.num_waiting_reqs for stats in servers]
    least, most = min(queues), max(queues)
    return [(most - queue) / (most - least) if most > least else 1.0 for queue in queues]


def queue_and_headroom(servers: Sequence[EngineStats]) -> list[float]:
    scored = zip(queue_scores(servers), servers, strict=True)
    return [score + stats.headroom for score, stats in scored]


ROUTERS: dict[str, Scores | None] = {
    "round robin": None,
    "least queue": queue_scores,
    "queue and headroom": queue_and_headroom,
}


@attrs.define
class Server:
    """A simulated board with its own air, and the limits of its last step."""

    simulation: Simulation
    max_running_seqs: int
    max_prefill_tokens: int

    @classmethod
    def in_air(cls, celsius: float, number: int, requests: Workload, seconds: float) -> Server:
        config = SimulationConfig(
            device="gaudi3",
            quantization="fp8",
            max_num_seqs=128,
            max_num_batched_tokens=4096,
            max_model_len=7168,
            thermal_policy="two_phase",
            thermal_options={"target_temp_c": TARGET_C},
            ambient_c=celsius,
            seed=number,
        )
        simulation = Simulation(config, LLAMA_70B, requests)
        simulation.warm_up()
        simulation.start(seconds)
        server = cls(simulation, config.max_num_seqs, config.max_num_batched_tokens)
        schedule = simulation.scheduler.schedule

        def watched() -> object:
            output = schedule()
            server.max_running_seqs = output.max_running_seqs
            server.max_prefill_tokens = output.max_prefill_tokens
            return output

        simulation.scheduler.schedule = watched  # type: ignore[method-assign,assignment]
        return server

    def run_until(self, at_s: float) -> None:
        for _ in self.simulation.serve_until(self.simulation.started_s + at_s):
            pass

    @property
    def stats(self) -> EngineStats:
        simulation, scheduler = self.simulation, self.simulation.scheduler
        return EngineStats(
            num_running_seqs=scheduler.num_running_seqs,
            num_waiting_reqs=scheduler.num_waiting,
            num_swapped_reqs=scheduler.num_swapped,
            num_preempted_reqs=scheduler.num_preempted,
            max_running_seqs=self.max_running_seqs,
            max_num_seqs=simulation.config.max_num_seqs,
            max_prefill_tokens=self.max_prefill_tokens,
            max_num_batched_tokens=simulation.config.max_num_batched_tokens,
            thermal=ThermalStats(
                hottest_c=simulation.reader.state().hottest_c, target_temp_c=TARGET_C
            ),
        )


def route(router: str, requests: Workload, seconds: float) -> list[Server]:
    """Serve all requests, each by the server that the router chooses when it arrives."""
    servers = [Server.in_air(air, n, requests, seconds) for n, air in enumerate(AIR_C)]
    scores, chance, scraped_s = ROUTERS[router], random.Random(0), -1.0
    known: list[float] = []
    for number, (arrival_s, request) in enumerate(requests.requests(LLAMA_70B.vocab_size, 0)):
        if scores is None:
            server = servers[number % len(servers)]
        else:
            if arrival_s - scraped_s >= SCRAPE_S:
                scraped_s = arrival_s
                for each in servers:
                    each.run_until(arrival_s)
                known = scores([each.stats for each in servers])
            best = max(known)
            server = chance.choice([s for s, n in zip(servers, known, strict=True) if n == best])
        server.run_until(arrival_s)
        server.simulation.accept(server.simulation.started_s + arrival_s, request)
    for server in servers:
        server.run_until(seconds)
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.4, 0.45, 0.5])
    options = parser.parse_args()
    print(
        "| rate | router | tokens/s | TTFT p50 | TTFT p99 | hottest chip | coolest | hot / cool |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for rate in options.rates:
        requests = workload(options.seconds, rate * len(AIR_C))
        for router in ROUTERS:
            boards = [server.simulation for server in route(router, requests, options.seconds)]
            waits = np.concatenate([board.records.waits_s(board.clock()) for board in boards])
            tokens = [board.records.generated_tokens for board in boards]
            peaks = [board.heat.hottest_c for board in boards]
            p50, p99 = np.percentile(waits, [50, 99])
            print(
                f"| {rate:g} | {router} | {sum(tokens) / options.seconds:,.0f} | {p50:.2f} s "
                f"| {p99:.1f} s | {max(peaks):.1f} °C | {min(peaks):.1f} °C "
                f"| {tokens[-1] / tokens[0]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
