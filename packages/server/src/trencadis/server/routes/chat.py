"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import chat_completion as complete
from openai.types.chat import chat_completion_chunk as chunk
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

from trencadis.engine import PositionLogprobs
from trencadis.server.api.chat_batch import ChatBatchRequest
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.logprobs import chat_logprobs, prompt_logprobs
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.translation import client_fields
from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.generation.answer_writer import AnswerText, AnswerWriter, ChatFinishReason
from trencadis.server.generation.choice_stream import ChoiceDelta, FinishedChoice, stop_fields
from trencadis.server.generation.prompts import Prompt
from trencadis.server.generation.reasoning_usage import ReasoningUsage
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import (
    ChunkWriter,
    generation_responses,
    respond_to_chat,
)

_WITHOUT_VALUE: dict[str, Any] = dict.fromkeys(
    ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text")
)
"""Fields of a whole response that clients of vLLM read whether they asked for them or not."""


def chat_router(context: ServingContext) -> APIRouter:
    """The route for conversations."""
    router = APIRouter(tags=["chat"], route_class=context.bodies.route_class)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses=generation_responses(ChatCompletion),
    )
    async def create_chat_completion(
        body: Checked[ChatCompletionRequest], request: Request
    ) -> Response:
        """Answer a conversation, in one response or as a stream of chunks."""
        return await respond_to_chat(context, request, body, ChatWriter)

    @router.post(
        "/v1/chat/completions/batch",
        response_model=None,
        responses={
            200: {"model": ChatCompletion},
            **error_responses(*BODY_ERRORS, 404, 415, 429, 500, 503),
        },
    )
    async def create_chat_batch(body: Checked[ChatBatchRequest], request: Request) -> Response:
        """Answer several conversations: choice i is the answer to conversation i."""
        with client_fields({}):
            chats = await context.bodies.translated(request, body.chats)

        async def encode(_: object, model: ServedModel, client: str) -> list[Prompt]:
            # One after the other: of those that wait for the tokenizer there is a limit.
            encoded = [await context.encoder.chat(chat, model, client) for chat in chats]
            return [prompt for prompts in encoded for prompt in prompts]

        return await respond_to_chat(context, request, chats[0], ChatWriter, encode)

    return router


def _hides_reasoning(plan: AnswerPlan | None) -> bool:
    return plan is not None and plan.reasoning is not None and not plan.shows_reasoning


def _new_answer(prompt: Prompt) -> AnswerWriter:
    return AnswerWriter(prompt.answer or AnswerPlan())


class ChatWriter(ChunkWriter[ChatCompletionChunk]):
    """Writes choices as assistant messages. The first chunk of a choice carries the role."""

    id_prefix = "chatcmpl-"

    def __init__(
        self,
        model: ServedModel,
        request: ChatCompletionRequest,
        prompts: Sequence[Prompt],
        name: str | None = None,
    ) -> None:
        super().__init__(model, request, prompts, name)
        self.usage = ReasoningUsage.of(prompts)
        if request.service_tier is not None:
            self.header["service_tier"] = "default"  # the one that served the request
        # The tokens of a reasoning that the client does not want would tell it.
        is_hidden = any(_hides_reasoning(prompt.answer) for prompt in prompts)
        self._has_logprobs = request.num_logprobs is not None and not is_hidden
        self._has_token_ids = bool(request.return_token_ids) and not is_hidden
        self._answers: dict[int, AnswerWriter] = {}

    def completion(self, choices: Sequence[FinishedChoice]) -> ChatCompletion:
        vllm_fields: dict[str, Any] = {}
        if self.request.prompt_logprobs is not None:
            vllm_fields["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, choices[0].prompt_logprobs, self.request.prompt_logprobs
            )
        return ChatCompletion(
            object="chat.completion",
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=self.usage.so_far(),
            **_WITHOUT_VALUE | self.header | self._prompt_fields() | vllm_fields,
        )

    def make_chunk(self, choices: list[chunk.Choice]) -> ChatCompletionChunk:
        is_opening = bool(choices) and choices[0].delta.role is not None
        fields = self._prompt_fields() if is_opening else {}
        return ChatCompletionChunk(
            object="chat.completion.chunk", choices=choices, **self.header | fields
        )

    def opening(self, delta: ChoiceDelta) -> Iterator[chunk.Choice]:
        if delta.choice in self._answers:
            return
        self._answers[delta.choice] = _new_answer(self.prompts[delta.prompt])
        first = chunk.ChoiceDelta(role="assistant", content="")
        echo = chunk.ChoiceDelta(content=self.prompts[delta.prompt].echo)
        for part in (first, echo) if echo.content else (first,):
            yield chunk.Choice(index=delta.choice, delta=part, logprobs=None, finish_reason=None)

    def new_choices(self, delta: ChoiceDelta) -> Iterator[chunk.Choice]:
        answer = self._answers[delta.choice]
        new = answer.add(delta.delta.text, is_last=delta.finish_reason is not None)
        has_tokens = (self._has_logprobs and delta.delta.logprobs) or (
            self._has_token_ids and delta.delta.token_ids
        )
        if new or has_tokens or delta.finish_reason:
            yield self._new_choice(delta, new, answer.finish_reason(delta.finish_reason))

    def _logprobs(self, positions: Sequence[PositionLogprobs]) -> list[ChatCompletionTokenLogprob]:
        lists = bool(self.request.logprob_token_ids)
        return chat_logprobs(self.token_texts, positions, with_chosen=lists)

    def _prompt_fields(self) -> dict[str, Any]:
        if len(self.prompts) > 1:
            return {}
        prompt = self.prompts[0]
        fields: dict[str, Any] = {}
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.token_ids)
        if prompt.text is not None:
            fields["prompt_text"] = prompt.text
        return fields

    def _choice(self, index: int, choice: FinishedChoice) -> complete.Choice:
        logprobs = None
        if self._has_logprobs:
            content = self._logprobs(choice.logprobs)
            logprobs = complete.ChoiceLogprobs(content=content, refusal=None)
        vllm_fields: dict[str, Any] = {
            **stop_fields(choice.finish_reason, choice.stop_reason, choice.token_ids),
            "token_ids": choice.token_ids if self._has_token_ids else None,
        }
        prompt = self.prompts[index // self.request.num_choices]
        answer = _new_answer(prompt)
        new = answer.add(choice.text, is_last=True)
        reason = answer.finish_reason(choice.finish_reason)
        return complete.Choice(
            index=index,
            message=new.message(prompt.echo),
            logprobs=logprobs,
            finish_reason=reason or choice.finish_reason,
            **vllm_fields,
        )

    def _new_choice(
        self, item: ChoiceDelta, new: AnswerText, finish_reason: ChatFinishReason | None
    ) -> chunk.Choice:
        delta = item.delta
        logprobs = None
        if self._has_logprobs and delta.logprobs:
            content = self._logprobs(delta.logprobs)
            logprobs = chunk.ChoiceLogprobs(content=content, refusal=None)
        vllm_fields: dict[str, Any] = stop_fields(
            item.finish_reason, delta.stop_reason, delta.token_ids
        )
        if self._has_token_ids:
            vllm_fields["token_ids"] = list(delta.token_ids)
        return chunk.Choice(
            index=item.choice,
            delta=new.delta(),
            logprobs=logprobs,
            finish_reason=finish_reason,
            **vllm_fields,
        )
