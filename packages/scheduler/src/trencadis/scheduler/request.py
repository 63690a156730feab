"""What is scheduled: a `Request` as the client sent it and the `Sequence` that it becomes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds

import attrs


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are those of the OpenAI API, and ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _as_tuple(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen(kw_only=True)
class Request:
    """One generation that a client asked for; token counts exclude the prompt.

    ``stop_token_ids`` end the sequence once ``min_tokens`` are generated (end-of-sequence tokens
    are among them unless the client ignores those). ``max_tokens`` is a hard bound.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_as_tuple, repr=False)
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@attrs.define(eq=False)
class Sequence:
    """A request in progress. The scheduler alone changes it; others may read.

    ``token_ids`` are prompt and output. The first ``num_computed`` of them have their keys and
    values in the cache, ``num_slots`` of them have cache slots reserved.
    """

    seq_id: int
    request: Request
    token_ids: list[int] = attrs.field(repr=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_slots: int = 0
    num_cached_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> TokenIds[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed
