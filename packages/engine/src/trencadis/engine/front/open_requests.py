"""The requests of a front that have not ended: those that the core knows, and parked ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator

import attrs
import msgspec

from trencadis.engine.api.outputs import CompletionDelta
from trencadis.engine.api.requests import EngineRequest, PoolingRequest
from trencadis.engine.errors import (
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    RequestFailed,
)
from trencadis.engine.front.core_supervisor import CoreSupervisor
from trencadis.engine.front.request_stream import RequestStream
from trencadis.engine.ipc.messages import Abort, Finish, Rejected, StepDone, add_message

logger = logging.getLogger("trencadis.engine")

_DRAIN_POLL_SECONDS = 0.005
"""Period in which a drain checks whether requests are left."""


@attrs.define(eq=False)
class OpenRequest:
    """A request. Its generator reads ``queue``, at most one delta per generated token.

    ``keys``: under which keys the core knows it, and which sample it has there; None is all of
    them.
    """

    stream: RequestStream
    queue: asyncio.Queue[CompletionDelta | EngineError]
    keys: dict[str, int | None]
    lora_digest: str = ""
    """The content of its adapter when it began: the name may stand for another later."""

    def resumption(self, sample: int | None, token_ids: tuple[int, ...]) -> EngineRequest:
        """The request by which ``sample`` goes on after ``token_ids``."""
        request = self.stream.request
        if isinstance(request, PoolingRequest):
            return attrs.evolve(request, is_resumed=True)
        params = request.params
        if sample is not None and params.num_seqs > 1:
            seed = None if params.seed is None else params.seed + sample
            params = attrs.evolve(params, n=1, best_of=None, seed=seed)
        output = request.output_token_ids + token_ids
        return attrs.evolve(
            request,
            params=params,
            output_token_ids=output,
            lora_digest=self.lora_digest,
            is_resumed=True,
        )


class OpenRequests:
    """Begins, ends, parks and resumes requests, and gives them the core's tokens.

    ``numbers`` make the keys of resumed requests unique.
    """

    def __init__(self, core: CoreSupervisor, numbers: Iterator[int]) -> None:
        self._core = core
        self._numbers = numbers
        self._requests: dict[str, OpenRequest] = {}
        self._parked: set[OpenRequest] = set()

    def begin(
        self, key: str, stream: RequestStream, queue: asyncio.Queue[CompletionDelta | EngineError]
    ) -> OpenRequest:
        """A request that is sent to the core under ``key``."""
        request = self._requests[key] = OpenRequest(stream, queue, {key: None})
        return request

    def unfinished(self) -> list[OpenRequest]:
        """All requests, parked ones last."""
        return [*dict.fromkeys(self._requests.values()), *self._parked]

    def keys_of(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """The keys under which the core knows these requests."""
        names = frozenset(request_ids)
        return tuple(key for key, each in self._requests.items() if each.stream.request_id in names)

    async def abort(self, request: OpenRequest) -> None:
        """Abort a request in the core, unless it has ended there."""
        self._parked.discard(request)
        keys = tuple(key for key in request.keys if self._requests.pop(key, None) is not None)
        request.keys.clear()
        if keys and self._core.is_alive:
            await self._core.send(Abort(keys))

    async def abort_all(self) -> int:
        """End every request that is not parked with the reason ``abort``; returns how many."""
        requests = list(dict.fromkeys(self._requests.values()))
        for request in requests:
            request.stream.abort()
            await self.abort(request)
        return len(requests)

    async def drain(self, timeout_s: float) -> int:
        """Wait until no request is left, at most ``timeout_s`` seconds; returns how many are."""
        deadline = time.monotonic() + timeout_s
        while self._requests and time.monotonic() < deadline:
            self._core.check_health()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return len(dict.fromkeys(self._requests.values()))

    def park(self) -> list[OpenRequest]:
        """Keep the tokens of all requests here, so that the core may drop them.

        Their generators wait. Pass the result to `resume`.
        """
        parked = list(dict.fromkeys(self._requests.values()))
        for request in parked:
            request.keys.clear()
        self._requests.clear()
        self._parked.update(parked)
        return parked

    async def resume(self, parked: Iterable[OpenRequest]) -> int:
        """Go on with parked requests of the model that is served; returns how many there are.

        Those that have ended meanwhile are skipped. Where the core cannot be reached, those that
        are left end with the error.
        """
        waiting = [request for request in parked if request in self._parked]
        self._parked.difference_update(waiting)
        messages = []
        sent = 0
        try:
            # All before the first is sent: what ends or parks every request meanwhile, as a sleep
            # does, must find those of which the core is told next. It ends them without a message.
            for number, request in enumerate(waiting):
                for sample, token_ids in request.stream.to_resume().items():
                    key = f"{request.stream.request_id}/{next(self._numbers)}"
                    self._requests[key] = request
                    request.keys[key] = sample
                    resumed = request.resumption(sample, token_ids)
                    messages.append((number, add_message(key, resumed)))
            for number, message in messages:
                sent = number
                if message.key in self._requests:  # it may be aborted between two messages
                    self._core.check_health()
                    await self._core.send(message)
        except EngineError as error:
            for left in waiting[sent:]:
                if left not in self._parked:  # again
                    await self.abort(left)
                    left.queue.put_nowait(type(error)(*error.args))
            return sent
        return len(waiting)

    async def deliver(self, step: StepDone) -> None:
        """Give each request its tokens of a step."""
        for token in step.tokens:
            request = self._requests.get(token.key)
            if request is None:
                continue  # aborted after the core had sent the token
            sample = request.keys[token.key]
            try:
                stopped = request.stream.push(
                    token if sample is None else msgspec.structs.replace(token, index=sample)
                )
            except Exception as error:  # only this request is concerned: the others are served
                await self._fail(token.key, error)
                continue
            stream = request.stream
            # Before anything is sent: meanwhile the request may be aborted, and its keys are gone.
            if stream.finished if sample is None else stream.has_ended(sample):
                del self._requests[token.key], request.keys[token.key]
            if stopped:  # by a stop string, which the core cannot see
                await self._core.send(Finish(token.key, token.index))

    async def _fail(self, key: str, error: Exception) -> None:
        """End a request because of an unexpected error, which its caller gets."""
        name = key.rpartition("/")[0]
        logger.error("Request %s fails", name, exc_info=error)
        if not isinstance(error, EngineError):
            error = RequestFailed(f"request {name} failed: {type(error).__name__}: {error}")
        request = self._requests[key]
        request.queue.put_nowait(error)
        await self.abort(request)

    def reject(self, message: Rejected) -> None:
        """End a request that the core has rejected."""
        if message.overloaded:
            self.end_with(message.key, EngineOverloaded(message.message))
        elif message.sleeping:
            self.end_with(message.key, EngineSleeping(message.message))
        else:
            self.end_with(message.key, InvalidRequest(message.message, message.field))

    def end_with(self, key: str, error: EngineError) -> None:
        """End a request, which has ended in the core, with an error."""
        request = self._requests.pop(key, None)
        if request is not None:
            del request.keys[key]
            request.queue.put_nowait(error)

    def end_all(self, error: EngineDead) -> None:
        """End every request that is not parked with an error."""
        for request in dict.fromkeys(self._requests.values()):
            request.queue.put_nowait(type(error)(*error.args))
            request.keys.clear()
        self._requests.clear()

    def end_parked(self, error: EngineDead) -> None:
        """End every parked request with an error."""
        for request in self._parked:
            request.queue.put_nowait(type(error)(*error.args))
        self._parked.clear()
