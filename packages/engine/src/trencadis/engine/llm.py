"""Offline batches: prompts in, completions out, in the caller's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.core import EngineCore, check_request
from trencadis.engine.detokenizer import IncrementalDetokenizer
from trencadis.engine.messages import NewToken
from trencadis.engine.outputs import FinishReason, PositionLogprobs
from trencadis.engine.sampling_params import SamplingParams
from trencadis.engine.tokenizer import Tokenizer


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
    """A model in this process, for batches: ``LLM("path", max_num_seqs=8).generate([...])``.

    ``settings`` are those of `EngineConfig`. Raises `ModelError` or `ConfigError`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.core = EngineCore(EngineConfig(model=model, **settings))
        self.tokenizer = Tokenizer.load(self.core.spec.source)
        self.core.warm_up()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[Generation]:
        """Complete every prompt, text or token ids, in whatever order is fastest.

        Raises `InvalidRequest` for a prompt that cannot be served; nothing is generated then.
        """
        params = params or SamplingParams()
        token_ids = [
            tuple(self.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts
        ]
        spec, longest = self.core.spec, self.core.max_model_len
        for ids in token_ids:
            check_request(ids, params, spec.vocab_size, longest)
        running: dict[str, _Sample] = {}
        waiting = deque(
            (f"{i}/{n}", ids, own)
            for i, ids in enumerate(token_ids)
            for n, own in enumerate(params.split())
        )
        samples: dict[str, _Sample] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.core.config.max_waiting:
                    key, ids, own = waiting.popleft()
                    self.core.add(key, ids, own)
                    samples[key] = running[key] = _Sample(self.tokenizer, own, ids)
                self._advance(running)
        finally:
            for key in running:
                self.core.abort(key)
        return [
            Generation(ids, tuple(samples[f"{i}/{n}"].completion for n in range(params.n)))
            for i, ids in enumerate(token_ids)
        ]

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
    ) -> list[Generation]:
        """Answer every conversation, rendered with the model's chat template."""
        return self.generate([self.tokenizer.render_chat(one) for one in conversations], params)

    def _advance(self, running: dict[str, _Sample]) -> None:
        """One step of the core; samples that end leave ``running``."""
        for token in self.core.step():
            sample = running[token.key]
            sample.push(token)
            if sample.completion.finish_reason is not None:
                self.core.abort(token.key)
                del running[token.key]


class _Sample:
    """A completion while it grows."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self.completion = Completion()
        self._keep_stop = params.include_stop_str_in_output
        self._text = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)

    def push(self, token: NewToken) -> None:
        completion, matched = self.completion, None
        completion.token_ids.append(token.token_id)
        if token.logprobs is not None:
            completion.logprobs.append(token.logprobs)
        if token.finish_reason != "stop" or self._keep_stop:
            text, matched = self._text.push(token.token_id)
            completion.text += text
        completion.finish_reason = "stop" if matched is not None else token.finish_reason
        if token.finish_reason is not None and matched is None:
            completion.text += self._text.finish()
