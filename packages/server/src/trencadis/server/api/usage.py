"""Token counts of a request."""

from __future__ import annotations

import attrs
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from trencadis.engine import CompletionDelta


@attrs.define
class Usage:
    """Token counts of one request. ``cached`` is the number of prefix hits of each prompt."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = attrs.field(factory=dict)

    def add(self, prompt: int, delta: CompletionDelta) -> None:
        """Add a delta of a choice for prompt number ``prompt``."""
        self.completion_tokens += len(delta.token_ids)
        self.cached[prompt] = delta.num_cached_tokens

    def so_far(self) -> CompletionUsage:
        """The current counts, as the OpenAI API reports them."""
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached.values())),
        )
