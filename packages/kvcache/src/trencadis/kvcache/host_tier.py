"""A tier in host memory. It ends with its process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from trencadis.kvcache.lru_bytes import LruBytes
from trencadis.kvcache.tier import Content, TierCounters


class HostTier:
    """A `BlockTier` of at most ``limit_bytes`` of host memory, least recently used blocks first
    dropped."""

    name = "host"

    def __init__(self, limit_bytes: int) -> None:
        self.counters = TierCounters()
        self._lock = threading.Lock()
        self._lru = LruBytes(limit_bytes)
        self._blocks: dict[bytes, bytes] = {}

    def wants(self, key: bytes) -> bool:
        with self._lock:
            return key not in self._lru

    def store(self, key: bytes, content: Content) -> None:
        stored = b"".join(content)
        with self._lock:
            dropped = self._lru.add(key, len(stored))
            if dropped is None:
                return
            for oldest in dropped:
                del self._blocks[oldest]
            self._blocks[key] = stored
            self.counters.num_stored_blocks += 1
            self.counters.num_stored_bytes += len(stored)
            self.counters.num_bytes = self._lru.num_bytes

    def num_leading(self, keys: Iterable[bytes]) -> int:
        with self._lock:
            return self._lru.num_leading(keys)

    def load(self, key: bytes, content: Content) -> bool:
        with self._lock:
            stored = self._blocks.get(key)
            if stored is None or len(stored) != sum(piece.nbytes for piece in content):
                return False
            self._lru.touch(key)
            self.counters.num_loaded_blocks += 1
            self.counters.num_loaded_bytes += len(stored)
        start = 0
        for piece in content:
            piece[:] = stored[start : start + piece.nbytes]
            start += piece.nbytes
        return True

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._lru = LruBytes(self._lru.limit_bytes)
            self.counters.num_bytes = 0
