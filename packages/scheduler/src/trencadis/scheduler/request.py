"""Requests as a client submits them: frozen values."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import Literal

import attrs

from trencadis.scheduler.errors import UnservableRequest
from trencadis.scheduler.validators import as_token_ids, instance_of, integer, number, one_of


class FinishReason(enum.Enum):
    """Why a sequence finished: the values of the OpenAI API, and ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _as_prompt(token_ids: Iterable[int]) -> tuple[int, ...]:
    return as_token_ids(token_ids, "prompt_token_ids", UnservableRequest)


def _as_stop_tokens(token_ids: Iterable[int]) -> frozenset[int]:
    return frozenset(as_token_ids(token_ids, "stop_token_ids", UnservableRequest))


@attrs.frozen(kw_only=True)
class BeamSearch:
    """Parameters of beam search, with the scores and the stopping rules of ``transformers``.

    The score of a hypothesis of ``L`` generated tokens is its cumulative log-probability divided
    by ``L ** length_penalty``. The search ends once there are ``width`` finished hypotheses and
    ``early_stopping`` is True; or, for False, the best running beam scores below the worst
    hypothesis at its current length; or, for ``"never"``, at any length. Raises
    `UnservableRequest`.
    """

    width: int = attrs.field(validator=integer(1, error=UnservableRequest))
    length_penalty: float = attrs.field(default=1.0, validator=number(error=UnservableRequest))
    early_stopping: bool | Literal["never"] = attrs.field(
        default=False, validator=one_of((True, False, "never"), error=UnservableRequest)
    )


@attrs.frozen(kw_only=True)
class Request:
    """A generation request. Token counts exclude the prompt.

    ``stop_token_ids`` finish a sequence once ``min_tokens`` are generated; EOS tokens belong to
    them unless the client ignores EOS. ``max_tokens`` is a hard limit.

    The client gets ``n`` results, chosen from ``best_of`` samples (None: n) or from
    ``beam_search``. Under the ``priority`` policy, requests with a lower ``priority`` run first.
    Of equal priority, those of the ``client`` run first that got the least service
    (`ClientShares`); by default all requests are of the same one.
    ``adapter``: the weights that it runs with; empty for those of the model alone. At most
    ``max_adapters`` of them are in use at once.
    ``extra_keys`` (adapter id, cache salt): prompts share cached prefixes only if these are equal.
    Without ``reads_prefix_cache`` every token of the prompt is computed, also one that is cached,
    for a host that needs what the model computes from each.
    ``prompt_token_cost``: what a token of a prefill chunk takes of the step's token budget, for a
    host that computes more from it than its keys and values, as a step should not last longer.
    Raises `UnservableRequest`.
    """

    request_id: str = attrs.field(validator=instance_of(str, error=UnservableRequest))
    prompt_token_ids: tuple[int, ...] = attrs.field(converter=_as_prompt, repr=False)
    max_tokens: int = attrs.field(validator=integer(1, error=UnservableRequest))
    min_tokens: int = attrs.field(default=0, validator=integer(0, error=UnservableRequest))
    stop_token_ids: frozenset[int] = attrs.field(default=(), converter=_as_stop_tokens)
    n: int = attrs.field(default=1, validator=integer(1, error=UnservableRequest))
    best_of: int | None = attrs.field(
        default=None, validator=integer(1, optional=True, error=UnservableRequest)
    )
    beam_search: BeamSearch | None = attrs.field(
        default=None, validator=instance_of(BeamSearch, optional=True, error=UnservableRequest)
    )
    priority: int = attrs.field(default=0, validator=integer(None, error=UnservableRequest))
    extra_keys: tuple[Hashable, ...] = attrs.field(
        default=(), validator=instance_of(tuple, error=UnservableRequest)
    )
    reads_prefix_cache: bool = attrs.field(
        default=True, validator=instance_of(bool, error=UnservableRequest)
    )
    prompt_token_cost: float = attrs.field(
        default=1.0, validator=number(1.0, error=UnservableRequest)
    )
    client: str = attrs.field(default="", validator=instance_of(str, error=UnservableRequest))
    adapter: str = attrs.field(default="", validator=instance_of(str, error=UnservableRequest))

    def __attrs_post_init__(self) -> None:
        if self.n > self.num_seqs:
            raise UnservableRequest(
                f"n {self.n} is above the {self.num_seqs} sequences to choose from: "
                "lower n or raise best_of or the beam width"
            )
        if self.beam_search is not None and self.best_of is not None:
            raise UnservableRequest(
                f"best_of {self.best_of} and beam_search exclude each other: use the beam width"
            )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_seqs(self) -> int:
        """Maximum number of sequences of this request that run at once."""
        if self.beam_search is not None:
            return self.beam_search.width
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the results are selected from more samples, by their log-probabilities."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def is_scored(self) -> bool:
        """Whether the results depend on log-probabilities: ranked samples, or beams."""
        return self.is_ranked or self.beam_search is not None
