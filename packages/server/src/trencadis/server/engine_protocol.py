"""The interface of an engine that this server needs. `trencadis.engine.AsyncEngine` has it.

The protocols let tests run without a model, and let another runtime use this server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from trencadis.engine import (
    AdapterInfo,
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    EngineInspection,
    EngineRequest,
    EngineStats,
    ModelEntry,
    PairPrompt,
    Scoring,
    SwitchReport,
    TextPrompts,
)


class ServingTokenizer(Protocol):
    """Converts text to token ids and back. The server calls it from several threads: `encode` and
    `render_chat` from worker threads, the others also from the event loop."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are 0 to ``vocab_size - 1``."""

    @property
    def chat_template(self) -> str | None:
        """The chat template in Jinja, which shows how the model writes tool calls and reasoning;
        None if there is none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, of special tokens only where they are not skipped."""

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, as log-probabilities report it."""

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text: those of a part of a character, too.

        No bytes for a special token that is skipped.
        """

    def min_num_tokens(self, length: int) -> int:
        """The fewest tokens that a text of ``length`` characters can have."""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        quick: bool | None = None,
    ) -> list[int]:
        """Apply the chat template and return the token ids of a conversation.

        ``quick``: True where others wait: raise `SlowConversation` rather than take long; False
        after that, in another thread. A tokenizer that is always quick may ignore it. Raises
        `InvalidRequest` (field ``messages``) if the chat template rejects it.
        """


@runtime_checkable
class DescribedTokenizer(Protocol):
    """A tokenizer that tells its configuration."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        """That of ``tokenizer_config.json``, as values of JSON."""


class ServingEngine(Protocol):
    """A running engine that serves one model."""

    @property
    def tokenizer(self) -> ServingTokenizer:
        """The tokenizer of the model."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""

    @property
    def model_name(self) -> str:
        """The name that clients send as ``model``."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""

    async def check_health(self) -> str | None:
        """Raise an error if requests cannot be served.

        Returns what the engine does, where that may keep it silent for minutes, otherwise None.
        `EngineDead` if the engine has stopped, `EngineRestarting` while it recovers by itself, and
        `EngineUnresponsive` if it hangs.
        """

    def generate(self, request: EngineRequest) -> AsyncGenerator[CompletionDelta, None]:
        """Yield the deltas of all ``request.params.n`` choices, interleaved.

        Closing the generator aborts the request. The first iteration raises `InvalidRequest`,
        `EngineOverloaded`, `ModelNotActiveError` where another model than ``request.model`` is
        active by now, `SwitchInProgressError` during a switch, or an error of `check_health`; later
        ones raise `RequestFailed`, an internal error that concerns this request alone,
        `BucketMiss`, a shape that the engine may not compile for it, or `EngineDead`.
        """

    async def control(self, order: BatchControl) -> BatchControlResult:
        """Carry out an administrator's order and return its effect.

        Raises `InvalidRequest`, `EngineOverloaded` or an error of `check_health`.
        """


@runtime_checkable
class SwitchingEngine(ServingEngine, Protocol):
    """An engine of several models, one of which is active: `trencadis.engine.MultiModelEngine`.

    ``model_name``, ``tokenizer`` and ``max_model_len`` are those of the active model.
    """

    @property
    def active(self) -> str:
        """The alias of the active model."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases of all models."""

    @property
    def entry(self) -> ModelEntry:
        """The active model's entry."""

    def entry_of(self, alias: str) -> ModelEntry:
        """The entry of a model. Raises `UnknownModelError`."""

    async def tokenizer_of(self, alias: str) -> ServingTokenizer:
        """The tokenizer of a model, active or not. Raises `UnknownModelError` or `ModelError`."""

    def totals_of(self, alias: str) -> EngineStats:
        """The totals of a model since the start, active or not; its other values have no meaning.

        Those of the active model are those of ``stats``.
        """

    @property
    def is_switching(self) -> bool:
        """Whether a switch is under way and prepared: new requests are rejected meanwhile."""

    async def prepare_model(self, alias: str) -> float:
        """What a switch to a model can do while the active one serves; returns the seconds.

        Raises `SwitchFailedError`.
        """

    async def switch_model(
        self,
        alias: str,
        *,
        running: Literal["wait", "abort", "park"] = "wait",
        drain_timeout_s: float = 60.0,
        wait_for_turn: bool = True,
    ) -> SwitchReport:
        """Make another model the active one; returns when it serves.

        Raises `UnknownModelError`, `SwitchInProgressError` or `SwitchFailedError`.
        """


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its device memory for a while."""

    async def sleep(self, level: int = 1) -> int:
        """Level 1 keeps the weights in host memory, level 2 discards them.

        Returns the bytes of device memory that are released.
        """

    async def wake_up(self) -> None:
        """Serve again; returns when it does.

        Raises `SwitchFailedError` where it cannot, for example because device memory is missing;
        it stays asleep then.
        """

    @property
    def is_sleeping(self) -> bool:
        """Whether the device memory is released, so that no request can be served."""


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine that may compute embeddings.

    Where it does, its ``generate`` takes a `PoolingRequest` and yields one delta, which has the
    ``embedding`` of the prompt.
    """

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 while the engine generates."""


def embedding_size(engine: ServingEngine) -> int:
    """Numbers of an embedding; 0 for an engine that generates or scores."""
    return engine.embedding_size if isinstance(engine, EmbeddingEngine) else 0


@runtime_checkable
class PromptingEngine(Protocol):
    """An engine whose model may declare prompts for texts to embed."""

    @property
    def text_prompts(self) -> TextPrompts:
        """The prompts by name, and which of them is the default."""


def text_prompts(engine: ServingEngine) -> TextPrompts:
    """The prompts that an engine's model declares for texts to embed."""
    return engine.text_prompts if isinstance(engine, PromptingEngine) else TextPrompts()


class PairTokenizer(ServingTokenizer, Protocol):
    """The tokenizer of a model that scores pairs."""

    def render_pair(
        self,
        prompt: PairPrompt,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
        quick: bool | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt by which a model scores a document for a query.

        ``quick`` is that of `render_chat`. Raises `InvalidRequest` where the template rejects the
        texts, or the prompt has no place for an instruction (field ``instruction``).
        """


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that may score pairs of texts.

    Where it does, its tokenizer is a `PairTokenizer`, and its ``generate`` takes a `PoolingRequest`
    and yields one delta, whose ``embedding`` is the logit, a float32.
    """

    @property
    def scoring(self) -> Scoring | None:
        """How the model scores; None while it does not."""


def scoring(engine: ServingEngine) -> Scoring | None:
    """How an engine's model scores pairs; None for one that does not."""
    return engine.scoring if isinstance(engine, ScoringEngine) else None


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that serves adapters beside the weights of its model: requests name them by
    ``lora``."""

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """Those that requests to the active model may name."""

    async def load_adapter(self, name: str, path: str, within: Sequence[str] = ()) -> None:
        """Load the adapter in the directory ``path``, whose files are below one of ``within`` when
        they are opened. Raises `InvalidRequest` where it cannot be served, or the name is taken,
        `RequestFailed`, or an error of `ServingEngine.check_health`."""

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter: new requests may not name it, others go on. Errors as above."""


def adapters(engine: ServingEngine) -> Mapping[str, AdapterInfo]:
    """The adapters that requests may name, by name."""
    found = engine.adapters if isinstance(engine, AdapterEngine) else ()
    return {adapter.name: adapter for adapter in found}


@runtime_checkable
class InspectableEngine(Protocol):
    """An engine that reports its KV blocks and buckets, which the dashboard shows."""

    async def inspect(self) -> EngineInspection:
        """The KV blocks of the device, and the grids of prefill and decode.

        Called at most once a second, and only while someone watches. Raises an `EngineError`
        where it cannot tell.
        """


def as_switching(engine: ServingEngine) -> SwitchingEngine | None:
    """The engine, if it has several models."""
    return engine if isinstance(engine, SwitchingEngine) else None


def totals_by_model(engine: ServingEngine) -> Mapping[str, EngineStats]:
    """The totals of each model since the start; only these values of the statistics count."""
    switching = as_switching(engine)
    if switching is None:
        return {engine.model_name: engine.stats}
    return {alias: switching.totals_of(alias) for alias in switching.aliases}
