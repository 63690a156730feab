"""The interface of an engine that this server needs. `trencadis.engine.AsyncEngine` has it.

The protocols let tests run without a model, and let another runtime use this server.
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
    """Converts text to token ids and back. The server calls it from several threads: `encode` and
    `render_chat` from worker threads, the others also from the event loop."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to ``vocab_size - 1``."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The chat template in Jinja, which tells how the model writes tool calls and reasoning;
        None if there is none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, as log-probabilities report it."""
        ...

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text: those of a part of a character, too.

        No bytes for a special token that is skipped.
        """
        ...

    def min_num_tokens(self, length: int) -> int:
        """The fewest tokens that a text of ``length`` characters can have."""
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
        """Apply the chat template and return the token ids of a conversation.

        Raises `InvalidRequest` (field ``messages``) if the chat template rejects it.
        """
        ...


class ServingEngine(Protocol):
    """A running engine that serves one model."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        ...

    @property
    def model_name(self) -> str: ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""
        ...

    async def check_health(self) -> None:
        """Raise an error if requests cannot be served.

        `EngineDead` if the engine has stopped, `EngineRestarting` while it recovers by itself, and
        `EngineUnresponsive` if it hangs.
        """
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield the deltas of all ``params.n`` choices, interleaved.

        Closing the generator aborts the request. A request with a lower ``priority`` runs first.
        Requests share cached prefixes only if their ``cache_salt`` is the same.
        The first iteration raises `InvalidRequest`, `EngineOverloaded` or an error of
        `check_health`; later ones raise `RequestFailed`, an internal error that concerns this
        request alone, `BucketMiss`, a shape that the engine refuses to compile for it, or
        `EngineDead`.
        """
        ...

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Carry out an operator's order and return its effect.

        Raises `InvalidRequest`, `EngineOverloaded` or an error of `check_health`.
        """
        ...
