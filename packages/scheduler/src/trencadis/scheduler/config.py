"""Scheduler settings: a frozen value that is validated when it is constructed."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.validators import integer, number, one_of, setting

QueuePolicy = Literal["fcfs", "priority"]


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queues. The metadata of each field has its ``help`` text.

    Raises `ConfigError`.
    """

    max_num_seqs: int = setting(
        128,
        integer(1),
        "Maximum number of sequences that run at once; a group of n samples or n beams counts n.",
    )
    max_num_batched_tokens: int = setting(
        2048,
        integer(1),
        "Token budget of a step: decodes (one token each) and prefill chunks together.",
    )
    max_prefill_tokens: int | None = setting(
        None,
        integer(1, optional=True),
        "Maximum number of tokens in all prefill chunks of a step together; None: only "
        "the token budget limits them.",
    )
    max_mixed_prefill_tokens: int | None = setting(
        None,
        integer(1, optional=True),
        "The same for a step that also decodes: long chunks compute a prompt faster, and a "
        "decode waits for those of its step; None: the limits of every step alone.",
    )
    max_model_len: int = setting(
        4096, integer(1), "Maximum length of prompt and output together, in tokens."
    )
    max_chunk_tokens: int | None = setting(
        None,
        integer(1, optional=True),
        "Maximum length of a prefill chunk, in tokens, usually the longest prompt "
        "bucket; None: only the token budget limits a chunk.",
    )
    max_waiting: int = setting(
        2048,
        integer(1),
        "Maximum number of requests in the waiting queue. Each of n clients that wait "
        "may have the n-th part of it there, also when others have filled it.",
    )
    max_steps_in_flight: int = setting(
        1,
        integer(1, 2),
        "Number of steps that may be scheduled before the results of the first: with "
        "2, the host prepares a step while the device computes the one before.",
    )
    policy: QueuePolicy = setting(
        "fcfs",
        one_of(get_args(QueuePolicy)),
        "Order of the queues: fcfs (first come, first served) or priority (lower "
        "values of Request.priority first, then first come, first served).",
    )
    lookahead: int = setting(
        8,
        integer(1),
        "Number of groups of a queue that a step tries to start when the first does not fit.",
    )
    max_bypasses: int = setting(
        16,
        integer(0),
        "Number of times that a group may be bypassed: a later group starts while it "
        "is the oldest of its queue, or it is preempted while a later group keeps its blocks. "
        "After that it starts next and keeps its blocks.",
    )
    max_adapters: int | None = setting(
        None,
        integer(1, optional=True),
        "Maximum number of different adapters (Request.adapter) that requests have which were "
        "admitted and have not ended; None: any number.",
    )
    force_evict_hold_s: float = setting(
        5.0,
        number(0),
        "Seconds during which a forced eviction keeps the running limit at the number "
        "of sequences that were left.",
    )

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}, so a full decode batch does not fit in a step: "
                "raise the first or lower the second"
            )


@attrs.define(eq=False)
class SettingsInForce:
    """The settings of one scheduler, which control requests change.

    Every part of the scheduler has this object and reads a setting when it needs it, so a change
    holds everywhere from the same step on. Only `ControlHandler` changes it.
    """

    config: SchedulerConfig
