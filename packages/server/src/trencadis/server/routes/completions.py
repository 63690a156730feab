"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from fastapi import APIRouter, Request, Response
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs
from trencadis.server.api.logprobs import TextOffset, completion_logprobs, prompt_logprobs
from trencadis.server.api.protocol import CompletionRequest
from trencadis.server.generation.choice_stream import (
    ChoiceDelta,
    FinishedChoice,
    PromptPositions,
    stop_fields,
)
from trencadis.server.generation.prompts import Prompt
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import (
    ChunkWriter,
    generation_responses,
    respond,
)

_WITHOUT_VALUE: dict[str, Any] = dict.fromkeys(("service_tier", "system_fingerprint"))
"""Fields of a whole response that clients of vLLM read whether they asked for them or not."""


def completions_router(context: ServingContext) -> APIRouter:
    """The route for texts and token ids."""
    router = APIRouter(tags=["completions"], route_class=context.bodies.route_class)

    @router.post(
        "/v1/completions",
        response_model=None,
        responses=generation_responses(Completion),
    )
    async def create_completion(body: Checked[CompletionRequest], request: Request) -> Response:
        """Continue one or several prompts, in one response or as a stream of chunks."""
        encode = context.encoder.completion
        return await respond(context, request, body, encode, CompletionWriter)

    return router


class CompletionWriter(ChunkWriter[Completion]):
    """Writes choices as texts. The first chunk of a choice repeats the prompt under ``echo``."""

    id_prefix = "cmpl-"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._text_offsets: dict[int, TextOffset] = {}
        """For each choice that has begun, where its next token is in its text."""
        self._prompt_logprobs: dict[int, PromptPositions] = {}
        """Those of each prompt of a stream."""

    def completion(self, choices: Sequence[FinishedChoice]) -> Completion:
        return Completion(
            object="text_completion",
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=self.usage.so_far(),
            **_WITHOUT_VALUE | self.header,
        )

    def make_chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(object="text_completion", choices=choices, **self.header)

    def new_choices(self, delta: ChoiceDelta) -> Iterator[CompletionChoice]:
        text, is_first = delta.delta.text, False
        prompt: PromptPositions = ()
        if delta.delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.prompt] = delta.delta.prompt_logprobs
        if delta.choice not in self._text_offsets:
            self._text_offsets[delta.choice] = self._text_offset(self.prompts[delta.prompt])
            text = self.prompts[delta.prompt].echo + text
            prompt = self._prompt_logprobs.get(delta.prompt, ())
            is_first = True
        has_logprobs = self.request.num_logprobs is not None and delta.delta.logprobs
        has_token_ids = self.request.return_token_ids and delta.delta.token_ids
        if text or has_logprobs or has_token_ids or delta.finish_reason:
            yield self._new_choice(delta, text, prompt, is_first=is_first)

    def _choice(self, index: int, choice: FinishedChoice) -> CompletionChoice:
        prompt = self.prompts[index // self.request.num_choices]
        has_token_ids = bool(self.request.return_token_ids)
        vllm_fields: dict[str, Any] = {
            **stop_fields(choice.finish_reason, choice.stop_reason, choice.token_ids),
            "token_ids": choice.token_ids if has_token_ids else None,
            "prompt_token_ids": list(prompt.token_ids) if has_token_ids else None,
            "prompt_logprobs": None,
        }
        if self.request.prompt_logprobs is not None:
            vllm_fields["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, choice.prompt_logprobs, self.request.prompt_logprobs
            )
        logprobs = self._logprobs(
            prompt, choice.prompt_logprobs, choice.logprobs, self._text_offset(prompt)
        )
        return CompletionChoice(
            index=index,
            text=prompt.echo + choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            **vllm_fields,
        )

    def _new_choice(
        self, item: ChoiceDelta, text: str, prompt: PromptPositions, *, is_first: bool
    ) -> CompletionChoice:
        offset = self._text_offsets[item.choice]
        logprobs = self._logprobs(self.prompts[item.prompt], prompt, item.delta.logprobs, offset)
        vllm_fields: dict[str, Any] = stop_fields(
            item.finish_reason, item.delta.stop_reason, item.delta.token_ids
        )
        if self.request.return_token_ids:
            vllm_fields["token_ids"] = list(item.delta.token_ids)
            if is_first:
                vllm_fields["prompt_token_ids"] = list(self.prompts[item.prompt].token_ids)
        # not validated: the type requires a finish_reason, which most chunks do not have
        return CompletionChoice.model_construct(
            index=item.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=item.finish_reason,
            **vllm_fields,
        )

    def _text_offset(self, prompt: Prompt) -> TextOffset:
        has_special = self.request.echoes and prompt.echo_has_special
        return TextOffset(
            self.tokenizer,
            self.request.skip_special_tokens is not False,
            len(prompt.token_ids) if has_special else 0,
        )

    def _logprobs(
        self,
        prompt: Prompt,
        of_prompt: PromptPositions,
        positions: Sequence[PositionLogprobs],
        text_offset: TextOffset,
    ) -> Logprobs | None:
        """Those of a choice, or of a part of it: of the prompt, if it is echoed, and of tokens."""
        if self.request.num_logprobs is None:
            return None
        most = self.request.num_logprobs  # the prompt may have more, for `prompt_logprobs`
        echoed = of_prompt if self.request.echoes else ()
        cut = (
            attrs.evolve(position, top=position.top[:most])
            for position in echoed
            if position is not None
        )
        return completion_logprobs(
            self.token_texts,
            [*cut, *positions],
            text_offset,
            num_logprobs=None if self.request.logprob_token_ids else most,
            first_token=prompt.token_ids[0] if echoed else None,
        )
