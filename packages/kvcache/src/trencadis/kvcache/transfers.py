"""Pending transfers: the copies between host and device that wait for bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from trencadis.kvcache.bandwidth import BandwidthGovernor
from trencadis.kvcache.block_keys import BlockKey
from trencadis.kvcache.sequences import SequenceState


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


class TransferQueue:
    """The pending transfers of one direction, first in, first out.

    ``governor`` limits how many are admitted; without one all are admitted at once. Both
    directions share one governor, because they share the link. ``transfers`` may be read.
    """

    def __init__(self, governor: BandwidthGovernor | None) -> None:
        self._governor = governor
        self.transfers: deque[Transfer] = deque()

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.transfers)

    def extend(self, transfers: Iterable[Transfer]) -> None:
        """Append transfers."""
        self.transfers.extend(transfers)

    def admit(self, now: float) -> list[Transfer]:
        """Remove and return the transfers that may be carried out at time ``now`` (seconds)."""
        num_pending = len(self.transfers)
        if not num_pending:
            return []
        granted = num_pending if self._governor is None else self._governor.grant(num_pending, now)
        return [self.transfers.popleft() for _ in range(granted)]

    def cancel(self, is_unused: Callable[[Transfer], bool]) -> list[Transfer]:
        """Remove and return the transfers whose content no sequence needs any more."""
        cancelled = [transfer for transfer in self.transfers if is_unused(transfer)]
        if cancelled:
            self.transfers = deque(
                transfer for transfer in self.transfers if not is_unused(transfer)
            )
        return cancelled

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Update the transfers after device blocks have moved from key to value of ``moves``."""
        for transfer in self.transfers:
            transfer.device_block = moves.get(transfer.device_block, transfer.device_block)
