"""The asynchronous front of an engine whose core runs in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from trencadis.engine.channel import FrontChannel
from trencadis.engine.config import EngineConfig
from trencadis.engine.core_process import LogSettings, run_core
from trencadis.engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EngineOverloaded,
    InvalidRequest,
    ModelError,
)
from trencadis.engine.messages import Abort, Add, Failed, Ready, Rejected, StepDone, Stop
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.outputs import CompletionDelta, EngineStats
from trencadis.engine.sample_stream import SampleStream
from trencadis.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trencadis.engine.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_START_SECONDS = 3600.0
"""Longest start: a large model with every graph to compile takes tens of minutes on Gaudi."""
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.5
"""How often a silent core is looked at."""


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
        self.stats = EngineStats(total_blocks=ready.num_blocks - 1)
        self._ready = ready
        self._process = process
        self._channel = channel
        self._streams: dict[str, SampleStream] = {}
        self._keys = itertools.count()
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
            loading = asyncio.to_thread(_load_tokenizer, source)
            tokenizer, ready = await asyncio.gather(loading, _await_ready(channel, process))
        except BaseException:
            await _end(process)
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
        await _end(self._process, patience=_STOP_SECONDS)
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
        """Yield what the samples of a request gain, until the last one ends.

        Closing the generator aborts the request. Raises `InvalidRequest` (naming the field),
        `EngineOverloaded` or `EngineDead`.
        """
        del priority  # first come, first served
        await self.check_health()
        name = request_id if request_id is not None else f"request-{next(self._keys)}"
        prompt = tuple(prompt_token_ids)
        queue: asyncio.Queue[CompletionDelta | EngineError] = asyncio.Queue()
        keys = [f"{name}/{next(self._keys)}" for _ in range(params.n)]
        try:
            for index, (key, own) in enumerate(zip(keys, params.split(), strict=True)):
                self._streams[key] = SampleStream(name, index, prompt, own, self.tokenizer, queue)
                await self._channel.send(Add(key, prompt, own))
            running = params.n
            while running:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                running -= delta.finish_reason is not None
                yield delta
        finally:
            await self._forget(keys)

    async def abort(self, request_id: str) -> None:
        """End every sample of a request; its generator yields their last deltas and ends."""
        for key, stream in list(self._streams.items()):
            if stream.request_id == request_id:
                stream.abort()
                await self._forget([key])

    async def _forget(self, keys: Sequence[str]) -> None:
        """Abort those of ``keys`` that the core still serves."""
        unfinished = tuple(key for key in keys if self._streams.pop(key, None) is not None)
        if unfinished and self.is_alive:
            await self._channel.send(Abort(unfinished))

    async def _read(self) -> None:
        """Take the core's messages to the requests that they are for."""
        try:
            while True:
                message = await self._channel.receive(_POLL_SECONDS)
                if message is None:
                    if not self._process.is_alive():
                        raise EngineDead(
                            f"the engine core ended with exit code {self._process.exitcode}"
                        )
                elif isinstance(message, StepDone):
                    await self._deliver(message)
                elif isinstance(message, Rejected):
                    self._reject(message)
                elif isinstance(message, Failed):
                    raise EngineDead(message.message)
        except EngineError as error:
            logger.error("The engine stops serving: %s", error)
            self._fail(f"{error}: restart the server")

    async def _deliver(self, step: StepDone) -> None:
        self.stats = step.stats
        stopped = []
        for token in step.tokens:
            stream = self._streams.get(token.key)
            if stream is None:
                continue  # aborted while the token was on its way
            stream.push(token)
            if stream.finished:
                if token.finish_reason is None:
                    stopped.append(token.key)  # a stop string: the core does not know of it
                else:
                    del self._streams[token.key]
        await self._forget(stopped)

    def _reject(self, message: Rejected) -> None:
        stream = self._streams.pop(message.key, None)
        if stream is not None:
            stream.fail(
                EngineOverloaded(message.message)
                if message.overloaded
                else InvalidRequest(message.message, message.field)
            )

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        for stream in self._streams.values():
            stream.fail(EngineDead(self._failure))
        self._streams.clear()


def _load_tokenizer(source: str) -> Tokenizer:
    from trencadis.engine.tokenizer import Tokenizer  # noqa: PLC0415  (imports transformers)

    return Tokenizer.load(source)


async def _await_ready(channel: FrontChannel, process: BaseProcess) -> Ready:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        message = await channel.receive(_POLL_SECONDS)
        if isinstance(message, Ready):
            return message
        if isinstance(message, Failed):
            kinds = {"config": ConfigError, "model": ModelError}
            raise kinds.get(message.kind, EngineDead)(message.message)
        if message is None and not process.is_alive():
            raise EngineDead(f"the engine core ended at start with exit code {process.exitcode}")
    raise EngineDead(f"the engine core was not ready within {_START_SECONDS:.0f} s")


async def _end(process: BaseProcess, patience: float = 0.0) -> None:
    """Wait for the process to end, then make it, and with it all that it has started."""
    await asyncio.to_thread(process.join, patience)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.is_alive() and process.pid is not None:
            _signal_group(process.pid, number)
            await asyncio.to_thread(process.join, 2.0)


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # it has no group of its own yet
        os.kill(leader, number)
