"""Host blocks, and the copies between host and device that are planned but not yet allowed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import attrs

from trencadis.kvcache.bandwidth import BandwidthGovernor
from trencadis.kvcache.errors import OutOfHostBlocks
from trencadis.kvcache.id_set import IdSet
from trencadis.kvcache.prefix import BlockKey, PrefixIndex
from trencadis.kvcache.sequence import SequenceState


@attrs.define(eq=False)
class Transfer:
    """One block's copy between host and device; ``waiting`` are the sequences that need it."""

    device: int
    host: int
    waiting: tuple[SequenceState, ...] = ()
    key: BlockKey | None = None


class SwapSpace:
    """Host blocks with reference counts, found again by content, and two queues of transfers.

    A block that several swapped sequences share is there once. Transfers leave their queue in the
    order in which they entered it, as fast as the governor allows (at once without one).
    """

    def __init__(self, num_blocks: int, governor: BandwidthGovernor | None = None) -> None:
        self.outgoing: deque[Transfer] = deque()
        self.incoming: deque[Transfer] = deque()
        self._governor = governor
        self._free = IdSet(num_blocks)
        self._free.add_range(0, num_blocks)
        self._refs = [0] * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    def ref_count(self, host: int) -> int:
        """How many sequences and transfers need the content of ``host``."""
        return self._refs[host]

    def find(self, key: BlockKey | None) -> int | None:
        """The host block that holds, or will hold, the content of ``key``."""
        return None if key is None else self._index.find(key)

    def take(self, key: BlockKey | None) -> int:
        """The lowest free host block, for the content of ``key``. Raises `OutOfHostBlocks`."""
        host = self._free.lowest()
        if host < 0:
            raise OutOfHostBlocks("no host block is free: raise num_host_blocks")
        self._free.remove(host)
        self._refs[host] = 1
        if key is not None:
            self._index.register(key, host)
        return host

    def share(self, host: int) -> None:
        """One more reference to a used host block."""
        self._refs[host] += 1

    def release(self, host: int) -> None:
        """One reference less; the last one frees the host block."""
        self._refs[host] -= 1
        if self._refs[host] == 0:
            self._index.drop(host)
            self._free.add(host)

    def forget_contents(self) -> None:
        """Share nothing that is on the host, or on its way back, with any other sequence."""
        self._index = PrefixIndex()
        for transfer in self.incoming:
            transfer.key = None

    def admit_outgoing(self, now: float) -> list[Transfer]:
        """The next transfers to the host that may be carried out at time ``now`` (seconds)."""
        return self._admit(self.outgoing, now)

    def admit_incoming(self, now: float) -> list[Transfer]:
        """The next transfers to the device that may be carried out at time ``now`` (seconds)."""
        return self._admit(self.incoming, now)

    def cancel(
        self, queue: deque[Transfer], is_useless: Callable[[Transfer], bool]
    ) -> list[Transfer]:
        """Take out of ``queue`` the transfers that nobody needs any more, and return them."""
        cancelled = [transfer for transfer in queue if is_useless(transfer)]
        if cancelled:
            needed = [transfer for transfer in queue if not is_useless(transfer)]
            queue.clear()
            queue.extend(needed)
        return cancelled

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Device blocks have moved, from key to value: planned transfers follow them."""
        for queue in (self.outgoing, self.incoming):
            for transfer in queue:
                transfer.device = moved.get(transfer.device, transfer.device)

    def _admit(self, queue: deque[Transfer], now: float) -> list[Transfer]:
        if not queue:
            return []
        wanted = len(queue)
        granted = wanted if self._governor is None else self._governor.grant(wanted, now)
        return [queue.popleft() for _ in range(granted)]
