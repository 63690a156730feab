"""The asynchronous front of an engine whose core runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
from collections.abc import AsyncGenerator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.core.core_process import LogSettings, run_core
from trencadis.engine.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
)
from trencadis.engine.front.core_start import POLL_SECONDS, await_ready, end, load_tokenizer
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.ipc.channel import FrontChannel
from trencadis.engine.ipc.messages import (
    Abort,
    Add,
    Control,
    Controlled,
    Failed,
    Finish,
    Ready,
    Rejected,
    StepDone,
    Stop,
)
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.outputs import CompletionDelta, EngineStats
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BatchControl, BatchControlResult

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_STOP_SECONDS = 10.0
_ORDER_SECONDS = 60.0
"""Longest wait for an order: a step takes seconds only where it compiles."""


class AsyncEngine:
    """Serves requests on one event loop. Make it with `start`, end it with `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        process: BaseProcess,
        channel: FrontChannel,
        ready: Ready,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.stats = EngineStats(
            num_total_blocks=ready.num_blocks - 1, max_running_seqs=config.max_num_seqs
        )
        self._ready = ready
        self._process = process
        self._channel = channel
        self._streams: dict[str, _Running] = {}
        self._orders: dict[int, asyncio.Future[BatchControlResult]] = {}
        self._numbers = itertools.count()
        self._failure: str | None = None
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @classmethod
    async def start(cls, config: EngineConfig, log: LogSettings | None = None) -> AsyncEngine:
        """Start the core, load and warm up; returns when requests can be served.

        Raises `ConfigError` or `ModelError` when the model cannot be served, `EngineDead` when
        the core fails otherwise.
        """
        source = await asyncio.to_thread(locate, config.model)
        channel = FrontChannel()
        process = multiprocessing.get_context("spawn").Process(
            target=run_core,
            args=(config, channel.to_core, channel.from_core, log or LogSettings()),
            name="trencadis-core",
            daemon=True,
        )
        process.start()
        try:
            loading = asyncio.to_thread(load_tokenizer, source)
            tokenizer, ready = await asyncio.gather(loading, await_ready(channel, process))
        except BaseException:
            await end(process)
            channel.close()
            raise
        return cls(config, tokenizer, process, channel, ready)

    async def stop(self) -> None:
        """End the core; requests that are still running end with `EngineDead`."""
        self._fail("the engine was stopped")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        if self._process.is_alive():
            await self._channel.send(Stop())
        await end(self._process, patience=_STOP_SECONDS)
        self._channel.close()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self._ready.max_model_len

    @property
    def model_name(self) -> str:
        """The name under which clients address the model."""
        return self.config.name

    @property
    def info(self) -> Mapping[str, Any]:
        """How the engine was set up, for people and dashboards."""
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
        return self._failure is None and self._process.is_alive()

    async def check_health(self) -> None:
        """Raises `EngineDead` when no request can be served any more."""
        if not self.is_alive:
            raise EngineDead(self._failure or "the engine core is gone: restart the server")

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what the answers of a request gain, until the last one ends.

        A lower ``priority`` is served first, where the engine's scheduling policy says so. Closing
        the generator aborts the request. Raises `InvalidRequest` (naming the field),
        `EngineOverloaded` or `EngineDead`.
        """
        await self.check_health()
        number = next(self._numbers)
        name = request_id if request_id is not None else f"request-{number}"
        # The core's key is never used again, so that no token can reach a later request.
        key = f"{name}/{number}"
        prompt = tuple(prompt_token_ids)
        queue: asyncio.Queue[CompletionDelta | EngineError] = asyncio.Queue()
        stream = RequestStream(name, prompt, params, self.tokenizer, queue.put_nowait)
        self._streams[key] = _Running(stream, queue)
        try:
            await self._channel.send(Add(key, prompt, params, priority))
            running = params.n
            while running:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                running -= delta.finish_reason is not None
                yield delta
        finally:
            await self._forget(key)

    async def abort(self, request_id: str) -> None:
        """End every answer of a request; its generator yields their last deltas and ends."""
        for key, running in tuple(self._streams.items()):
            if running.stream.request_id == request_id:
                running.stream.abort()
                await self._forget(key)

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Have an operator's order carried out at the top of the next step; returns what it did.

        Raises `InvalidRequest`, naming the field, for an order that cannot be obeyed,
        `EngineOverloaded` where no step ends within a minute, and `EngineDead`.
        """
        await self.check_health()
        number = next(self._numbers)
        self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            await self._channel.send(Control(number, order))
            return await asyncio.wait_for(self._orders[number], _ORDER_SECONDS)
        except asyncio.TimeoutError:
            raise EngineOverloaded(
                f"the order was not carried out within {_ORDER_SECONDS:.0f} s, and will be when "
                "the step under way ends: see /metrics before it is given again"
            ) from None
        finally:
            del self._orders[number]

    async def _forget(self, key: str) -> None:
        """Abort a request, if the core may still serve it."""
        if self._streams.pop(key, None) is not None and self.is_alive:
            await self._channel.send(Abort((key,)))

    async def _read(self) -> None:
        """Take the core's messages to the requests that they are for."""
        try:
            while True:
                message = await self._channel.receive(POLL_SECONDS)
                if message is None:
                    if not self._process.is_alive():
                        raise EngineDead(
                            f"the engine core ended with exit code {self._process.exitcode}"
                        )
                elif isinstance(message, StepDone):
                    await self._deliver(message)
                elif isinstance(message, Rejected):
                    self._reject(message)
                elif isinstance(message, Controlled):
                    self._answer(message)
                elif isinstance(message, Failed):
                    raise EngineDead(message.message)
        except EngineError as error:
            logger.error("The engine stops serving: %s", error)
            self._fail(f"{error}: restart the server")
        except Exception as error:
            # Whatever it was, those who wait must hear of it: nobody reads for them any more.
            logger.exception("The engine stops serving")
            self._fail(f"{type(error).__name__}: {error}: restart the server")

    async def _deliver(self, step: StepDone) -> None:
        self.stats = step.stats
        for token in step.tokens:
            running = self._streams.get(token.key)
            if running is None:
                continue  # aborted while the token was on its way
            if running.stream.push(token):  # a stop string: the core does not know of it
                await self._channel.send(Finish(token.key, token.index))
            if running.stream.finished:
                del self._streams[token.key]

    def _reject(self, message: Rejected) -> None:
        running = self._streams.pop(message.key, None)
        if running is not None:
            running.queue.put_nowait(
                EngineOverloaded(message.message)
                if message.overloaded
                else InvalidRequest(message.message, message.field)
            )

    def _answer(self, message: Controlled) -> None:
        order = self._orders.get(message.number)
        if order is None or order.done():
            return  # whoever gave it does not wait any more
        result = message.result
        if result is not None:
            names = dict.fromkeys(key.rpartition("/")[0] for key in result.evicted_request_ids)
            order.set_result(attrs.evolve(result, evicted_request_ids=tuple(names)))
        else:
            order.set_exception(InvalidRequest(message.message, message.field))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        for running in self._streams.values():
            running.queue.put_nowait(EngineDead(self._failure))
        self._streams.clear()
        for order in self._orders.values():
            if not order.done():
                order.set_exception(EngineDead(self._failure))


@attrs.frozen
class _Running:
    """A request and where its generator waits. The queue holds at most a delta per token."""

    stream: RequestStream
    queue: asyncio.Queue[CompletionDelta | EngineError]
