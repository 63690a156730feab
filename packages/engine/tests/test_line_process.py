"""A process that answers questions: each caller gets the answer to its own, or an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trencadis.engine.errors import ProcessUnresponsive, RequestFailed
from trencadis.engine.front import template_process
from trencadis.engine.front.chat_renderer import ChatRenderer
from trencadis.engine.line_process import LineProcess

WORKER = """
import json, os, sys, time

def main():
    for line in sys.stdin:
        number, question = json.loads(line)
        if question == "die":
            os._exit(1)
        if question == "twice":
            print(json.dumps([number, question]), flush=True)
        if isinstance(question, list):
            time.sleep(question[0])
        print(json.dumps([number, question]), flush=True)
"""
READY = "print('[0, null]', flush=True)\n"
RENDERER = "trencadis.engine.front.template_process"


def conversation(
    text: str, template: str = "{{ messages[0].content }}", limit_s: float = 2.0
) -> list[Any]:
    arguments = {
        "chat_template": template,
        "conversations": [[{"role": "user", "content": text}]],
        "tools": None,
    }
    return [limit_s, arguments]


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LineProcess]:
    (tmp_path / "echo_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    process = LineProcess("echo_worker", answer_s=60.0)
    yield process
    process.close()


@pytest.fixture
def renderer() -> Iterator[LineProcess]:
    process = LineProcess(RENDERER, answer_s=60.0)
    yield process
    process.close()


def ask(process: LineProcess, text: str) -> str | None:
    """The rendered text; None where the process had failed."""
    try:
        return process.ask(conversation(text))["text"]
    except RequestFailed:
        return None


def num_open_files() -> int:
    return psutil.Process().num_fds()


def wait_until_gone(pid: int) -> None:
    for _ in range(600):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} lives on")


def wait_until_asked(process: LineProcess) -> None:
    """Until a question of another thread waits for its answer."""
    for _ in range(6000):
        if process._asked is not None:
            return
        time.sleep(0.01)
    pytest.fail("nothing was asked")


def kill_at_work(pid: int) -> None:
    """Kill a process once it has worked for a moment."""
    process = psutil.Process(pid)
    begun_s = process.cpu_times().user
    while process.cpu_times().user < begun_s + 0.2:
        time.sleep(0.01)
    process.kill()


def fork_of(process: LineProcess) -> int:
    (fork,) = psutil.Process(process.started().pid).children()
    return fork.pid


@pytest.mark.parametrize("kill_outer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_client_gets_the_answer_of_another_after_a_process_was_killed(
    renderer: LineProcess, kill_outer: bool
) -> None:
    assert renderer.ask(conversation("first")) == {"text": "first"}
    outer, fork = renderer.started().pid, fork_of(renderer)
    os.kill(outer if kill_outer else fork, signal.SIGKILL)
    time.sleep(0.3)
    names = ("alice", "bob", "carol", "dave")
    answers = [ask(renderer, name) for name in names]
    assert answers[1:] == [*names[1:]]
    assert answers[0] in ("alice", None)
    wait_until_gone(outer)
    wait_until_gone(fork)


def test_a_fork_that_is_killed_at_work_blames_no_conversation(renderer: LineProcess) -> None:
    renderer.ask(conversation("first"))
    killer = threading.Thread(target=kill_at_work, args=(fork_of(renderer),))
    killer.start()
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestFailed, match="send the request again"):
        renderer.ask(conversation("slow", endless, limit_s=30.0))
    killer.join(60)
    assert renderer.ask(conversation("next")) == {"text": "next"}


def slow_to_compile() -> str:
    """A template that takes this machine about 0.4 s to compile: above 0.1 s, and below 2 s."""
    template, part = "{{ messages[0].content }}", "{% if 0 %}{{ a[b] + c(d) }}{% endif %}"
    for _ in range(2):  # the first one imports and compiles what the second one uses
        begun_s = time.process_time()
        ImmutableSandboxedEnvironment().from_string(template + part * 100)
        seconds = time.process_time() - begun_s
    return template + part * max(100, round(100 * 0.4 / seconds))


def test_a_template_that_is_slow_to_compile_renders_quick_conversations(
    renderer: LineProcess,
) -> None:
    """Also after a slow conversation has ended the fork that had compiled it."""
    _, quick = conversation("quick", slow_to_compile())
    loop = "{% for _ in range(99999) %}"
    _, slow = conversation("slow", loop + loop + "{% endfor %}{% endfor %}")
    assert renderer.ask([0.1, quick]) == {"text": "quick"}
    assert "timed_out" in renderer.ask([0.01, slow])
    assert renderer.ask([0.1, quick]) == {"text": "quick"}


def test_an_answer_that_came_twice_is_not_that_to_the_next_question(echo: LineProcess) -> None:
    assert echo.ask("twice") == "twice"
    time.sleep(0.2)
    assert [echo.ask(name) for name in ("a", "b")] == ["a", "b"]


def test_an_interrupted_question_leaves_no_answer_behind(
    echo: LineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo.ask("warm")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            echo.ask([50, "first conversation"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert echo.ask("second conversation") == "second conversation"


def test_closing_ends_a_question_at_once(echo: LineProcess) -> None:
    echo.ask("warm")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(echo.ask, [300])
        wait_until_asked(echo)
        echo.close()
        with pytest.raises(RequestFailed, match="closed"):
            asked.result(timeout=60)
    assert echo.ask("again") == "again"


def test_a_question_after_the_end_starts_no_process(echo: LineProcess) -> None:
    """Also one that has waited for another, which was answered by the end."""
    echo.ask("warm")
    process, turn = echo.started(), threading.Lock()

    def ask(question: object) -> object:
        with turn:
            return echo.ask(question)

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, question) for question in ([300], "waits")]
        wait_until_asked(echo)
        echo.close_for_good()
        for question in asked:
            with pytest.raises(RequestFailed):
                question.result(timeout=60)
    assert process.poll() is not None
    assert echo._process is None
    with pytest.raises(RequestFailed, match="closed for good"):
        echo.ask("later")


@pytest.mark.parametrize("question", ["short", "long" * 100_000])
def test_a_stopped_process_is_given_up_after_the_limit(echo: LineProcess, question: str) -> None:
    echo.ask("warm")
    echo._answer_s = 0.5
    os.kill(echo.started().pid, signal.SIGSTOP)
    with pytest.raises(ProcessUnresponsive, match=r"no answer within 0\.5 s"):
        echo.ask(question)
    echo._answer_s = 60.0
    assert echo.ask(question) == question


def test_the_limit_of_an_answer_is_not_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import time; time.sleep(3)\n"
    (tmp_path / "slow_worker.py").write_text(slow + WORKER.replace("for", READY + "    for", 1))
    monkeypatch.syspath_prepend(tmp_path)
    process = LineProcess("slow_worker", answer_s=1.5)
    assert process.ask("first") == "first"
    process.close()


@pytest.mark.parametrize("quick", [pytest.param(None, marks=pytest.mark.slow), False])
def test_a_stopped_renderer_fails_within_seconds_and_is_replaced(
    quick: bool | None,
) -> None:
    renderer = ChatRenderer()
    processes = (renderer._quick, renderer._patient)
    _, arguments = conversation("hello")
    try:
        assert renderer.render(arguments, quick) == {"text": "hello"}
        for child in psutil.Process().children(recursive=True):
            if "template_process" in " ".join(child.cmdline()):
                child.suspend()
        for process in processes:
            assert process._answer_s <= 30
            process._answer_s = 0.5
        with pytest.raises(ProcessUnresponsive):
            renderer.render(arguments, quick)
        for process in processes:
            process._answer_s = 60.0
        assert renderer.render(arguments, quick) == {"text": "hello"}
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (-signal.SIGSEGV, {"error": "they are nested too deep"}),
        (-signal.SIGBUS, {"error": "they are nested too deep"}),
        (-signal.SIGABRT, {"error": "rendering them takes more than 512 MiB"}),
        (3, {"error": "rendering them takes more than 512 MiB"}),
        (1, {"error": "the process that renders it ended with exit code 1"}),
        (
            -signal.SIGPROF,
            {"error": "rendering them takes too much processor time", "timed_out": ""},
        ),
    ],
)
def test_how_a_fork_ends_tells_why_a_conversation_is_not_rendered(
    code: int, answer: dict[str, str]
) -> None:
    assert template_process._failure(code) == answer


def test_a_process_that_ends_is_replaced(echo: LineProcess) -> None:
    num_open = num_open_files()
    for _ in range(3):
        with pytest.raises(RequestFailed, match="it has ended"):
            echo.ask("die")
    assert echo.ask("x" * 3_000_000) == "x" * 3_000_000
    echo.close()
    assert num_open_files() <= num_open


def test_modules_in_the_working_directory_are_not_imported(
    renderer: LineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    assert renderer.ask(conversation("safe")) == {"text": "safe"}
