"""The asynchronous front: serves many callers on one event loop; the core is another process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs
from typing_extensions import assert_never

from trencadis.engine.config import EngineConfig
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
    EngineRestarting,
    EngineUnresponsive,
    InvalidRequest,
    RequestFailed,
)
from trencadis.engine.front.core_client import CoreClient
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.grammars.checker import GrammarChecker
from trencadis.engine.ipc.messages import (
    Abort,
    Add,
    Busy,
    Control,
    Controlled,
    Failed,
    Finish,
    Preempt,
    Preempted,
    Ready,
    Rejected,
    RequestError,
    StepDone,
    Stop,
)
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.outputs import CompletionDelta, EngineStats
from trencadis.engine.runner.limits import token_budget
from trencadis.engine.sampling_params import SamplingParams
from trencadis.engine.structured_output import StructuredOutput
from trencadis.engine.validators import items_of, shown
from trencadis.scheduler import BatchControl, BatchControlResult

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_STOP_SECONDS = 10.0
"""Time for the core to end by itself before its process is killed."""

_MAX_GRAMMAR_CHECKS = 64
"""Requests that may wait until their grammar is checked. A check takes up to seconds."""

_ORDER_SECONDS = 60.0
"""Longest wait for an order. A step takes seconds only where it compiles."""


_BUSY_SECONDS = 1800.0
"""Longest silence of a core that has said that it compiles or warms up."""

_MAX_BACKOFF_SECONDS = 30.0
"""Longest wait before a restart of the core: 1 s before the first, then twice as long each time."""


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
        self.config = config
        self.tokenizer = tokenizer
        self._log = log
        self._core = core
        self._ready = ready
        self._num_restarts = 0
        self.stats = self._first_stats()
        self._last_message_s = time.monotonic()
        self._busy = ""
        """What the core does since its last message, if that may take minutes."""
        self._restarting = ""
        """Why the core died, while it is being restarted."""
        self._has_failed = asyncio.Event()
        self._requests: dict[str, _Request] = {}
        self._orders: dict[int, asyncio.Future[BatchControlResult]] = {}
        self._preemptions: dict[int, asyncio.Future[tuple[str, ...]]] = {}
        self._grammars = GrammarChecker(tokenizer.to_json)
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self._num_grammar_checks = 0
        self._numbers = itertools.count()
        self._failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

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
            loading = asyncio.to_thread(_load_tokenizer, source, config.chat_template)
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
            await self._core.end()  # the channel belongs to the other loop, which may be closed
            return
        self._fail("the engine was stopped")
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        if self._core.is_alive:
            await self._core.send(Stop())
        await self._core.end(_STOP_SECONDS)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self._ready.max_model_len

    @property
    def model_name(self) -> str:
        """The name that clients send as ``model``."""
        return self.config.name

    @property
    def info(self) -> Mapping[str, Any]:
        """Device, dtype, size of the cache, number of buckets, warm-up time in seconds."""
        return {
            name: getattr(self._ready, name)
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
        return self._failure is None and not self._restarting and self._core.is_alive

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the core. An idle core sends one each second."""
        return time.monotonic() - self._last_message_s

    async def wait_until_failed(self) -> str:
        """Wait until no request can be served any more; returns why."""
        await self._has_failed.wait()
        return self._failure or ""

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
        if self._failure is not None:
            raise EngineDead(self._failure)
        if not self.is_alive:
            reason = self._restarting or "the engine core is gone"
            if self._num_restarts >= self.config.engine_restarts and not self._restarting:
                raise EngineDead(f"{reason}: restart the server")
            raise EngineRestarting(f"{reason}: it is being restarted, try again in some seconds")
        limit_s = max(self.config.hang_timeout, _BUSY_SECONDS if self._busy else 0.0)
        if self.silence_s > limit_s:
            raise EngineUnresponsive(
                f"{self._busy or 'the engine core hangs'}: no message for {self.silence_s:.0f} s, "
                f"more than {limit_s:.0f} s. Restart the server if it stays so"
            )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield the new text and tokens of each sample, until the last sample ends.

        With the scheduling policy ``priority``, requests of a lower ``priority`` value run first.
        Only requests of the same ``cache_salt`` share cached prefixes, so that the time of a prompt
        tells nothing of the prompts of others. Closing the generator aborts the request.

        Raises `InvalidRequest` (naming the field),
        `EngineOverloaded`, `BucketMiss` where the engine refuses to compile a shape for it,
        `RequestFailed` where an internal error ends this request alone, or an error of
        `check_health`.
        """
        await self.check_health()
        number = next(self._numbers)
        name = request_id if request_id is not None else f"request-{number}"
        prompt = check_arguments(name, prompt_token_ids, params, priority, cache_salt)
        if params.structured_output is not None:
            await self._check_grammar(params.structured_output)
            await self.check_health()  # a check takes up to seconds
        # Keys are never reused, so a late token of an ended request cannot reach another one.
        key = f"{name}/{number}"
        queue: asyncio.Queue[CompletionDelta | EngineError] = asyncio.Queue()
        stream = RequestStream(name, prompt, params, self.tokenizer, queue.put_nowait)
        self._requests[key] = _Request(stream, queue)
        try:
            await self._core.send(Add(key, prompt, params, priority, cache_salt))
            unfinished = params.n
            while unfinished:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            await self._abort(key)

    async def abort(self, request_id: str) -> None:
        """End every sample of a request. Its generator yields their last deltas and ends.

        An unknown id is ignored: its request has ended. Raises `InvalidRequest` for what is no id.
        """
        check_request_id(request_id)
        for key, request in tuple(self._requests.items()):
            if request.stream.request_id == request_id:
                request.stream.abort()
                await self._abort(key)

    async def abort_and_swap(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests at the start of the next step; they keep their tokens.

        Returns the ids of those that run; the others are ignored. As after ``force_evict``, no more
        sequences run for some seconds than are left. Raises `InvalidRequest` for what is no list of
        ids, and the errors of `check_health`.
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
        keys = [key for key, each in self._requests.items() if each.stream.request_id in names]
        number = next(self._numbers)
        answer = self._preemptions[number] = asyncio.get_running_loop().create_future()
        try:
            await self._core.send(Preempt(number, tuple(keys)))
            running = await answer
        finally:
            del self._preemptions[number]
        return tuple(dict.fromkeys(key.rpartition("/")[0] for key in running))

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Carry out an operator's order at the start of the next step; returns its result.

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

    async def _check_grammar(self, structured_output: StructuredOutput) -> None:
        if self._grammars.recall(structured_output):
            return
        if self._num_grammar_checks >= _MAX_GRAMMAR_CHECKS:
            raise EngineOverloaded(
                f"{self._num_grammar_checks} requests wait until their grammars are checked: "
                "try again later"
            )
        self._num_grammar_checks += 1
        try:
            loop = asyncio.get_running_loop()
            check = self._grammars.check
            await loop.run_in_executor(self._grammar_thread, check, structured_output)
        finally:
            self._num_grammar_checks -= 1

    async def _abort(self, key: str) -> None:
        """Abort a request in the core, unless it has ended there."""
        if self._requests.pop(key, None) is not None and self.is_alive:
            await self._core.send(Abort((key,)))

    async def _read(self) -> None:
        """Read the core's messages until it dies for good; restart it before that."""
        while True:
            reason = await self._read_core()
            if self._num_restarts >= self.config.engine_restarts:
                break
            self._restarting = reason
            lost = f"{reason}: this request is lost. The core is restarted: send it again"
            self._end_all(EngineRestarting(lost))
            while self._restarting and self._num_restarts < self.config.engine_restarts:
                await self._restart()
            if self._restarting:
                reason = self._restarting
                break
        logger.error("The engine stops serving: %s", reason)
        self._fail(f"{reason}: restart the server")

    async def _restart(self) -> None:
        """Start another core, after a wait. Where that fails, the reason is the new one."""
        await self._core.end()
        self.stats = self._first_stats()
        delay_s = min(2.0**self._num_restarts, _MAX_BACKOFF_SECONDS)
        self._num_restarts += 1
        logger.error(
            "%s: restart %d of %d in %.0f s",
            self._restarting,
            self._num_restarts,
            self.config.engine_restarts,
            delay_s,
        )
        await asyncio.sleep(delay_s)
        try:
            self._core = CoreClient(self.config, self._log)
            self._ready = await self._core.wait_until_ready()
        except (EngineError, OSError) as error:
            self._restarting = str(error)
            return
        except asyncio.CancelledError:  # the engine is stopped
            await self._core.end()
            raise
        self._restarting = self._busy = ""
        self._last_message_s = time.monotonic()
        self.stats = self._first_stats()
        logger.info("The engine core serves again")

    async def _read_core(self) -> str:
        """Pass each message to the request that it belongs to; returns why there are no more."""
        try:
            while True:
                message = await self._core.receive(self._patience_s)
                self._last_message_s = time.monotonic()
                self._busy = message.reason if isinstance(message, Busy) else ""
                if isinstance(message, StepDone):
                    await self._deliver(message)
                elif isinstance(message, Rejected):
                    self._reject(message)
                elif isinstance(message, RequestError):
                    kind = BucketMiss if message.bucket_miss else RequestFailed
                    self._end_with(message.key, kind(message.message))
                elif isinstance(message, Controlled):
                    self._resolve_order(message)
                elif isinstance(message, Preempted):
                    preemption = self._preemptions.get(message.number)
                    if preemption is not None and not preemption.done():
                        preemption.set_result(message.keys)
                elif isinstance(message, Failed):
                    raise EngineDead(message.message)
                elif not isinstance(message, (Busy, Ready)):
                    assert_never(message)
        except EngineError as error:
            return str(error)
        except Exception as error:
            # The core's messages are not read from here on, so every waiting caller must fail.
            logger.exception("The front cannot read the engine core's messages")
            return f"{type(error).__name__}: {error}"

    @property
    def _patience_s(self) -> float | None:
        """Seconds of silence after which the core is killed; None: it never is."""
        config = self.config
        if not config.hang_restart_timeout:
            return None
        busy_s = _BUSY_SECONDS if self._busy else 0.0
        return max(config.hang_restart_timeout, config.hang_timeout, busy_s)

    def _first_stats(self) -> EngineStats:
        """The stats before the core has sent its own."""
        return EngineStats(
            num_total_blocks=self._ready.num_blocks - 1,
            max_running_seqs=self.config.max_num_seqs,
            max_prefill_tokens=token_budget(self.config),
            num_core_restarts=self._num_restarts,
        )

    async def _deliver(self, step: StepDone) -> None:
        if step.stats is not None:
            self.stats = attrs.evolve(step.stats, num_core_restarts=self._num_restarts)
        for token in step.tokens:
            request = self._requests.get(token.key)
            if request is None:
                continue  # aborted after the core had sent the token
            try:
                stopped = request.stream.push(token)
            except Exception as error:  # only this request is concerned: the others are served
                await self._fail_request(token.key, error)
                continue
            if stopped:  # by a stop string, which the core cannot see
                await self._core.send(Finish(token.key, token.index))
            if request.stream.finished:
                del self._requests[token.key]

    async def _fail_request(self, key: str, error: Exception) -> None:
        """End a request because of an unexpected error, which its caller gets."""
        name = key.rpartition("/")[0]
        logger.error("Request %s fails", name, exc_info=error)
        if not isinstance(error, EngineError):
            error = RequestFailed(f"request {name} failed: {type(error).__name__}: {error}")
        self._requests[key].queue.put_nowait(error)
        await self._abort(key)

    def _reject(self, message: Rejected) -> None:
        if message.overloaded:
            self._end_with(message.key, EngineOverloaded(message.message))
        else:
            self._end_with(message.key, InvalidRequest(message.message, message.field))

    def _end_with(self, key: str, error: EngineError) -> None:
        """End a request, which has ended in the core, with an error."""
        request = self._requests.pop(key, None)
        if request is not None:
            request.queue.put_nowait(error)

    def _resolve_order(self, message: Controlled) -> None:
        order = self._orders.get(message.number)
        if order is None or order.done():
            return  # its caller has stopped waiting
        result = message.result
        if result is not None:
            names = dict.fromkeys(key.rpartition("/")[0] for key in result.evicted_request_ids)
            order.set_result(attrs.evolve(result, evicted_request_ids=tuple(names)))
        else:
            order.set_exception(InvalidRequest(message.message, message.field))

    def _fail(self, reason: str) -> None:
        """No request can be served any more."""
        if self._failure is None:
            self._failure = reason
        self._end_all(EngineDead(self._failure))
        self._has_failed.set()

    def _end_all(self, error: EngineDead) -> None:
        """End every request, and every wait for an order, with an error."""
        for request in self._requests.values():
            request.queue.put_nowait(type(error)(*error.args))
        self._requests.clear()
        futures: list[asyncio.Future[Any]] = [*self._orders.values(), *self._preemptions.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(type(error)(*error.args))


@attrs.frozen
class _Request:
    """A running request. Its generator reads ``queue``, at most one delta per generated token."""

    stream: RequestStream
    queue: asyncio.Queue[CompletionDelta | EngineError]


def _load_tokenizer(source: str, chat_template: str | None) -> Tokenizer:
    from trencadis.engine.front.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    return Tokenizer.load(source, chat_template)
