"""Pending transfers between host and device, and the bandwidth limit that admits them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import attrs

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.sequences import SequenceState
from trencadis.kvcache.validators import integer, number

DEFAULT_BYTES_PER_S = 20e9
"""Above 20 GB/s, copies between host and device dominate the step time (seed 003)."""

TIME = number(remedy="pass seconds")
_NUM_BLOCKS = integer(0, remedy="pass a number of blocks")


@attrs.define(eq=False)
class BandwidthGovernor:
    """A token bucket: grants at most ``bytes_per_s * (t + window_s)`` bytes in any ``t`` seconds.

    ``bytes_per_block`` is the size of a block in all layers, keys and values together.
    ``window_s`` limits the burst: the seconds of unused bandwidth that can be saved. Raises
    `InvalidSetting` if the burst is smaller than one block, or a setting is not finite: without a
    governor, swapping has no limit.
    """

    bytes_per_block: int = attrs.field(
        validator=integer(1, remedy="pass the bytes of a block in all layers")
    )
    bytes_per_s: float = attrs.field(
        default=DEFAULT_BYTES_PER_S, validator=number(0, exclusive_low=True)
    )
    window_s: float = attrs.field(default=0.1, validator=number(0, exclusive_low=True))
    _saved_bytes: float = attrs.field(init=False)
    _updated_s: float | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._saved_bytes = self._burst_bytes
        if not self.bytes_per_block <= self._burst_bytes < math.inf:
            raise InvalidSetting(
                f"window_s {self.window_s} at {self.bytes_per_s:.3g} bytes_per_s is "
                f"{self._burst_bytes:.3g} bytes, less than one block of {self.bytes_per_block} or "
                "not finite: raise or lower window_s or bytes_per_s"
            )

    @property
    def _burst_bytes(self) -> float:
        return float(self.bytes_per_s) * float(self.window_s)

    def grant(self, num_blocks: int, now: float) -> int:
        """Of ``num_blocks`` blocks, how many may be copied at time ``now`` (seconds).

        The granted bytes are spent. Each second of ``now`` is saved once: a clock that steps back
        saves nothing until it is past the latest time of an earlier call. Raises `InvalidSetting`
        for a negative number of blocks or a time that is not finite.
        """
        num_blocks = _NUM_BLOCKS.checked("num_blocks", num_blocks)
        now = TIME.checked("now", now)
        if self._updated_s is not None and now > self._updated_s:
            earned = (now - self._updated_s) * self.bytes_per_s
            self._saved_bytes = min(self._burst_bytes, self._saved_bytes + earned)
        self._updated_s = now if self._updated_s is None else max(self._updated_s, now)
        granted = min(num_blocks, int(self._saved_bytes // self.bytes_per_block))
        self._saved_bytes -= granted * self.bytes_per_block
        return granted


@attrs.define(eq=False)
class Transfer:
    """The copy of one block between host and device.

    For a swap in, ``sequences`` are the sequences that need the block, and ``key`` is the key of
    its content, if it may be shared.
    """

    device_block: int
    host_block: int
    sequences: tuple[SequenceState, ...] = ()
    key: BlockKey | None = None


class TransferQueue(deque[Transfer]):
    """The pending transfers of one direction, first in, first out.

    ``governor`` limits how many are admitted; without one all are admitted at once. Both
    directions share one governor, because they share the link.
    """

    def __init__(self, governor: BandwidthGovernor | None) -> None:
        super().__init__()
        self._governor = governor

    def admit(self, now: float) -> list[Transfer]:
        """Remove and return the transfers that may be carried out at time ``now`` (seconds)."""
        if not self:
            return []
        granted = len(self)
        if self._governor is not None:
            granted = self._governor.grant(granted, now)
        return [self.popleft() for _ in range(granted)]

    def cancel(self, is_unused: Callable[[Transfer], bool]) -> list[Transfer]:
        """Remove and return the transfers whose content no sequence needs any more."""
        cancelled = [transfer for transfer in self if is_unused(transfer)]
        if cancelled:
            kept = [transfer for transfer in self if not is_unused(transfer)]
            self.clear()
            self.extend(kept)
        return cancelled

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Update the transfers after device blocks have moved from key to value of ``moves``."""
        for transfer in self:
            transfer.device_block = moves.get(transfer.device_block, transfer.device_block)
