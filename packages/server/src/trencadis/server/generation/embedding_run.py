"""The embeddings or scores of one API request: one engine request for each input."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from trencadis.engine import CompletionDelta, EngineOverloaded
from trencadis.server.generation.choice_stream import ChoiceStream, EngineRequest, Generate
from trencadis.server.metrics.serving_metrics import ServingMetrics

ResultT = TypeVar("ResultT")

_AT_ONCE = 128
"""Most inputs of a request that are in the engine at once: enough for full batches, and its queue
is not filled by one request."""


async def embed_all(
    generate: Generate,
    metrics: ServingMetrics,
    requests: Sequence[EngineRequest],
    request_id: str,
    read: Callable[[CompletionDelta], ResultT],
) -> list[ResultT]:
    """What ``read`` makes of the result of each request, in the order of ``requests``.

    An input that a full queue rejects waits for another of this request to end; with none in the
    engine it is an error. The first error ends all of them, and so does the end of the caller.
    Raises what the engine's ``generate`` raises.
    """
    run = _EmbeddingRun(generate, metrics, requests, request_id, read)
    tasks = [asyncio.create_task(run.embed_next()) for _ in requests[:_AT_ONCE]]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [run.found[number] for number in range(len(requests))]


class _EmbeddingRun(Generic[ResultT]):
    """What the tasks of one API request share. ``found``: the results by number of the input."""

    def __init__(
        self,
        generate: Generate,
        metrics: ServingMetrics,
        requests: Sequence[EngineRequest],
        request_id: str,
        read: Callable[[CompletionDelta], ResultT],
    ) -> None:
        self.found: dict[int, ResultT] = {}
        self._read = read
        self._generate = generate
        self._metrics = metrics
        self._request_id = request_id
        self._numbered = enumerate(requests)
        self._num_sent = 0
        """Inputs that the engine has, or is asked to take."""
        self._refused: deque[asyncio.Event] = deque()

    async def embed_next(self) -> None:
        """Embed one input after the other, until none is left that no other task has taken."""
        for number, request in self._numbered:
            while not await self._embed(number, request):
                await self._wait()

    async def _embed(self, number: int, request: EngineRequest) -> bool:
        """Whether the engine took an input, which then has its result.

        Raises `EngineOverloaded` where the engine has no other input of this request.
        """
        stream = ChoiceStream(
            self._generate, self._metrics, [request], f"{self._request_id}-{number}"
        )
        self._num_sent += 1
        try:
            async with aclosing(stream):
                async for item in stream:
                    self.found[number] = self._read(item.delta)
        except EngineOverloaded:
            if self._num_sent == 1:
                raise
            return False
        finally:
            self._num_sent -= 1
        # One alone: this task sends its next input, too, and at most one of them finds no place.
        if self._refused:
            self._refused.popleft().set()
        return True

    async def _wait(self) -> None:
        """Wait until an input that the engine has ends."""
        ended = asyncio.Event()
        self._refused.append(ended)
        await ended.wait()
