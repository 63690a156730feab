"""Publishes what the prefix cache gets and loses, as vLLM does, for routers that know the cache.

The format is vLLM's (``vllm/distributed/kv_events.py``, 0.32): ZeroMQ messages of topic, sequence
number (8 bytes, big-endian) and a msgpack array ``[seconds since 1970, events, rank]``. An event is
a map whose ``type`` is the name of its class. A subscriber that has missed messages sends the first
number that it wants to the replay endpoint, and gets those that are kept, then the number -1.
Numbers begin at the time of the start: a subscriber that has seen an earlier core has missed some.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import attrs
import msgspec
import zmq

from trencadis.engine.errors import ConfigError
from trencadis.engine.settings.kv_events_config import KVEventsConfig
from trencadis.kvcache import BlockKey, CacheEvents, decode_extra_keys

logger = logging.getLogger("trencadis.engine")

MEDIUM = "GPU"
"""vLLM's name of the device's memory, whatever the device."""

POLL_SECONDS = 0.05
"""How long a request for a replay may wait."""

STOP_SECONDS = 1.0
"""How long `KVEventPublisher.close` waits for what was published last, as in vLLM."""

REPLAY_SECONDS = 1.0
"""Between two replays: each may be long, and takes time of the core's interpreter."""

MAX_REQUEST_BYTES = 1024
"""Of what a peer sends. ZeroMQ closes the connection of one that sends more."""

END = (-1).to_bytes(8, "big", signed=True)
"""The number after the last message of a replay."""

_HASH_BYTES = 8


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other in a prefix are cached.

    ``extra_keys`` has an entry for each block: what separates it from blocks with the same tokens,
    as a cache salt, which is that of the first block of a prompt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are no longer cached."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def kv_events(
    events: CacheEvents, block_size: int, adapters: Mapping[str, str] | None = None
) -> Iterator[KVEvent]:
    """The events of one message, in the order in which a subscriber applies them.

    ``adapters``: a name of each adapter, by the digest that is among the extra keys of its blocks.
    """
    if events.cleared:
        yield AllBlocksCleared()
    if events.removed:
        yield BlockRemoved([_hash(digest) for digest in events.removed], MEDIUM)
    for chain in _chains(events.stored):
        first = chain[0].parent
        tokens = b"".join(key.tokens for key in chain)
        keys = [decode_extra_keys(key.extra) if key.parent is None else None for key in chain]
        yield BlockStored(
            block_hashes=[_hash(key.digest) for key in chain],
            parent_block_hash=None if first is None else _hash(first.digest),
            token_ids=memoryview(tokens).cast("i").tolist(),
            block_size=block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=_adapter_of(chain[0], adapters) if adapters else None,
            extra_keys=[each or None for each in keys] if any(keys) else None,
        )


def _adapter_of(key: BlockKey, adapters: Mapping[str, str]) -> str | None:
    """A name of the adapter with which a block was computed; see `core.request_table`."""
    extra = decode_extra_keys(key.extra)
    return adapters.get(str(extra[1])) if len(extra) > 1 else None


def _chains(keys: Iterable[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    """Runs of keys of which each is the parent of the next."""
    chain: list[BlockKey] = []
    for key in keys:
        parent = key.parent
        if chain and (parent is None or parent.digest != chain[-1].digest):
            yield chain
            chain = []
        chain.append(key)
    if chain:
        yield chain


def _hash(digest: bytes) -> int:
    """The 64 bits by which subscribers know content. They trust it, as they trust vLLM's."""
    return int.from_bytes(digest[-_HASH_BYTES:], "big")


@attrs.frozen
class _Batch:
    at_s: float
    events: CacheEvents
    block_size: int
    adapters: Mapping[str, str]


class KVEventPublisher:
    """Publishes events from a thread of its own: the core waits for no subscriber.

    Raises `ConfigError` for an endpoint that cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.Queue[_Batch | None] = queue.Queue()  # bounded by `has_space`
        most_kept = 0 if config.replay_endpoint is None else config.buffer_steps
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=most_kept)
        self._next_replay_s = 0.0
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._published = self._socket(zmq.PUB, config.endpoint, config.hwm)
            self._replayed = None
            if config.replay_endpoint is not None:
                # A whole replay is sent at once: its reader may be slower than this thread.
                most = config.buffer_steps + 2
                self._replayed = self._socket(zmq.ROUTER, config.replay_endpoint, most)
        except BaseException as error:
            self._context.destroy(linger=0)
            if not isinstance(error, zmq.ZMQError):
                raise
            raise ConfigError(
                f"kv_events_config: {config.endpoint} or {config.replay_endpoint} cannot be used "
                f"({error}): name free ports of this host, as tcp://127.0.0.1:5557",
                "kv_events_config",
            ) from error
        logger.info("KV events with the token ids of prompts are published on %s", config.endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def has_space(self) -> bool:
        """Whether `publish` takes more. Otherwise what is to be told stays where it comes from."""
        return self._queue.qsize() < self._config.max_queue_size

    def publish(
        self, events: CacheEvents, block_size: int, adapters: Mapping[str, str] | None = None
    ) -> None:
        """Queue events, for which there must be space. ``block_size`` is in tokens.

        ``adapters``: see `kv_events`.
        """
        self._queue.put(_Batch(time.time(), events, block_size, adapters or {}))

    def close(self) -> None:
        """Publish what is queued, if that is possible within seconds, and end the thread."""
        self._queue.put(None)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():  # it uses the sockets
            logger.warning("KV events are not told: the queue is full")
        else:
            self._context.destroy(linger=int(1000 * STOP_SECONDS))

    def _socket(self, kind: int, endpoint: str, most_messages: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(most_messages)
        socket.maxmsgsize = MAX_REQUEST_BYTES
        socket.ipv6 = "[" in endpoint
        if kind == zmq.ROUTER or _is_bound(endpoint):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def _run(self) -> None:
        numbers = count(time.time_ns())
        is_open = True
        while is_open:
            try:
                batch = self._queue.get(timeout=POLL_SECONDS)
                is_open = batch is not None
            except queue.Empty:
                batch = None
            try:
                if batch is not None:
                    self._publish(batch, next(numbers))
                self._replay_if_asked()
            except Exception:
                logger.exception("KV events could not be published")

    def _publish(self, batch: _Batch, number: int) -> None:
        """Send the message of a batch, and keep it for replays."""
        events = list(kv_events(batch.events, batch.block_size, batch.adapters))
        content = self._encoder.encode([batch.at_s, events, 0])
        named = number.to_bytes(8, "big")
        self._published.send_multipart((self._topic, named, content))
        self._kept.append((named, content))

    def _replay_if_asked(self) -> None:
        """Answer one request for a replay, unless the last one was a moment ago."""
        if self._replayed is None or time.monotonic() < self._next_replay_s:
            return
        if not self._replayed.poll(0):
            return
        self._next_replay_s = time.monotonic() + REPLAY_SECONDS
        subscriber, *_, first = self._replayed.recv_multipart()
        if len(first) != len(END):
            logger.warning("A request for KV events has %d bytes, not 8: ignored", len(first))
            return
        for number, content in self._kept:
            if number >= first:  # both are big-endian
                self._replayed.send_multipart((subscriber, b"", self._topic, number, content))
        self._replayed.send_multipart((subscriber, b"", b"", END, b""))


def _is_bound(endpoint: str) -> bool:
    """Whether an address is of this host. As vLLM's rule, which has no loopback address."""
    own = ("*", "::", "//127.", "//localhost", "//0.0.0.0")
    return endpoint.startswith("ipc:") or any(part in endpoint for part in own)
