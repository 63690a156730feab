"""Prefill and decode apart: two simulated Gaudi 3, each serving all, as one, or each a phase.

    python benchmarks/prefill_apart.py [--seconds 400] [--rates 0.3 0.4 0.5]

The simulator serves the Azure conversation trace of 2023 (`benchmarks/data`) with Llama 3.1 70B in
FP8. A rate of 1 is the trace's 5.5 requests a second for each card.

- ``each all``: two servers; a request goes to the one with fewer requests.
- ``as one``: one server of two ranks, each with half of the heads and of the matrices.
- ``apart``: a request's first token is of one card; its KV cache then goes to the other, one
  request after the other over the 3 of 21 ports that join two cards, and its other tokens are
  computed there. The first one, which the second card has, too, takes it no time there.

``TPOT`` is, of each request, the mean time between its tokens, the transfer and the wait for the
second card in it. Tokens are those within the time; requests without a token
at its end count with their wait so far in TTFT. Steps have at most ``--budget`` tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import attrs
import numpy as np
from heat_soak import LLAMA_70B, workload

from trencadis.bucketing import Bucket
from trencadis.engine.simulated import Simulation, SimulationConfig, Workload
from trencadis.engine.simulated.cost_model import NOT_SHARED, Sharing
from trencadis.engine.simulated.records import Records
from trencadis.scheduler import Request
from trencadis.warmup import Phase

CARDS = 2


@attrs.define
class Times:
    """When a request arrived, and its first and its last token so far; seconds from the start."""

    arrived_s: float
    tokens: int = 0
    first_s: float = float("nan")
    last_s: float = float("nan")
    ended: bool = False


@attrs.define
class RequestRecords(Records):
    """Records that keep the times of each request, in the order in which they were accepted."""

    started_s: float = 0.0
    requests: dict[int, Times] = attrs.field(factory=dict)

    def accepted(self, seq_id: int, arrived_s: float, prompt: int, asked: int) -> None:
        super().accepted(seq_id, arrived_s, prompt, asked)
        self.requests[seq_id] = Times(arrived_s - self.started_s)

    def token(self, seq_id: int, now_s: float) -> None:
        super().token(seq_id, now_s)
        times = self.requests[seq_id]
        times.last_s = now_s - self.started_s
        times.first_s = times.last_s if not times.tokens else times.first_s
        times.tokens += 1

    def ended(self, seq_id: int, now_s: float) -> None:
        super().ended(seq_id, now_s)
        self.requests[seq_id].ended = True


def server(requests: Workload, seconds: float, budget: int, ranks: int = 1) -> Simulation:
    config = SimulationConfig(
        device="gaudi3",
        quantization="fp8",
        max_num_seqs=128,
        max_num_batched_tokens=budget,
        max_model_len=7168,
        tensor_parallel_size=ranks,
    )
    simulation = Simulation(config, LLAMA_70B, requests)
    simulation.warm_up()
    simulation.start(seconds)
    simulation.records = RequestRecords(started_s=simulation.started_s)
    return simulation


def accept(simulation: Simulation, at_s: float, request: Request) -> None:
    run_until(simulation, at_s)
    if not simulation.accept(simulation.started_s + at_s, request):
        raise RuntimeError(f"request {request.request_id} is not accepted")


def run_until(simulation: Simulation, at_s: float) -> None:
    for _ in simulation.serve_until(simulation.started_s + at_s):
        pass


def arrivals(requests: Workload) -> Iterator[tuple[float, Request]]:
    return requests.requests(LLAMA_70B.vocab_size, 0)


def times_of(simulation: Simulation) -> list[Times]:
    return list(simulation.records.requests.values())


def each_all(requests: Workload, seconds: float, budget: int) -> list[Times]:
    servers = [server(requests, seconds, budget) for _ in range(CARDS)]
    for at_s, request in arrivals(requests):
        for each in servers:
            run_until(each, at_s)
        least = min(
            servers, key=lambda each: each.scheduler.num_waiting + each.scheduler.num_running_seqs
        )
        accept(least, at_s, request)
    return _ended(servers, seconds)


def as_one(requests: Workload, seconds: float, budget: int) -> list[Times]:
    one = server(requests, seconds, budget, ranks=CARDS)
    for at_s, request in arrivals(requests):
        accept(one, at_s, request)
    return _ended([one], seconds)


def apart(requests: Workload, seconds: float, budget: int) -> list[Times]:
    first, second = (server(requests, seconds, budget) for _ in range(CARDS))
    forward = second.runtime.forward

    def received(phase: Phase, bucket: Bucket, sharing: Sharing = NOT_SHARED) -> float:
        return 0.0 if phase is Phase.PROMPT else forward(phase, bucket, sharing)

    second.runtime.forward = received  # type: ignore[method-assign]
    asked = list(arrivals(requests))
    for at_s, request in asked:
        accept(first, at_s, attrs.evolve(request, max_tokens=1))
    prefilled = _ended([first], seconds)
    hardware = first.hardware
    bytes_per_s = hardware.peer_bytes_per_s / hardware.num_wired_peers
    free_s, handed = 0.0, []
    goes_on = [
        number
        for number, (_, request) in enumerate(asked)
        if prefilled[number].ended and request.max_tokens != 1
    ]
    for number in sorted(goes_on, key=lambda number: prefilled[number].first_s):
        times, (_, request) = prefilled[number], asked[number]
        size = len(request.prompt_token_ids) * first.model.kv_bytes_per_token
        free_s = max(free_s, times.first_s) + size / bytes_per_s
        accept(second, free_s, request)
        handed.append(number)
    for number, then in zip(handed, _ended([second], seconds), strict=True):
        times = prefilled[number]
        times.ended = then.ended
        if then.tokens:
            times.tokens, times.last_s = then.tokens, then.last_s
    return prefilled


def _ended(servers: list[Simulation], seconds: float) -> list[Times]:
    for each in servers:
        run_until(each, seconds)
    return [times for each in servers for times in times_of(each)]


WAYS: dict[str, Callable[[Workload, float, int], list[Times]]] = {
    "each all": each_all,
    "as one": as_one,
    "apart": apart,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 0.4, 0.5])
    parser.add_argument("--budget", type=int, nargs="*", default=[4096])
    options = parser.parse_args()
    print("| rate | way | budget | tokens/s | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for rate in options.rates:
        requests = workload(options.seconds, rate * CARDS)
        for name, serve in WAYS.items():
            for budget in options.budget:
                show(rate, name, budget, serve(requests, options.seconds, budget), options.seconds)


def show(rate: float, name: str, budget: int, found: list[Times], seconds: float) -> None:
    waits = [(t.first_s if t.tokens else seconds) - t.arrived_s for t in found]
    paces = [(t.last_s - t.first_s) / (t.tokens - 1) for t in found if t.ended and t.tokens > 1]
    tokens = sum(times.tokens for times in found)
    ttft, tpot = (np.percentile(values, [50, 99]) for values in (waits, paces))
    print(
        f"| {rate:g} | {name} | {budget} | {tokens / seconds:,.0f} | {ttft[0]:.2f} s "
        f"| {ttft[1]:.2f} s | {tpot[0] * 1e3:.0f} ms | {tpot[1] * 1e3:.0f} ms |",
        flush=True,
    )


if __name__ == "__main__":
    main()
