"""KV events: a subscriber knows what the prefix cache has, whatever it missed, in vLLM's format."""

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from adapters import save_adapter

from trencadis.engine import (
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    ModelError,
    SamplingParams,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.kv_events import END, KVEventPublisher, kv_events
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.settings.kv_events_config import KVEventsConfig
from trencadis.kvcache import BlockKey, BlockManager, CacheConfig, CacheEvents
from trencadis.kvcache.prefix_cache import encode_extra_keys

WAIT_S = 60.0
BLOCK = 8


class Subscriber:
    """A router's index of the cache, from the messages alone: token ids and salt of each hash."""

    def __init__(self, context: zmq.Context[Any], settings: dict[str, Any]) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(settings.get("topic", "").encode())
        self.socket.connect(settings["endpoint"])
        self.replay = context.socket(zmq.DEALER)  # a request has many answers
        self.replay.connect(settings["replay_endpoint"])
        self.index: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.next = 0
        """The number of the next message, once there was one; below those of a core."""
        self.topics: set[bytes] = set()
        self.adapters: dict[int, str | None] = {}
        """The adapter of each block that was told."""

    def receive(self, *, apply: bool = True) -> int:
        """Messages that are there now; with ``apply``, all since the last one that was applied."""
        received = 0
        while self.socket.poll(50):
            topic, number, content = self.socket.recv_multipart()
            self.topics.add(topic)
            received += 1
            if not apply:
                continue
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            self._apply(number, content)
        return received

    def catch_up(self) -> None:
        """Ask for what was missed."""
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            *_, number, content = self.replay.recv_multipart()
            if number == END:
                return
            self._apply(number, content)

    def _apply(self, number: bytes, content: bytes) -> None:
        if int.from_bytes(number, "big") < self.next:
            return  # known by the replay
        self.next = int.from_bytes(number, "big") + 1
        at_s, events, rank = msgspec.msgpack.decode(content)
        assert abs(at_s - time.time()) < 600
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.index.clear()
            elif event["type"] == "BlockRemoved":
                for digest in event["block_hashes"]:
                    del self.index[digest]
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        assert event["type"] == "BlockStored"
        assert (event["medium"], event["lora_id"]) == ("GPU", None)
        parent, size = event["parent_block_hash"], event["block_size"]
        extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for place, digest in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
            assert digest not in self.index
            self.index[digest] = parent, tokens, extra[place]
            self.adapters[digest] = event["lora_name"]
            parent = digest


def cached(blocks: BlockManager) -> dict[int, tuple[int | None, tuple[int, ...], bytes]]:
    """What the prefix cache has, by the hashes that are told."""

    def told(digest: bytes) -> int:
        return int.from_bytes(digest[-8:], "big")

    found = {}
    for block in range(blocks.config.num_blocks):
        key = blocks.pool.prefix_index.key_of(block)
        if key is not None:
            tokens = tuple(memoryview(key.tokens).cast("i"))
            parent = None if key.parent is None else told(key.parent.digest)
            found[told(key.digest)] = parent, tokens, key.extra
    return found


def is_known(subscriber: Subscriber, core: EngineCore) -> bool:
    held = {digest: entry[:2] for digest, entry in cached(core.blocks).items()}
    return {digest: entry[:2] for digest, entry in subscriber.index.items()} == held


def wait_until_known(subscriber: Subscriber, core: EngineCore) -> None:
    began = time.monotonic()
    deadline, late = began + WAIT_S, began + WAIT_S / 6
    while True:
        subscriber.receive()
        if is_known(subscriber, core):
            return
        if time.monotonic() > late:  # on a busy machine it may join after the first message
            subscriber.catch_up()
            late = deadline
        assert time.monotonic() < deadline, (subscriber.index, cached(core.blocks))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod@model",
    }


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> list[Path]:
    place = tmp_path_factory.mktemp("events")
    return [make_tiny_model(place / "one"), make_tiny_model(place / "two")]


def config_of(model: Path, settings: dict[str, Any], **changes: Any) -> EngineConfig:
    given = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "block_size": BLOCK}
    given |= {"num_blocks": 24, "device": "cpu", "kv_events_config": settings}
    return EngineConfig(model=str(model), **given | changes)


def serve(core: EngineCore, first: int, salt: str | None = None, lora: str | None = None) -> None:
    prompt = tuple(range(first, first + 20))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    core.add(str(first), GenerateRequest(prompt, params, cache_salt=salt, lora=lora))
    while core.has_work:
        core.step()


def test_a_subscriber_knows_the_cache_through_evictions_sleep_and_another_model(
    context: zmq.Context[Any], settings: dict[str, Any], models: list[Path]
) -> None:
    core = EngineCore(config_of(models[0], settings))
    try:
        subscriber = Subscriber(context, settings)
        serve(core, 1)
        wait_until_known(subscriber, core)
        assert len(subscriber.index) == 3
        for first in range(2, 30):  # more than the cache holds
            serve(core, first, salt="tenant" if first % 2 else None)
        wait_until_known(subscriber, core)
        assert len(subscriber.index) > 10
        firsts = [entry for entry in subscriber.index.values() if entry[0] is None]
        assert {repr(extra) for _, _, extra in firsts} == {"None", "['tenant']"}
        assert all(extra is None for parent, _, extra in subscriber.index.values() if parent)
        switcher = ModelSwitcher(core)
        switcher.sleep(1)
        wait_until_known(subscriber, core)
        assert not subscriber.index
        switcher.wake_up()
        serve(core, 40)
        wait_until_known(subscriber, core)
        assert len(subscriber.index) == 3
        switcher.reconfigure_engine(config_payload(config_of(models[1], settings)), 1 << 30)
        wait_until_known(subscriber, core)
        assert not subscriber.index
        serve(core, 40)
        wait_until_known(subscriber, core)
        assert subscriber.topics == {b"kv@pod@model"}
    finally:
        core.close()


def test_a_subscriber_that_missed_messages_asks_for_them(
    context: zmq.Context[Any], settings: dict[str, Any], models: list[Path]
) -> None:
    core = EngineCore(config_of(models[0], settings))
    try:
        subscriber = Subscriber(context, settings)
        serve(core, 1)
        deadline = time.monotonic() + WAIT_S
        while not subscriber.receive(apply=False):  # these are lost
            assert time.monotonic() < deadline
        for first in range(2, 20):
            serve(core, first)
        wait_until_known(subscriber, core)
        late = Subscriber(context, settings)  # it has seen nothing
        late.index = {1: (None, (), None)}  # but another core on this address, before
        late.catch_up()
        deadline = time.monotonic() + WAIT_S
        while not is_known(late, core):
            late.catch_up()
            assert time.monotonic() < deadline
    finally:
        core.close()


def test_a_failed_step_tells_that_nothing_is_cached(
    context: zmq.Context[Any],
    settings: dict[str, Any],
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = EngineCore(config_of(models[0], settings))
    try:
        subscriber = Subscriber(context, settings)
        serve(core, 1)
        wait_until_known(subscriber, core)
        assert subscriber.index
        with monkeypatch.context() as patch:
            patch.setattr(core.scheduler, "update", lambda *_, **__: 1 / 0)
            serve(core, 30)
        wait_until_known(subscriber, core)
        assert not subscriber.index
    finally:
        core.close()


def test_without_the_setting_nothing_is_recorded_or_published(models: list[Path]) -> None:
    for given in ({}, {"endpoint": "tcp://127.0.0.1:1"}, {"enable_kv_cache_events": False}):
        core = EngineCore(config_of(models[0], given))
        serve(core, 1)
        assert not core.blocks.config.record_events
        core.close()
    null = {"enable_kv_cache_events": True, "publisher": "null"}
    core = EngineCore(config_of(models[0], null))
    assert not core.blocks.config.record_events
    core.close()


def test_a_full_queue_stops_no_step_and_loses_nothing(
    context: zmq.Context[Any],
    settings: dict[str, Any],
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    def slow(*given: Any) -> list[Any]:
        goes_on.wait(WAIT_S)
        return list(kv_events(*given))

    monkeypatch.setattr("trencadis.engine.core.kv_events.kv_events", slow)
    core = EngineCore(config_of(models[0], {**settings, "max_queue_size": 1}))
    try:
        subscriber = Subscriber(context, settings)
        for first in range(2, 20):
            serve(core, first)
        assert not core.take_failures()
        goes_on.set()
        deadline = time.monotonic() + WAIT_S
        while not core._kv_events or not core._kv_events.has_space:
            assert time.monotonic() < deadline
        serve(core, 20)
        while not is_known(subscriber, core):  # the queue of one may be full after the last step
            assert time.monotonic() < deadline
            core.step()
            subscriber.receive()
    finally:
        goes_on.set()
        core.close()


def test_a_subscriber_that_stays_learns_of_a_new_core(
    context: zmq.Context[Any], settings: dict[str, Any], models: list[Path]
) -> None:
    """Whose first messages are lost: it connects again only a while later."""
    core = EngineCore(config_of(models[0], settings))
    subscriber = Subscriber(context, settings)
    for first in range(1, 9):
        serve(core, first)
    wait_until_known(subscriber, core)
    core.close()
    core = EngineCore(config_of(models[0], settings))
    try:
        deadline = time.monotonic() + WAIT_S
        first = 30
        while not is_known(subscriber, core):
            assert time.monotonic() < deadline
            serve(core, first)
            first += 1
            subscriber.receive()
        assert subscriber.index
    finally:
        core.close()


def test_an_engine_that_is_dropped_gives_its_address_back(
    settings: dict[str, Any], models: list[Path]
) -> None:
    port = {**settings, "endpoint": "tcp://127.0.0.1:15557", "replay_endpoint": None}
    core = EngineCore(config_of(models[0], port))
    serve(core, 1)
    del core
    gc.collect()
    with pytest.raises(ModelError):
        EngineCore(config_of(models[0].parent, port))
    gc.collect()
    EngineCore(config_of(models[0], port)).close()


def test_a_request_of_megabytes_is_not_read(
    context: zmq.Context[Any], settings: dict[str, Any]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig.of(settings))
    try:
        hostile = context.socket(zmq.DEALER)
        events = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        hostile.connect(settings["replay_endpoint"])
        hostile.send_multipart((b"", b"x" * (4 << 20)))
        assert events.poll(1000 * WAIT_S), "closed"
        hostile.disable_monitor()
    finally:
        publisher.close()


OF_VLLM = bytes.fromhex(
    "93cb3ff80000000000009481a474797065b0416c6c426c6f636b73436c656172656483a474797065ac426c6f63"
    "6b52656d6f766564ac626c6f636b5f6861736865739207cf8000000000000005a66d656469756da347505589a4"
    "74797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cf8000000000000005b170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f69647394ce00011170020304aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739292a4"
    "73616c7401c088a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e"
    "745f626c6f636b5f6861736801a9746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f69"
    "64c0a66d656469756da3475055a96c6f72615f6e616d65c000"
)
"""What ``KVEventBatch`` of vLLM 0.32 (``vllm/distributed/kv_events.py``) is encoded as by msgspec:
at 1.5 s, of rank 0, all cleared; blocks 7 and 2**63 + 5 removed; blocks 1 and 2**63 + 5 stored, of
two tokens each, 70000, 2, 3, 4, with extra keys ("salt", 1); block 9 after block 1, tokens 5, 6."""

OF_VLLM_WITH_ADAPTER = bytes.fromhex(
    "93cb3ff80000000000009189a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1"
    "706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c"
    "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65a373716caa65787472615f6b6579739192"
    "c0a2643100"
)
"""The same: block 1 of the tokens 1, 2 with ``lora_name`` "sql" and extra keys (None, "d1")."""


def test_messages_are_those_of_vllm() -> None:
    def key(number: int, tokens: list[int], parent: BlockKey | None, *extra: Any) -> BlockKey:
        encoded = encode_extra_keys(extra)
        digest = bytes(24) + number.to_bytes(8, "big")
        return BlockKey(digest, array("i", tokens).tobytes(), parent, encoded)

    gone = [key(7, [], None), key((1 << 63) + 5, [], None)]
    first = key(1, [70_000, 2], None, "salt", 1)
    second = key((1 << 63) + 5, [3, 4], first, "salt", 1)
    other = key(9, [5, 6], first, "salt", 1)
    events = CacheEvents(
        cleared=True,
        removed=tuple(each.digest for each in gone),
        stored=(first, second, other),
    )
    assert msgspec.msgpack.encode([1.5, list(kv_events(events, 2)), 0]) == OF_VLLM


def test_an_adapter_is_named_as_by_vllm() -> None:
    encoded = encode_extra_keys((None, "d1"))
    key = BlockKey(bytes(31) + b"\1", array("i", [1, 2]).tobytes(), None, encoded)
    events = CacheEvents(cleared=False, removed=(), stored=(key,))
    told = list(kv_events(events, 2, {"d1": "sql"}))
    assert msgspec.msgpack.encode([1.5, told, 0]) == OF_VLLM_WITH_ADAPTER


def test_blocks_are_told_with_the_adapter_that_a_request_named(
    context: zmq.Context[Any], settings: dict[str, Any], models: list[Path], tmp_path: Path
) -> None:
    adapters = {name: save_adapter(models[0], tmp_path / name, seed=ord(name)) for name in "ab"}
    core = EngineCore(config_of(models[0], settings, enable_lora=True, max_lora_rank=8))
    try:
        subscriber = Subscriber(context, settings)
        for name, path in (("a", adapters["a"]), ("alias", adapters["a"]), ("b", adapters["b"])):
            core.load_adapter(name, str(path))
        for first, lora in enumerate((None, "a", "b")):
            serve(core, 1 + 30 * first, lora=lora)
        wait_until_known(subscriber, core)
        assert Counter(subscriber.adapters.values()) == {None: 3, "a": 3, "b": 3}
        core.add("last", GenerateRequest((200,) * 20, SamplingParams(max_tokens=2), lora="b"))
        core.unload_adapter("b")
        while core.has_work:
            core.step()
        wait_until_known(subscriber, core)
        assert Counter(subscriber.adapters.values())["b"] == 5, "it began with that name"
    finally:
        core.close()


@pytest.mark.parametrize("max_tokens", [4, 5, 8, 12, 13])
def test_the_last_block_of_an_adapter_that_was_unloaded_has_its_name(
    context: zmq.Context[Any],
    settings: dict[str, Any],
    models: list[Path],
    tmp_path: Path,
    max_tokens: int,
) -> None:
    """The block may be full in the step that ends the request, the last one with the adapter."""
    core = EngineCore(config_of(models[0], settings, enable_lora=True, max_lora_rank=8))
    try:
        subscriber = Subscriber(context, settings)
        core.load_adapter("a", str(save_adapter(models[0], tmp_path / "a", seed=1)))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        core.add("last", GenerateRequest((200,) * 20, params, lora="a"))
        core.unload_adapter("a")
        while core.has_work:
            core.step()
        wait_until_known(subscriber, core)
        assert set(subscriber.adapters.values()) == {"a"}
    finally:
        core.close()


def filled(prompts: int) -> BlockManager:
    blocks = BlockManager(CacheConfig(num_blocks=9, block_size=4, record_events=True))
    for number in range(prompts):
        blocks.allocate(number, range(number, number + 8))
        blocks.mark_computed(number, 8)
        blocks.free(number)
    return blocks


def test_what_is_queued_is_published_before_the_end(
    context: zmq.Context[Any], settings: dict[str, Any]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig.of(settings))
    subscriber = Subscriber(context, settings)
    deadline = time.monotonic() + WAIT_S
    while not subscriber.receive():  # until it has connected
        assert time.monotonic() < deadline
        publisher.publish(CacheEvents(cleared=True, removed=(), stored=()), 4)
    blocks = filled(3)
    publisher.publish(blocks.take_events(), 4)
    publisher.close()
    subscriber.receive()
    assert subscriber.index.keys() == cached(blocks).keys()


@pytest.mark.parametrize("frames", [[b""], [b"x" * 9], [b"", b"", b"abc"], [b"\xff" * 8]])
def test_a_wrong_request_for_a_replay_harms_nobody(
    context: zmq.Context[Any], settings: dict[str, Any], frames: list[bytes]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig.of(settings))
    try:
        hostile = context.socket(zmq.DEALER)
        hostile.connect(settings["replay_endpoint"])
        hostile.send_multipart(frames)
        if len(frames[-1]) != 8:
            assert not hostile.poll(300), "an answer"
        blocks = filled(3)
        publisher.publish(blocks.take_events(), 4)
        subscriber = Subscriber(context, settings)
        deadline = time.monotonic() + WAIT_S
        while not subscriber.index:
            subscriber.catch_up()
            assert time.monotonic() < deadline
        assert subscriber.index.keys() == cached(blocks).keys()
    finally:
        publisher.close()


def replayed(socket: Any, first: int) -> list[int]:
    """The numbers of the messages from ``first`` on."""
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    numbers = []
    while (frames := socket.recv_multipart())[-2] != END:
        numbers.append(int.from_bytes(frames[-2], "big"))
    return numbers


def test_only_the_last_messages_are_kept(
    context: zmq.Context[Any], settings: dict[str, Any]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig.of({**settings, "buffer_steps": 2}))
    try:
        for _ in range(5):
            publisher.publish(filled(1).take_events(), 4)
        asks = context.socket(zmq.DEALER)
        asks.connect(settings["replay_endpoint"])
        deadline = time.monotonic() + WAIT_S
        numbers, before = replayed(asks, 0), [0]
        while len(numbers) < 2 or numbers != before:  # until all are published
            assert time.monotonic() < deadline, numbers
            numbers, before = replayed(asks, 0), numbers
            assert len(numbers) <= 2
        last = numbers[-1]
        assert numbers == [last - 1, last]
        assert last > 1 << 60, "the time of the start"
        assert replayed(asks, last) == [last]
        assert replayed(asks, last + 1) == []
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "kv_events_config must be an object"),
        ({"enabled": True}, "no setting 'enabled': its settings are enable_kv_cache_events, pub"),
        ({"enable_kv_cache_events": 1}, "kv_events_config: enable_kv_cache_events must be True or"),
        ({"publisher": "kafka"}, "publisher must be one of zmq, null, got 'kafka'"),
        ({"endpoint": 5557}, "endpoint must be an address of ZeroMQ, got 5557: give tcp://HOST"),
        ({"endpoint": "inproc://events"}, "endpoint must be an address"),
        ({"endpoint": "tcp://*:0"}, "endpoint must be an address"),
        ({"replay_endpoint": ""}, "replay_endpoint must be an address"),
        ({"buffer_steps": 1 << 30}, "buffer_steps must be an integer from 0"),
        ({"buffer_steps": -1}, "buffer_steps must be an integer from 0"),
        ({"hwm": 0}, "hwm must be an integer from 1"),
        ({"max_queue_size": 0}, "max_queue_size must be an integer from 1"),
        ({"topic": None}, "topic must be a text"),
    ],
)
def test_a_wrong_setting_is_named(models: list[Path], given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(models[0], given)


def test_an_address_that_is_taken_is_a_setting_that_cannot_be_used(
    context: zmq.Context[Any], models: list[Path]
) -> None:
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    given = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .* cannot be used .*in use"):
        EngineCore(config_of(models[0], given))
