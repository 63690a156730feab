"""Settings of the cache and of the defragmenter: frozen values that check themselves when made.

Each field carries its meaning, and its environment variable if it has one, as attrs metadata
(``help`` and ``env``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import attrs

from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.rounding import ceil_div, most_window_blocks
from trencadis.kvcache.validators import (
    Validator,
    boolean,
    instance_of,
    integer,
    is_finite,
    is_integer,
    number,
    plain_number,
)

PADDING_BLOCK = 0
"""The block that padded positions of a batch write to and read from. It is never allocated."""

MAX_NUM_BLOCKS = 1 << 24
"""Most blocks of a pool: the block manager needs 24 bytes of host memory for each of them."""

MAX_BLOCK_SIZE = 1 << 24
"""Most tokens of a block. Slots are counted in 32-bit integers."""

IGNORED_VARIABLES = ("VLLM_DEFRAG_WITH_GRAPHS",)
"""Variables of the vLLM plugin for Gaudi that are accepted and have no effect here."""

MAX_DIGITS = 18
"""Most digits of a number in an environment variable."""

logger = logging.getLogger(__name__)


def _setting(default: Any, validator: Validator, help: str, **env: str) -> Any:
    """A field with its meaning, and its environment variable, as metadata."""
    return attrs.field(default=default, validator=validator, metadata={"help": help, **env})


def as_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    """``numbers`` as a tuple. What gives no tuple is left for the validator."""
    try:
        return tuple(map(plain_number, numbers))
    except (TypeError, OverflowError):
        return numbers  # type: ignore[return-value]


def as_windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """``windows`` as a tuple. What gives no tuple is left for the validator."""
    try:
        return tuple(None if window is None else plain_number(window) for window in windows)
    except (TypeError, OverflowError):
        return windows  # type: ignore[return-value]


def _is_power_of_two(value: object) -> bool:
    return is_integer(value) and value > 0 and not value & (value - 1)


def _is_ascending(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and all(is_integer(number) and number > 0 for number in value)
        and all(low < high for low, high in pairwise(value))
    )


NUM_BLOCKS = integer(
    2,
    MAX_NUM_BLOCKS,
    remedy="block 0 is the padding block, so only a second block can hold tokens; for a larger "
    "cache use larger blocks",
)
NUM_HOST_BLOCKS = integer(
    0, MAX_NUM_BLOCKS, remedy="0 turns swapping off; for more host memory use larger blocks"
)
MAX_GROUPS = 256
"""Most block groups of a cache."""

WINDOWS = Validator(
    f"1 to {MAX_GROUPS} positive numbers of tokens or None, in descending order after the Nones",
    lambda windows: (
        isinstance(windows, tuple)
        and 0 < len(windows) <= MAX_GROUPS
        and all(window is None or (is_integer(window) and window > 0) for window in windows)
        and all(
            above is None or (below is not None and below <= above)
            for above, below in pairwise(windows)
        )
    ),
    remedy="pass the window of each block group, as group_layers gives them",
)
TOKENS_AHEAD = Validator(
    "a positive number of tokens or None",
    lambda tokens: tokens is None or (is_integer(tokens) and tokens > 0),
    remedy="pass the tokens that steps without results compute of a sequence at most",
)
DECODE_BUCKETS = Validator(
    "positive and strictly ascending",
    _is_ascending,
    remedy="pass each block count of the decode grid once, in ascending order",
)


@attrs.frozen(kw_only=True)
class CacheConfig:
    """Number and size of the blocks, and the rules of their allocation.

    Raises `InvalidSetting`, which names the setting.
    """

    num_blocks: int = attrs.field(
        validator=NUM_BLOCKS,
        metadata={"help": "Number of device blocks, the padding block 0 included."},
    )
    block_size: int = attrs.field(
        validator=Validator(
            "a power of two", _is_power_of_two, 1, MAX_BLOCK_SIZE, remedy="use 16, 32, 64 or 128"
        ),
        metadata={"help": "Size of a block in tokens, a power of two."},
    )
    watermark: float = _setting(
        0.01,
        Validator(
            "a finite number of at least 0 and below 1",
            lambda share: is_finite(share) and 0 <= share < 1,
            remedy="0.01 is usual",
        ),
        "Share of the device blocks (0 to 1) that stays free for running sequences "
        "when a prompt is admitted.",
    )
    num_host_blocks: int = _setting(
        0, NUM_HOST_BLOCKS, "Number of host blocks for swapped sequences, 0 for no swapping."
    )
    enable_prefix_caching: bool = _setting(
        True, boolean(), "Whether prompts share the blocks of a common prefix."
    )
    windows: tuple[int | None, ...] = attrs.field(
        default=(None,),
        converter=as_windows,
        validator=WINDOWS,
        metadata={
            "help": "Of each block group, the last tokens, with itself, that a token attends to in "
            "any of its layers, None if one sees all; blocks that no later token sees are given "
            "back. A block holds the layers of one group, and a sequence has a table for each."
        },
    )
    tokens_ahead: int | None = attrs.field(
        default=None,
        validator=TOKENS_AHEAD,
        metadata={
            "help": "Tokens after the computed ones of a sequence that have blocks in groups with "
            "a window: those that steps without results compute at most. `BlockManager.append` "
            "adds blocks for others. None: all tokens have blocks."
        },
    )
    record_events: bool = _setting(
        False,
        boolean(),
        "Whether `BlockManager.take_events` tells what the prefix cache gets and loses.",
    )
    decode_buckets: tuple[int, ...] = attrs.field(
        default=(),
        converter=as_tuple,
        validator=DECODE_BUCKETS,
        metadata={
            "help": "Prefix lengths in blocks that decode graphs exist for; set them only for a "
            "runtime without a defragmenter."
        },
    )

    @property
    def most_window_blocks(self) -> tuple[int | None, ...]:
        """Of each group, how many blocks a sequence has at most; None: those of all its tokens."""
        ahead = self.tokens_ahead
        return tuple(
            None
            if window is None or ahead is None
            else most_window_blocks(window, ahead, self.block_size)
            for window in self.windows
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks, in all groups, that a sequence has until it has so many tokens."""
        of_all = ceil_div(num_tokens, self.block_size)
        most = self.most_window_blocks
        return sum(of_all if each is None else min(of_all, each) for each in most)


@attrs.frozen(kw_only=True)
class DefragConfig:
    """Whether and when to defragment, and which cached content to keep.

    A used block may move to a block with cached content. That content is kept, at the cost of a
    second copy, if its reuse probability reaches ``keep_from``. The probability is 1 for content
    that had a prefix hit before, and `ReuseEstimator.rate` for other content. A copy takes about
    1/300 of the time in which a block is recomputed.
    """

    enabled: bool = _setting(True, boolean(), "Defragment.", env="VLLM_DEFRAG")
    warm_up: bool = _setting(
        True,
        boolean(),
        "Run each plan size once before serving; a host reads it.",
        env="VLLM_DEFRAG_WARMUP",
    )
    threshold: int = _setting(
        32,
        number(0),
        "Defragment when the highest used block is more than this number of blocks "
        "above the number of used blocks.",
        env="VLLM_DEFRAG_THRESHOLD",
    )
    debug: bool = _setting(
        False,
        boolean(),
        "Log every defragmentation. The variable is a comma-separated list; the word "
        "defrag in it sets this.",
        env="VLLM_DEBUG",
    )
    keep_from: float = _setting(
        0.05,
        number(0),
        "Reuse probability from which cached content is kept: 0 keeps all content, a "
        "value above 1 keeps none.",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DefragConfig:
        """Settings from the environment variables that the metadata of the fields names.

        ``environ`` is the environment of the process by default. A variable that is not set, or
        blank, leaves the default. Raises `InvalidSetting`, which names the variable and its value.
        """
        environ = os.environ if environ is None else environ
        instance_of(Mapping).checked("environ", environ)
        for name in IGNORED_VARIABLES:
            if environ.get(name, "").strip():
                logger.warning(
                    "%s has no effect: the device decides whether copies are graphs", name
                )
        fields = attrs.fields(cls)
        settings: dict[str, Any] = {}
        for field in (fields.enabled, fields.warm_up):
            text = environ.get(field.metadata["env"], "").strip()
            if text:
                settings[field.name] = _parse_flag(field.metadata["env"], text)
        name = fields.threshold.metadata["env"]
        threshold = environ.get(name, "").strip()
        if threshold:
            if not threshold.isdecimal() or len(threshold) > MAX_DIGITS:
                raise InvalidSetting(
                    f"{name} must be a number of blocks, got {threshold!r}: "
                    f"{fields.threshold.default} is usual"
                )
            settings["threshold"] = int(threshold)
        topics = environ.get(fields.debug.metadata["env"], "")
        if topics.strip():
            settings["debug"] = "defrag" in topics.replace(" ", "").split(",")
        return cls(**settings)


def _parse_flag(name: str, text: str) -> bool:
    """A variable that is true or false, in the spellings of the vLLM plugin for Gaudi."""
    if text.lower() in ("1", "true", "yes", "on", "y", "t"):
        return True
    if text.lower() in ("0", "false", "no", "off", "n", "f"):
        return False
    raise InvalidSetting(f"{name} must be true or false, got {text[:40]!r}")
