"""Checks grammars in a process of its own, so that a grammar can crash nothing else.

llguidance bounds the work of most grammars, not of all: a schema of 800 nested references
overflows the stack, and ``a?`` repeated thirty thousand times compiles for minutes. So each grammar
is compiled in a fork with limits of processor time, memory and stack, and some tokens are generated
with it.

Reads a line of JSON with the tokenizer, then questions of `LineProcess`, one for each grammar;
answers each with the reason to reject it, "" for none.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.grammars.finite_schemas import accepts_finite
from trencadis.engine.grammars.grammar import matcher_error, new_matcher
from trencadis.engine.line_process import announce_ready

CPU_SECONDS = 3.0
"""Processor time in which a grammar must be compiled and pass the trial."""

MEMORY_BYTES = 128 << 20
"""Memory that the compiled grammar and its compilation may take."""

STACK_BYTES = 1 << 20
"""Stack of the check: less than that of any thread that compiles the grammar in the core."""

_TRIAL_TOKENS = 16
_MEAN_MASK_SECONDS = 0.02
"""Mean processor time of a mask in the trial. A usual schema takes a thousandth of it."""


def main() -> None:
    """Serve until the end of the input."""
    tokenizer, failure = None, ""
    try:
        # The ids of end and padding tokens, which only the model knows, do not matter here.
        tokenizer = LLTokenizer(json.loads(sys.stdin.readline()))
    except ValueError as error:
        failure = f"llguidance cannot use this model's tokenizer: {error}"
    announce_ready()
    for line in sys.stdin:
        number, fields = json.loads(line)
        if tokenizer is None:
            _answer(number, failure)
        else:
            _check_in_fork(tokenizer, number, fields)


def _check_in_fork(tokenizer: LLTokenizer, number: int, fields: dict[str, Any]) -> None:
    fork = os.fork()
    if fork == 0:
        # Exit at once whatever happens: this copy must not read the next grammar.
        try:
            _set_limits()
            verdict = _check(tokenizer, StructuredOutput(**fields))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _answer(number, verdict)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(fork, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code == -signal.SIGKILL:
        sys.exit("the check was killed")  # from outside, so it says nothing about the grammar
    if exit_code != 0:
        _answer(number, _cause(exit_code))


def _set_limits() -> None:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    in_use = Path("/proc/self/statm")
    if in_use.exists():
        pages = int(in_use.read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _check(tokenizer: LLTokenizer, structured_output: StructuredOutput) -> str:
    """Why a grammar cannot be served; "" if it can."""
    try:
        matcher = new_matcher(tokenizer, structured_output)
        schema = structured_output.json_schema
        if schema is not None and not accepts_finite(json.loads(schema)):
            return "it requires itself within itself, so that no finite value matches it"
    except (ValueError, RecursionError) as error:
        return str(error)
    except MemoryError:
        return _cause(-signal.SIGABRT)
    began = time.thread_time()
    num_tokens = _generate(matcher)
    seconds = time.thread_time() - began
    if matcher.is_error():
        reason = matcher_error(matcher)
        return "no text matches it" if "NoExtension" in reason else reason
    if seconds > _MEAN_MASK_SECONDS * _TRIAL_TOKENS:
        return f"it is too hard: a token takes {seconds / num_tokens * 1000:.0f} ms"
    return ""


def _generate(matcher: LLMatcher) -> int:
    """Generate random tokens, at least one; returns how many."""
    rng = random.Random(0)
    for number in range(_TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask == 0 or matcher.is_error():
            return max(1, number)
        allowed = [token for token, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
        matcher.consume_token(rng.choice(allowed))
        if matcher.is_stopped():
            return number + 1
    return _TRIAL_TOKENS


def _cause(exit_code: int) -> str:
    if exit_code == -signal.SIGPROF:
        return f"it is too hard: it takes more than {CPU_SECONDS:.0f} s to compile"
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS):
        return "it is nested too deep"
    return f"it is too large: it takes more than {MEMORY_BYTES >> 20} MiB to compile"


def _answer(number: int, error: str) -> None:
    sys.stdout.write(json.dumps([number, error]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
