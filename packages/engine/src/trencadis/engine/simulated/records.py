"""What happened to each request, and how the device fared over time."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import attrs


class Moment(NamedTuple):
    """The state of the simulated server at one time, seconds since the first arrival.

    ``tokens`` were generated since the moment before.
    """

    at_s: float
    running: int
    waiting: int
    swapped: int
    used_blocks: int
    highest_block: int
    tokens: int
    temperature_c: float
    power_w: float
    cap: int


@attrs.define
class _Live:
    """A request being served; times in seconds."""

    arrived_s: float
    last_token_s: float | None = None


@attrs.define
class Records:
    """Latencies in seconds, one entry per request or per token, in order of occurrence."""

    first_token_s: array[float] = attrs.field(factory=lambda: array("d"))
    between_tokens_s: array[float] = attrs.field(factory=lambda: array("d"))
    latency_s: array[float] = attrs.field(factory=lambda: array("d"))
    asked_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    refused: int = 0
    last_token_s: float = 0.0
    moments: list[Moment] = attrs.field(factory=list)
    _live: dict[int, _Live] = attrs.field(factory=dict)
    _tokens_before: int = 0

    @property
    def num_finished(self) -> int:
        return len(self.latency_s)

    @property
    def num_live(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._live)

    def accepted(self, seq_id: int, arrived_s: float, prompt: int, asked: int) -> None:
        """A request was queued."""
        self._live[seq_id] = _Live(arrived_s)
        self.prompt_tokens += prompt
        self.asked_tokens += asked

    def token(self, seq_id: int, now_s: float) -> None:
        """A sequence has one more token."""
        live = self._live[seq_id]
        if live.last_token_s is None:
            self.first_token_s.append(now_s - live.arrived_s)
        else:
            self.between_tokens_s.append(now_s - live.last_token_s)
        live.last_token_s = now_s
        self.generated_tokens += 1
        self.last_token_s = now_s

    def ended(self, seq_id: int, now_s: float) -> None:
        """A sequence has its last token."""
        live = self._live.pop(seq_id)
        self.latency_s.append(now_s - live.arrived_s)

    def tokens_since_last_moment(self) -> int:
        """Generated since this was asked before."""
        since = self.generated_tokens - self._tokens_before
        self._tokens_before = self.generated_tokens
        return since
