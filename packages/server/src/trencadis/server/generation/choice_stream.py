"""One request's way through the engine: its prompts side by side, as one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Literal

import attrs

from trencadis.engine import (
    CompletionDelta,
    EngineOverloaded,
    InvalidRequest,
    PositionLogprobs,
    SamplingParams,
)
from trencadis.server.api.usage import Usage
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.errors import RequestAbortedError
from trencadis.server.generation.prompts import Prompt
from trencadis.server.metrics import RequestTimeline, ServingMetrics

FinishReason = Literal["stop", "length"]
"""How an answer ends; one that the engine aborts is an error here."""


@attrs.frozen
class Job:
    """A prompt, how to continue it, and how urgent that is (lower: sooner)."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0


@attrs.frozen
class ChoiceDelta:
    """What one answer gained. ``choice`` numbers the answers of a request, prompt by prompt."""

    choice: int
    prompt: int
    delta: CompletionDelta
    finish_reason: FinishReason | None


class Deltas(AsyncIterator[ChoiceDelta]):
    """The deltas of all jobs of a request, as they come. `aclose` aborts what still runs."""

    def __init__(
        self,
        engine: ServingEngine,
        metrics: ServingMetrics,
        jobs: Sequence[Job],
        request_id: str,
    ) -> None:
        streams = [
            _run(engine, metrics, job, number, f"{request_id}-{number}")
            for number, job in enumerate(jobs)
        ]
        self._source = streams[0] if len(streams) == 1 else _merged(streams)
        self._first: ChoiceDelta | None = None

    async def start(self) -> None:
        """Wait for the first delta: a request that the engine refuses raises here, while its
        HTTP status can still tell."""
        self._first = await anext(self._source)

    async def __anext__(self) -> ChoiceDelta:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._source)

    async def aclose(self) -> None:
        await self._source.aclose()


@attrs.define
class Answer:
    """One answer, put together from its deltas."""

    text: str = ""
    logprobs: list[PositionLogprobs] = attrs.field(factory=list)
    finish_reason: FinishReason = "length"
    stop_reason: str | int | None = None


async def collect(deltas: Deltas, num_choices: int, usage: Usage) -> list[Answer]:
    """All answers of a request, complete; counts them in ``usage``."""
    answers = [Answer() for _ in range(num_choices)]
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    async with aclosing(deltas):
        async for item in deltas:
            usage.add(item.prompt, item.delta)
            answer, delta = answers[item.choice], item.delta
            texts[item.choice].append(delta.text)
            answer.logprobs.extend(delta.logprobs)
            if item.finish_reason is not None:
                answer.finish_reason = item.finish_reason
                answer.stop_reason = delta.stop_reason
    for answer, parts in zip(answers, texts, strict=True):
        answer.text = "".join(parts)
    return answers


async def _run(
    engine: ServingEngine,
    metrics: ServingMetrics,
    job: Job,
    number: int,
    request_id: str,
) -> AsyncGenerator[ChoiceDelta, None]:
    first_choice = number * job.params.n
    timeline = RequestTimeline(metrics, job.params.n, len(job.prompt.token_ids))
    outcome: str | None = "abort"
    stream = engine.generate(job.prompt.token_ids, job.params, request_id, job.priority)
    try:
        async with aclosing(stream):
            async for delta in stream:
                timeline.observe(delta)
                if delta.finish_reason == "abort":
                    raise RequestAbortedError("the engine aborted this request: send it again")
                choice = first_choice + delta.index
                yield ChoiceDelta(choice, number, delta, delta.finish_reason)
    except (InvalidRequest, EngineOverloaded):
        outcome = None  # never accepted, so nothing ended
        raise
    except Exception:
        outcome = "error"
        raise
    finally:
        if outcome is not None:
            timeline.end(outcome)


async def _merged(
    streams: Sequence[AsyncGenerator[ChoiceDelta, None]],
) -> AsyncGenerator[ChoiceDelta, None]:
    """The items of all streams in order of arrival. An error in one ends, and closes, all."""
    arrivals: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(len(streams))

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await arrivals.put(item)
        except Exception as error:  # handed to the reader, who raises it
            await arrivals.put(error)
        else:
            await arrivals.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
