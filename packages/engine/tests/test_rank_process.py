"""The order in which a rank starts steps and answers them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import AdapterError, ModelError, RankError
from trencadis.engine.runner.ranks import rank_process, rank_processes
from trencadis.engine.runner.ranks.packed_steps import StepPacker
from trencadis.engine.runner.ranks.rank_messages import (
    Answer,
    Call,
    Cold,
    MessageReader,
    digest_of,
    encode,
    packed_result,
    unpacked_result,
)
from trencadis.engine.runner.ranks.rank_processes import RankProcesses
from trencadis.engine.runner.ranks.step_board import RankBoard, StepBoard
from trencadis.engine.runner.step import StepInput, StepResult
from trencadis.kvcache import CopyPlan
from trencadis.scheduler import Candidate, ScheduledSequence

LIMIT_SECONDS = 30.0


class Executor:
    """Notes what it is asked for. The steps in ``failing`` fail at their start."""

    def __init__(self, *, on_host: bool, failing: tuple[int, ...] = ()) -> None:
        self.device = SimpleNamespace(shares_host_memory=on_host)
        self.on_cold: Callable[[object], None] = lambda shape: None
        self.events: list[str] = []
        self.failing = failing

    def execute(self, step: StepInput) -> Any:
        self.events.append(f"start {step.number}")
        if step.number in self.failing:
            raise ModelError(f"step {step.number}")

        def wait() -> StepResult:
            self.events.append(f"wait {step.number}")
            return StepResult(token_ids={1: step.number})

        return SimpleNamespace(wait=wait)

    def counters(self) -> None:
        self.events.append("counters")

    def compiles(self, shape: str) -> None:
        self.on_cold(shape)


class Rank:
    """A rank that serves calls in a thread. Steps are on the board, other calls are not."""

    def __init__(self, executor: Executor) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_SECONDS)
        self.reader = MessageReader(ours)
        self.board = StepBoard(1)
        board = RankBoard(self.board.files_of(0), 0)
        self.calls = rank_process.CallQueue(board)
        serve: Any = rank_process._serve
        arguments = (executor, self.calls, theirs, board, 0)
        self.thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self.packer = StepPacker()

    def given(self, *calls: Call) -> Rank:
        for call in calls:
            if call.method == "execute":
                packed = self.packer.packed(call.arguments[0])
                assert self.board.write(pickle.dumps((call.number, packed)))
            else:
                self.calls.put(attrs.evolve(call, num_steps=self.board.num_written))
        return self

    def answers(self, count: int) -> list[Any]:
        self.thread.start()
        found = [self.reader.receive() for _ in range(count)]
        self.calls.put(None)
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()
        return found


def step(number: int) -> Call:
    return Call(number, "execute", (StepInput(number, (), (), CopyPlan(), {}),))


def numbers(answers: list[Answer]) -> list[int]:
    return [answer.number for answer in answers]


def test_what_computes_on_the_host_is_answered_before_the_next_step() -> None:
    executor = Executor(on_host=True)
    assert numbers(Rank(executor).given(step(1), step(2)).answers(2)) == [1, 2]
    assert executor.events == ["start 1", "wait 1", "counters", "start 2", "wait 2", "counters"]


def test_a_device_has_its_next_step_before_the_first_is_waited_for() -> None:
    executor = Executor(on_host=False)
    assert numbers(Rank(executor).given(step(1), step(2)).answers(2)) == [1, 2]
    assert executor.events == ["start 1", "start 2", "wait 1", "counters", "wait 2", "counters"]


def test_a_step_without_a_next_one_is_answered_after_a_moment() -> None:
    assert numbers(Rank(Executor(on_host=False)).given(step(1)).answers(1)) == [1]


def test_after_a_step_that_failed_nothing_is_started_before_the_core_knows() -> None:
    """The core may go on with another step than it has sent."""
    executor = Executor(on_host=False, failing=(2,))
    answers = Rank(executor).given(step(1), step(2), step(3)).answers(3)
    assert numbers(answers) == [1, 2, 3]
    assert str(answers[1].error) == "step 2"
    assert executor.events[:4] == ["start 1", "start 2", "wait 1", "counters"]
    assert executor.events.index("start 3") > executor.events.index("wait 1")


def test_a_question_is_answered_after_the_steps_before_it() -> None:
    executor = Executor(on_host=False)
    asked = Rank(executor).given(step(1), step(2), Call(3, "counters"))
    assert numbers(asked.answers(3)) == [1, 2, 3]
    assert executor.events[-1] == "counters"


def test_the_core_is_told_what_may_compile_and_during_which_call() -> None:
    rank = Rank(Executor(on_host=False)).given(Call(7, "compiles", ("a shape",)))
    assert rank.answers(2) == [Cold(7, "a shape"), Answer(7)]


def of_connections(connections: list[socket.socket]) -> Any:
    """The core's end of ranks that a test plays, which were called once."""
    processes: Any = RankProcesses.__new__(RankProcesses)
    processes._failure, processes._cold, processes._on_cold = "", set(), lambda _: None
    processes._limit_s, processes._stopped_since = LIMIT_SECONDS, {}
    processes._unread, processes._end, processes._answered = {1: {}}, lambda: None, None
    processes._board = StepBoard(len(connections))
    processes._connect(connections)
    return processes


def test_what_compiles_after_another_rank_has_failed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the failed one in a collective call."""
    monkeypatch.setattr(rank_processes, "_OTHERS_SECONDS", 0.2)
    pairs = [socket.socketpair() for _ in range(2)]
    told: list[str] = []
    processes = of_connections([ours for ours, _ in pairs])
    processes._on_cold = told.append
    processes._processes = [SimpleNamespace(pid=1, poll=lambda: None)] * 2
    pairs[0][1].sendall(encode(Answer(1, error=ModelError("no memory"))))

    def compile_late() -> None:
        if not told_late:
            told_late.append("sent")
            pairs[1][1].sendall(encode(Cold(1, "a shape")))

    told_late: list[str] = []
    with pytest.raises(ModelError, match="no memory"):
        processes.answers(1, LIMIT_SECONDS, while_waiting=compile_late)
    assert told_late
    assert not told
    assert "rank 0 has failed alone" in processes._failure


def test_an_error_of_the_one_rank_that_was_asked_ends_none() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    processes = of_connections([ours for ours, _ in pairs])
    processes._processes = [SimpleNamespace(pid=1, poll=lambda: None)] * 2
    pairs[0][1].sendall(encode(Answer(1, error=AdapterError("serves no adapters"))))
    with pytest.raises(AdapterError, match="serves no adapters"):
        processes.answers(1, LIMIT_SECONDS, ranks=(0,))
    assert not processes._failure


def test_a_stopped_rank_is_given_up_however_long_the_call_may_take() -> None:
    ours, _theirs = socket.socketpair()
    processes = of_connections([ours])
    processes._limit_s, processes._stopped_since = 0.1, {}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            processes._processes = [process]
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(RankError, match=r"stopped\) has been so for 0.1 s"):
                processes.answers(1, LIMIT_SECONDS)
        finally:
            process.kill()


def test_a_rank_that_answers_was_not_stopped_since_it_last_was() -> None:
    ours, theirs = socket.socketpair()
    processes = of_connections([ours])
    processes._limit_s, processes._stopped_since = 60.0, {0: 0.0}
    theirs.sendall(encode(Answer(1)))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            processes._processes = [process]
            assert processes.answers(1, LIMIT_SECONDS)
            process.send_signal(signal.SIGSTOP)
            while processes._status(0) != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            processes._check_running([0])
        finally:
            process.kill()


def test_ranks_disagree_in_the_step_the_tokens_the_beams_or_the_failures() -> None:
    def plan(number: int, *seq_ids: int) -> StepInput:
        table = np.array([1], np.int32)
        decodes = tuple(ScheduledSequence(seq_id, 5, [7], table, True) for seq_id in seq_ids)
        return StepInput(number, (), decodes, CopyPlan(), {})

    same = StepResult(token_ids={1: 7}, candidates={2: [Candidate(3, -0.5)]})
    others = [
        StepResult(token_ids={1: 8}, candidates=same.candidates),
        StepResult(token_ids={1: 7}, candidates={2: [Candidate(4, -0.5)]}),
        StepResult(token_ids={1: 7}, candidates=same.candidates, failed={5: ModelError("no")}),
    ]
    plans = [plan(1, 1, 2), plan(2, 1, 2), plan(1, 1, 2, 3)]
    digests = [digest_of(each, same) for each in plans]
    digests += [digest_of(plans[0], each) for each in others]
    assert len(set(digests)) == len(digests)
    close = StepResult(token_ids={1: 7}, candidates={2: [Candidate(3, -0.4)]})
    assert digest_of(plans[0], close) == digests[0], "sums may be rounded otherwise"


def answered(number: int) -> bytes:
    return encode(Answer(number, packed_result(StepResult(token_ids={1: number}), None)))


@pytest.fixture
def played() -> Iterator[tuple[Any, list[socket.socket], list[RankBoard]]]:
    """The core's end of two ranks, and what they send and write."""
    pairs = [socket.socketpair() for _ in range(2)]
    processes = of_connections([ours for ours, _ in pairs])
    processes._processes = [SimpleNamespace(pid=os.getpid(), poll=lambda: None)] * 2
    processes._number = processes._num_steps = processes._last_call = 0
    processes.num_messages = processes.num_bytes = 0
    processes._unread = {}
    boards = [RankBoard(processes._board.files_of(rank), rank) for rank in range(2)]
    yield processes, [theirs for _, theirs in pairs], boards
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_rank_that_computes_something_else_is_found_before_what_follows_is_used(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    processes, (first, _second), boards = played
    sent = [processes.send_step(number, ()) for number in (4, 5)]
    for board, digests in zip(boards, ((10, 11), (10, 12)), strict=True):
        for count, digest in enumerate(digests, 1):
            board.answer(count, digest)
    first.sendall(answered(1) + answered(2))
    for step in sent:
        processes.step_answer(step, LIMIT_SECONDS)
    with pytest.raises(RankError, match="rank 1 has other results of step 5 than rank 0"):
        processes.check_alive()


def test_a_rank_that_never_computes_a_step_is_found_with_the_next_one(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    processes, (first, _second), boards = played
    sent = [processes.send_step(number, ()) for number in (4, 5)]
    boards[0].answer(1, 10)
    first.sendall(answered(1) + answered(2))
    processes.step_answer(sent[0], LIMIT_SECONDS)
    processes.check_alive()
    with pytest.raises(RankError, match=r"no answer of rank 1 .* within 0\.05 s"):
        processes.step_answer(sent[1], 0.05)


def test_an_error_of_one_rank_that_comes_after_the_answer_ends_all(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    processes, (first, second), boards = played
    sent = [processes.send_step(number, ()) for number in (4, 5)]
    boards[0].answer(1, 10)
    first.sendall(answered(1))
    processes.step_answer(sent[0], LIMIT_SECONDS)
    second.sendall(encode(Answer(1, error=ModelError("no memory"))))
    with pytest.raises(ModelError, match="no memory"):
        processes.step_answer(sent[1], LIMIT_SECONDS)
    assert "rank 1 has failed alone" in processes._failure


def test_an_error_of_all_ranks_is_that_of_the_step(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    processes, connections, _ = played
    sent = processes.send_step(4, ())
    message = encode(Answer(1, error=ModelError("no memory")))
    connections[0].sendall(message)
    threading.Timer(0.2, connections[1].sendall, (message,)).start()
    with pytest.raises(ModelError, match="no memory"):
        processes.step_answer(sent, LIMIT_SECONDS)
    assert not processes._failure


def test_a_step_on_the_board_waits_for_the_one_that_the_connection_still_brings(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    """A rank takes long to receive a large step, and the next one is sent meanwhile."""
    processes, ends, boards = played
    large = threading.Thread(target=processes.send_step, args=(4, (bytes(1 << 20),)))
    large.start()
    calls = [MessageReader(end).receive() for end in ends]
    large.join()
    processes.send_step(5, ())
    for call, board in zip(calls, boards, strict=True):
        queue = rank_process.CallQueue(board)
        with pytest.raises(TimeoutError):
            queue.get(0.0)
        queue.put(call)
        assert [queue.get(LIMIT_SECONDS).number for _ in range(2)] == [1, 2]


def test_a_step_that_not_all_ranks_were_told_of_ends_them(
    played: tuple[Any, list[socket.socket], list[RankBoard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would get its number, and its answer."""
    processes, _, _ = played
    own = os.eventfd_write

    def interrupted(event: int, value: int) -> None:
        if event == processes._board.files_of(1).event:
            raise KeyboardInterrupt
        own(event, value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            processes.send_step(4, ())
    with pytest.raises(RankError, match="a call was interrupted"):
        processes.send_step(5, ())


SENT = st.lists(st.sampled_from(["step", "large step", "call", "take"]), max_size=60)


@given(SENT)
def test_calls_arrive_in_their_order_whatever_way_they_go(sent: list[str]) -> None:
    """A step that finds no space on the board is sent as other calls are."""
    board = StepBoard(2)
    rank = RankBoard(board.files_of(1), 1)
    queue = rank_process.CallQueue(rank)
    RankBoard(board.files_of(0), 0)  # takes nothing, as a rank that computes
    number, taken, last_call = 0, 0, 0
    for what in [*sent, "take"]:
        if what == "take":
            while taken < number:
                taken += 1
                assert queue.get(LIMIT_SECONDS).number == taken
            with pytest.raises(TimeoutError):
                queue.get(0.0)
            continue
        number += 1
        size = 1 << 20 if what == "large step" else 8
        message = pickle.dumps((number, bytes(size)))
        if what == "call" or not board.write(message, last_call):
            queue.put(Call(number, what, (), board.num_written))
            last_call = number
    board.close()


def test_an_answer_that_comes_beside_an_error_is_kept(
    played: tuple[Any, list[socket.socket], list[RankBoard]],
) -> None:
    """Of the step after the one that all ranks fail in."""
    processes, (first, second), boards = played
    sent = [processes.send_step(number, ()) for number in (4, 5)]
    failed = encode(Answer(1, error=ModelError("no memory")))
    first.sendall(failed)
    threading.Timer(0.2, first.sendall, (answered(2),)).start()
    threading.Timer(0.6, second.sendall, (failed,)).start()
    with pytest.raises(ModelError, match="no memory"):
        processes.step_answer(sent[0], LIMIT_SECONDS)
    for board in boards:
        board.answer(2, 10)
    result, _ = unpacked_result(processes.step_answer(sent[1], LIMIT_SECONDS))
    assert result.token_ids == {1: 2}
