"""What the front and the engine core say to each other, as msgpack over ZeroMQ."""

from __future__ import annotations

from typing import Literal

import msgspec

from trencadis.engine.outputs import EngineStats, FinishReason, PositionLogprobs
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import BatchControl, BatchControlResult


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve a request under ``key``, unique among those being served."""

    key: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop serving these; a key that is not known has finished and is ignored."""

    keys: tuple[str, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A sample has all the text it may have: a stop string, of which the core does not know."""

    key: str
    index: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """An operator's order, answered by `Controlled` with the same number."""

    number: int
    order: BatchControl


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the core."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core is warm and serves from now on."""

    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    num_buckets: int
    warmup_seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core ends. ``kind`` says which error the front raises for it."""

    kind: Literal["config", "model", "internal"]
    message: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request that is not served. ``overloaded``: it may be sent again later."""

    key: str
    message: str
    field: str | None = None
    overloaded: bool = False


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of sample ``index`` of a request; the last one carries a reason.

    Of a beam search ``index`` is the rank, and all tokens of its answers come at its end.
    """

    key: str
    index: int
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: PositionLogprobs | None = None


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """The answer to an order; without a ``result`` it was refused, for the ``message``'s reason."""

    number: int
    result: BatchControlResult | None = None
    message: str = ""
    field: str | None = None


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """What a step produced, and how the core stands."""

    tokens: tuple[NewToken, ...]
    stats: EngineStats


ToCore = Add | Abort | Finish | Control | Stop
FromCore = Ready | Failed | Rejected | Controlled | StepDone
