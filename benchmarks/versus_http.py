"""This server beside vLLM's on the CPU: Poisson arrivals at a share of capacity, over HTTP.

    nox -s peers                                    # vLLM's environment, once
    python benchmarks/versus_http.py
    python benchmarks/versus_http.py --engines compile int8 --load 0.7 --rounds 2

One client, ``engine-serve bench``, measures all servers: first how many requests each answers per
second with 32 at a time, then requests that arrive at random (Poisson) at ``--load`` of the lowest
of these capacities, the same arrivals for all. The servers stay loaded and take turns; only one has
work at any time. Prints TTFT and the time between tokens (ITL), p50 and p99, medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from peers import OURS, VLLM, environ_of, found, python_of
from rich.console import Console
from rich.table import Table

from trencadis.engine import default_model

ENGINES = (*OURS, *VLLM)
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64
CONCURRENCY = 32
START_SECONDS = 600.0
RUN_SECONDS = 900.0
SETTINGS = ("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(CONCURRENCY))


def main() -> None:
    options = _options()
    model = options.model or default_model()
    names = found(options.engines)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.closing(Server(name, model))) for name in names]
        for server in servers:  # not counted
            server.bench("--concurrency", CONCURRENCY, "--num-requests", CONCURRENCY)
        capacities = {server.name: server.capacity() for server in servers}
        rate = options.load * min(capacities.values())
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for seed in range(options.rounds):
            for server in servers:
                report = server.bench(
                    *("--rate", rate, "--num-requests", options.num_requests, "--seed", seed)
                )
                rounds[server.name].append(report)
    show(rounds, capacities, rate, options.load)


class Server:
    """A server as a process of its own."""

    def __init__(self, name: str, model: str) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        python = str(python_of(name))
        where = ("--host", "127.0.0.1", "--port", str(port))
        if name in VLLM:
            command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
            command += ["--gpu-memory-utilization", "0.3"]
        else:
            command = [python, "-m", "trencadis.server", model, "--device", "cpu"]
            command += ["--compile"] if name != "eager" else []
            command += ["--quantization", "int8"] if name == "int8" else []
        command += [*SETTINGS, "--no-enable-prefix-caching", *where]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            command,
            env=environ_of(name),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self._url}/health", timeout=5).is_success:
                    return
            time.sleep(0.5)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-2000:]
        self.close()
        raise RuntimeError(f"{self.name} did not start: {said}")

    def capacity(self) -> float:
        """Requests per second when as many run as may."""
        report = self.bench("--concurrency", CONCURRENCY, "--num-requests", 4 * CONCURRENCY)
        return float(report["requests"] / report["seconds"])

    def bench(self, *flags: object) -> dict[str, Any]:
        """The report of ``engine-serve bench``. Raises if a request failed."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "report.json"
            command = [
                sys.executable,
                "-m",
                "trencadis.server",
                "bench",
                "--url",
                f"{self._url}/v1",
            ]
            command += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
            command += ["--json", str(path), *map(str, flags)]
            subprocess.run(command, check=True, timeout=RUN_SECONDS, stdout=subprocess.DEVNULL)
            report: dict[str, Any] = json.loads(path.read_text())["report"]
        if report["failed"]:
            raise RuntimeError(f"{self.name}: {report['errors']}")
        return report

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


def show(
    rounds: dict[str, list[dict[str, Any]]],
    capacities: dict[str, float],
    rate: float,
    load: float,
) -> None:
    columns = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    table = Table("server", "capacity", *columns)
    for name, reports in rounds.items():
        cells = [
            _median_ms([report[metric][level] for report in reports])
            for metric in ("ttft_s", "itl_s")
            for level in ("p50", "p99")
        ]
        table.add_row(name, f"{capacities[name]:.2f}/s", *cells)
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{INPUT_TOKENS} in, {OUTPUT_TOKENS} out, {rate:.2f} requests/s ({load:.0%} of the lowest "
        f"capacity); milliseconds, median of the rounds (lowest to highest). "
        f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}"
    )


def _median_ms(seconds: Sequence[float]) -> str:
    ms = [value * 1e3 for value in seconds]
    return f"{statistics.median(ms):,.0f} ({min(ms):,.0f} to {max(ms):,.0f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--load", type=float, default=0.7, help="share of capacity (default: 0.7)")
    parser.add_argument("--num-requests", type=int, default=100, help="of a round (default: 100)")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
