"""The command `vllm run-batch`, as vLLM's tests call it: engine-serve's with the small model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import vllm_server


def install(directory: Path) -> None:
    """From now on a process that starts `vllm` starts this. ``directory`` is for its file."""
    command = directory / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} "{__file__}" "$@"\n', "utf-8")
    command.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(directory), os.environ["PATH"]))


def main(command: str, *words: str) -> None:
    files: list[str] = []
    model = ""
    others = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("-i", "-o"):
            files += [word, left.pop(0)]
        elif word == "--model":
            model = left.pop(0)
        else:
            others.append(word)
    flags = [*vllm_server.ON_A_CPU, "--served-model-name", model, *vllm_server.flags_of(others)]
    flags += vllm_server.runner_of(model)
    arguments = (
        "-m",
        "trencadis.server",
        command,
        *files,
        *vllm_server.model_of_test(model),
        *flags,
    )
    os.execv(sys.executable, (sys.executable, *arguments))  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(*sys.argv[1:])
