"""Starts the processes of the ranks, exchanges messages with all of them, and ends them.

Whatever goes wrong with one rank ends all of them: the others wait for it in a collective call, and
what it has computed is unknown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from trencadis.engine.errors import EngineError, RankError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.ranks.rank_messages import (
    Answer,
    Call,
    Cold,
    MessageReader,
    Start,
    encode,
)
from trencadis.engine.settings.engine_config import EngineConfig

logger = logging.getLogger("trencadis.engine")

_SLICE_SECONDS = 0.5
"""Period in which who waits for the ranks is called."""

_OTHERS_SECONDS = 5.0
"""Time for the other ranks to answer when one has failed: with the same error, all can go on."""

_KILL_SECONDS = 10.0
"""Longest wait for the end of a process that was killed."""

_SEND_SECONDS = 60.0
"""Longest wait until a rank takes a part of a message, or sends the rest of one."""

_MOST_IN_FLIGHT = 8
"""Calls whose answers may be kept; two steps and a question are in flight at most."""

_MODULE = "trencadis.engine.runner.ranks.rank_process"


class RankProcesses:
    """``config.tensor_parallel_size`` processes, started with this object.

    ``environments``: variables of each rank. ``limit_s``: seconds that a collective call waits, and
    that the process of a rank may be stopped, whatever it has to do.
    ``on_cold``: called by each rank that may compile in a step, with the words for the shape; who
    waits for that step, or for the one before it, then does so for as long as a core may be busy.
    ``records``: whether rank 0 records traffic.
    ``num_messages``, ``num_bytes``: what each rank was sent since the start. Each method raises
    `RankError` where a rank has ended, hangs, or has failed alone; then all are ended, and every
    later call raises it, too.
    """

    def __init__(
        self,
        config: EngineConfig,
        environments: Sequence[Mapping[str, str]],
        limit_s: float,
        on_cold: Callable[[str], None] = lambda shape: None,
        *,
        records: bool,
    ) -> None:
        self._on_cold = on_cold
        self._cold: set[int] = set()
        """The numbers of calls during which a rank may compile."""
        self._failure = ""
        self._limit_s = limit_s
        self._stopped_since: dict[int, float] = {}
        self._number = 0
        self._unread: dict[int, dict[int, Answer]] = {}
        """By the numbers of the calls that `answers` was not asked for yet: what has arrived."""
        self.num_messages = self.num_bytes = 0
        directory = Path(tempfile.mkdtemp(prefix="trencadis-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        pipe, self._pipe = os.pipe()
        self._end = weakref.finalize(
            self, _end_all, self._processes, self._connections, self._pipe, directory
        )
        try:
            for rank, environment in enumerate(environments):
                self._start_process(pipe, environment)
                part = RankPart(rank, len(environments))
                is_recorded = records and rank == 0
                self._connections[rank].sendall(
                    encode(_start(config, part, is_recorded, directory / "store", limit_s))
                )
        except BaseException:
            self._end()
            raise
        finally:
            os.close(pipe)
        self._readers = [MessageReader(connection) for connection in self._connections]

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the processes, by rank."""
        return tuple(process.pid for process in self._processes)

    def call(
        self,
        method: str,
        *arguments: Any,
        limit_s: float,
        ranks: Sequence[int] | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What a method of the executor returns in each of ``ranks``, by default in all.

        Waits ``limit_s`` seconds at most, and calls ``while_waiting`` twice a second. Raises the
        error of the method where all of them raise one of its type.
        """
        number = self.send(method, *arguments, ranks=ranks)
        return self.answers(number, limit_s, ranks=ranks, while_waiting=while_waiting)

    def send(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> int:
        """Send a call, encoded once; returns the number with which `answers` awaits it."""
        self.check_alive()
        self._number += 1
        message = encode(Call(self._number, method, arguments))
        for rank in self._ranks(ranks):
            self._send(rank, message)
        self._unread[self._number] = {}
        if len(self._unread) > _MOST_IN_FLIGHT:  # the oldest was given up, as by Ctrl-C
            del self._unread[min(self._unread)]
        self.num_messages += 1
        self.num_bytes += len(message)
        return self._number

    def answers(
        self,
        number: int,
        limit_s: float,
        *,
        ranks: Sequence[int] | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What each rank has answered to the call with this number, as `call`."""
        if self._failure:
            raise RankError(self._failure)
        asked = self._ranks(ranks)
        answers = self._unread.pop(number, {})
        limit_s = max(limit_s, BUSY_SECONDS) if number in self._cold else limit_s
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank in set(asked) - set(answers):
                selector.register(self._connections[rank], selectors.EVENT_READ, rank)
            while (silent := set(asked) - set(answers)) and time.monotonic() < deadline:
                ready = {rank for rank in silent if self._readers[rank].has_message}
                if not ready:
                    ready = {key.data for key, _ in selector.select(_SLICE_SECONDS)}
                if not ready:
                    self._check_running(silent)
                for rank in ready:
                    answer = self._read(rank)
                    if isinstance(answer, Cold):
                        has_failed = any(each.error is not None for each in answers.values())
                        if not has_failed:  # or the rank waits for one that has
                            self._cold.add(answer.number)
                            self._on_cold(answer.shape)
                            limit_s = max(limit_s, BUSY_SECONDS)
                            deadline = time.monotonic() + limit_s
                    elif answer.number == number:
                        answers[rank] = answer
                        selector.unregister(self._connections[rank])
                        if answer.error is not None:
                            deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
                    elif answer.number in self._unread:  # of a step in flight
                        self._unread[answer.number][rank] = answer
                while_waiting()
        self._cold.discard(number)
        self._raise_errors(answers, len(asked))
        if silent:
            words = ", ".join(map(self._described, sorted(silent)))
            raise self.fail(f"no answer of {words} within {limit_s:g} s")
        return [answers[rank].value for rank in asked]

    def check_alive(self) -> None:
        """Raise `RankError` where a rank has ended."""
        if self._failure:
            raise RankError(self._failure)
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self.fail(f"rank {rank} has ended with exit code {process.returncode}")

    def fail(self, reason: str) -> RankError:
        """End all ranks; returns the error that every later call raises."""
        if not self._failure:
            self._failure = f"{reason}: all ranks were ended"
            logger.error("%s", self._failure)
        self._end()
        return RankError(self._failure)

    def end(self) -> None:
        """End the processes, whatever they do."""
        self._failure = self._failure or "the ranks were ended"
        self._end()

    def _start_process(self, pipe: int, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # As in `LineProcess`. In the process group of the core, so that what ends that group ends
        # the ranks. Collective calls stay on this machine.
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:] = {path!r}; from {_MODULE} import main; main()"
        with theirs:
            process = subprocess.Popen(  # noqa: S603  (a module of this package)
                [sys.executable, "-c", code, str(theirs.fileno()), str(pipe)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), pipe),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
            )
        self._processes.append(process)
        self._connections.append(ours)
        ours.settimeout(_SEND_SECONDS)

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._connections[rank].sendall(message)
        except OSError as error:  # a timeout, too
            raise self.fail(f"rank {rank} takes no message ({error})") from error
        except BaseException:  # Ctrl-C: it may have a part of the message
            self.fail("a call was interrupted")
            raise

    def _ranks(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._processes)) if ranks is None else ranks

    def _read(self, rank: int) -> Answer | Cold:
        try:
            answer = self._readers[rank].receive()
        except TimeoutError as error:
            described = self._described(rank)
            raise self.fail(f"{described} has sent a part of an answer alone") from error
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(_SLICE_SECONDS)
            raise self.fail(f"{self._described(rank)} has ended ({error})") from error
        except Exception as error:
            raise self.fail(f"rank {rank} has sent what cannot be read: {error}") from error
        assert isinstance(answer, (Answer, Cold))  # noqa: S101  (nothing else is sent)
        self._stopped_since.pop(rank, None)  # it goes on
        return answer

    def _raise_errors(self, answers: dict[int, Answer], num_asked: int) -> None:
        errors = {rank: each.error for rank, each in answers.items() if each.error is not None}
        if not errors:
            return
        first = next(iter(errors.values()))
        if len(errors) == num_asked and len(set(map(type, errors.values()))) == 1:
            if isinstance(first, RankError):
                raise self.fail(str(first))
            raise first
        rank, error = next(iter(errors.items()))
        failure = self.fail(f"rank {rank} has failed alone: {error}")
        raise error if isinstance(error, EngineError) else failure

    def _check_running(self, ranks: Iterable[int]) -> None:
        """Raise `RankError` for a rank that computes nothing because its process is stopped."""
        now = time.monotonic()
        for rank in ranks:
            if self._status(rank) != psutil.STATUS_STOPPED:
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > self._limit_s:
                raise self.fail(f"{self._described(rank)} has been so for {self._limit_s:g} s")

    def _status(self, rank: int) -> str:
        """What the system says of a process; "" of one that has ended."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._processes[rank].pid).status()
        return ""

    def _described(self, rank: int) -> str:
        process = self._processes[rank]
        if (code := process.poll()) is not None:
            return f"rank {rank} (exit code {code})"
        return f"rank {rank} (process {process.pid}: {self._status(rank)})"


def _start(
    config: EngineConfig, part: RankPart, records: bool, store: Path, limit_s: float
) -> Start:
    root = logging.getLogger()
    formatter = root.handlers[0].formatter if root.handlers else None
    is_percent = isinstance(getattr(formatter, "_style", None), logging.PercentStyle)
    layout = getattr(formatter, "_fmt", None) if is_percent else None
    return Start(config, part, records, str(store), limit_s, logger.getEffectiveLevel(), layout)


def _end_all(
    processes: Sequence[subprocess.Popen[bytes]],
    connections: Sequence[socket.socket],
    pipe: int,
    directory: Path,
) -> None:
    for process in processes:
        process.kill()  # also one that was stopped
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
    for connection in connections:
        connection.close()
    os.close(pipe)
    shutil.rmtree(directory, ignore_errors=True)
