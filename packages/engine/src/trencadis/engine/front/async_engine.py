"""The asynchronous front: serves many callers on one event loop; the core is another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from typing_extensions import Unpack, assert_never

from trencadis.engine.api.inspection import AdapterInfo, EngineInspection
from trencadis.engine.api.outputs import CompletionDelta, EngineStats
from trencadis.engine.api.requests import (
    EngineRequest,
    PoolingRequest,
    RequestFields,
    check_adapter_name,
    check_is_request,
    check_request_id,
)
from trencadis.engine.api.scoring import Scoring
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.core.core_process import LogSettings
from trencadis.engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    ModelNotActiveError,
    RequestFailed,
    SwitchInProgressError,
    shown,
)
from trencadis.engine.front.adapter_calls import AdapterCalls, error_of
from trencadis.engine.front.bad_words import with_bad_tokens
from trencadis.engine.front.core_supervisor import CoreClient, CoreSupervisor
from trencadis.engine.front.grammar_checks import GrammarChecks
from trencadis.engine.front.model_changes import ModelChanges, end_future
from trencadis.engine.front.open_requests import OpenRequests
from trencadis.engine.front.pooled_results import Embedding, Score, check_pooling, check_scoring
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.ipc.messages import (
    AdaptersChanged,
    Busy,
    Control,
    Controlled,
    Failed,
    FromCore,
    Inspect,
    Inspected,
    ModelChecked,
    Preempt,
    Preempted,
    Ready,
    Reconfigured,
    ReconfigureFailed,
    Rejected,
    RequestError,
    Slept,
    StepDone,
    ToCore,
    add_message,
    check_order,
)
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import is_text, items_of
from trencadis.scheduler import BatchControl, BatchControlResult

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_ORDER_SECONDS = 60.0
"""Longest wait for an order. A step takes seconds only where it compiles."""


class EngineFront:
    """Serves requests on one event loop: what `AsyncEngine` and `MultiModelEngine` share.

    When the core dies, or is killed because it hangs for ``config.hang_restart_timeout``, every
    running request ends with `EngineRestarting`, and the core is started again,
    ``config.engine_restarts`` times in all; `wait_until_failed` returns after the last. Compiled
    programs are loaded from ``config.compile_cache``.

    It belongs to the event loop in which it was started. Calls from another one raise
    `EngineError`, except `stop`.
    """

    def __init__(self, tokenizer: Tokenizer, core: CoreSupervisor) -> None:
        self.tokenizer = tokenizer
        self._core = core
        self._numbers = itertools.count()
        self._requests = OpenRequests(self._core, self._numbers)
        self._changes = ModelChanges(self._core, self._requests, self._numbers, self._use_tokenizer)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._adapters = AdapterCalls(self._core, self._ask)
        self._grammars = GrammarChecks(tokenizer.to_json)
        self._loop = asyncio.get_running_loop()
        reading = self._core.run(self._handle, self._end_all)
        self._reader = asyncio.create_task(reading, name="engine-reader")

    async def stop(self) -> None:
        """End the core. Requests that still run end with `EngineDead`."""
        self.tokenizer.close()
        if self._loop is not asyncio.get_running_loop():
            await self._core.kill()  # the channel belongs to the other loop, which may be closed
            return
        self._fail("the engine was stopped")
        self._grammars.close()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._core.stop()

    @property
    def config(self) -> EngineConfig:
        """The configuration of the model that is served."""
        return self._core.config

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot of the core."""
        return self._core.stats

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self._core.ready.max_model_len

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 for an engine that generates or scores."""
        return self._core.ready.embedding_size

    @property
    def scoring(self) -> Scoring | None:
        """How the model scores pairs of texts; None for one that does not."""
        return self._core.ready.scoring

    @property
    def text_prompts(self) -> TextPrompts:
        """The prompts that the checkpoint declares for texts to embed."""
        return self._core.ready.text_prompts

    @property
    def model_name(self) -> str:
        """The name that clients send as ``model``."""
        return self.config.name

    @property
    def info(self) -> Mapping[str, Any]:
        """Device, dtype, size of the cache, number of buckets, warm-up time in seconds."""
        return {
            name: getattr(self._core.ready, name)
            for name in (
                "device",
                "dtype",
                "num_blocks",
                "block_size",
                "num_buckets",
                "warmup_seconds",
            )
        }

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._core.is_alive

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the core. An idle core sends one each second."""
        return self._core.silence_s

    async def wait_until_recovered(self) -> None:
        """Wait until a core that died has been restarted. Raises `EngineDead` where it is not."""
        await self._core.wait_until_recovered()

    async def wait_until_failed(self) -> str:
        """Wait until no request can be served any more; returns why."""
        return await self._core.wait_until_failed()

    async def check_health(self) -> str | None:
        """Raises an error when requests cannot be served.

        Returns what the core does, where it has said that this may take minutes, with how long it
        has been silent and may be; otherwise None.
        `EngineRestarting` while the core is restarted after its death, otherwise `EngineDead`, and
        `EngineUnresponsive` for a core that lives and has been silent for ``config.hang_timeout``.
        """
        if self._loop is not asyncio.get_running_loop():
            raise EngineError(
                "this engine was started in another event loop: call it there, from other threads "
                "with asyncio.run_coroutine_threadsafe"
            )
        return self._core.check_health()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        """Yield the new text and tokens of each sample, until the last sample ends.

        A `PoolingRequest` yields one delta, which has the embedding or the logit. Closing the
        generator aborts the request.

        Raises `InvalidRequest` (naming the field), `ModelNotActiveError`,
        `EngineOverloaded`, `BucketMiss` where the engine may not compile a shape for it,
        `RequestFailed` where an internal error ends this request alone, or an error of
        `check_health`.
        """
        check_is_request(request)
        self._check_active(request.model)
        await self.check_health()
        number = next(self._numbers)
        name = request.request_id if request.request_id is not None else f"request-{number}"
        self._changes.check_admission()
        if request.params.structured_output is not None:
            num_models = self._changes.num_models
            await self._grammars.check(request.params.structured_output, request.client)
            await self.check_health()  # a check takes up to seconds
            self._changes.check_admission()
            if num_models != self._changes.num_models:
                raise SwitchInProgressError("the model was switched meanwhile: send it again")
        request = with_bad_tokens(request, self.tokenizer)
        # Keys are never reused, so a late token of an ended request cannot reach another one.
        key = f"{name}/{number}"
        queue: asyncio.Queue[CompletionDelta | EngineError] = asyncio.Queue()
        stream = RequestStream(name, request, self.tokenizer, queue.put_nowait)
        opened = self._requests.begin(key, stream, queue)
        if request.lora is not None:
            of_name = (each.digest for each in self.adapters if each.name == request.lora)
            opened.lora_digest = next(of_name, "")
        try:
            await self._core.send(add_message(key, request))
            unfinished = request.params.n
            while unfinished:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            await self._requests.abort(opened)

    async def embed(self, request: PoolingRequest, *, use_activation: bool = True) -> Embedding:
        """The embedding of a prompt, of an engine with the runner ``pooling``.

        Without ``use_activation`` it is the hidden state, of any length.

        Errors are those of `generate`; raises `RequestFailed` also where the request is aborted.
        """
        check_is_request(request)
        self._check_active(request.model)
        check_pooling(self.embedding_size, self.scoring)
        async with contextlib.aclosing(self.generate(request)) as stream:
            return Embedding.of(await anext(stream), use_activation)

    async def score(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        use_activation: bool = True,
        request_id: str | None = None,
        model: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Score:
        """How relevant a document is to a query, of an engine with a reranker.

        ``instruction`` and ``use_activation``: see `LLM.score`; the others are fields of the
        `PoolingRequest`. Errors are those of `generate`; raises `RequestFailed` also where the
        request is aborted.
        """
        self._check_active(model)
        await self.check_health()
        scoring, num_models = check_scoring(self.scoring), self._changes.num_models
        prompt = await asyncio.to_thread(
            self.tokenizer.render_pair, scoring.prompt, query, document, instruction=instruction
        )
        if num_models != self._changes.num_models:
            raise SwitchInProgressError("the model was switched meanwhile: send it again")
        request = PoolingRequest(prompt, request_id=request_id, **fields)
        async with contextlib.aclosing(self.generate(request)) as stream:
            return Score.of(await anext(stream), scoring, use_activation)

    def _check_active(self, model: str | None) -> None:
        """Raise `ModelNotActiveError` for a request to another model."""
        if model is not None and model != self.model_name:
            raise ModelNotActiveError(
                f"the model {model} is not active, {self.model_name} is: switch to {model} first"
            )

    async def abort(self, request_id: str) -> None:
        """End every sample of a request. Its generator yields their last deltas and ends.

        An unknown id is ignored: its request has ended. Raises `InvalidRequest` for other values.
        """
        check_request_id(request_id)
        for request in self._requests.unfinished():
            if request.stream.request_id == request_id:
                request.stream.abort()
                await self._requests.abort(request)

    async def abort_and_swap(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests at the start of the next step; they keep their tokens.

        Returns the ids of those that run; the others are ignored. As after ``force_evict``, no more
        sequences run for some seconds than are left. Raises `InvalidRequest` for what is not a list
        of ids, and the errors of `check_health`.
        """
        await self.check_health()
        names = items_of(request_ids)
        if names is None:
            raise InvalidRequest(
                f"abort_and_swap needs a list of request ids, got {shown(request_ids)}",
                "request_ids",
            )
        for name in names:
            check_request_id(name)
        keys = self._requests.keys_of(names)
        running: tuple[str, ...] = await self._ask(lambda number: Preempt(number, keys))
        return tuple(dict.fromkeys(key.rpartition("/")[0] for key in running))

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Carry out an administrator's order at the start of the next step; returns its result.

        Raises `InvalidRequest`, naming the field, for an order that cannot be carried out,
        `EngineOverloaded` where no step ends within a minute, and the errors of `check_health`.
        """
        await self.check_health()
        check_order(order)
        carried_out = self._ask(lambda number: Control(number, order))
        try:
            result: BatchControlResult = await asyncio.wait_for(carried_out, _ORDER_SECONDS)
        except asyncio.TimeoutError:
            raise EngineOverloaded(
                f"the order was not carried out within {_ORDER_SECONDS:.0f} s, and will be when "
                "the step under way ends: see /metrics before it is given again"
            ) from None
        return result

    async def inspect(self) -> EngineInspection:
        """Which KV blocks are used, and the state and the hits of the buckets.

        The core answers between two steps, so not before the end of what it compiles. Raises
        `RequestFailed` where it cannot tell, and the errors of `check_health`.
        """
        await self.check_health()
        inspection: EngineInspection = await self._ask(Inspect)
        return inspection

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name."""
        return self._adapters.served

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str], within: Sequence[str] = ()
    ) -> None:
        """Load the adapter in the directory ``path``, for requests with ``lora=name``.

        ``within``: its files have to be below one of these directories, wherever links lead when
        they are opened; by default anywhere. Raises `AdapterError` for a name that is taken or an
        adapter that cannot be served, `InvalidRequest` for other values, `RequestFailed` for an
        error of the engine, `SwitchInProgressError` while models are switched, and the errors of
        `check_health`.
        """
        await self.check_health()
        self._changes.check_switching()  # it would be one of the next model
        check_adapter_name(name, "lora_name")
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not is_text(path) or not path:
            raise InvalidRequest(
                f"lora_path must be the directory of an adapter, got {shown(path)}", "lora_path"
            )
        directories = items_of(within)
        if directories is None or not all(map(is_text, directories)):
            raise InvalidRequest(f"within must be directories, got {shown(within)}", "within")
        await self._adapters.load(name, path, directories)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter: new requests may not name it, those that were added go on with it.

        Raises `AdapterError` for one that is not loaded, `SwitchInProgressError` while models are
        switched, and the errors of `check_health`.
        """
        await self.check_health()
        self._changes.check_switching()
        check_adapter_name(name, "lora_name")
        await self._adapters.unload(name)

    async def _ask(self, message: Callable[[int], ToCore]) -> Any:
        """Send a numbered message and wait for its answer."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._core.send(message(number))
            return await answer
        finally:
            del self._answers[number]

    # Sleep, and the change of the model.

    @property
    def is_sleeping(self) -> bool:
        """Whether the device memory is released, so that requests are rejected."""
        return self._changes.is_sleeping

    async def sleep(self, level: int = 1) -> int:
        """Release the device memory; returns the bytes that are free now. Levels are vLLM's.

        Level 1 keeps the weights in host memory, level 2 drops them, so that `wake_up` reads the
        checkpoint again. The KV cache is dropped with all cached prefixes. Requests that run end
        with the reason ``abort``; new ones raise `EngineSleeping`. Raises `InvalidRequest` for
        another level, `SwitchInProgressError`, and the errors of `check_health`.
        """
        await self.check_health()
        return await self._changes.sleep(level)

    async def wake_up(self) -> None:
        """Serve again after `sleep`; returns when it does. Does nothing in an engine that is awake.

        Raises `SwitchFailedError` with the step ``wake`` where it stays asleep, for example because
        device memory is missing, `SwitchInProgressError`, and the errors of `check_health`.
        """
        await self.check_health()
        await self._changes.wake_up()

    def _use_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._grammars.use_tokenizer(tokenizer.to_json)

    async def _handle(self, message: FromCore) -> None:
        """Pass a message of the core to the request or the call that it belongs to."""
        if isinstance(message, StepDone):
            await self._requests.deliver(message)
        elif isinstance(message, Rejected):
            self._requests.reject(message)
        elif isinstance(message, RequestError):
            self._requests.end_with(message.key, message.to_error())
        elif isinstance(message, (Reconfigured, ReconfigureFailed, ModelChecked, Slept)):
            self._changes.answer(message)
        elif isinstance(message, AdaptersChanged):
            if not message.error:
                self._adapters.note(message)
            self._answer(message)
        elif isinstance(message, Controlled):
            self._changes.refuse(message.number, InvalidRequest(message.message))
            self._answer(message)
        elif isinstance(message, (Preempted, Inspected)):
            self._answer(message)
        elif isinstance(message, Busy):
            self._changes.begin(message.number)
        elif not isinstance(message, (Failed, Ready)):
            assert_never(message)

    def _answer(self, message: Controlled | Preempted | Inspected | AdaptersChanged) -> None:
        answer = self._answers.get(message.number)
        if answer is None or answer.done():
            return  # its caller has stopped waiting
        if isinstance(message, Preempted):
            answer.set_result(message.keys)
        elif isinstance(message, AdaptersChanged):
            if message.error:
                answer.set_exception(error_of(message))
            else:
                answer.set_result(message.adapters)
        elif isinstance(message, Inspected):
            if message.inspection is not None:
                answer.set_result(message.inspection)
            else:
                answer.set_exception(RequestFailed(message.error))
        elif (result := message.result) is not None:
            names = dict.fromkeys(key.rpartition("/")[0] for key in result.evicted_request_ids)
            answer.set_result(attrs.evolve(result, evicted_request_ids=tuple(names)))
        else:
            answer.set_exception(InvalidRequest(message.message, message.field))

    def _fail(self, reason: str) -> None:
        """No request can be served any more."""
        self._end_all(self._core.fail(reason))

    def _end_all(self, error: EngineDead) -> None:
        """End every request and every wait for an answer with an error.

        Parked requests are kept by the front, so they end only where no core follows.
        """
        if self._core.failure is not None:
            self._requests.end_parked(error)
        self._requests.end_all(error)
        self._changes.end_all(error)
        for answer in self._answers.values():
            end_future(answer, type(error)(*error.args))


class AsyncEngine(EngineFront):
    """Serves requests of one model on one event loop. Create it with `start`, end it with `stop`.

    See `EngineFront`.
    """

    @classmethod
    async def start(cls, config: EngineConfig, log: LogSettings | None = None) -> AsyncEngine:
        """Start the core, load the model and warm up; returns when requests can be served.

        Raises `ConfigError` or `ModelError` when the model cannot be served, `EngineDead` when
        the core fails for another reason.
        """
        return cls(*await start_core(config, log))


async def start_core(
    config: EngineConfig, log: LogSettings | None
) -> tuple[Tokenizer, CoreSupervisor]:
    """The tokenizer and the core of a new engine. Raises the errors of `AsyncEngine.start`."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"config must be an EngineConfig, as in EngineConfig(model='./my-model'), "
            f"got {shown(config)}"
        )
    source = await asyncio.to_thread(locate, config.model)
    log = log or LogSettings()
    core = CoreClient(config, log)
    try:
        loading = asyncio.to_thread(load_tokenizer, source, config.chat_template)
        tokenizer, ready = await asyncio.gather(loading, core.wait_until_ready())
        tokenizer.start_renderer()
    except BaseException:
        await core.end()
        raise
    return tokenizer, CoreSupervisor(config, core, ready, log)


def load_tokenizer(source: str, chat_template: str | None) -> Tokenizer:
    """`Tokenizer.load`, which imports transformers only now."""
    from trencadis.engine.front.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    return Tokenizer.load(source, chat_template)
