"""`LLM`: which prompts it takes, what a rejected or interrupted call leaves behind, threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trencadis.engine import LLM, EngineCore, InvalidRequest, SamplingParams
from trencadis.engine.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


SURROGATE = [{"role": "user", "content": "\ud800"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(
        str(tiny_model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=80,
        warmup="none",
    )


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Any:
    """After each test: no request, no block in use, and the LLM answers."""
    yield
    assert not llm.core.has_work
    assert llm.core.stats.num_used_blocks == 0
    assert len(llm.generate("after", GREEDY)[0].completions[0].token_ids) == 6


def test_a_single_text_is_one_prompt(llm: LLM) -> None:
    (alone,) = llm.generate("Hello world", GREEDY)
    assert alone == llm.generate(["Hello world"], GREEDY)[0]


def test_a_single_conversation_is_one_prompt(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    assert llm.chat(conversation, GREEDY) == llm.chat([conversation], GREEDY)


def test_no_prompt_gets_no_answer(llm: LLM) -> None:
    assert llm.generate([]) == llm.chat([]) == []


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([[1.5]], "prompt"),
        (["fine", [1.5]], "prompt"),
        (["fine", [1, "a"]], "prompt"),
        ([[1, 2], None], "prompt"),
        ([[1, 2], 3], "prompt"),
        ([1, 2, 3], "prompt"),
        (["fine", b"bytes"], "prompt"),
        (["fine", "\ud800"], "prompt"),
        (["fine", []], "prompt"),
        (["fine", [258]], "prompt"),
        (["fine", [-1]], "prompt"),
        (["fine", [2**40]], "prompt"),
        (["fine", [1] * 128], "prompt"),
        (5, "prompts"),
        (None, "prompts"),
        (b"bytes", "prompts"),
        ({"prompt": "a"}, "prompts"),
    ],
    ids=str,
)
def test_one_bad_prompt_refuses_the_call_before_anything_is_generated(
    llm: LLM, prompts: Any, field: str
) -> None:
    steps = llm.core.stats.num_steps
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refusal:
            llm.generate(prompts, GREEDY)
        assert refusal.value.field == field
    assert llm.core.stats.num_steps == steps


def test_the_error_tells_which_prompt_is_bad(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompt 2: token ids of the prompt must be integers"):
        llm.generate(["fine", [1], ["a"]], GREEDY)


@pytest.mark.parametrize(
    "conversations",
    [
        "hello",
        [["hello"]],
        [[]],
        ["hello"],
        [[{"role": "user", "content": "a"}], None],
        5,
        [5],
        [None],
        SURROGATE,
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(llm: LLM, conversations: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(conversations, GREEDY)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, n=n, ignore_eos=True)
        for length, n in ((3, 1), (5, 2), (1, 1))
    ]
    prompts = ["one", [1, 2, 3], "three"]
    together = llm.generate(prompts, params)
    assert [len(answer.completions) for answer in together] == [1, 2, 1]
    assert [len(answer.completions[0].token_ids) for answer in together] == [3, 5, 1]
    for prompt, prompt_params, answer in zip(prompts, params, together, strict=True):
        assert llm.generate([prompt], prompt_params) == [answer]
    conversation = [{"role": "user", "content": "Hello"}]
    answers = llm.chat([conversation] * 3, params)
    assert [len(answer.completions) for answer in answers] == [1, 2, 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 params for 2 prompts"),
        ([GREEDY] * 3, "3 params for 2 prompts"),
        ([], "0 params for 2 prompts"),
        ([GREEDY, None], "params must be SamplingParams, got None"),
        ([GREEDY, {"max_tokens": 3}], "params must be SamplingParams"),
        ({"max_tokens": 3}, "params must be a list"),
        (7, "params must be a list"),
    ],
    ids=str,
)
def test_params_that_fit_no_prompt_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        llm.generate(["a", "b"], params)
    assert refusal.value.field == "params"


def test_a_completion_tells_what_stopped_it(llm: LLM) -> None:
    (free,) = llm.generate("hello", LONG)
    text, token_ids = free.completions[0].text, free.completions[0].token_ids
    assert free.completions[0].stop_reason is None
    for params, reason in (
        ({"stop": text[5:7]}, text[5:7]),
        ({"stop": ["absent", text[5:7]]}, text[5:7]),
        ({"stop_token_ids": [token_ids[4]]}, token_ids[4]),
    ):
        settings = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, **params)
        (stopped,) = llm.generate("hello", settings)
        assert stopped.completions[0].finish_reason == "stop"
        assert stopped.completions[0].stop_reason == reason


def test_calls_from_several_threads_all_get_their_answers(llm: LLM) -> None:
    prompts = [f"thread {number}" for number in range(8)]
    expected = [llm.generate(prompt, GREEDY) for prompt in prompts]
    conversation = [{"role": "user", "content": "Hello"}]
    chatted = llm.chat(conversation, GREEDY)
    with ThreadPoolExecutor(9) as threads:
        chatting = threads.submit(llm.chat, conversation, GREEDY)
        answers = list(threads.map(llm.generate, prompts, [GREEDY] * 8))
    assert answers == expected
    assert chatting.result() == chatted


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError("no memory")])
@pytest.mark.parametrize("run", [1, 4])
def test_an_interrupted_step_leaves_no_request_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: Any, run: int
) -> None:
    expected = llm.generate(["abc", "def"], GREEDY)
    calls = 0
    carry_out = ModelRunner.run

    def interrupted(self: ModelRunner, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= run:
            raise error
        return carry_out(self, output)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", interrupted)
        with pytest.raises(BaseException) as caught:
            llm.generate(["abc", "def", "ghi"] * 3, LONG)
    assert not isinstance(caught.value, InvalidRequest)
    assert not llm.core.has_work
    assert llm.generate(["abc", "def"], GREEDY) == expected


def test_an_error_while_requests_are_added_leaves_none_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = EngineCore.add

    def failing(self: EngineCore, key: str, request: Any) -> None:
        if len(request.prompt_token_ids) == 2:
            raise RuntimeError("no such thing")
        add(self, key, request)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "add", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such thing"):
                llm.generate([[1], [1, 2, 3], [1, 2]], GREEDY)
    assert not llm.core.has_work


@pytest.fixture
def sigint() -> Iterator[None]:
    """Python's handler of SIGINT. A shell ignores the signal for what it runs in the background."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` within the given step, where it would leave a half-done change of state."""
    update = ModelRunner.run
    calls = 0

    def run(self: ModelRunner, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == steps:
            act()
        return update(self, *arguments)

    monkeypatch.setattr(ModelRunner, "run", run)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_ends_the_call_after_the_step_under_way(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["abc", "def"], GREEDY)
    steps = llm.core.stats.num_steps
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_after(3, patch, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"] * 9, LONG)
    assert llm.core.stats.num_steps == steps + 3, "the step under way was completed"
    assert signal.getsignal(signal.SIGINT) is handler
    assert llm.generate(["abc", "def"], GREEDY) == expected


@pytest.mark.usefixtures("sigint")
def test_a_second_ctrl_c_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = llm.core.stats.num_steps

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        interrupt_after(3, patch, twice)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"] * 9, LONG)
    assert llm.core.stats.num_steps == steps + 2, "the step under way was not completed"


def test_another_thread_leaves_ctrl_c_to_the_main_thread(llm: LLM) -> None:
    handler = signal.getsignal(signal.SIGINT)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate("abc", GREEDY)))
    thread.start()
    assert signal.getsignal(signal.SIGINT) is handler
    thread.join(60)
    assert len(answers) == 1


def test_a_call_from_inside_another_is_refused_where_it_would_wait_for_itself(llm: LLM) -> None:
    def nested() -> None:
        llm.generate((llm.generate(text)[0].completions[0].text for text in ["a"]), GREEDY)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(nested)
        try:
            with pytest.raises(
                InvalidRequest, match=r"generate\(\) was called while this thread is"
            ):
                call.result(timeout=60)
        finally:
            if not call.done():
                llm._lock.release()  # so that it ends


@pytest.mark.parametrize("prompts", [5, None, "0", ["0"], [[1]], [0.5], [True]])
def test_prompts_to_preempt_are_named_by_their_numbers(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="abort_and_swap needs a list of the numbers of pro"):
        llm.abort_and_swap(prompts)
