"""A sum over ranks on the CPU: through shared memory, and through gloo's sockets.

    python benchmarks/rank_sums.py

Tensors ``[tokens, 4096]`` in bf16 and fp32, as between two layers of an 8B model, on one thread for
each rank. Both ways take turns; shown are medians over the rounds, and of the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from trencadis.engine.devices.cpu.rank_sums import RankSums
from trencadis.engine.models.rank_modules import sum_over_ranks
from trencadis.engine.models.rank_part import RankPart

WIDTH, CALLS, LIMIT_SECONDS = 4096, 30, 60.0
TOKENS = (1, 8, 32, 128)


def main() -> None:
    """Measure with each number of ranks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for size in options.ranks:
        memory = os.memfd_create("sums")
        with tempfile.TemporaryDirectory() as directory:
            path = f"/proc/{os.getpid()}/fd/{memory}"
            given = size, options.rounds, path, Path(directory) / "store"
            multiprocessing.spawn(measure, given, nprocs=size)
        os.close(memory)


def measure(rank: int, size: int, rounds: int, path: str, store: Path) -> None:
    """The process of a rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=size)
    shared = RankSums(os.open(path, os.O_RDWR), RankPart(rank, size), LIMIT_SECONDS)
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in TOKENS:
            part = torch.randn(tokens, WIDTH).to(dtype)
            ways = partial(sum_over_ranks, part), partial(shared, part)
            times = [[seconds(way) for way in ways] for _ in range(rounds)]
            gloo, own = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
            ratio = statistics.median(gloo / own for gloo, own in times)
            if rank == 0:
                print(
                    f"{size} ranks, {part.nbytes >> 10:>5} KiB of {str(dtype)[6:]:<8}  "
                    f"gloo {gloo:7.0f} µs  shared memory {own:7.0f} µs  ratio {ratio:5.1f}",
                    flush=True,
                )


def seconds(way: Callable[[], object]) -> float:
    """Seconds of a call."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        way()
    return (time.perf_counter() - started) / CALLS


if __name__ == "__main__":
    main()
