"""From a request to token ids: chat templates, tokenisation, and what fits the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs

from trencadis.engine import EngineOverloaded, InvalidRequest
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.errors import ApiError

T = TypeVar("T")


@attrs.frozen
class Prompt:
    """Token ids to continue, and their text where the answer repeats it (``echo``)."""

    token_ids: Sequence[int]
    text: str = ""


class PromptEncoder:
    """Tokenises in one thread of its own, so that a long prompt does not hold up the others'
    streams. At most ``max_pending`` requests wait for it; one more raises `EngineOverloaded`."""

    def __init__(self, engine: ServingEngine, max_pending: int) -> None:
        self._engine = engine
        self._max_pending = max_pending
        self._pending = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def chat(self, request: ChatCompletionRequest) -> Prompt:
        """The rendered conversation. Raises `InvalidRequest` where the template rejects it."""
        messages = [message.for_template() for message in request.messages]
        continues = bool(request.continue_final_message)
        generation_prompt = request.add_generation_prompt
        if generation_prompt is None:
            generation_prompt = not continues

        def render() -> list[int]:
            return self._engine.tokenizer.render_chat(
                messages,
                add_generation_prompt=generation_prompt,
                continue_final_message=continues,
                chat_template_kwargs=request.chat_template_kwargs,
            )

        token_ids = await self._run(render)
        self._check(token_ids, "messages")
        return Prompt(token_ids)

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        """All prompts of a request, in order."""
        tokenizer = self._engine.tokenizer
        special = request.add_special_tokens is not False

        def encode(prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str):
                return Prompt(tokenizer.encode(prompt, special), prompt)
            self._check(prompt, "prompt")  # before decode, which may not take a foreign id
            return Prompt(prompt, tokenizer.decode(prompt) if request.echo else "")

        prompts = await self._run(lambda: [encode(prompt) for prompt in request.prompt])
        for prompt in prompts:
            self._check(prompt.token_ids, "prompt")
        return prompts

    def close(self) -> None:
        """End the thread; what still waits for it is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            raise EngineOverloaded(
                f"{self._pending} prompts are waiting to be tokenised: try again later"
            )
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pending -= 1

    def _check(self, token_ids: Sequence[int], field: str) -> None:
        if not token_ids:
            raise InvalidRequest(f"{field} holds no token: there is nothing to continue", field)
        limit = self._engine.max_model_len
        if len(token_ids) >= limit:
            raise ApiError(
                400,
                f"{field} has {len(token_ids)} tokens, which leaves no room for an answer in this "
                f"model's context of {limit} tokens: shorten it",
                param=field,
                code="context_length_exceeded",
            )
        vocab_size = self._engine.tokenizer.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"{field} holds a token id outside this model's vocabulary (0 to {vocab_size - 1})",
                field,
            )


def answer_budget(requested: int | None, field: str, prompt: Prompt, max_model_len: int) -> int:
    """Tokens that may be generated: as requested, or what the context has left.

    ``field`` is the name under which the client requested it. Raises `ApiError` when prompt and
    answer would not fit together.
    """
    room = max_model_len - len(prompt.token_ids)
    if requested is None:
        return room
    if requested > room:
        raise ApiError(
            400,
            f"{field} {requested} and a prompt of {len(prompt.token_ids)} tokens exceed this "
            f"model's context of {max_model_len} tokens: ask for at most {room}",
            param=field,
            code="context_length_exceeded",
        )
    return requested
