"""What the HTTP layer asks of an engine; `trencadis.engine.AsyncEngine` answers all of it.

A protocol of its own keeps this layer testable without a model, and lets another runtime put
this API in front of itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from trencadis.engine import (
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    EngineStats,
    SamplingParams,
)


class ServingTokenizer(Protocol):
    """Text to token ids and back; called from one worker thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to ``vocab_size - 1``."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, as log-probabilities report it."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises `InvalidRequest` (field ``messages``) where the chat template rejects it.
        """
        ...


class ServingEngine(Protocol):
    """A running engine with one model."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    @property
    def model_name(self) -> str: ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""
        ...

    @property
    def is_alive(self) -> bool: ...

    async def check_health(self) -> None:
        """Raise `EngineDead` if no request can be served any more."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Deltas of all ``params.n`` answers, interleaved; closing the generator aborts them.

        Requests of a lower ``priority`` are served first. Raises `InvalidRequest`,
        `EngineOverloaded` or `EngineDead` when first iterated, and `EngineDead` later.
        """
        ...

    async def control(self, order: BatchControl) -> BatchControlResult:
        """What an operator's order did. Raises `InvalidRequest` or `EngineDead`."""
        ...
