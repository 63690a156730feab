"""From tokens to answers: what is emitted when, and which of several are chosen."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import pytest

from trencadis.engine import (
    CompletionDelta,
    GenerateRequest,
    PositionLogprobs,
    RequestFailed,
    SamplingParams,
    Tokenizer,
    TokenLogprob,
)
from trencadis.engine.front.open_requests import OpenRequest, OpenRequests
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.ipc.messages import Abort, Add, Finish, NewToken, StepDone


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


class Answers:
    """A stream and what came out of it."""

    def __init__(self, tokenizer: Tokenizer, **params: object) -> None:
        self.deltas: list[CompletionDelta] = []
        request = GenerateRequest((1, 2), SamplingParams(**params))
        self.stream = RequestStream("a", request, tokenizer, self.deltas.append)
        self._encode = tokenizer.encode

    def push(
        self,
        index: int,
        letter: str,
        logprob: float | None = -1.0,
        ends: bool | Literal["stop"] = False,
    ) -> bool:
        (token_id,) = self._encode(letter)
        position = None
        if logprob is not None:
            position = PositionLogprobs(TokenLogprob(token_id, logprob))
        reason = ("stop" if ends == "stop" else "length") if ends else None
        return self.stream.push(NewToken("key", index, token_id, reason, 0, position))

    @property
    def texts(self) -> list[tuple[int, str, str | None]]:
        return [(delta.index, delta.text, delta.finish_reason) for delta in self.deltas]


def test_samples_are_told_of_as_they_grow(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer, n=2)
    answers.push(1, "x")
    answers.push(0, "y", ends=True)
    assert not answers.stream.finished
    answers.push(1, "z", ends=True)
    assert answers.texts == [(1, "x", None), (0, "y", "length"), (1, "z", "length")]
    assert answers.stream.finished


@pytest.mark.parametrize("params", [{"n": 1}, {"n": 1, "best_of": 2}], ids=["grows", "ranked"])
def test_the_first_delta_tells_how_long_the_request_waited(
    tokenizer: Tokenizer, params: dict[str, int]
) -> None:
    answers = Answers(tokenizer, **params)
    (token_id,) = tokenizer.encode("x")
    position = PositionLogprobs(TokenLogprob(token_id, -1.0))
    token = NewToken("key", 0, token_id, None, 0, position, queue_s=1.5)
    for index in range(max(params.values())):
        answers.stream.push(msgspec.structs.replace(token, index=index))
        answers.push(index, "y", ends=True)
    assert [delta.queue_s for delta in answers.deltas] in ([1.5, None], [1.5])


NUMBERS = [
    field.name
    for field in msgspec.structs.fields(NewToken)
    if field.default is not msgspec.NODEFAULT and field.type in (int, float, float | None)
]
"""What the core tells of a request with its tokens, as ``away_s``."""


@pytest.mark.parametrize("params", [{"n": 1}, {"n": 1, "best_of": 2}], ids=["grows", "ranked"])
def test_a_delta_has_every_number_of_its_token(
    tokenizer: Tokenizer, params: dict[str, int]
) -> None:
    assert set(NUMBERS) >= {"queue_s", "away_s", "num_preemptions"}
    answers = Answers(tokenizer, **params)
    (token_id,) = tokenizer.encode("x")
    position = PositionLogprobs(TokenLogprob(token_id, -1.0))
    numbers = {name: 3 + place for place, name in enumerate(NUMBERS)}
    for index in range(max(params.values())):
        answers.stream.push(NewToken("key", index, token_id, "stop", 0, position, **numbers))
    for name, number in numbers.items():
        place = f"{name}: CompletionDelta in api/outputs.py, front/request_stream.py"
        assert [getattr(delta, name, None) for delta in answers.deltas] == [number], place


def test_the_best_are_told_of_in_the_end_and_in_their_order(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer, n=2, best_of=3)
    for index, logprob in ((0, -3.0), (1, -1.0), (2, -2.0)):
        answers.push(index, "abc"[index], logprob)
        assert not answers.deltas
    for index, logprob in ((0, -3.0), (1, -1.2), (2, -0.1)):
        answers.push(index, "!", logprob, ends=True)
    assert answers.texts == [(0, "c!", "length"), (1, "b!", "length")]
    assert [len(delta.token_ids) for delta in answers.deltas] == [2, 2]
    assert not any(delta.logprobs for delta in answers.deltas)


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)])
def test_the_best_cannot_be_chosen_without_log_probabilities(
    tokenizer: Tokenizer, missing: tuple[int, ...]
) -> None:
    answers = Answers(tokenizer, n=1, best_of=2)
    for position, ends in ((0, False), (1, True)):
        logprob = None if position in missing else -1.0
        answers.push(0, "a", logprob, ends)
    with pytest.raises(RequestFailed, match=f"for {2 - len(missing)} of its 2 tokens"):
        for ends in (False, True):
            answers.push(1, "b", -2.0, ends)
    assert not answers.deltas


@pytest.mark.parametrize(
    ("params", "letters", "reason"),
    [
        ({"stop": "#"}, "a#", "#"),
        ({"stop_token_ids": [66]}, "aB", 66),
        ({}, "aB", None),
    ],
)
def test_the_last_delta_tells_what_stopped_the_sample(
    tokenizer: Tokenizer, params: dict[str, object], letters: str, reason: str | int | None
) -> None:
    (stop_id,) = tokenizer.encode("B")
    if reason == 66:
        params, reason = {"stop_token_ids": [stop_id]}, stop_id
    answers = Answers(tokenizer, **params)
    answers.push(0, letters[0])
    answers.push(0, letters[1], ends="stop" if letters[1] == "B" else False)
    assert [delta.stop_reason for delta in answers.deltas] == [None, reason]
    assert answers.deltas[-1].finish_reason == "stop"


def test_what_follows_a_stop_string_counts_for_nothing(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer, n=1, best_of=2, stop=("#",))
    assert not answers.push(0, "a", -1.0)
    assert answers.push(0, "#", -1.0), "the core has to be told"
    assert not answers.push(0, "z", -50.0), "it was on its way"
    answers.push(1, "b", -2.0, ends=True)
    assert answers.texts == [(0, "a", "stop")]
    assert answers.deltas[0].stop_reason == "#"


def test_hypotheses_keep_the_order_in_which_they_come(tokenizer: Tokenizer) -> None:
    answers = Answers(tokenizer, n=2, best_of=4, use_beam_search=True)
    for index, text in enumerate(("no", "yes")):
        for letter in text[:-1]:
            answers.push(index, letter, -9.0 + index)
        answers.push(index, text[-1], ends=True)
    assert answers.texts == [(0, "no", "length"), (1, "yes", "length")]


@pytest.mark.parametrize(
    "params", [{"n": 2}, {"n": 2, "best_of": 4}, {"n": 2, "use_beam_search": True}]
)
def test_an_aborted_request_ends_each_of_its_answers_once(
    tokenizer: Tokenizer, params: dict[str, object]
) -> None:
    answers = Answers(tokenizer, **params)
    answers.push(0, "a", ends=True)
    answers.stream.abort()
    ended = {delta.index: delta.finish_reason for delta in answers.deltas if delta.finish_reason}
    assert ended == {0: "length" if params == {"n": 2} else "abort", 1: "abort"}
    assert sum(delta.finish_reason is not None for delta in answers.deltas) == 2


def test_a_request_that_brings_output_goes_on_after_all_of_it(tokenizer: Tokenizer) -> None:
    """Also where a multi-byte character is divided between what it brings and what follows."""
    first, second = tokenizer.encode("ü", add_special_tokens=False)
    params = SamplingParams(max_tokens=8)
    request = GenerateRequest((1, 2), params, output_token_ids=(first,), client="a")
    deltas: list[CompletionDelta] = []
    stream = RequestStream("a", request, tokenizer, deltas.append)
    stream.push(NewToken("key", 0, second, None, 0))
    assert [delta.text for delta in deltas] == ["ü"]
    ((sample, token_ids),) = stream.to_resume().items()
    resumed = OpenRequest(stream, asyncio.Queue(), {}).resumption(sample, token_ids)
    expected = attrs.evolve(request, output_token_ids=(first, second), is_resumed=True)
    assert resumed == expected


class BusyCore:
    """A request of it is aborted while the first message of a kind is sent."""

    is_alive = True

    def __init__(self, kind: type) -> None:
        self.messages: list[Any] = []
        self.kind = kind
        self.requests = OpenRequests(self, itertools.count())  # type: ignore[arg-type]

    def check_health(self) -> None:
        pass

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if isinstance(message, self.kind) and len(self.messages) == 1:
            await self.requests.abort_all()


def test_a_request_may_be_aborted_while_its_end_is_sent(tokenizer: Tokenizer) -> None:
    core = BusyCore(Finish)
    answers = [Answers(tokenizer, stop="b", max_tokens=9) for _ in range(2)]
    for key, each in zip("xy", answers, strict=True):
        core.requests.begin(key, each.stream, asyncio.Queue())
    (token_id,) = tokenizer.encode("b")
    tokens = tuple(NewToken(key, 0, token_id, None, 0) for key in "xy")
    asyncio.run(core.requests.deliver(StepDone(tokens, None)))
    assert core.messages == [Finish("x", 0), Abort(("y",))]
    assert not core.requests.unfinished()


def test_a_request_that_is_aborted_while_it_resumes_asks_the_core_for_nothing_more(
    tokenizer: Tokenizer,
) -> None:
    core = BusyCore(Add)
    answers = Answers(tokenizer, n=3, max_tokens=9)
    core.requests.begin("x", answers.stream, asyncio.Queue())
    answers.push(1, "a")
    parked = core.requests.park()
    asyncio.run(core.requests.resume(parked))
    added, aborted = core.messages
    assert isinstance(added, Add)
    assert isinstance(aborted, Abort)
    assert added.key in aborted.keys
    assert not core.requests.unfinished()


def test_what_ends_all_requests_ends_those_that_are_still_to_resume(tokenizer: Tokenizer) -> None:
    """The core would end them without a message once it sleeps, and their clients would wait."""
    core = BusyCore(Add)
    queues: list[asyncio.Queue[Any]] = [asyncio.Queue(), asyncio.Queue()]
    for key, queue in zip("xy", queues, strict=True):
        answers = Answers(tokenizer, max_tokens=9)
        stream = RequestStream(key, answers.stream.request, tokenizer, queue.put_nowait)
        core.requests.begin(key, stream, queue)
    asyncio.run(core.requests.resume(core.requests.park()))
    assert [type(message) for message in core.messages] == [Add, Abort, Abort]
    assert not core.requests.unfinished()
    for queue in queues:
        assert queue.get_nowait().finish_reason == "abort"
