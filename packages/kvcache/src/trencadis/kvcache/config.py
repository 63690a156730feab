"""Settings of the cache and of the defragmenter: frozen values that check themselves when made.

Each field carries its meaning, and its environment variable if it has one, as attrs metadata
(``help`` and ``env``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from trencadis.kvcache import validators
from trencadis.kvcache.errors import InvalidSetting

PADDING_BLOCK = 0
"""The block that padded positions of a batch write to and read from. It is never allocated."""

IGNORED_VARIABLES = ("VLLM_DEFRAG_WITH_GRAPHS",)
"""Variables of the vLLM plugin for Gaudi that are accepted and have no effect here."""

logger = logging.getLogger(__name__)


def _as_tuple(buckets: Iterable[int]) -> tuple[int, ...]:
    return tuple(buckets)


@attrs.frozen(kw_only=True)
class CacheConfig:
    """Number and size of the blocks, and the rules of their allocation.

    Raises `InvalidSetting`, which names the setting.
    """

    num_blocks: int = attrs.field(
        validator=validators.at_least(
            2, "block 0 is the padding block, so only a second block can hold tokens"
        ),
        metadata={"help": "Number of device blocks, the padding block 0 included."},
    )
    block_size: int = attrs.field(
        validator=validators.power_of_two,
        metadata={"help": "Size of a block in tokens, a power of two."},
    )
    watermark: float = attrs.field(
        default=0.01,
        validator=validators.fraction,
        metadata={
            "help": "Share of the device blocks (0 to 1) that stays free for running sequences "
            "when a prompt is admitted."
        },
    )
    num_host_blocks: int = attrs.field(
        default=0,
        validator=validators.at_least(0, "0 turns swapping off"),
        metadata={"help": "Number of host blocks for swapped sequences, 0 for no swapping."},
    )
    enable_prefix_caching: bool = attrs.field(
        default=True,
        validator=validators.boolean,
        metadata={"help": "Whether prompts share the blocks of a common prefix."},
    )
    decode_buckets: tuple[int, ...] = attrs.field(
        default=(),
        converter=_as_tuple,
        validator=validators.ascending,
        metadata={
            "help": "Prefix lengths in blocks that decode graphs exist for; set them only for a "
            "runtime without a defragmenter."
        },
    )


@attrs.frozen(kw_only=True)
class DefragConfig:
    """When to defragment, and which cached content to keep.

    A used block may move to a block with cached content. That content is kept, at the cost of a
    second copy, if its reuse probability reaches ``keep_from``. The probability is 1 for content
    that had a prefix hit before, and `ReuseEstimator.rate` for other content. A copy takes about
    1/300 of the time in which a block is recomputed.
    """

    threshold: int = attrs.field(
        default=32,
        validator=validators.not_negative,
        metadata={
            "help": "Defragment when the highest used block is more than this number of blocks "
            "above the number of used blocks.",
            "env": "VLLM_DEFRAG_THRESHOLD",
        },
    )
    debug: bool = attrs.field(
        default=False,
        validator=validators.boolean,
        metadata={
            "help": "Log every defragmentation. The variable is a comma-separated list; the word "
            "defrag in it sets this.",
            "env": "VLLM_DEBUG",
        },
    )
    keep_from: float = attrs.field(
        default=0.05,
        validator=validators.not_negative,
        metadata={
            "help": "Reuse probability from which cached content is kept: 0 keeps all content, a "
            "value above 1 keeps none."
        },
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DefragConfig:
        """Settings from the environment variables that the metadata of the fields names.

        ``environ`` is the environment of the process where it is None. A variable that is not
        set, or blank, leaves the default. Raises `InvalidSetting`, which names the variable and
        its value.
        """
        if environ is None:
            environ = os.environ
        for name in IGNORED_VARIABLES:
            if environ.get(name, "").strip():
                logger.info("%s has no effect: the device decides whether copies are graphs", name)
        fields = attrs.fields(cls)
        settings: dict[str, Any] = {}
        name = fields.threshold.metadata["env"]
        threshold = environ.get(name, "").strip()
        if threshold:
            if not threshold.isdecimal():
                raise InvalidSetting(
                    f"{name} must be a number of blocks, got {threshold!r}: "
                    f"{fields.threshold.default} is usual"
                )
            settings["threshold"] = int(threshold)
        topics = environ.get(fields.debug.metadata["env"], "")
        if topics.strip():
            settings["debug"] = "defrag" in topics.replace(" ", "").split(",")
        return cls(**settings)
