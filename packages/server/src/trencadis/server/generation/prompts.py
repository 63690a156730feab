"""Prompts of a request as token ids: chat template, tokenisation, limits of the model."""

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
    """Token ids of a prompt. ``echo`` is the text that each choice repeats before its output."""

    token_ids: Sequence[int]
    echo: str = ""


class PromptEncoder:
    """Tokenises prompts in one worker thread, so that a long prompt does not block the event loop.

    At most ``max_pending`` requests wait for the thread; a further one raises `EngineOverloaded`.
    """

    def __init__(self, engine: ServingEngine, max_pending: int) -> None:
        self._engine = engine
        self._max_pending = max_pending
        self._pending = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def chat(self, request: ChatCompletionRequest) -> list[Prompt]:
        """The conversation as one prompt.

        Raises `InvalidRequest` if the chat template rejects it or the model cannot take it, and
        `ApiError` if it leaves no token of the context for the output.
        """
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
        return [Prompt(token_ids)]

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        """All prompts of a request, in order. Raises as `chat` does."""
        tokenizer = self._engine.tokenizer
        special = request.add_special_tokens is not False

        def encode(prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str):
                return Prompt(tokenizer.encode(prompt, special), prompt if request.echo else "")
            self._check(prompt, "prompt")  # decode may fail on ids outside the vocabulary
            return Prompt(prompt, tokenizer.decode(prompt) if request.echo else "")

        prompts = await self._run(lambda: [encode(prompt) for prompt in request.prompt])
        for prompt in prompts:
            self._check(prompt.token_ids, "prompt")
        return prompts

    def close(self) -> None:
        """End the thread. Requests that wait for it are cancelled."""
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
        """Reject what the engine would reject, with the client's field name and OpenAI's code.

        The engine would reject the second prompt of a stream after the HTTP status was sent.
        """
        if not token_ids:
            raise InvalidRequest(f"{field} holds no token: there is nothing to continue", field)
        limit = self._engine.max_model_len
        if len(token_ids) >= limit:
            raise ApiError(
                400,
                f"{field} has {len(token_ids)} tokens, which leaves none of this model's context "
                f"of {limit} tokens for an answer: shorten it",
                param=field,
                code="context_length_exceeded",
            )
        vocab_size = self._engine.tokenizer.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"{field} holds a token id outside this model's vocabulary (0 to {vocab_size - 1})",
                field,
            )


def max_output_tokens(requested: int | None, field: str, prompt: Prompt, max_model_len: int) -> int:
    """Maximum number of output tokens: ``requested``, or the rest of the context.

    ``field`` is the request field of ``requested``. Raises `ApiError` if prompt and output together
    exceed the context.
    """
    available = max_model_len - len(prompt.token_ids)
    if requested is None:
        return available
    if requested > available:
        raise ApiError(
            400,
            f"{field} {requested} and a prompt of {len(prompt.token_ids)} tokens exceed this "
            f"model's context of {max_model_len} tokens: ask for at most {available}",
            param=field,
            code="context_length_exceeded",
        )
    return requested
