"""Scheduler settings: one frozen value, checked when it is made."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError


def _at_least_one(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{attribute.name} must be a positive integer, got {value!r}")


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of the queues.

    ``max_num_seqs``: sequences running at once. ``max_num_batched_tokens``: tokens computed in
    one step, decodes (one token each) and prompt chunks together; a longer prompt is computed in
    chunks over several steps, none longer than ``max_chunk_tokens`` where that is given (the
    longest prompt shape that is prepared). ``max_model_len``: longest prompt plus output, tokens.
    ``max_waiting``: requests that may wait to start. Raises `ConfigError`.
    """

    max_num_seqs: int = attrs.field(default=128, validator=_at_least_one)
    max_num_batched_tokens: int = attrs.field(default=2048, validator=_at_least_one)
    max_model_len: int = attrs.field(default=4096, validator=_at_least_one)
    max_chunk_tokens: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_at_least_one)
    )
    max_waiting: int = attrs.field(default=2048, validator=_at_least_one)

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}, so a full decode batch would not fit in a step: "
                "raise the first or lower the second"
            )
