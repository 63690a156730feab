"""What a running request reports: one `CompletionDelta` per sample and step."""

from __future__ import annotations

from typing import Literal

import attrs

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: end-of-sequence token, stop token or stop string. ``length``: the token limit."""

SensorHealth = Literal["fresh", "stale", "failed"]
"""How far temperatures can be trusted: read a moment ago, some seconds ago, or not at all."""


@attrs.frozen
class TokenLogprob:
    """A token with its log-probability (natural log) under the model's unmodified distribution."""

    token_id: int
    logprob: float


@attrs.frozen
class PositionLogprobs:
    """Log-probabilities at one generated position: the chosen token, then the most likely ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@attrs.frozen
class CompletionDelta:
    """What one sample of a request gained since its previous delta.

    ``text`` holds only characters that can no longer change; it may be empty while a character
    or a possible stop string is incomplete. ``index`` numbers the samples of a request (``n``).
    The last delta of each sample, and no other, has a ``finish_reason``; ``stop_reason`` is the
    stop string or stop token that matched, None for end-of-sequence and for other reasons.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@attrs.frozen
class ThermalStats:
    """The devices' heat, and what is done about it.

    ``hottest_c`` is the temperature that counts, in degrees C (None: none was read yet),
    ``power_w`` what all devices draw together, in watts. ``sensor`` says how far to trust them;
    ``fault`` is what is wrong with a sensor or with the policy, "" where all is well. ``policy`` is
    the policy's name, "" for none; it is not ``policy_active`` once it failed.
    """

    hottest_c: float | None = None
    power_w: float | None = None
    sensor: SensorHealth = "fresh"
    fault: str = ""
    policy: str = ""
    policy_active: bool = False


@attrs.frozen
class EngineStats:
    """A snapshot of the engine core after a step, for metrics and health checks.

    ``num_running`` counts sequences, of which at most ``max_running`` may run now; ``num_waiting``
    and ``num_swapped`` count requests. Preemptions are ``num_swaps`` and ``num_recomputes``.
    ``prompt_tokens`` counts each prompt once; ``computed_prefill_tokens`` counts the tokens of all
    prefill chunks, so cached tokens are left out and recomputed ones counted again.
    ``thermal`` is what is known of the devices' heat, None where nobody measures it.
    ``cold_forwards`` ran in shapes that were not warmed up, ``compilations`` happened in live
    traffic; both are 0 after a full warm-up that covers what comes.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    max_running: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    highest_block_in_use: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_prefill_tokens: int = 0
    padded_tokens: int = 0
    bucket_misses: int = 0
    buckets: int = 0
    ready_buckets: int = 0
    cold_forwards: int = 0
    compilations: int = 0
    thermal: ThermalStats | None = None

    @property
    def cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0
