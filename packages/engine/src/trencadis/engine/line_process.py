"""A child process that answers questions: one that crashes or blocks it affects nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any

from trencadis.engine.errors import ProcessUnresponsive, RequestFailed

_START_SECONDS = 60.0
"""Longest wait for the first line of a process, which imports its modules on a busy machine."""

_SLICE_SECONDS = 0.2
"""Period in which a question that waits notices that the process was closed."""

_PART_BYTES = 1 << 16

_KILL_SECONDS = 10.0
"""Longest wait for the end of a process that was killed."""


class LineProcess:
    """A process that runs ``main()`` of a module, and answers lines of JSON with lines of JSON.

    A question is ``[number, question]`` and its answer ``[number, answer]``: an answer that no
    question waits for is never taken for that to another question. The process starts with the
    first question, and again after its end. ``first_line``, if any, is sent before the questions
    and not answered. ``answer_s``: the longest wait for an answer, in seconds. It counts from the
    first line of the process, for which a module calls `announce_ready` when it has started.
    ``shows_errors``: what it writes to stderr is shown. Not thread-safe, but for `close` and
    `close_for_good`.
    """

    def __init__(
        self,
        module: str,
        first_line: Callable[[], object] | None = None,
        *,
        answer_s: float,
        shows_errors: bool = False,
    ) -> None:
        self._module = module
        self._stderr = None if shows_errors else subprocess.DEVNULL
        self._answer_s = answer_s
        self._first_line = first_line
        self._has_started = False
        """Whether the process has written a line."""
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._asked: subprocess.Popen[bytes] | None = None
        """The process that a question waits for: its pipes are closed by that thread."""
        self._end: weakref.finalize[[subprocess.Popen[bytes]], LineProcess] | None = None
        self._lock = threading.Lock()
        self._is_closed_for_good = False

    def ask(self, question: object, answer_s: float | None = None) -> Any:
        """The answer to a question. ``answer_s`` replaces the limit of the process for this one.

        Raises `ProcessUnresponsive` where there is no answer within the limit, `RequestFailed`
        where the process cannot be started or has ended, and as ``json.dumps`` for what JSON cannot
        hold.
        """
        self._number += 1
        line = f"[{self._number}, {json.dumps(question)}]\n".encode()
        try:
            process = self._asked = self.started()
            try:
                limit_s = self._answer_s if answer_s is None else answer_s
                return self._exchange(process, line, self._number, limit_s)
            finally:
                self._end_question(process)
        except ProcessUnresponsive:
            self.close()
            raise
        except (OSError, ValueError, EOFError) as error:
            self.close()
            raise RequestFailed(
                f"the process {self._module} has failed ({error}): send the request again"
            ) from error
        except BaseException:  # Ctrl-C while it waits
            self.close()
            raise

    def start(self) -> None:
        """Start the process, so that no question waits for it.

        Raises `RequestFailed` where it cannot be started, or was closed for good.
        """
        try:
            self.started()
        except (OSError, EOFError) as error:
            self.close()
            raise RequestFailed(f"the process {self._module} cannot be started: {error}") from error

    def started(self) -> subprocess.Popen[bytes]:
        """The process; starts it without waiting until it can answer."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._start()
            if self._first_line is not None:
                inbox, _ = _pipes(process)
                inbox.write(json.dumps(self._first_line()).encode() + b"\n")
                inbox.flush()
            for pipe in _pipes(process):
                os.set_blocking(pipe.fileno(), False)
        return process

    def close(self) -> None:
        """End the process. A later question starts it again. Thread-safe."""
        with self._lock:
            process, self._process = self._process, None
            if self._end is not None:
                self._end.detach()
            is_asked = process is self._asked
        if process is not None:
            _kill(process)
            if not is_asked:
                _close_pipes(process)

    def close_for_good(self) -> None:
        """End the process. A later question fails, also of a thread that starts it now.

        Thread-safe.
        """
        with self._lock:
            self._is_closed_for_good = True
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # Not multiprocessing, which would import the caller's main module again, and not
        # ``python -m``, which would import from the working directory first. A session of its own:
        # Ctrl-C does not reach it, the end of its input ends it.
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:] = {path!r}; from {self._module} import main; main()"
        with self._lock:  # so that `close_for_good` finds it, or comes before it
            if self._is_closed_for_good:
                raise EOFError("it was closed for good")
            process = subprocess.Popen(  # noqa: S603  (modules of this package)
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
            self._process, self._has_started = process, False
            self._end = weakref.finalize(self, _kill, process)
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, number: int, answer_s: float
    ) -> Any:
        """Send a line and wait ``answer_s`` seconds for the answer with its number.

        Neither waits longer than the limit, after which it raises `ProcessUnresponsive`. Raises
        `EOFError` at the end of the process.
        """
        inbox, outbox = _pipes(process)
        limit_s = answer_s if self._has_started else _START_SECONDS + answer_s
        deadline = time.monotonic() + limit_s
        unsent, received = memoryview(line), bytearray()
        # Not select(), which takes no descriptor above 1023: a busy server has more connections.
        with selectors.DefaultSelector() as selector:
            selector.register(outbox, selectors.EVENT_READ)
            selector.register(inbox, selectors.EVENT_WRITE)
            while time.monotonic() < deadline:
                ready = {key.fileobj for key, _ in selector.select(_SLICE_SECONDS)}
                if self._process is not process:
                    raise EOFError("it was closed")
                if inbox in ready:
                    unsent = unsent[os.write(inbox.fileno(), unsent[:_PART_BYTES]) :]
                    if not unsent:
                        selector.unregister(inbox)
                if outbox in ready:
                    part = os.read(outbox.fileno(), _PART_BYTES)
                    if not part:
                        raise EOFError("it has ended")
                    if not self._has_started:
                        self._has_started, limit_s = True, answer_s
                        deadline = time.monotonic() + limit_s
                    received += part
                    if b"\n" in part:
                        *answers, received = received.split(b"\n")
                        for answered, answer in map(json.loads, answers):
                            if answered == number:
                                return answer
        raise ProcessUnresponsive(
            f"the process {self._module} has sent no answer within {limit_s:g} s and was ended: "
            "send the request again"
        )

    def _end_question(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._asked = None
            was_closed = self._process is not process
        if was_closed:
            _close_pipes(process)


def announce_ready() -> None:
    """Tell the `LineProcess` of this process that it has started. An answer to no question."""
    sys.stdout.write("[0, null]\n")
    sys.stdout.flush()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with its forks
        # A driver that does not answer may keep it from ending.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    # Not communicate(), which would wait for a fork that still works.
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):
            pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None  # noqa: S101  (made by Popen)
    assert process.stdout is not None  # noqa: S101
    return process.stdin, process.stdout
