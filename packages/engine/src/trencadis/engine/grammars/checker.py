"""Checks grammars before their requests are sent to the core, in a process that may fail."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

import attrs

from trencadis.engine.errors import InvalidRequest, RequestFailed
from trencadis.engine.grammars.grammar import require_llguidance
from trencadis.engine.structured_output import FIELD, StructuredOutput
from trencadis.engine.validators import shown

_NUM_VERDICTS = 256
"""Grammars whose verdict is kept."""

_ANSWER_SECONDS = 60.0
"""Longest wait for a verdict, on a machine that is busy. The check itself has a limit of processor
time."""


class GrammarChecker:
    """Starts the process of `check_process` with the first grammar. Thread-safe.

    ``tokenizer`` gives the text of the model's ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] | None = None
        self._verdicts: dict[StructuredOutput, str] = {}
        self._lock = threading.Lock()

    def recall(self, structured_output: StructuredOutput) -> bool:
        """Whether a grammar was checked already; then raises as `check` did. Does not wait."""
        verdict = self._verdicts.get(structured_output)
        if verdict is not None:
            _raise_if_bad(verdict)
        return verdict is not None

    def check(self, structured_output: StructuredOutput) -> None:
        """Raise `InvalidRequest` for a grammar that is not valid or too hard to serve.

        Takes up to seconds for a new grammar; do not call it in an event loop. Raises
        `RequestFailed` where the process cannot be started or does not answer.
        """
        require_llguidance()
        with self._lock:
            verdict = self._verdicts.get(structured_output)
            if verdict is None:
                verdict = self._ask(structured_output)
                self._verdicts[structured_output] = verdict
            if len(self._verdicts) > _NUM_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
        _raise_if_bad(verdict)

    def close(self) -> None:
        """End the process. A later check starts it again."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _ask(self, structured_output: StructuredOutput) -> str:
        try:
            process = self._started()
            inbox, outbox = _pipes(process)
            _send(inbox, attrs.asdict(structured_output))
            # The answer is one line, written at once, so a readable pipe has all of it.
            ready, _, _ = select.select([outbox], [], [], _ANSWER_SECONDS)
            line = outbox.readline() if ready else ""
            verdict = str(json.loads(line)) if line else None
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            self.close()
            raise RequestFailed(f"grammars cannot be checked: {error}") from error
        if verdict is None:
            self.close()
            raise RequestFailed("the process that checks grammars has failed: send it again")
        return verdict

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            # Not multiprocessing, which would import the program's main module again. A session
            # of its own: Ctrl-C does not reach it, the end of its input ends it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trencadis.engine.grammars.check_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._end = weakref.finalize(self, _end_process, self._process)
            inbox, _ = _pipes(self._process)
            _send(inbox, self._tokenizer())
        return self._process


def _end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    # Not communicate(), which would wait for a fork that still checks a grammar.
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):
            pipe.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None  # noqa: S101  (made by Popen)
    assert process.stdout is not None  # noqa: S101
    return process.stdin, process.stdout


def _send(inbox: IO[str], value: object) -> None:
    inbox.write(json.dumps(value) + "\n")
    inbox.flush()


def _raise_if_bad(verdict: str) -> None:
    if verdict:
        raise InvalidRequest(f"structured_output cannot be served: {_short(verdict)}", FIELD)


def _short(message: str) -> str:
    """A message of llguidance, which may quote the whole grammar."""
    message = " ".join(message.split())
    return message if len(message) <= 300 else shown(message)[1:]
