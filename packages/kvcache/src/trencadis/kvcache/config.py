"""Settings of the cache: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import attrs

from trencadis.kvcache.errors import InvalidSetting

PADDING_BLOCK = 0
"""Never allocated: what padded positions of a batch write to and read from."""


def _at_least(low: int, remedy: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise InvalidSetting(
                f"{attribute.name} must be an integer of at least {low}, got {value!r}: {remedy}"
            )

    return check


def _power_of_two(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise InvalidSetting(
            f"{attribute.name} must be a power of two, got {value!r}: use 16, 32, 64 or 128"
        )


def _fraction(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    if not ok:
        raise InvalidSetting(
            f"{attribute.name} must be at least 0 and below 1, got {value!r}: 0.01 is usual"
        )


def _boolean(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidSetting(f"{attribute.name} must be True or False, got {value!r}")


def _as_tuple(buckets: Iterable[int]) -> tuple[int, ...]:
    return tuple(buckets)


def _ascending(_: object, attribute: attrs.Attribute[Any], value: tuple[Any, ...]) -> None:
    ok = all(isinstance(bucket, int) and bucket > 0 for bucket in value)
    if not ok or any(low >= high for low, high in pairwise(value)):
        raise InvalidSetting(
            f"{attribute.name} must be positive and strictly ascending, got {value!r}: "
            "pass the block counts of the decode grid, each once, in order"
        )


@attrs.frozen(kw_only=True)
class CacheConfig:
    """How many blocks there are and how they may be used.

    ``num_blocks`` counts device blocks, the padding block 0 among them; ``num_host_blocks``
    counts host blocks for swapped sequences (0: no swapping). ``block_size`` is in tokens, a
    power of two. ``watermark`` is the share of the device blocks that new prompts leave free for
    sequences that already run. ``decode_buckets``, for a runtime without a `Defragmenter`, are the
    prefix lengths in blocks for which decode graphs exist: allocation stays inside the bucket in
    use as long as it can (see `BlockPool`). Raises `InvalidSetting`, which names the setting.
    """

    num_blocks: int = attrs.field(
        validator=_at_least(2, "block 0 is padding, so two is the least that can hold a token")
    )
    block_size: int = attrs.field(validator=_power_of_two)
    watermark: float = attrs.field(default=0.01, validator=_fraction)
    num_host_blocks: int = attrs.field(default=0, validator=_at_least(0, "0 turns swapping off"))
    enable_prefix_caching: bool = attrs.field(default=True, validator=_boolean)
    decode_buckets: tuple[int, ...] = attrs.field(
        default=(), converter=_as_tuple, validator=_ascending
    )
