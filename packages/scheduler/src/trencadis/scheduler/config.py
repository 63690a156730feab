"""Scheduler settings: one frozen value, checked when it is made."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trencadis.scheduler.errors import ConfigError

QueuePolicy = Literal["fcfs", "priority"]


def _at_least(low: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            kind = "a positive integer" if low == 1 else "an integer of 0 or more"
            raise ConfigError(f"{attribute.name} must be {kind}, got {value!r}")

    return check


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of the queues.

    ``max_num_seqs``: sequences running at once; a group of n samples or beams counts n.
    ``max_num_batched_tokens``: tokens computed in one step, decodes (one token each) and prompt
    chunks together; a longer prompt is computed in chunks over several steps, none longer than
    ``max_chunk_tokens`` where that is given (the longest prompt shape that is prepared).
    ``max_model_len``: longest prompt plus output, tokens. ``max_waiting``: requests that may wait
    to start.

    ``policy``: ``fcfs``, or ``priority`` (lower values of `Request.priority` first, then first
    come). ``lookahead``: how many groups of a queue are tried in a step when the first does not
    fit. ``max_passed_over``: how many later groups may start before the oldest of a queue; then
    nothing passes it any more. ``evict_hold_s``: for how many seconds a forced eviction keeps the
    batch at the size that it left.

    Raises `ConfigError`.
    """

    max_num_seqs: int = attrs.field(default=128, validator=_at_least(1))
    max_num_batched_tokens: int = attrs.field(default=2048, validator=_at_least(1))
    max_model_len: int = attrs.field(default=4096, validator=_at_least(1))
    max_chunk_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least(1))
    )
    max_waiting: int = attrs.field(default=2048, validator=_at_least(1))
    policy: QueuePolicy = attrs.field(default="fcfs")
    lookahead: int = attrs.field(default=8, validator=_at_least(1))
    max_passed_over: int = attrs.field(default=16, validator=_at_least(0))
    evict_hold_s: float = attrs.field(default=5.0)

    @policy.validator
    def _known_policy(self, _: object, value: object) -> None:
        if value not in {"fcfs", "priority"}:
            raise ConfigError(f"policy must be 'fcfs' or 'priority', got {value!r}")

    @evict_hold_s.validator
    def _seconds(self, _: object, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ConfigError(f"evict_hold_s must be 0 seconds or more, got {value!r}")

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}, so a full decode batch would not fit in a step: "
                "raise the first or lower the second"
            )
