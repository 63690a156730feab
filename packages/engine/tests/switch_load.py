"""Clients of several models at once, whose answers are those of each model alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from trencadis.engine import (
    GenerateRequest,
    LogSettings,
    ModelEntry,
    ModelNotActiveError,
    MultiModelEngine,
    SamplingParams,
    SwitchInProgressError,
)

QUIET = LogSettings(level=logging.CRITICAL)

Answer = tuple[list[int], str]
"""The tokens and the text of an answer."""


@asynccontextmanager
async def running(*models: ModelEntry) -> AsyncIterator[MultiModelEngine]:
    engine = await MultiModelEngine.start(models, log=QUIET)
    try:
        yield engine
    finally:
        await engine.stop()


class SwitchLoad:
    """A client for each text and model, which asks again and again.

    ``texts`` are cut to ``max_prompt_tokens`` tokens of the model's own tokenizer.
    """

    def __init__(
        self,
        texts: Sequence[str],
        params: SamplingParams,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._texts = texts
        self._params = params
        self._max_prompt_tokens = max_prompt_tokens
        self._is_over = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.answered: dict[str, int] = {}
        """Answers of each model."""

    async def alone(self, engine: MultiModelEngine) -> list[Answer]:
        """The answers of the active model, one after the other."""
        return [await self._answer(engine, engine.active, text) for text in self._texts]

    def start(self, engine: MultiModelEngine, alone: Mapping[str, Sequence[Answer]]) -> None:
        """Let the clients ask; an answer other than that in ``alone`` ends its client."""
        self.answered = dict.fromkeys(alone, 0)
        self._clients = [
            asyncio.create_task(self._ask(engine, alias, text, expected))
            for alias, answers in alone.items()
            for text, expected in zip(self._texts, answers, strict=True)
        ]

    async def end(self, engine: MultiModelEngine) -> None:
        """Wait for the answers to all requests, and raise what ended a client."""
        self._is_over.set()
        for alias in (*self.answered, *self.answered):  # so that the parked requests end
            await engine.switch_model(alias, drain_timeout_s=600)
        await asyncio.gather(*self._clients)

    async def _ask(self, engine: MultiModelEngine, alias: str, text: str, expected: Answer) -> None:
        while not self._is_over.is_set():
            try:
                answer = await self._answer(engine, alias, text)
            except (SwitchInProgressError, ModelNotActiveError):
                await asyncio.sleep(0.02)
                continue
            assert answer == expected, (alias, text)
            self.answered[alias] += 1

    async def _answer(self, engine: MultiModelEngine, alias: str, text: str) -> Answer:
        prompt = (await engine.tokenizer_of(alias)).encode(text)[: self._max_prompt_tokens]
        stream = engine.generate(GenerateRequest(prompt, self._params, model=alias))
        deltas = [delta async for delta in stream]
        tokens = [token for delta in deltas for token in delta.token_ids]
        return tokens, "".join(delta.text for delta in deltas)
