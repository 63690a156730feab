"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from fastapi import APIRouter, Depends, Request, Response
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from trencadis.engine import PositionLogprobs
from trencadis.server.api.logprobs import completion_logprobs
from trencadis.server.api.protocol import CompletionRequest
from trencadis.server.api.usage import Usage
from trencadis.server.generation.choice_stream import Answer, ChoiceDelta, Job, collect
from trencadis.server.generation.prompts import answer_budget
from trencadis.server.http.content_type import json_only
from trencadis.server.http.event_stream import EventStream, answer_events, unless_disconnected
from trencadis.server.routes.context import ServingContext, new_id


def completions_router(context: ServingContext) -> APIRouter:
    """The route that continues texts."""
    router = APIRouter(tags=["completions"], dependencies=[Depends(json_only)])

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        return await unless_disconnected(request.receive, _respond(context, body))

    return router


async def _respond(context: ServingContext, request: CompletionRequest) -> Response:
    context.check_model(request.model)
    jobs = await _jobs(context, request)
    text = _Text(context, request, jobs)
    deltas = context.start(jobs, text.id)
    if request.stream:
        await deltas.start()
        events = answer_events(deltas, text.chunks, text.last_chunks)
        return EventStream(events, deltas, context.settings.send_timeout, text.id)
    answers = await collect(deltas, len(jobs) * request.num_samples, text.usage)
    content = text.completion(answers).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers={"X-Request-Id": text.id})


async def _jobs(context: ServingContext, request: CompletionRequest) -> list[Job]:
    # checked before the prompts are tokenised, which takes longer
    context.check_token_ids(request.sampling_params(request.max_tokens, request.logprobs))
    max_model_len = context.engine.max_model_len
    jobs = []
    for prompt in await context.encoder.completion(request):
        budget = answer_budget(request.max_tokens, "max_tokens", prompt, max_model_len)
        params = request.sampling_params(budget, request.logprobs)
        jobs.append(Job(prompt, params, request.priority or 0))
    return jobs


@attrs.define
class _Text:
    """One text completion: its id, its time, its cost, and how its answers are written."""

    context: ServingContext
    request: CompletionRequest
    jobs: Sequence[Job]
    usage: Usage = attrs.field(init=False)
    id: str = attrs.field(factory=lambda: new_id("cmpl"))
    created: int = attrs.field(factory=lambda: int(time.time()))
    offsets: dict[int, int] = attrs.field(factory=dict)
    """Characters that each answer's tokens reached so far; one not here has not begun."""

    def __attrs_post_init__(self) -> None:
        self.usage = Usage(sum(len(job.prompt.token_ids) for job in self.jobs))

    def completion(self, answers: Sequence[Answer]) -> Completion:
        """All answers at once."""
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.context.engine.model_name,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=self.usage.so_far(),
        )

    def chunks(self, item: ChoiceDelta) -> Iterator[Completion]:
        """What a streamed answer gained; its first chunk repeats the prompt if asked to."""
        self.usage.add(item.prompt, item.delta)
        text = item.delta.text
        if item.choice not in self.offsets:
            self.offsets[item.choice] = 0
            text = self._echo(item.prompt) + text
        if (
            text
            or item.finish_reason
            or (item.delta.logprobs and self.request.logprobs is not None)
        ):
            yield self._chunk([self._growth(item, text)])

    def last_chunks(self) -> Iterator[Completion]:
        """What follows the answers: the token counts, where they were asked for."""
        if self.request.usage_at_end:
            last = self._chunk([])
            last.usage = self.usage.so_far()
            yield last

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        vllms_own: dict[str, Any] = {"stop_reason": answer.stop_reason}
        return CompletionChoice(
            index=index,
            text=self._echo(index // self.request.num_samples) + answer.text,
            logprobs=self._logprobs(answer.logprobs, 0),
            finish_reason=answer.finish_reason,
            **vllms_own,
        )

    def _growth(self, item: ChoiceDelta, text: str) -> CompletionChoice:
        logprobs = self._logprobs(item.delta.logprobs, self.offsets[item.choice])
        if logprobs is not None:
            self.offsets[item.choice] += sum(len(token) for token in logprobs.tokens or ())
        ended = item.finish_reason is not None
        vllms_own: dict[str, Any] = {"stop_reason": item.delta.stop_reason} if ended else {}
        # constructed unchecked: its type asks for the finish_reason that a chunk has not yet
        return CompletionChoice.model_construct(
            index=item.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=item.finish_reason,
            **vllms_own,
        )

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        made = Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.context.engine.model_name,
            choices=choices,
        )
        if self.request.usage_at_end:  # null until the end, says the API
            made.usage = self.usage.so_far() if self.request.usage_throughout else None
        return made

    def _echo(self, prompt: int) -> str:
        return self.jobs[prompt].prompt.text if self.request.echo else ""

    def _logprobs(self, positions: Sequence[PositionLogprobs], offset: int) -> Logprobs | None:
        if self.request.logprobs is None:
            return None
        return completion_logprobs(self.context.engine.tokenizer, positions, offset)
