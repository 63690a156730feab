"""The asynchronous front: serves many callers on one event loop; the core is another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from typing_extensions import assert_never

from trencadis.engine.api.inspection import EngineInspection
from trencadis.engine.api.outputs import CompletionDelta, EngineStats
from trencadis.engine.api.sampling_params import POOLING, SamplingParams
from trencadis.engine.api.scoring import Scoring
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.core.core_process import LogSettings
from trencadis.engine.core.request_conversion import (
    check_arguments,
    check_order,
    check_request_id,
)
from trencadis.engine.errors import (
    BucketMiss,
    ConfigError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    RequestFailed,
    SwitchInProgressError,
    shown,
)
from trencadis.engine.front.core_client import CoreClient
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.embeddings import Embedding, check_pooling
from trencadis.engine.front.grammar_checks import GrammarChecks
from trencadis.engine.front.model_changes import ModelChanges, end_future
from trencadis.engine.front.open_requests import OpenRequest, OpenRequests
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.front.scores import Score, check_scoring
from trencadis.engine.ipc.messages import (
    Add,
    Busy,
    Control,
    Controlled,
    Failed,
    FromCore,
    Inspect,
    Inspected,
    Preempt,
    Preempted,
    Ready,
    Reconfigured,
    ReconfigureFailed,
    Rejected,
    RequestError,
    Slept,
    StepDone,
)
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import items_of
from trencadis.scheduler import BatchControl, BatchControlResult

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_ORDER_SECONDS = 60.0
"""Longest wait for an order. A step takes seconds only where it compiles."""


class AsyncEngine:
    """Serves requests on one event loop. Create it with `start`, end it with `stop`.

    When the core dies, or is killed because it hangs for ``config.hang_restart_timeout``, every
    running request ends with `EngineRestarting`, and the core is started again,
    ``config.engine_restarts`` times in all; `wait_until_failed` returns after the last. Compiled
    programs are loaded from ``config.compile_cache``.

    It belongs to the event loop in which it was started. Calls from another one raise
    `EngineError`, except `stop`.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        core: CoreClient,
        ready: Ready,
        log: LogSettings,
    ) -> None:
        self.tokenizer = tokenizer
        self._core = CoreSupervisor(config, core, ready, log)
        self._numbers = itertools.count()
        self._requests = OpenRequests(self._core, self._numbers)
        self._changes = ModelChanges(self._core, self._requests, self._numbers, self._use_tokenizer)
        self._orders: dict[int, asyncio.Future[BatchControlResult]] = {}
        self._preemptions: dict[int, asyncio.Future[tuple[str, ...]]] = {}
        self._inspections: dict[int, asyncio.Future[EngineInspection]] = {}
        self._grammars = GrammarChecks(tokenizer.to_json)
        self._loop = asyncio.get_running_loop()
        reading = self._core.run(self._handle, self._end_all)
        self._reader = asyncio.create_task(reading, name="engine-reader")

    @classmethod
    async def start(cls, config: EngineConfig, log: LogSettings | None = None) -> AsyncEngine:
        """Start the core, load the model and warm up; returns when requests can be served.

        Raises `ConfigError` or `ModelError` when the model cannot be served, `EngineDead` when
        the core fails for another reason.
        """
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
        return cls(config, tokenizer, core, ready, log)

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

    async def check_health(self) -> None:
        """Raises an error when requests cannot be served.

        `EngineRestarting` while the core is restarted after its death, otherwise `EngineDead`, and
        `EngineUnresponsive` for a core that lives and has been silent for ``config.hang_timeout``.
        """
        if self._loop is not asyncio.get_running_loop():
            raise EngineError(
                "this engine was started in another event loop: call it there, from other threads "
                "with asyncio.run_coroutine_threadsafe"
            )
        self._core.check_health()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield the new text and tokens of each sample, until the last sample ends.

        With the scheduling policy ``priority``, requests of a lower ``priority`` value run first.
        Only requests of the same ``cache_salt`` share cached prefixes, so that the time of a prompt
        reveals nothing about the prompts of others. ``client`` names who sends the request: of the
        clients whose requests wait with equal priority, the one that got the fewest tokens is
        served next. Closing the generator aborts the request.

        Raises `InvalidRequest` (naming the field),
        `EngineOverloaded`, `BucketMiss` where the engine may not compile a shape for it,
        `RequestFailed` where an internal error ends this request alone, or an error of
        `check_health`.
        """
        await self.check_health()
        number = next(self._numbers)
        name = request_id if request_id is not None else f"request-{number}"
        prompt = check_arguments(name, prompt_token_ids, params, priority, cache_salt, client)
        self._changes.check_admission()
        if params.structured_output is not None:
            num_models = self._changes.num_models
            await self._grammars.check(params.structured_output)
            await self.check_health()  # a check takes up to seconds
            self._changes.check_admission()
            if num_models != self._changes.num_models:
                raise SwitchInProgressError("the model was switched meanwhile: send it again")
        # Keys are never reused, so a late token of an ended request cannot reach another one.
        key = f"{name}/{number}"
        queue: asyncio.Queue[CompletionDelta | EngineError] = asyncio.Queue()
        stream = RequestStream(name, prompt, params, self.tokenizer, queue.put_nowait)
        add = Add(key, prompt, params, priority, cache_salt, client=client)
        request = self._requests.begin(stream, queue, add)
        try:
            await self._core.send(add)
            unfinished = params.n
            while unfinished:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            await self._requests.abort(request)

    async def embed(
        self,
        prompt_token_ids: Sequence[int],
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
    ) -> Embedding:
        """The embedding of a prompt, of an engine with the runner ``pooling``.

        Arguments and errors are those of `generate`; raises `RequestFailed` also where the request
        is aborted.
        """
        check_pooling(self.embedding_size, self.scoring)
        stream = self.generate(prompt_token_ids, POOLING, request_id, priority, cache_salt, client)
        async with contextlib.aclosing(stream):
            return Embedding.of(await anext(stream))

    async def score(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        use_activation: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
    ) -> Score:
        """How relevant a document is to a query, of an engine with a reranker.

        ``instruction`` and ``use_activation``: see `LLM.score`; other arguments and errors are
        those of `generate`. Raises `RequestFailed` also where the request is aborted.
        """
        await self.check_health()
        scoring, num_models = check_scoring(self.scoring), self._changes.num_models
        prompt = await asyncio.to_thread(
            self.tokenizer.render_pair, scoring.prompt, query, document, instruction=instruction
        )
        if num_models != self._changes.num_models:
            raise SwitchInProgressError("the model was switched meanwhile: send it again")
        stream = self.generate(prompt, POOLING, request_id, priority, cache_salt, client)
        async with contextlib.aclosing(stream):
            return Score.of(await anext(stream), scoring, use_activation)

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
        number = next(self._numbers)
        answer = self._preemptions[number] = asyncio.get_running_loop().create_future()
        try:
            await self._core.send(Preempt(number, keys))
            running = await answer
        finally:
            del self._preemptions[number]
        return tuple(dict.fromkeys(key.rpartition("/")[0] for key in running))

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Carry out an administrator's order at the start of the next step; returns its result.

        Raises `InvalidRequest`, naming the field, for an order that cannot be carried out,
        `EngineOverloaded` where no step ends within a minute, and the errors of `check_health`.
        """
        await self.check_health()
        check_order(order)
        number = next(self._numbers)
        self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            await self._core.send(Control(number, order))
            return await asyncio.wait_for(self._orders[number], _ORDER_SECONDS)
        except asyncio.TimeoutError:
            raise EngineOverloaded(
                f"the order was not carried out within {_ORDER_SECONDS:.0f} s, and will be when "
                "the step under way ends: see /metrics before it is given again"
            ) from None
        finally:
            del self._orders[number]

    async def inspect(self) -> EngineInspection:
        """Which KV blocks are used, and the state and the hits of the buckets.

        The core answers between two steps, so not before the end of what it compiles. Raises
        `RequestFailed` where it cannot tell, and the errors of `check_health`.
        """
        await self.check_health()
        number = next(self._numbers)
        answer: asyncio.Future[EngineInspection] = asyncio.get_running_loop().create_future()
        self._inspections[number] = answer
        try:
            await self._core.send(Inspect(number))
            return await answer
        finally:
            del self._inspections[number]

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

    @property
    def has_begun_change(self) -> bool:
        """Whether the core has begun the last call of `sleep`, `wake_up` or `reconfigure`."""
        return self._changes.has_begun

    def close_admission(self, reason: str) -> None:
        """Reject new requests with `SwitchInProgressError`. An empty reason: accept them again."""
        self._changes.switching = reason

    async def drain(self, timeout_s: float) -> int:
        """Wait until no request is left, at most ``timeout_s`` seconds; returns how many are."""
        return await self._requests.drain(timeout_s)

    async def abort_all(self) -> int:
        """End every request that is not parked with the reason ``abort``; returns how many."""
        return await self._requests.abort_all()

    def park(self) -> list[OpenRequest]:
        """Keep the tokens of all requests here, so that the core may drop them.

        Their generators wait. Pass the result to `resume`.
        """
        return self._requests.park()

    async def resume(self, parked: Iterable[OpenRequest]) -> int:
        """Go on with parked requests of the model that is served; returns how many there are.

        Requests that have ended meanwhile, because their clients left, are skipped. Where the core
        cannot be reached, those that are left end with the error.
        """
        return await self._requests.resume(parked)

    async def reconfigure(
        self, config: EngineConfig, tokenizer: Tokenizer, stash_bytes: int
    ) -> Reconfigured:
        """Serve the model of ``config``. Drain, abort or park the requests before.

        ``stash_bytes``: host memory for the weights of models that are not served. Raises
        `SwitchFailedError` where the previous model serves again, `ConfigError` for a configuration
        that cannot be sent, and `EngineDead` or `EngineRestarting` where the core dies.
        """
        await self.check_health()
        return await self._changes.reconfigure(config, tokenizer, stash_bytes)

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
            kind = BucketMiss if message.bucket_miss else RequestFailed
            self._requests.end_with(message.key, kind(message.message))
        elif isinstance(message, (Reconfigured, ReconfigureFailed, Slept)):
            self._changes.answer(message)
        elif isinstance(message, Controlled):
            self._resolve_order(message)
        elif isinstance(message, Preempted):
            preemption = self._preemptions.get(message.number)
            if preemption is not None and not preemption.done():
                preemption.set_result(message.keys)
        elif isinstance(message, Inspected):
            self._resolve_inspection(message)
        elif isinstance(message, Busy):
            self._changes.begin(message.number)
        elif not isinstance(message, (Failed, Ready)):
            assert_never(message)

    def _resolve_order(self, message: Controlled) -> None:
        self._changes.refuse(message.number, InvalidRequest(message.message))
        order = self._orders.get(message.number)
        if order is None or order.done():
            return  # its caller has stopped waiting
        result = message.result
        if result is not None:
            names = dict.fromkeys(key.rpartition("/")[0] for key in result.evicted_request_ids)
            order.set_result(attrs.evolve(result, evicted_request_ids=tuple(names)))
        else:
            order.set_exception(InvalidRequest(message.message, message.field))

    def _resolve_inspection(self, message: Inspected) -> None:
        inspection = self._inspections.get(message.number)
        if inspection is None or inspection.done():
            return  # its caller has stopped waiting
        if message.inspection is not None:
            inspection.set_result(message.inspection)
        else:
            inspection.set_exception(RequestFailed(message.error))

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
        answers: list[asyncio.Future[Any]] = [
            *self._orders.values(),
            *self._preemptions.values(),
            *self._inspections.values(),
        ]
        for waiting in answers:
            end_future(waiting, type(error)(*error.args))


def load_tokenizer(source: str, chat_template: str | None) -> Tokenizer:
    """`Tokenizer.load`, which imports transformers only now."""
    from trencadis.engine.front.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    return Tokenizer.load(source, chat_template)
