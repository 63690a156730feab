"""What a client asks for: a frozen `Request`, and how its output may branch."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import Literal

import attrs

from trencadis.scheduler.errors import UnservableRequest


class FinishReason(enum.Enum):
    """Why a sequence ended. The values are those of the OpenAI API, and ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _as_tuple(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen(kw_only=True)
class BeamSearch:
    """Beam search with the scores and the stopping rules of ``transformers``.

    A hypothesis of ``L`` generated tokens scores its summed log-probability over
    ``L ** length_penalty``. ``early_stopping`` True ends as soon as there are ``width`` finished
    hypotheses, False when the best running beam, scored at its present length, does not beat the
    worst of them, ``"never"`` only when it could not at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __attrs_post_init__(self) -> None:
        if self.width < 1:
            raise UnservableRequest(f"beam width must be 1 or more, got {self.width}")


@attrs.frozen(kw_only=True)
class Request:
    """One generation that a client asked for; token counts exclude the prompt.

    ``stop_token_ids`` end a sequence once ``min_tokens`` are generated (end-of-sequence tokens
    are among them unless the client ignores those). ``max_tokens`` is a hard bound.

    ``n`` results are wanted, of ``best_of`` samples (None: n) or of ``beam_search``. ``priority``
    counts under the ``priority`` policy, lower first. ``extra_keys`` (adapter id, cache salt) keep
    prompts with other keys from sharing cached prefixes. Raises `UnservableRequest`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_as_tuple, repr=False)
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    priority: int = 0
    extra_keys: tuple[Hashable, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.n < 1:
            raise UnservableRequest(f"n must be 1 or more, got {self.n}")
        if self.n > self.width:
            raise UnservableRequest(
                f"n {self.n} is above the {self.width} sequences to choose from: "
                "lower n or raise best_of or the beam width"
            )
        if self.beam_search is not None and self.best_of is not None:
            raise UnservableRequest(
                f"best_of {self.best_of} and beam_search exclude each other: use the beam width"
            )

    @property
    def width(self) -> int:
        """Sequences that run at once for this request, at most."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.n if self.best_of is None else self.best_of
