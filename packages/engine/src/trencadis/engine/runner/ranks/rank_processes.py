"""Starts the processes of the ranks, exchanges messages with all of them, and ends them.

Whatever goes wrong with one rank ends all of them: the others wait for it in a collective call, and
what it has computed is unknown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
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

import attrs
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
from trencadis.engine.runner.ranks.step_board import BoardFiles, StepBoard, is_before, is_of
from trencadis.engine.settings.engine_config import EngineConfig

logger = logging.getLogger("trencadis.engine")

_SLICE_SECONDS = 0.5
"""Period in which who waits for the ranks is called."""

_LATE_SECONDS = 0.001
"""Pause before it is looked again whether other ranks have computed a step before the last one."""

_OTHERS_SECONDS = 5.0
"""Time for the other ranks to answer when one has failed: with the same error, all can go on."""

_KILL_SECONDS = 10.0
"""Longest wait for the end of a process that was killed."""

_SEND_SECONDS = 60.0
"""Longest wait until a rank takes a part of a message, or sends the rest of one."""

_MOST_IN_FLIGHT = 8
"""Calls whose answers may be kept; two steps and a question are in flight at most."""

_MODULE = "trencadis.engine.runner.ranks.rank_process"


@attrs.frozen
class SentStep:
    """A step by its number, by that of its call, and counted from 1 among those sent."""

    number: int
    call: int
    count: int


class RankProcesses:
    """``config.tensor_parallel_size`` processes, started with this object.

    ``environments``: variables of each rank. ``limit_s``: seconds that a collective call waits, and
    that the process of a rank may be stopped, whatever it has to do.
    ``on_cold``: called by each rank that may compile in a step, with the words for the shape; who
    waits for that step, or for the one before it, then does so for as long as a core may be busy.
    ``records``: whether rank 0 records traffic. ``cores``: those that each rank is bound to.
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
        cores: Sequence[Sequence[int]] = (),
    ) -> None:
        self._on_cold = on_cold
        self._cold: set[int] = set()
        """The numbers of calls during which a rank may compile."""
        self._failure = ""
        self._limit_s = limit_s
        self._stopped_since: dict[int, float] = {}
        self._number = self._num_steps = self._last_call = 0
        self._answered: SentStep | None = None
        """The last step that rank 0 has answered, until the others were compared with it."""
        self._unread: dict[int, dict[int, Answer]] = {}
        """By the numbers of the calls that `answers` was not asked for yet: what has arrived."""
        self.num_messages = self.num_bytes = 0
        self._board = StepBoard(len(environments))
        sums = os.memfd_create("trencadis-sums")
        directory = Path(tempfile.mkdtemp(prefix="trencadis-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        pipe, self._pipe = os.pipe()
        ended = (self._processes, self._connections, self._pipe, directory, self._board.close)
        self._end = weakref.finalize(self, _end_all, *ended)
        try:
            for rank, environment in enumerate(environments):
                board = self._board.files_of(rank)
                own = cores[rank] if cores else ()
                self._start_process((pipe, board.memory, board.event, sums), environment, own)
                part = RankPart(rank, len(environments))
                is_recorded = records and rank == 0
                start = _start(config, part, is_recorded, directory / "store", limit_s, board, sums)
                self._connections[rank].sendall(encode(start))
        except BaseException:
            self._end()
            raise
        finally:
            os.close(pipe)
            os.close(sums)
        self._connect(self._connections)

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
        return self._send_call(method, arguments, self._ranks(ranks))

    def send_step(self, step: int, packed: tuple[Any, ...]) -> SentStep:
        """Write step number ``step``, as a `StepPacker` has packed it, for all ranks.

        A rank that has ended is noticed by `step_answer`.
        """
        if self._failure:
            raise RankError(self._failure)
        number = self._number + 1
        message = pickle.dumps((number, packed), pickle.HIGHEST_PROTOCOL)
        try:
            if self._board.write(message, self._last_call):
                self._note_sent(number, len(message))
            else:
                self._send_call("execute", (packed,), self._ranks(None))
            self._num_steps += 1
        except BaseException:  # Ctrl-C: some ranks may know of it
            self.fail("a call was interrupted")
            raise
        return SentStep(step, number, self._num_steps)

    def _send_call(self, method: str, arguments: tuple[Any, ...], ranks: Sequence[int]) -> int:
        number = self._number + 1
        message = encode(Call(number, method, arguments, self._board.num_written))
        for rank in ranks:
            self._send(rank, message)
        if len(ranks) == len(self._connections):
            self._last_call = number
        return self._note_sent(number, len(message))

    def _note_sent(self, number: int, num_bytes: int) -> int:
        self._number = number
        self._unread[number] = {}
        if len(self._unread) > _MOST_IN_FLIGHT:  # the oldest was given up, as by Ctrl-C
            del self._unread[min(self._unread)]
        self.num_messages += 1
        self.num_bytes += num_bytes
        return number

    def answers(
        self,
        number: int,
        limit_s: float,
        *,
        ranks: Sequence[int] | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """What each rank has answered to the call with this number, as `call`."""
        asked = self._ranks(ranks)
        answers = self._awaited(number, limit_s, asked, while_waiting)
        return [answers[rank].value for rank in asked]

    def step_answer(self, step: SentStep, limit_s: float) -> Any:
        """What rank 0 has computed in a step.

        The others end when it does, but for what each does on its own host: that they have computed
        the same is seen before the answer to the next step is returned, and in `check_alive`. So
        rank 0's tokens are used, and none that follow from others. Raises as `call`, and
        `RankError` where ranks differ.
        """
        first = self._awaited(step.call, limit_s, self._ranks(None), answers_first=True)[0]
        if self._answered is not None:
            self._await_words(self._answered, limit_s)
        self._answered = step
        return first.value

    def _await_words(self, step: SentStep, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while late := self._compare(step):
            if time.monotonic() > deadline:
                raise self._no_answer_of(late, limit_s)
            for rank in self._polled(_LATE_SECONDS):
                self._keep(rank, self._read(rank))

    def _compare(self, step: SentStep) -> list[int]:
        """Raise `RankError` where the ranks have computed other things; returns those to come."""
        words = self._board.words(step.count)
        for rank, word in enumerate(words):
            if is_of(word, step.count) and word != words[0]:
                raise self.fail(f"rank {rank} has other results of step {step.number} than rank 0")
        return [rank for rank, word in enumerate(words) if is_before(word, step.count)]

    def _awaited(
        self,
        number: int,
        limit_s: float,
        asked: Sequence[int],
        while_waiting: Callable[[], None] = lambda: None,
        *,
        answers_first: bool = False,
    ) -> dict[int, Answer]:
        """The answers of the ranks that were asked; with ``answers_first`` that of rank 0 alone,
        unless one of them has failed."""
        if self._failure:
            raise RankError(self._failure)
        answers = self._unread.pop(number, {})
        limit_s = max(limit_s, BUSY_SECONDS) if number in self._cold else limit_s
        deadline = time.monotonic() + limit_s
        while True:
            silent = [rank for rank in asked if rank not in answers]
            if answers_first and answers.keys() == {0} and answers[0].error is None:
                silent = []
            if not silent or time.monotonic() >= deadline:
                break
            ready = [rank for rank in silent if self._readers[rank].has_message]
            ready = ready or self._polled(_SLICE_SECONDS)
            if not ready:
                self._check_running(silent)
            for rank in ready:
                answer = self._read(rank)
                if not isinstance(answer, Cold) and answer.number == number:
                    answers[rank] = answer
                    if answer.error is not None:
                        deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
                elif isinstance(answer, Cold) and any(each.error for each in answers.values()):
                    pass  # it waits for one that has failed
                elif self._keep(rank, answer):
                    limit_s = max(limit_s, BUSY_SECONDS)
                    deadline = time.monotonic() + limit_s
            while_waiting()
        self._cold.discard(number)
        self._raise_errors(answers, len(asked))
        if silent:
            raise self._no_answer_of(silent, limit_s)
        return answers

    def _keep(self, rank: int, message: Answer | Cold) -> bool:
        """Keep what came while another call was waited for; returns whether the rank compiles."""
        if isinstance(message, Cold):
            self._cold.add(message.number)
            self._on_cold(message.shape)
            return True
        if message.number in self._unread:  # of a step in flight
            self._unread[message.number][rank] = message
        elif self._answered is not None and message.number == self._answered.call:
            self._raise_errors({rank: message}, len(self._processes))  # rank 0 had none
        return False

    def _polled(self, seconds: float) -> list[int]:
        """The ranks that have sent something; waits until there is one, or the time has passed."""
        return [self._rank_of[file] for file, _ in self._poll.poll(1000 * seconds)]

    def check_alive(self) -> None:
        """Raise `RankError` where a rank has ended, or computed something else in the last step."""
        if self._failure:
            raise RankError(self._failure)
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self.fail(f"rank {rank} has ended with exit code {process.returncode}")
        if self._answered is not None:
            self._compare(self._answered)

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

    def _start_process(
        self, files: Sequence[int], environment: Mapping[str, str], cores: Sequence[int]
    ) -> None:
        ours, theirs = socket.socketpair()
        # As in `LineProcess`. In the process group of the core, so that what ends that group ends
        # the ranks. Collective calls stay on this machine.
        path = [entry for entry in sys.path if entry]
        code = f"import sys; sys.path[:] = {path!r}; from {_MODULE} import main; main()"
        of_cores = {}
        if cores:  # before anything else: threads inherit it, and memory is that of their node
            code = f"import os; os.sched_setaffinity(0, {[*cores]}); {code}"
            of_cores = {"OMP_NUM_THREADS": f"{len(cores)}"}
        with theirs:
            process = subprocess.Popen(  # noqa: S603  (a module of this package)
                [sys.executable, "-c", code, str(theirs.fileno()), str(files[0])],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *files),
                env={**of_cores, **os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
            )
        self._processes.append(process)
        self._connections.append(ours)
        ours.settimeout(_SEND_SECONDS)

    def _connect(self, connections: list[socket.socket]) -> None:
        self._connections = connections
        self._readers = [MessageReader(connection) for connection in connections]
        self._rank_of = {each.fileno(): rank for rank, each in enumerate(connections)}
        self._poll = select.poll()
        for file in self._rank_of:
            self._poll.register(file, select.POLLIN)

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

    def _no_answer_of(self, ranks: Iterable[int], limit_s: float) -> RankError:
        words = ", ".join(map(self._described, sorted(ranks)))
        return self.fail(f"no answer of {words} within {limit_s:g} s")

    def _described(self, rank: int) -> str:
        process = self._processes[rank]
        if (code := process.poll()) is not None:
            return f"rank {rank} (exit code {code})"
        return f"rank {rank} (process {process.pid}: {self._status(rank)})"


def _start(
    config: EngineConfig,
    part: RankPart,
    records: bool,
    store: Path,
    limit_s: float,
    board: BoardFiles,
    sums: int,
) -> Start:
    root = logging.getLogger()
    formatter = root.handlers[0].formatter if root.handlers else None
    is_percent = isinstance(getattr(formatter, "_style", None), logging.PercentStyle)
    layout = getattr(formatter, "_fmt", None) if is_percent else None
    level = logger.getEffectiveLevel()
    return Start(config, part, records, str(store), limit_s, level, layout, board, sums)


def _end_all(
    processes: Sequence[subprocess.Popen[bytes]],
    connections: Sequence[socket.socket],
    pipe: int,
    directory: Path,
    close_board: Callable[[], object],
) -> None:
    for process in processes:
        process.kill()  # also one that was stopped
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
    for connection in connections:
        connection.close()
    os.close(pipe)
    close_board()
    shutil.rmtree(directory, ignore_errors=True)
