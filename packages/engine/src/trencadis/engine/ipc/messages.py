"""The messages between the front and the engine core, sent as msgpack over ZeroMQ.

Adding a message: define it here, add it to `ToCore` or `FromCore`, handle it in
`core_process._handle` or `AsyncEngine._handle`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trencadis.engine.api.inspection import AdapterInfo, EngineInspection
from trencadis.engine.api.outputs import (
    EngineStats,
    FinishReason,
    PositionLogprobs,
    RequestStatus,
)
from trencadis.engine.api.requests import EngineRequest, GenerateRequest, PoolingRequest
from trencadis.engine.api.scoring import Scoring
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.errors import (
    ENDING_ERRORS,
    EngineError,
    InvalidRequest,
    shown,
)
from trencadis.scheduler import BatchControl, BatchControlResult

BUSY_SECONDS = 1800.0
"""Longest silence of a core that compiles or warms up."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve a request. ``key`` is unique among the requests being served."""

    key: str
    request: GenerateRequest


class AddPooling(msgspec.Struct, frozen=True, tag=True):
    """As `Add`: the two kinds of requests need two messages to be told apart."""

    key: str
    request: PoolingRequest


def add_message(key: str, request: EngineRequest) -> Add | AddPooling:
    """The message that adds a request."""
    return AddPooling(key, request) if isinstance(request, PoolingRequest) else Add(key, request)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort requests. Unknown keys are ignored: those requests have ended."""

    keys: tuple[str, ...]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End one sample: the front found a stop string, which the core cannot see."""

    key: str
    index: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """An administrator's order. The core answers with `Controlled` of the same number."""

    number: int
    order: BatchControl


def check_order(order: BatchControl) -> None:
    """Raise `InvalidRequest` for what is not an order."""
    if not isinstance(order, BatchControl):
        raise InvalidRequest(
            f"an order must be a BatchControl, as in BatchControl(max_num_seqs=4), "
            f"got {shown(order)}",
            "order",
        )


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Preempt requests; they keep their tokens. The core answers with `Preempted`."""

    number: int
    keys: tuple[str, ...]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """An administrator looks at KV blocks and buckets. The core answers with `Inspected`."""

    number: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in the directory ``path``. The core answers with `AdaptersChanged`.

    ``within``: see `AsyncEngine.load_adapter`.
    """

    number: int
    name: str
    path: str
    within: tuple[str, ...] = ()


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unload an adapter. The core answers with `AdaptersChanged`."""

    number: int
    name: str


class Reconfigure(msgspec.Struct, frozen=True, tag=True):
    """Serve another model. ``config`` is that of `config_payload`.

    ``stash_bytes``: host memory for the weights of models that are not served. The core answers
    with `Reconfigured` or `ReconfigureFailed` of the same number.
    """

    number: int
    config: bytes
    stash_bytes: int


class CheckModel(msgspec.Struct, frozen=True, tag=True):
    """Whether the model of ``config`` can be served. The core answers with `ModelChecked`."""

    number: int
    config: bytes


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Release device memory. The core answers with `Slept` or `ReconfigureFailed`."""

    number: int
    level: Literal[1, 2]


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Serve again after `Sleep`. The core answers with `Reconfigured` or `ReconfigureFailed`."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the core."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core has warmed up and accepts requests.

    ``embedding_size``: numbers of an embedding; 0 for a core without. ``scoring``: of a core that
    scores pairs. ``text_prompts``: those of a core that embeds. ``adapters``: those that requests
    may name.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    num_buckets: int
    warmup_seconds: float
    embedding_size: int = 0
    scoring: Scoring | None = None
    text_prompts: TextPrompts = msgspec.field(default_factory=TextPrompts)
    adapters: tuple[AdapterInfo, ...] = ()


class Reconfigured(msgspec.Struct, frozen=True, tag=True):
    """The core serves the model of `Reconfigure`. Times are in seconds; see `SwitchReport`."""

    number: int
    ready: Ready
    unload_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    from_stash: bool = False


class ReconfigureFailed(msgspec.Struct, frozen=True, tag=True):
    """A step failed, and the core serves the model that it served before.

    With the step ``wake`` it sleeps, because that model could not be started again.
    """

    number: int
    step: str
    message: str


class ModelChecked(msgspec.Struct, frozen=True, tag=True):
    """The answer to `CheckModel`. ``error``: why the model cannot be served; empty if none is known
    without loading it."""

    number: int
    error: str = ""


class Slept(msgspec.Struct, frozen=True, tag=True):
    """The core sleeps; ``freed_bytes`` of memory are free."""

    number: int
    freed_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core has failed and ends. ``kind`` selects the error that the front raises."""

    kind: Literal["config", "model", "internal"]
    message: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request was rejected. ``overloaded``: the queue is full, a later try may succeed.

    ``sleeping``: the core sleeps, so that nothing is wrong with the request.
    """

    key: str
    message: str
    field: str | None = None
    overloaded: bool = False
    sleeping: bool = False


class RequestError(msgspec.Struct, frozen=True, tag=True):
    """An error ended a request. The core goes on serving the others.

    ``code``: a key of `ENDING_ERRORS`.
    """

    key: str
    message: str
    code: str = "internal_error"

    @classmethod
    def of(cls, key: str, error: Exception) -> RequestError:
        """For an error of `ENDING_ERRORS`, or any other, which is an internal one."""
        for code, kind in ENDING_ERRORS.items():
            if type(error) is kind:
                return cls(key, str(error), code)
        return cls(key, f"internal error: {type(error).__name__}: {error}")

    def to_error(self, name: str | None = None) -> EngineError:
        """The error that the front raises, after ``name``, that of the request, if any."""
        message = self.message if name is None else f"{name}: {self.message}"
        return ENDING_ERRORS[self.code](message)


class NewToken(msgspec.Struct, frozen=True, array_like=True):
    """One new token of sample ``index`` of a request. The last token has a finish reason.

    ``completes_grammar``: it is the last one because a structured output is complete with it. It
    belongs to the text, other than a stop token. ``queue_s``: with the first token of a sample, the
    seconds that it waited until it first ran. For beam search, ``index`` is the rank of the result,
    and all tokens come when the search ends. ``embedding``: the vector that the request gets
    instead of a token, see `CompletionDelta`. ``away_s`` and ``num_preemptions``: see there, too.
    ``prompt_logprobs``: with the first token after they are known, those of the request's prompt
    from its second token on, in the form of the runner's `ChunkScores`, as float32 in little
    endian.
    """

    key: str
    index: int
    token_id: int
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: PositionLogprobs | None = None
    request_status: RequestStatus = "normal"
    completes_grammar: bool = False
    queue_s: float | None = None
    embedding: bytes | None = None
    away_s: float = 0.0
    prompt_logprobs: bytes | None = None
    num_preemptions: int = 0


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """The keys of `Preempt` whose requests run, and are preempted at the next step."""

    number: int
    keys: tuple[str, ...]


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Inspect`, made between two steps. ``error``: why there is no inspection."""

    number: int
    inspection: EngineInspection | None
    error: str = ""


class AdaptersChanged(msgspec.Struct, frozen=True, tag=True):
    """The adapters that requests may name after a change, or ``error``: why it was rejected.

    ``is_internal``: it was none of who asked.
    """

    number: int
    adapters: tuple[AdapterInfo, ...] = ()
    error: str = ""
    field: str | None = None
    is_internal: bool = False


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """The result of an order, or, where ``result`` is None, why the order was rejected."""

    number: int
    result: BatchControlResult | None = None
    message: str = ""
    field: str | None = None


class Busy(msgspec.Struct, frozen=True, tag=True):
    """The core starts what may take minutes without another message, such as a compilation.

    ``limit_s``: seconds of silence after which it counts as hung, where these are more than those
    of a core that serves. ``number``: of the call that the core begins with this, if it does.
    """

    reason: str
    limit_s: float = BUSY_SECONDS
    number: int | None = None


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one step. ``stats`` follow ten times a second, and when the core is idle."""

    tokens: tuple[NewToken, ...]
    stats: EngineStats | None


ToCore = (
    Add
    | AddPooling
    | Abort
    | Finish
    | Control
    | Preempt
    | Inspect
    | LoadAdapter
    | UnloadAdapter
    | CheckModel
    | Reconfigure
    | Sleep
    | WakeUp
    | Stop
)
FromCore = (
    Ready
    | Reconfigured
    | ReconfigureFailed
    | ModelChecked
    | Slept
    | Failed
    | Rejected
    | RequestError
    | Controlled
    | Preempted
    | Inspected
    | AdaptersChanged
    | Busy
    | StepDone
)
