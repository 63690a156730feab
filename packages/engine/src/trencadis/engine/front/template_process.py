"""Renders chat templates in a process of its own, so that a template can crash nothing else.

A template is code that comes with the model, and clients choose what it works on. jinja's
sandbox bounds neither its time nor its memory, and a thread cannot be ended. So a fork with limits
renders, and is replaced when it ends at one.

Reads questions of `LineProcess`: seconds of processor time, besides that to compile the template,
and the arguments of transformers' ``render_jinja_template``. Answers each with ``{"text": ...}`` or
``{"error": ...}``; the error of a conversation that took longer has ``timed_out``, too.
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

from trencadis.engine.line_process import announce_ready

COMPILE_SECONDS = 2.0
"""Processor time in which a template must be compiled, once in each fork.

Apart from that of a conversation: it depends on the model alone.
"""

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
    announce_ready()
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
        _answer(current[0], _failure(exit_code))


def _serve(current: memoryview[int]) -> None:
    _set_limits()
    for line in sys.stdin:
        number, (limit_s, arguments) = json.loads(line)
        current[0] = number
        answer = _render(arguments, limit_s)
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


def _render(arguments: dict[str, Any], limit_s: float) -> dict[str, str]:
    try:
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # SIGPROF ends the process
        render_jinja_template([], chat_template=arguments["chat_template"])  # cached from then on
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        texts: Any = render_jinja_template(**arguments)[0]
    except _TEMPLATE_ERRORS as error:
        return {"error": str(error) or type(error).__name__}
    return {"text": texts[0]}


def _failure(exit_code: int) -> dict[str, str]:
    if exit_code == -signal.SIGPROF:
        return {"error": "rendering them takes too much processor time", "timed_out": ""}
    return {"error": _cause(exit_code)}


def _cause(exit_code: int) -> str:
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
