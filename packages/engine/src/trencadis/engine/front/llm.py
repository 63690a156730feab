"""Offline batch generation in the caller's process."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
from typing_extensions import Unpack

from trencadis.engine.api.outputs import (
    CompletionDelta,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
)
from trencadis.engine.api.requests import (
    EngineRequest,
    GenerateRequest,
    PoolingRequest,
    RequestFields,
    generates_nothing,
)
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.api.scoring import Scoring
from trencadis.engine.api.text_prompts import check_named_texts
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.errors import (
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    shown,
)
from trencadis.engine.front.bad_words import with_bad_tokens
from trencadis.engine.front.interrupts import deferred_interrupts
from trencadis.engine.front.pooled_results import Embedding, Score, check_pooling, check_scoring
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.grammars.checker import GrammarChecker
from trencadis.engine.ipc.messages import Rejected, RequestError
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import MAX_ITEMS, is_integer, items_of

ItemT = TypeVar("ItemT")


@attrs.define
class Completion:
    """One sample of a prompt.

    ``stop_reason``: the stop string or the id of the stop token that ended it, otherwise None.
    """

    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[PositionLogprobs] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@attrs.frozen
class Generation:
    """A prompt with its samples. ``prompt_logprobs``: see `CompletionDelta`."""

    prompt_token_ids: tuple[int, ...] = attrs.field(repr=False)
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[PromptLogprobs | None, ...] | None = attrs.field(
        default=None, repr=False
    )


@attrs.frozen
class _Job:
    """A checked prompt with its number, and what it gets while it is served: the completions that
    grow, or in ``pooled`` the delta with its embedding or logit; in ``prompt_logprobs`` those."""

    number: int
    request: EngineRequest
    completions: tuple[Completion, ...]
    pooled: list[CompletionDelta] = attrs.field(factory=list)
    prompt_logprobs: list[PromptLogprobs | None] = attrs.field(factory=list)


class LLM:
    """A model in this process, for offline batches: ``LLM("path").generate(["Hello"])``.

    ``settings`` are those of `EngineConfig`. Calls from several threads are served one after the
    other; one from inside another raises `InvalidRequest`. Raises `ModelError` or `ConfigError`.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.core = EngineCore(EngineConfig(model=model, **settings))
        self.tokenizer = Tokenizer.load(self.core.spec.source, self.core.config.chat_template)
        self._grammars = GrammarChecker(self.tokenizer.to_json)
        self._lock = threading.Lock()
        self._caller: int | None = None
        """The thread whose call is served."""
        self._numbers = itertools.count()
        self._keys: dict[int, str] = {}
        """The key of each prompt of the call that runs, by the number of the prompt."""
        self.core.warm_up()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[Generation]:
        """Complete every prompt, given as text or as token ids; results are in prompt order.

        A single text is one prompt. ``params`` hold for all prompts, or are a list with those of
        each prompt. ``fields``: other fields of each `GenerateRequest`. Raises `InvalidRequest`,
        before anything is generated, if one prompt cannot be served, and `RequestFailed` if an
        internal error ends one. After any error, or Ctrl-C, no request is left running.
        """
        with self._alone("generate"):
            return self._generate(self._encoded(prompts), params, fields)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[Generation]:
        """Answer every conversation, or a single one. Otherwise as `generate`.

        Prompts are rendered with the model's chat template.
        """
        with self._alone("chat"):
            listed: list[Any] = _listed(conversations, "conversations")
            if listed and isinstance(listed[0], Mapping):
                listed = [listed]
            rendered = [self.tokenizer.render_chat(_messages(messages)) for messages in listed]
            return self._generate(rendered, params, fields)

    def embed(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        prompt_name: str | None = None,
        *,
        use_activation: bool = True,
        **fields: Unpack[RequestFields],
    ) -> list[Embedding]:
        """The embedding of every prompt, with ``runner="pooling"``. Otherwise as `generate`.

        Without ``use_activation`` it is the hidden state, of any length.

        ``prompt_name``: which of the checkpoint's prompts is put before each text, as ``query``;
        None for its default prompt, if it declares one. Token ids stay unchanged, so that they take
        no name.
        """
        with self._alone("embed"):
            check_pooling(self.core.facts.embedding_size, self.core.spec.scoring)
            prefix = self.core.spec.text_prompts.prefix(prompt_name)
            listed = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
            check_named_texts(prompt_name, listed)
            jobs = self._pooled(self._encoded(listed, prefix), fields)
            return [Embedding.of(job.pooled[0], use_activation) for job in jobs]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None = None,
        *,
        use_activation: bool = True,
        **fields: Unpack[RequestFields],
    ) -> list[Score]:
        """How relevant each document is to its query, with ``runner="pooling"`` and a reranker.

        One query for all documents, or as many as there are. ``instruction`` tells what makes a
        document relevant; None for what the model has by default. Without ``use_activation`` the
        logits are the scores. Otherwise as `generate`.
        """
        with self._alone("score"):
            scoring = check_scoring(self.core.spec.scoring)
            pairs = _pairs(queries, documents)
            prompts = [
                self._render_pair(scoring, number, pair, instruction)
                for number, pair in enumerate(pairs)
            ]
            jobs = self._pooled(prompts, fields)
            return [Score.of(job.pooled[0], scoring, use_activation) for job in jobs]

    def abort_and_swap(self, prompts: Iterable[int]) -> tuple[int, ...]:
        """Preempt prompts of the call that runs, by their numbers; from any thread.

        They keep their tokens and continue after ``force_evict_hold_s`` seconds, or once the others
        have finished. Returns the numbers of those that run. Raises `InvalidRequest` unless they
        are a list of numbers.
        """
        asked = items_of(prompts)
        if asked is None or not all(map(is_integer, asked)):
            raise InvalidRequest(
                f"abort_and_swap needs a list of the numbers of prompts, got {shown(prompts)}",
                "prompts",
            )
        numbers = dict(self._keys)
        wanted = [numbers[number] for number in asked if number in numbers]
        running = self.core.abort_and_swap(wanted)
        return tuple(number for number, key in numbers.items() if key in running)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load the adapter in the directory ``path``, for calls with ``lora=name``.

        Raises `AdapterError` for a name that is taken, or an adapter that cannot be served.
        """
        with self._alone("load_adapter"):
            self.core.load_adapter(name, os.fspath(path))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises `AdapterError` for one that is not loaded."""
        with self._alone("unload_adapter"):
            self.core.unload_adapter(name)

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """One call after the other. Raises `InvalidRequest` for one from inside another."""
        if self._lock.locked() and self._caller == threading.get_ident():
            raise InvalidRequest(
                f"{call}() was called while this thread is in a call of the same LLM, which it "
                "would wait for: make a list of the prompts first"
            )
        with self._lock:
            try:
                self._caller = threading.get_ident()
                yield
            finally:
                self._caller = None

    def _encoded(
        self, prompts: str | Sequence[str | Sequence[int]], prefix: str = ""
    ) -> list[Sequence[int]]:
        texts = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
        return [
            self._encode(number, prefix + prompt) if isinstance(prompt, str) else prompt
            for number, prompt in enumerate(texts)
        ]

    def _encode(self, number: int, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except InvalidRequest as error:
            raise _of_prompt(number, error) from error

    def _render_pair(
        self, scoring: Scoring, number: int, pair: tuple[str, str], instruction: str | None
    ) -> list[int]:
        try:
            return self.tokenizer.render_pair(scoring.prompt, *pair, instruction=instruction)
        except InvalidRequest as error:
            raise _of_prompt(number, error) from error

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        fields: RequestFields,
    ) -> list[Generation]:
        if self.core.spec.is_pooling:
            raise generates_nothing()
        jobs = [
            self._job(number, partial(self._request_of, prompt, prompt_params, fields))
            for number, (prompt, prompt_params) in enumerate(
                zip(prompts, _per_prompt(params, prompts), strict=True)
            )
        ]
        self._serve(jobs)
        return [
            Generation(
                job.request.prompt_token_ids,
                job.completions,
                tuple(job.prompt_logprobs) or None,
            )
            for job in jobs
        ]

    def _request_of(
        self, prompt: Any, params: SamplingParams, fields: RequestFields
    ) -> GenerateRequest:
        request = GenerateRequest(prompt, params, **fields)
        return with_bad_tokens(request, self.tokenizer)

    def _pooled(self, prompts: Sequence[Sequence[int]], fields: RequestFields) -> list[_Job]:
        jobs = [
            self._job(number, partial(PoolingRequest, prompt, **fields))
            for number, prompt in enumerate(prompts)
        ]
        self._serve(jobs)
        return jobs

    def _job(self, number: int, new_request: Callable[[], EngineRequest]) -> _Job:
        spec = self.core.spec
        try:
            request = new_request()
            request.check(spec.vocab_size, self.core.max_model_len, is_pooling=spec.is_pooling)
            if request.params.structured_output is not None:
                self._grammars.check(request.params.structured_output)
        except InvalidRequest as error:
            raise _of_prompt(number, error) from error
        return _Job(number, request, tuple(Completion() for _ in range(request.params.n)))

    def _serve(self, jobs: Sequence[_Job]) -> None:
        """Generate the completions of all jobs; aborts those that an error leaves unfinished."""
        waiting = deque(jobs)
        running: dict[str, RequestStream] = {}
        with deferred_interrupts() as raise_interrupt:
            try:
                while waiting or running:
                    while waiting and len(running) < self.core.config.max_waiting:
                        self._start(waiting.popleft(), running)
                    self._advance(running)
                    raise_interrupt()
                self.core.finish_steps()
            finally:
                for key in running:
                    self.core.abort(key)
                self.core.discard_step()
                self._keys.clear()

    def _start(self, job: _Job, running: dict[str, RequestStream]) -> None:
        key = f"llm-{next(self._numbers)}"  # never used again, whatever becomes of the request
        name, emit = f"prompt {job.number}", partial(_extend, job)
        self._keys[job.number] = key
        running[key] = RequestStream(name, job.request, self.tokenizer, emit)
        self.core.add(key, job.request)

    def _advance(self, running: dict[str, RequestStream]) -> None:
        """Run one step of the core; remove the requests that it ends from ``running``."""
        tokens = self.core.step()
        # Other keys belong to requests that the caller has added to the core itself.
        for failure in self.core.take_failures():
            if failure.key in running:
                raise _error_of(failure, running[failure.key].request_id)
        for token in tokens:
            stream = running.get(token.key)
            if stream is None:
                continue
            if stream.push(token):
                self.core.finish(token.key, token.index)
            if stream.finished:
                del running[token.key]
        if self.core.pause_s:
            time.sleep(self.core.pause_s)


def _listed(values: Iterable[ItemT], name: str) -> list[ItemT]:
    items = None if isinstance(values, Mapping) else items_of(values)
    if items is None:
        raise InvalidRequest(
            f"{name} must be a list of at most {MAX_ITEMS}, got {shown(values)}", name
        )
    return list(items)


def _pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of one query and several documents, or of as many. Raises `InvalidRequest`."""
    left = [queries] if isinstance(queries, str) else _listed(queries, "queries")
    right = [documents] if isinstance(documents, str) else _listed(documents, "documents")
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise InvalidRequest(
            f"there are {len(left)} queries for {len(right)} documents: give one for all, or as "
            "many as there are",
            "queries",
        )
    return list(zip(left, right, strict=True))


def _of_prompt(number: int, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"prompt {number}: {error}", error.field)


def _error_of(failure: RequestError | Rejected, name: str) -> EngineError:
    if isinstance(failure, RequestError):
        return failure.to_error(name)
    message = f"{name}: {failure.message}"
    return (
        EngineOverloaded(message) if failure.overloaded else InvalidRequest(message, failure.field)
    )


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    listed: list[Any] = _listed(messages, "messages")
    if not listed or not all(isinstance(message, Mapping) for message in listed):
        raise InvalidRequest(
            "a conversation must be a list of messages, as in [{'role': 'user', 'content': 'Hi'}], "
            f"got {shown(messages)}",
            "messages",
        )
    return listed


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[object]
) -> list[SamplingParams]:
    """The parameters of each prompt. Raises `InvalidRequest` for a list of another length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    listed = _listed(params, "params")
    if len(listed) != len(prompts):
        raise InvalidRequest(
            f"there are {len(listed)} params for {len(prompts)} prompts: give one SamplingParams "
            "for all, or a list with one for each prompt",
            "params",
        )
    return listed


def _extend(job: _Job, delta: CompletionDelta) -> None:
    if delta.embedding is not None:
        job.pooled.append(delta)
        return
    job.prompt_logprobs.extend(delta.prompt_logprobs or ())
    completion = job.completions[delta.index]
    completion.text += delta.text
    completion.token_ids.extend(delta.token_ids)
    completion.logprobs.extend(delta.logprobs)
    completion.finish_reason = delta.finish_reason
    completion.stop_reason = delta.stop_reason
