"""A process that answers questions, so that a question that harms it harms nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import IO, Any

from trencadis.engine.errors import RequestFailed

_ANSWER_SECONDS = 60.0
"""Longest wait for an answer, on a machine that is busy. The work itself has a limit of processor
time."""


class LineProcess:
    """``python -m module``, which answers each line of JSON with a line of JSON.

    It starts with the first question, and again after its end. ``first_line``, if any, is sent
    before the questions and not answered. Not thread-safe.
    """

    def __init__(self, module: str, first_line: Callable[[], object] | None = None) -> None:
        self._module = module
        self._first_line = first_line
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] | None = None

    def ask(self, question: object) -> Any:
        """The answer to a question.

        Raises `RequestFailed` where the process cannot be started or does not answer, and as
        ``json.dumps`` for what JSON cannot hold.
        """
        line = json.dumps(question)
        try:
            inbox, outbox = _pipes(self.started())
            _send(inbox, line)
            # An answer is written at once, so the rest of its line follows the first bytes.
            answer = json.loads(outbox.readline() or "null") if _has_answer(outbox) else None
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            self.close()
            raise RequestFailed(f"the process {self._module} cannot be asked: {error}") from error
        if answer is None:
            self.close()
            raise RequestFailed(f"the process {self._module} has failed: send the request again")
        return answer

    def started(self) -> subprocess.Popen[str]:
        """The process; starts it without waiting until it can answer."""
        if self._process is None or self._process.poll() is not None:
            # Not multiprocessing, which would import the program's main module again. A session
            # of its own: Ctrl-C does not reach it, the end of its input ends it.
            self._process = subprocess.Popen(  # noqa: S603  (modules of this package)
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._end = weakref.finalize(self, _end_process, self._process)
            if self._first_line is not None:
                inbox, _ = _pipes(self._process)
                _send(inbox, json.dumps(self._first_line()))
        return self._process

    def close(self) -> None:
        """End the process. A later question starts it again."""
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end_process(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with its forks
        process.wait()
    # Not communicate(), which would wait for a fork that still works.
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):
            pipe.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None  # noqa: S101  (made by Popen)
    assert process.stdout is not None  # noqa: S101
    return process.stdin, process.stdout


def _has_answer(outbox: IO[str]) -> bool:
    # Not select(), which takes no descriptor above 1023: a busy server has more connections.
    with selectors.DefaultSelector() as selector:
        selector.register(outbox, selectors.EVENT_READ)
        return bool(selector.select(_ANSWER_SECONDS))


def _send(inbox: IO[str], line: str) -> None:
    inbox.write(line + "\n")
    inbox.flush()
