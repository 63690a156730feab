"""The process in which chat templates are rendered: what a template does to it, no request notices.

A template is a program that comes with the model, and clients choose what it works on. jinja's
sandbox bounds neither its time nor its memory, and a thread cannot be ended. So a fork with limits
renders, and is replaced when it ends at one.

Reads questions of `LineProcess`, the arguments of transformers' ``render_jinja_template``; answers
each with ``{"text": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

CPU_SECONDS = 2.0
"""Processor time in which a conversation must be rendered. Megabytes take a tenth of it."""

MEMORY_BYTES = 512 << 20
"""Memory that rendering may take."""

_TEMPLATE_ERRORS = (
    *(TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    RecursionError,
)
"""What a template raises for messages and arguments that it cannot take."""

_EXIT_MEMORY = 3


def main() -> None:
    """Serve until the end of the input."""
    # The number of the question that the fork works on; 0 before and after. In shared memory, which
    # outlives a fork: what ends it between two questions must not be the answer to the next.
    current = memoryview(mmap.mmap(-1, 8)).cast("q")
    while True:
        current[0] = 0
        fork = os.fork()
        if fork == 0:
            # Exit whatever happens: this copy must not fork again.
            try:
                _serve(current)
                os._exit(0)
            except MemoryError:
                os._exit(_EXIT_MEMORY)
            finally:
                os._exit(1)
        _, status = os.waitpid(fork, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        # Ended by the end of the input, or from outside: the questions in its buffer are lost.
        if current[0] == 0 or exit_code in (0, -signal.SIGKILL):
            return
        _answer(current[0], {"error": _cause(exit_code)})


def _serve(current: memoryview[int]) -> None:
    _set_limits()
    for line in sys.stdin:
        number, arguments = json.loads(line)
        current[0] = number
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        answer = _render(arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        current[0] = 0
        _answer(number, answer)


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    in_use = Path("/proc/self/statm")
    if in_use.exists():
        pages = int(in_use.read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _render(arguments: dict[str, Any]) -> dict[str, str]:
    try:
        texts: Any = render_jinja_template(**arguments)[0]
    except _TEMPLATE_ERRORS as error:
        return {"error": str(error) or type(error).__name__}
    return {"text": texts[0]}


def _cause(exit_code: int) -> str:
    if exit_code == -signal.SIGPROF:
        return f"rendering them takes more than {CPU_SECONDS:.0f} s"
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS):
        return "they are nested too deep"
    if exit_code in (_EXIT_MEMORY, -signal.SIGABRT):
        return f"rendering them takes more than {MEMORY_BYTES >> 20} MiB"
    return f"the process that renders it ended with exit code {exit_code}"


def _answer(number: int, answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps([number, answer]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
