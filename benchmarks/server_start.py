"""A server's first start with ``--compile`` beside its second, as a user waits for it.

    nox -s peers                                     # vLLM's environment, once
    python benchmarks/server_start.py

Each server starts twice in processes of its own, with a cache that is empty before the first start:
the time from the command until it answers ``/health``, the processor seconds of all its processes
(compilers included), and the bytes of the cache. For this server also the compiled programs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from peers import environ_of, found, python_of

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 32
LIMIT_SECONDS = 900.0
VLLM_MEMORY = "0.3"
"""Share of the host's memory, as in ``benchmarks/versus.py``."""


class Start(NamedTuple):
    """What one start took. ``programs``: compiled anew; None where that is not known."""

    seconds: float
    cpu_seconds: float
    programs: int | None
    cache_bytes: int


Command = Callable[[str, int, Path], list[str]]
"""The command of a server, from model, port and the directory of its cache."""


def main() -> None:
    options = _options()
    from trencadis.engine import default_model  # noqa: PLC0415  takes seconds

    model = options.model or default_model()
    commands: dict[str, Command] = {"compile": _ours, "vllm": _vllm}
    print(f"{'':24}{'seconds':>10}{'CPU s':>10}{'programs':>10}{'cache MB':>10}")
    for name in found(list(commands)):
        with tempfile.TemporaryDirectory() as cache:
            for which in ("first start", "second start"):
                start = measure(name, commands[name], model, Path(cache))
                programs = "" if start.programs is None else start.programs
                print(
                    f"{f'{name}, {which}':24}{start.seconds:>10.1f}{start.cpu_seconds:>10.1f}"
                    f"{programs:>10}{start.cache_bytes / 1e6:>10.1f}",
                    flush=True,
                )
    print(f"{os.cpu_count()} cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}")


def measure(name: str, command: Command, model: str, cache: Path) -> Start:
    """Start a server with this cache, wait until it serves, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = environ_of(name)
    if name == "vllm":  # with all of its caches in one place
        environ |= {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "i")}
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command(model, port, cache),
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds(process.pid)
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        programs = re.search(r"Warm-up compiled (\d+) programs", log.read())
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return Start(seconds, cpu_seconds, int(programs[1]) if programs else None, size)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  http, this machine
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server does not answer after {LIMIT_SECONDS:.0f} s")


def _cpu_seconds(pid: int) -> float:
    """Of a process and all it has started, those that have ended included."""
    process = psutil.Process(pid)
    times = [part.cpu_times() for part in (process, *process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _ours(model: str, port: int, cache: Path) -> list[str]:
    command = [sys.executable, "-m", "trencadis.server", model, "--port", str(port), "--compile"]
    return [*command, "--device", "cpu", "--compile-cache", str(cache), *_limits()]


def _vllm(model: str, port: int, cache: Path) -> list[str]:
    del cache  # by the environment
    command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    memory = ["--gpu-memory-utilization", VLLM_MEMORY, "--dtype", "bfloat16"]
    return [*command, "--port", str(port), *_limits(), *memory]


def _limits() -> list[str]:
    return ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; the small default model if not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
