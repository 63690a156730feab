"""Offline batch generation in the caller's process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.core.request_conversion import check_request
from trencadis.engine.errors import RequestFailed
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.outputs import CompletionDelta, FinishReason, PositionLogprobs
from trencadis.engine.sampling_params import SamplingParams


@attrs.define
class Completion:
    """One sample of a prompt."""

    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[PositionLogprobs] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None


@attrs.frozen
class Generation:
    """A prompt with its samples."""

    prompt_token_ids: tuple[int, ...] = attrs.field(repr=False)
    completions: tuple[Completion, ...]


class LLM:
    """A model in this process, for offline batches: ``LLM("path").generate(["Hello"])``.

    ``settings`` are those of `EngineConfig`. Raises `ModelError` or `ConfigError`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.core = EngineCore(EngineConfig(model=model, **settings))
        self.tokenizer = Tokenizer.load(self.core.spec.source)
        self.core.warm_up()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[Generation]:
        """Complete every prompt, given as text or as token ids; results are in prompt order.

        Raises `InvalidRequest`, before anything is generated, if one prompt cannot be served, and
        `RequestFailed` if an internal error ends one.
        """
        params = params or SamplingParams()
        token_ids = [
            tuple(self.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts
        ]
        spec, longest = self.core.spec, self.core.max_model_len
        for ids in token_ids:
            check_request(ids, params, spec.vocab_size, longest)
        waiting = deque(enumerate(token_ids))
        answers = [[Completion() for _ in range(params.n)] for _ in token_ids]
        running: dict[str, RequestStream] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.core.config.max_waiting:
                    number, ids = waiting.popleft()
                    self.core.add(str(number), ids, params)
                    running[str(number)] = RequestStream(
                        str(number), ids, params, self.tokenizer, partial(_extend, answers[number])
                    )
                self._advance(running)
        finally:
            for key in running:
                self.core.abort(key)
        return [
            Generation(ids, tuple(completions))
            for ids, completions in zip(token_ids, answers, strict=True)
        ]

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
    ) -> list[Generation]:
        """Answer every conversation. Prompts are rendered with the model's chat template."""
        prompts = [self.tokenizer.render_chat(messages) for messages in conversations]
        return self.generate(prompts, params)

    def _advance(self, running: dict[str, RequestStream]) -> None:
        """Run one step of the core; remove the requests that it ends from ``running``."""
        tokens = self.core.step()
        for failure in self.core.take_failures():
            raise RequestFailed(f"prompt {failure.key}: {failure.message}")
        for token in tokens:
            stream = running[token.key]
            if stream.push(token):
                self.core.finish(token.key, token.index)
            if stream.finished:
                del running[token.key]
        time.sleep(self.core.pause_s)


def _extend(completions: list[Completion], delta: CompletionDelta) -> None:
    completion = completions[delta.index]
    completion.text += delta.text
    completion.token_ids.extend(delta.token_ids)
    completion.logprobs.extend(delta.logprobs)
    completion.finish_reason = delta.finish_reason
