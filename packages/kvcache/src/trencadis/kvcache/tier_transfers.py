"""Moves the content of full blocks between the prefix cache and the tiers below it.

A full block is stored once its content is known to be computed, not when it is evicted: content
that is never evicted, as a system prompt, then survives a killed process, too, and an eviction has
to wait for nothing. A prompt whose prefix goes on in the tiers has it loaded into cached blocks,
which its allocation then shares like any others.

Content passes through *staging* blocks: host blocks of the cache that no swap uses. The scheduler's
`CopyPlan` copies between them and the device; two threads, one for each direction, between them and
the tiers. All methods are called by the thread of the scheduler, and none waits for a tier.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

import attrs

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.cache_events import CacheRecorder
from trencadis.kvcache.copy_plan import BlockCopy, Copies
from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.manager import BlockManager
from trencadis.kvcache.tier import KEY_BYTES, BlockTier, Content

logger = logging.getLogger("trencadis.kvcache")

MAX_WAIT_S = 1.0
"""How long a prompt waits for its prefix, unless computing it would take longer."""

MAX_UNSTORED = 1 << 16
"""Blocks that may wait for a staging block; above it the oldest are not stored."""

_ABANDONED_S = 1.0
"""A loaded prefix that no admission has asked for in this time is dropped."""

_NEWEST_WEIGHT = 0.2
_LOAD_S_PER_BYTE = 1e-9
"""Assumed until a load was measured: 1 GB/s, the reading of a common NVMe disk."""

_REFUSAL_DECAY = 0.98
"""What is left of the measured time after each prefix that was not loaded because of it: a disk
that was slow is measured again."""


@attrs.define(eq=False)
class _Load:
    """A part of a prefix that is loaded. ``num_loaded`` of ``keys``, known once ``is_done``."""

    keys: Sequence[BlockKey]
    staging: list[int]
    asked_s: float
    is_done: bool = False
    is_dropped: bool = False
    num_loaded: int = 0


@attrs.define(eq=False)
class _StepCopies:
    """What the copies of a step leave to do once they are known to be carried out."""

    stores: list[tuple[bytes, int]] = attrs.field(factory=list)
    loaded: list[int] = attrs.field(factory=list)


class TierTransfers:
    """The prefix cache of ``blocks`` above ``tiers``, the fastest first.

    ``staging``: the memory of the host blocks from ``first_host_block`` on, two or more.
    ``recorder``: the one that ``blocks`` was made with. ``identity``: whatever decides what the
    bytes of a block mean besides its tokens and extra keys: the model, the dtype, the layout. The
    tiers stay the caller's: `close` does not close them. Raises `InvalidSetting` for ``blocks``
    with several block groups.
    """

    def __init__(
        self,
        blocks: BlockManager,
        tiers: Sequence[BlockTier],
        recorder: CacheRecorder,
        *,
        staging: Sequence[Content],
        first_host_block: int,
        identity: bytes,
    ) -> None:
        if len(blocks.config.windows) > 1:
            raise InvalidSetting(
                f"tiers keep blocks that hold all layers, and the cache has "
                f"{len(blocks.config.windows)} block groups: make it with one",
                "blocks",
            )
        self._blocks = blocks
        self._tiers = tuple(tiers)
        self._recorder = recorder
        self._staging = staging
        self._first_host_block = first_host_block
        self._identity = blake2b(identity, digest_size=KEY_BYTES).digest()
        self._free = list(range(len(staging)))
        self._unstored: dict[bytes, BlockKey] = {}
        self._step = _StepCopies()
        self._in_flight: deque[_StepCopies] = deque()
        self._loads: dict[str, _Load] = {}
        self._deadlines_s: dict[str, float] = {}
        """Until when a request waits for its prefix; in the past for one that loads no more."""
        self._is_late = False
        """Whether a load has not ended in time, and the thread is still at it."""
        self._has_raised = False
        # What the threads have finished with.
        self._stored: deque[int] = deque()
        self._loaded: deque[_Load] = deque()
        block_bytes = sum(piece.nbytes for piece in staging[0])
        self._load_s_per_block = block_bytes * _LOAD_S_PER_BYTE
        self._store_queue: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._load_queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"kv-tier-{name}", daemon=True)
            for name, run in (("store", self._store_next), ("load", self._load_next))
        ]
        for thread in self._threads:
            thread.start()

    # The step of a scheduler.

    @property
    def can_store(self) -> bool:
        """Whether a step without requests would store blocks: otherwise those of a last answer
        would wait for the next request."""
        if not (self._unstored or self._recorder.has_stored):
            return False
        return len(self._free) + len(self._stored) > self._num_reserved

    @property
    def _num_reserved(self) -> int:
        """Staging blocks that are for loads alone."""
        return len(self._staging) // 2

    def begin_step(self, now: float) -> Copies:
        """The copies of device blocks to staging blocks with which a step begins."""
        self._collect(now)
        for key in self._recorder.take().stored:
            self._unstored[key.digest] = key
        copies: list[BlockCopy] = []
        while self._unstored and len(self._free) > self._num_reserved:
            key = self._unstored.pop(next(iter(self._unstored)))
            block = self._blocks.pool.prefix_index.lookup(key)
            name = self._tier_key(key)
            if block is None or not self._is_wanted(name):
                continue
            staging = self._free.pop()
            self._step.stores.append((name, staging))
            copies.append(BlockCopy(block, self._first_host_block + staging))
        while len(self._unstored) > MAX_UNSTORED:
            del self._unstored[next(iter(self._unstored))]
        return tuple(copies)

    def load_prefix(
        self, request_id: str, keys: Sequence[BlockKey], compute_s_per_token: float, now: float
    ) -> tuple[bool, Copies]:
        """Called when a waiting request could start: whether it should, or wait for the tiers.

        With the copies that the step has to carry out in both cases. ``keys``: of the blocks that
        its allocation may share. It does not wait where computing the prefix takes less time than
        loading it, by ``compute_s_per_token`` and what loads took so far, and never longer than
        `MAX_WAIT_S` or the computing.
        """
        if request_id not in self._deadlines_s:
            compute_s = len(keys) * self._blocks.config.block_size * compute_s_per_token
            self._deadlines_s[request_id] = now + max(MAX_WAIT_S, compute_s)
        copies: Copies = ()
        load = self._loads.get(request_id)
        if load is not None:
            load.asked_s = now
            if load.is_done:
                copies = self._cache_loaded(request_id, keys)
                if len(copies) < len(load.keys):
                    self._deadlines_s[request_id] = -math.inf
            elif now < self._deadlines_s[request_id]:
                return False, ()
            else:
                self._is_late = True
                self._drop_load(request_id)
        if now < self._deadlines_s[request_id] and not self._is_late:
            count = self._num_worth_loading(keys, compute_s_per_token)
            if count:
                self._begin_load(request_id, keys, count, now)
                return False, copies
        self._deadlines_s[request_id] = -math.inf
        return True, copies

    def forget(self, request_id: str) -> None:
        """A request has started, or ended."""
        self._drop_load(request_id)
        self._deadlines_s.pop(request_id, None)

    def end_scheduling(self) -> None:
        """The step is scheduled: its copies will be carried out next."""
        self._in_flight.append(self._step)
        self._step = _StepCopies()

    def end_step(self) -> None:
        """The copies of the oldest step in flight are carried out: its content may be stored."""
        step = self._in_flight.popleft()
        for store in step.stores:
            self._store_queue.put(store)
        self._free += step.loaded

    def discard_steps(self) -> None:
        """Whether the copies of the steps in flight were carried out is unknown."""
        for step in (*self._in_flight, self._step):
            self._free += [staging for _, staging in step.stores] + step.loaded
        self._in_flight.clear()
        self._step = _StepCopies()

    def close(self, timeout_s: float = 1.0) -> bool:
        """End the threads, after what is queued to be stored. False where they need longer than
        ``timeout_s``: the tiers are still in use then."""
        self._unstored.clear()  # no step of a scheduler that is idle is for them any more
        for load in self._loads.values():
            load.is_dropped = True
        self._store_queue.put(None)
        self._load_queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self._threads)
        if has_ended:
            self._staging = ()  # the scheduler may keep this object
        return has_ended

    # Loads.

    def _num_worth_loading(self, keys: Sequence[BlockKey], compute_s_per_token: float) -> int:
        """How many blocks after the cached prefix are in the tiers, if loading beats computing."""
        missing = self._blocks.uncached_after_prefix(keys)
        names = [self._tier_key(key) for key in missing]
        count = 0
        while count < len(names):
            # Each tier may have a part of the prefix.
            found = max(self._num_leading(tier, names[count:]) for tier in self._tiers)
            if not found:
                break
            count += found
        if self._load_s_per_block > self._blocks.config.block_size * compute_s_per_token:
            self._load_s_per_block *= _REFUSAL_DECAY if count else 1.0
            return 0
        return count

    def _is_wanted(self, name: bytes) -> bool:
        """Whether any tier would store a block. A tier that raises would not."""
        try:
            return any(tier.wants(name) for tier in self._tiers)
        except Exception:
            self._report_raised()
            return False

    def _num_leading(self, tier: BlockTier, names: Sequence[bytes]) -> int:
        """As `BlockTier.num_leading`; 0 of a tier that raises, which ends no step."""
        try:
            return max(0, min(len(names), tier.num_leading(names)))
        except Exception:
            self._report_raised()
            return 0

    def _report_raised(self) -> None:
        """Log the first error alone: there may be one for each block of each step."""
        if not self._has_raised:
            logger.exception("A tier raised where it may not: serving goes on without its answer")
        self._has_raised = True

    def _begin_load(
        self, request_id: str, keys: Sequence[BlockKey], count: int, now: float
    ) -> None:
        """Begin to load as many blocks as half of the staging blocks; none where all are in use."""
        count = min(count, len(self._free), max(1, len(self._staging) // 2))
        if count:
            missing = self._blocks.uncached_after_prefix(keys)
            staging = [self._free.pop() for _ in range(count)]
            self._loads[request_id] = load = _Load(missing[:count], staging, now)
            self._load_queue.put(load)

    def _cache_loaded(self, request_id: str, keys: Sequence[BlockKey]) -> Copies:
        """Make cached blocks of what was loaded; returns the copies of their content."""
        load = self._loads.pop(request_id)
        first = load.keys[0].digest
        start = next((i for i, key in enumerate(keys) if key.digest == first), len(keys))
        blocks = self._blocks.cache_loaded(keys[: start + load.num_loaded], start)
        self._step.loaded += load.staging[: len(blocks)]
        self._free += load.staging[len(blocks) :]
        return tuple(
            BlockCopy(self._first_host_block + staging, block)
            for staging, block in zip(load.staging, blocks, strict=False)
        )

    def _drop_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.is_done:
            self._free += load.staging
        load.is_dropped = True  # otherwise `_collect` frees them, once the thread has ended with it

    def _collect(self, now: float) -> None:
        """Take what the threads have finished with."""
        while self._stored:
            self._free.append(self._stored.popleft())
        while self._loaded:
            load = self._loaded.popleft()
            self._is_late = False
            load.is_done = True
            if load.is_dropped:
                self._free += load.staging
        for request_id, load in tuple(self._loads.items()):
            if load.is_done and now - load.asked_s > _ABANDONED_S:
                self._drop_load(request_id)

    def _tier_key(self, key: BlockKey) -> bytes:
        return blake2b(key.digest, key=self._identity, digest_size=KEY_BYTES).digest()

    # The threads.

    def _run(self, run: Callable[[], bool]) -> None:
        while run():
            pass

    def _store_next(self) -> bool:
        """Store a block in all tiers. False at the end."""
        item = self._store_queue.get()
        if item is None:
            return False
        key, staging = item
        try:
            for tier in self._tiers:
                if tier.wants(key):
                    tier.store(key, self._staging[staging])
        except Exception:
            logger.exception("A KV block could not be stored in a tier")
        self._stored.append(staging)
        return True

    def _load_next(self) -> bool:
        """Load the blocks of a prefix, up to one that fails. False at the end."""
        load = self._load_queue.get()
        if load is None:
            return False
        began = time.perf_counter()
        try:
            for key, staging in zip(load.keys, load.staging, strict=True):
                if load.is_dropped or not self._load_block(self._tier_key(key), staging):
                    break
                load.num_loaded += 1
        except Exception:
            logger.exception("A KV block could not be loaded from a tier")
        if load.num_loaded:
            measured_s = (time.perf_counter() - began) / load.num_loaded
            self._load_s_per_block += _NEWEST_WEIGHT * (measured_s - self._load_s_per_block)
        self._loaded.append(load)
        return True

    def _load_block(self, key: bytes, staging: int) -> bool:
        """Load a block from the first tier that can; it is stored in those that are faster."""
        for number, tier in enumerate(self._tiers):
            if tier.load(key, self._staging[staging]):
                for faster in self._tiers[:number]:
                    faster.store(key, self._staging[staging])
                return True
        return False
