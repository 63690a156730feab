"""Prompts of a request as token ids: chat template, tokenisation, limits of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs

from trencadis.engine import EngineOverloaded, InvalidRequest
from trencadis.server.api.chat_messages import messages_for_template
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.errors import ApiError
from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.parsers.chat_template import TemplateTraits

T = TypeVar("T")

_LONG = 65_536
"""Characters of a long prompt. Encoding so many takes about 50 ms."""


@attrs.frozen
class Prompt:
    """Token ids of a prompt. ``echo`` is the text that each choice repeats before its output.

    ``answer`` says how the answers to a conversation are read.
    """

    token_ids: Sequence[int]
    echo: str = ""
    answer: AnswerPlan | None = None


class PromptEncoder:
    """Tokenises prompts in worker threads, so that a long prompt does not block the event loop.

    Long prompts have a thread of their own, so that short ones do not wait for them. At most
    ``max_pending`` requests wait; a further one raises `EngineOverloaded`. ``traits`` are those of
    the model's chat template.
    """

    def __init__(
        self, engine: ServingEngine, max_pending: int, traits: TemplateTraits | None = None
    ) -> None:
        self._engine = engine
        self._traits = traits or TemplateTraits()
        self._max_pending = max_pending
        self._pending = 0
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")

    async def chat(self, request: ChatCompletionRequest) -> list[Prompt]:
        """The conversation as one prompt.

        Raises `InvalidRequest` if the chat template rejects it or the model cannot take it, and
        `ApiError` if it leaves no token of the context for the output.
        """
        messages = messages_for_template(
            request.messages,
            text_arguments=self._traits.text_arguments,
        )
        # Without them where no call is wanted: no model calls a tool that it does not know.
        may_call = request.choice_of_tools.mode != "none"
        tools = [tool.for_template() for tool in request.tools or ()] if may_call else None
        continues = bool(request.continue_final_message)
        generation_prompt = request.add_generation_prompt
        if generation_prompt is None:
            generation_prompt = not continues

        def render() -> list[int]:
            return self._engine.tokenizer.render_chat(
                messages,
                add_generation_prompt=generation_prompt,
                continue_final_message=continues,
                tools=tools,
                chat_template_kwargs=request.chat_template_kwargs,
            )

        length = sum(len(message.content or "") for message in request.messages)
        self._check_length(length, "messages")
        work = (messages, tools, request.chat_template_kwargs)
        token_ids = await self._run(render, sum(len(str(part)) for part in work))
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

        lengths = [len(prompt) for prompt in request.prompt if isinstance(prompt, str)]
        self._check_length(max(lengths, default=0), "prompt")
        prompts = await self._run(
            lambda: [encode(prompt) for prompt in request.prompt], sum(lengths)
        )
        for prompt in prompts:
            self._check(prompt.token_ids, "prompt")
        return prompts

    def close(self) -> None:
        """End the threads. Requests that wait for them are cancelled."""
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T], length: int) -> T:
        if self._pending >= self._max_pending:
            raise EngineOverloaded(
                f"{self._pending} prompts are waiting to be tokenised: try again later"
            )
        self._pending += 1
        thread = self._long if length > _LONG else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            self._pending -= 1

    def _check_length(self, length: int, field: str) -> None:
        """Reject a text of so many characters that no tokens could be long enough for it.

        Encoding it would take seconds, only to find that it is too long.
        """
        limit = self._engine.max_model_len
        if self._engine.tokenizer.min_num_tokens(length) >= limit:
            raise ApiError(
                400,
                f"{field} has {length} characters, more than this model's context of {limit} "
                "tokens can hold: shorten it",
                param=field,
                code="context_length_exceeded",
            )

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
