"""Records of a simulation: the latencies of each request, and samples of the server's state."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import attrs


class Sample(NamedTuple):
    """The state of the simulated server ``at_s`` seconds after the first arrival.

    ``tokens`` were generated since the previous sample. ``running_limit`` is in sequences,
    ``prefill_limit`` in tokens of a step.
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
    running_limit: int
    prefill_limit: int


@attrs.define
class StepTimes:
    """Seconds by part.

    - On the device: products with the layers' weight matrices, attention, the output head,
      collectives of ranks, sampling (of the host, where that samples).
    - Between both: batches uploaded, waits for the sampled tokens, copies of KV blocks.
    - Of the host: launches of forward passes that do not overlap them, compilation and capture,
      scheduling and everything else that a step needs.
    """

    matrices_s: float = 0.0
    attention_s: float = 0.0
    head_s: float = 0.0
    collectives_s: float = 0.0
    sample_s: float = 0.0
    upload_s: float = 0.0
    fetch_s: float = 0.0
    block_copy_s: float = 0.0
    launch_s: float = 0.0
    compile_s: float = 0.0
    host_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return float(sum(attrs.astuple(self)))


@attrs.define
class _Live:
    """A request being served. Times in seconds."""

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
    samples: list[Sample] = attrs.field(factory=list)
    _live: dict[int, _Live] = attrs.field(factory=dict)
    _tokens_at_last_sample: int = 0

    @property
    def num_finished(self) -> int:
        """Requests that have ended with their last token."""
        return len(self.latency_s)

    def accepted(self, seq_id: int, arrived_s: float, prompt: int, asked: int) -> None:
        """A request was queued."""
        self._live[seq_id] = _Live(arrived_s)
        self.prompt_tokens += prompt
        self.asked_tokens += asked

    def token(self, seq_id: int, now_s: float) -> None:
        """A sequence has generated a token."""
        live = self._live[seq_id]
        if live.last_token_s is None:
            self.first_token_s.append(now_s - live.arrived_s)
        else:
            self.between_tokens_s.append(now_s - live.last_token_s)
        live.last_token_s = now_s
        self.generated_tokens += 1
        self.last_token_s = now_s

    def ended(self, seq_id: int, now_s: float) -> None:
        """A sequence has generated its last token."""
        live = self._live.pop(seq_id)
        self.latency_s.append(now_s - live.arrived_s)

    def waits_s(self, now_s: float) -> list[float]:
        """The time to the first token of each request; of one without a token, its wait so far."""
        waiting = [
            now_s - each.arrived_s for each in self._live.values() if each.last_token_s is None
        ]
        return [*self.first_token_s, *waiting]

    def tokens_since_last_sample(self) -> int:
        """Tokens generated since the previous call."""
        since = self.generated_tokens - self._tokens_at_last_sample
        self._tokens_at_last_sample = self.generated_tokens
        return since
