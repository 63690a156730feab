"""Tokens that a request cost, as it goes and in OpenAI's form."""

from __future__ import annotations

import attrs
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from trencadis.engine import CompletionDelta


@attrs.define
class Usage:
    """Counts of one request. ``cached`` holds, for each prompt, its tokens found in the cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = attrs.field(factory=dict)

    def add(self, prompt: int, delta: CompletionDelta) -> None:
        """Count what an answer to prompt number ``prompt`` gained."""
        self.completion_tokens += len(delta.token_ids)
        self.cached[prompt] = delta.num_cached_tokens

    def so_far(self) -> CompletionUsage:
        """The counts up to now."""
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached.values())),
        )
