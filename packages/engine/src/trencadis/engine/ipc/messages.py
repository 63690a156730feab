"""The messages between the front and the engine core, sent as msgpack over ZeroMQ.

Adding a message: define it here, add it to `ToCore` or `FromCore`, handle it in
`core_process._handle` or `AsyncEngine._read`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trencadis.engine.outputs import (
    EngineStats,
    FinishReason,
    PositionLogprobs,
    RequestStatus,
)
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BatchControl, BatchControlResult


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve a request. ``key`` is unique among the requests being served."""

    key: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort requests. Unknown keys are ignored: those requests have ended."""

    keys: tuple[str, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End one sample: the front found a stop string, which the core cannot see."""

    key: str
    index: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """An operator's order. The core answers with `Controlled` of the same number."""

    number: int
    order: BatchControl


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Preempt requests; they keep their tokens. The core answers with `Preempted`."""

    number: int
    keys: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the core."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core has warmed up and accepts requests."""

    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    num_buckets: int
    warmup_seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core has failed and ends. ``kind`` selects the error that the front raises."""

    kind: Literal["config", "model", "internal"]
    message: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request was refused. ``overloaded``: the queue is full, a later try may succeed."""

    key: str
    message: str
    field: str | None = None
    overloaded: bool = False


class RequestError(msgspec.Struct, frozen=True, tag=True):
    """An internal error ended a request. The core goes on serving the others.

    ``bucket_miss``: it needs a shape that the engine refuses to compile.
    """

    key: str
    message: str
    bucket_miss: bool = False


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    """One new token of sample ``index`` of a request. The last token has a finish reason.

    ``completes_grammar``: it is the last one because a structured output is complete with it. It
    belongs to the text, other than a stop token. For beam search, ``index`` is the rank of the
    result, and all tokens come when the search ends.
    """

    key: str
    index: int
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: PositionLogprobs | None = None
    request_status: RequestStatus = "normal"
    completes_grammar: bool = False


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """The keys of `Preempt` whose requests run, and are preempted at the next step."""

    number: int
    keys: tuple[str, ...]


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """The result of an order, or, where ``result`` is None, why the order was refused."""

    number: int
    result: BatchControlResult | None = None
    message: str = ""
    field: str | None = None


class Busy(msgspec.Struct, frozen=True, tag=True):
    """The core starts what may take minutes without another message, such as a compilation."""

    reason: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one step. ``stats`` follow ten times a second, and when the core is idle."""

    tokens: tuple[NewToken, ...]
    stats: EngineStats | None


ToCore = Add | Abort | Finish | Control | Preempt | Stop
FromCore = Ready | Failed | Rejected | RequestError | Controlled | Preempted | Busy | StepDone
