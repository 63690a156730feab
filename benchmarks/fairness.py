"""Fair shares: what do nine clients notice of a tenth one that floods the server?

    python benchmarks/fairness.py [--device h200] [--seconds 120] [--plot FILE.png]

The simulator serves Llama 3.1 8B to ten clients, with prompts of about 512 and outputs of about 128
tokens that arrive at random (Poisson). The share of a client is a tenth of the requests that the
device completes when its queue never ends. Nine clients always send the same requests, `LOAD` of
their share. The table has their time to first token (TTFT), and the tokens that both sides got, if

- each of the nine is alone with its share: a device that is a tenth as fast, and so completes a
  tenth of the requests;
- each of the nine is alone on the whole device, with a tenth of the sequences;
- all ten stay within their share;
- the tenth floods: it sends `FLOOD` times what the device can complete, with and without fair
  shares.

A server that is fair keeps the p99 under the flood within 1.5 times that of the first row. Clients
that stay within their shares have a faster device than that, as long as others leave them more: so
the second column of ratios, to the third row, has what they notice of the flood.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.engine.simulated import ModelShape, Simulation, SimulationConfig, Workload
from trencadis.engine.simulated.hardware import Hardware, find_hardware
from trencadis.engine.simulated.records import Records
from trencadis.scheduler import Request

NUM_CLIENTS = 10
LOAD = 0.5
"""What the nine send, as part of their share."""

FLOOD = 4.0
"""What the tenth sends, as a multiple of what the device completes."""

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128

MAX_NUM_SEQS = 64

STYLES = ("-", (0, (5, 1)), "-.", "--", ":")
"""Lines of the plot, one for each row of the table."""

LLAMA_8B = ModelShape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    tied=False,
    dtype_bytes=2,
    max_position_embeddings=131072,
)


@attrs.frozen(eq=False)
class ClientWorkload(Workload):
    """Requests of several clients. ``clients``: who sends each of them."""

    clients: npt.NDArray[np.int64]
    are_told_apart: bool = True

    def requests(self, vocab_size: int, seed: int) -> Iterator[tuple[float, Request]]:
        for number, (arrival_s, request) in enumerate(super().requests(vocab_size, seed)):
            name = f"client {self.clients[number]}" if self.are_told_apart else ""
            yield arrival_s, attrs.evolve(request, client=name)


@attrs.define
class ClientRecords(Records):
    """Also the TTFT of each request, with its number in order of arrival."""

    first_s: dict[int, float] = attrs.field(factory=dict)
    numbers: dict[int, int] = attrs.field(factory=dict)
    num_tokens: dict[int, int] = attrs.field(factory=dict)

    def token(self, seq_id: int, now_s: float) -> None:
        number = self.numbers[seq_id]
        self.num_tokens[number] = self.num_tokens.get(number, 0) + 1
        if number not in self.first_s:
            self.first_s[number] = now_s - self._live[seq_id].arrived_s
        super().token(seq_id, now_s)


@attrs.frozen
class Run:
    """What the clients got: TTFT in seconds, output tokens a second."""

    name: str
    first_s: list[float]
    tokens_per_s: float
    tokens_per_s_of_tenth: float

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.first_s, q))


def arrivals(rates: dict[int, float], seconds: float) -> ClientWorkload:
    """Poisson arrivals of each client, requests a second. A client's do not depend on others."""
    columns: list[tuple[float, int, int, int]] = []
    for client, rate in rates.items():
        rng = np.random.default_rng(client)
        times = np.cumsum(rng.exponential(1 / rate, size=int(rate * seconds * 1.5) + 50))
        for at_s in times[times < seconds].tolist():
            prompt, output = rng.uniform(0.5, 1.5, size=2) * (PROMPT_TOKENS, OUTPUT_TOKENS)
            columns.append((at_s, int(prompt), int(output), client))
    at, prompts, outputs, clients = map(np.array, zip(*sorted(columns), strict=True))
    return ClientWorkload(at, prompts, outputs, clients)


def serve(
    device: str,
    workload: ClientWorkload,
    seconds: float,
    name: str,
    max_num_seqs: int = MAX_NUM_SEQS,
    hardware: Hardware | None = None,
) -> Run:
    config = SimulationConfig(
        device=device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    simulation = Simulation(config, LLAMA_8B, workload, hardware)
    simulation.warm_up()
    records = simulation.records = ClientRecords()
    add = simulation.scheduler.add

    def watched_add(request: Request) -> object:
        sequence = add(request)
        records.numbers[sequence.seq_id] = int(request.request_id)
        return sequence

    simulation.scheduler.add = watched_add  # type: ignore[method-assign, assignment]
    for _ in simulation.serve():
        if simulation.clock() - simulation.started_s >= seconds:
            break
    is_tenth = workload.clients == 0
    nine = [first_s for number, first_s in records.first_s.items() if not is_tenth[number]]
    tokens = np.zeros(len(workload))
    tokens[list(records.num_tokens)] = list(records.num_tokens.values())
    return Run(
        name, nine, tokens[~is_tenth].sum() / seconds, float(tokens[is_tenth].sum()) / seconds
    )


def capacity(device: str) -> float:
    """Requests a second that the device completes when its queue never ends."""
    seconds = 30.0
    run = serve(device, arrivals({0: 60.0, 1: 60.0}, seconds), seconds, "full")
    return (run.tokens_per_s + run.tokens_per_s_of_tenth) / OUTPUT_TOKENS


def compare(device: str, seconds: float) -> list[Run]:
    most = capacity(device)
    share = most / NUM_CLIENTS
    nine = dict.fromkeys(range(1, NUM_CLIENTS), LOAD * share)
    within = arrivals({0: LOAD * share, **nine}, seconds)
    flooded = arrivals({0: FLOOD * most, **nine}, seconds)
    print(f"{device}: {most:.1f} requests a second, {share:.2f} for each client")
    return [
        alone(device, nine, seconds, slowed(find_hardware(device)), "alone, a tenth of the speed"),
        alone(device, nine, seconds, None, "alone, a tenth of the sequences"),
        serve(device, within, seconds, "no flood"),
        serve(device, flooded, seconds, "flood, fair shares"),
        serve(
            device,
            attrs.evolve(flooded, are_told_apart=False),
            seconds,
            "flood, first come, first served",
        ),
    ]


def alone(
    device: str, rates: dict[int, float], seconds: float, hardware: Hardware | None, name: str
) -> Run:
    """Each client by itself: on ``hardware``, or with its part of the sequences of ``device``."""
    num_seqs = MAX_NUM_SEQS // NUM_CLIENTS if hardware is None else MAX_NUM_SEQS
    runs = [
        serve(device, arrivals({client: rate}, seconds), seconds, "", num_seqs, hardware)
        for client, rate in rates.items()
    ]
    first_s = [each for run in runs for each in run.first_s]
    return Run(name, first_s, sum(run.tokens_per_s for run in runs), 0.0)


def slowed(hardware: Hardware) -> Hardware:
    """A device and host that take `NUM_CLIENTS` times as long for everything."""
    rates = ("flops_per_s", "fp8_flops_per_s", "hbm_bytes_per_s", "link_bytes_per_s")
    times = ("launch_s", "replay_s", "copy_s", "step_s", "sequence_s")
    return attrs.evolve(
        hardware,
        **{name: getattr(hardware, name) / NUM_CLIENTS for name in rates},
        **{name: getattr(hardware, name) * NUM_CLIENTS for name in times},
    )


def table(runs: list[Run]) -> str:
    share, _, calm, *_ = runs
    lines = [
        f"{'':32} {'p50':>8} {'p99':>8} {'of the share':>13} {'of no flood':>12} "
        f"{'tokens/s':>9} {'tenth':>6}"
    ]
    for run in runs:
        p99 = run.percentile(99)
        lines.append(
            f"{run.name:32} {run.percentile(50):6.3f} s {p99:6.3f} s "
            f"{p99 / share.percentile(99):11.2f} × {p99 / calm.percentile(99):10.2f} × "
            f"{run.tokens_per_s:9.0f} {run.tokens_per_s_of_tenth:6.0f}"
        )
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415  only for plots

    figure, axis = plt.subplots(figsize=(7, 4))
    for run, style in zip(runs, STYLES, strict=True):
        shares = np.arange(1, len(run.first_s) + 1) / len(run.first_s)
        axis.plot(np.sort(run.first_s), shares, linestyle=style, label=run.name)
    axis.set(xscale="log", xlabel="TTFT of the nine, seconds", ylabel="share of their requests")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--plot", type=Path, help="write a drawing here")
    options = parser.parse_args()
    runs = compare(options.device, options.seconds)
    print(table(runs))
    print(time.strftime("%Y-%m-%d"))
    if options.plot is not None:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
