"""Tiers below the device: what they keep, what they refuse, and that no content is another's."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trencadis.kvcache import (
    BlockKey,
    BlockManager,
    BlockTier,
    CacheConfig,
    CacheRecorder,
    Content,
    DiskTier,
    HostTier,
    InvalidSetting,
    TierCounters,
    TierTransfers,
)
from trencadis.kvcache.copy_plan import Copies
from trencadis.kvcache.disk_tier import DIRECTORY
from trencadis.kvcache.lru_bytes import LruBytes

SIZE = 256
HEADER = 64
GIB = 1 << 30


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "big"), digest_size=32).digest()


def content_of(key: bytes, size: int = SIZE) -> list[memoryview]:
    """Content that only this key has, in two pieces."""
    stamped = bytearray((key * (size // len(key) + 1))[:size])
    return [memoryview(stamped)[:100], memoryview(stamped)[100:]]


def empty(size: int = SIZE) -> list[memoryview]:
    blank = bytearray(size)
    return [memoryview(blank)[:100], memoryview(blank)[100:]]


def is_loaded(tier: BlockTier, key: bytes) -> bool:
    """Whether the tier has the block, which is then that of the key."""
    content = empty()
    if not tier.load(key, content):
        return False
    assert b"".join(content) == b"".join(content_of(key))
    return True


def files_of(path: Path) -> list[Path]:
    return sorted((path / DIRECTORY).glob("*.kv"))


class TierMachine(RuleBasedStateMachine):
    """Any order of calls: the tier keeps the most recently used blocks that its bytes hold."""

    limit = 4

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make()
        self.kept: list[bytes] = []
        self.num_stored = self.num_loaded = 0

    def make(self) -> BlockTier:
        return HostTier(self.limit * SIZE)

    @rule(number=st.integers(0, 9))
    def store(self, number: int) -> None:
        key = key_of(number)
        assert self.tier.wants(key) == (key not in self.kept)
        self.tier.store(key, content_of(key))
        if key not in self.kept:
            self.kept = [*self.kept, key][-self.limit :]
            self.num_stored += 1

    @rule(number=st.integers(0, 9))
    def load(self, number: int) -> None:
        key = key_of(number)
        assert is_loaded(self.tier, key) == (key in self.kept)
        if key in self.kept:
            self.kept.remove(key)
            self.kept.append(key)
            self.num_loaded += 1

    @rule(numbers=st.lists(st.integers(0, 9)))
    def look_up(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        count = self.tier.num_leading(keys)
        assert all(key in self.kept for key in keys[:count])
        assert count == len(keys) or keys[count] not in self.kept

    @rule()
    def store_too_large(self) -> None:
        self.tier.store(key_of(99), content_of(key_of(99), 10 * SIZE))
        assert self.tier.num_leading([key_of(99)]) == 0

    @invariant()
    def counts_what_it_did(self) -> None:
        assert self.tier.counters == TierCounters(
            num_bytes=len(self.kept) * self.stored_size,
            num_stored_blocks=self.num_stored,
            num_stored_bytes=self.num_stored * SIZE,
            num_loaded_blocks=self.num_loaded,
            num_loaded_bytes=self.num_loaded * SIZE,
            num_errors=0,
        )

    stored_size = SIZE

    def teardown(self) -> None:
        self.tier.close()


class DiskMachine(TierMachine):
    stored_size = SIZE + HEADER

    def make(self) -> BlockTier:
        self.path = Path(self.directories.mktemp("tier"))
        return DiskTier(str(self.path), self.limit * self.stored_size)

    @precondition(lambda self: self.kept)
    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = DiskTier(str(self.path), self.limit * self.stored_size)
        self.num_stored = self.num_loaded = 0
        assert self.tier.num_leading(self.kept) == len(self.kept)

    @invariant()
    def disk_has_what_is_kept(self) -> None:
        assert {file.stem for file in files_of(self.path)} == {key.hex() for key in self.kept}


def test_what_was_used_last_stays() -> None:
    lru = LruBytes(3)
    for key in (b"a", b"b", b"c"):
        assert lru.add(key, 1) == []
    assert lru.touch(b"a")
    assert not lru.touch(b"d")
    assert lru.add(b"d", 2) == [b"b", b"c"]
    assert (lru.num_bytes, len(lru)) == (3, 2)
    assert [lru.num_leading(keys) for keys in ([b"a", b"d", b"b"], [b"b", b"a"], [])] == [2, 0, 0]
    assert lru.add(b"e", 4) is None
    assert lru.add(b"a", 1) is None
    assert lru.remove(b"a")
    assert not lru.remove(b"a")
    assert lru.num_bytes == 2


def test_a_host_tier_keeps_what_was_used_last_within_its_bytes() -> None:
    run_state_machine_as_test(TierMachine, settings=settings(max_examples=30, deadline=None))


def test_a_disk_tier_does_so_over_restarts(tmp_path_factory: pytest.TempPathFactory) -> None:
    DiskMachine.directories = tmp_path_factory
    run_state_machine_as_test(
        DiskMachine, settings=settings(max_examples=10, stateful_step_count=20, deadline=None)
    )


def stored(path: Path, count: int = 1) -> list[bytes]:
    keys = [key_of(number) for number in range(count)]
    tier = DiskTier(str(path), GIB)
    for key in keys:
        tier.store(key, content_of(key))
    tier.close()
    return keys


def test_a_file_of_other_bytes_is_refused_and_removed(tmp_path: Path) -> None:
    """500 hostile files: cut, grown, changed in any byte, of another block, or another kind."""
    rng = random.Random(5)
    keys = stored(tmp_path, 500)
    tier = DiskTier(str(tmp_path), GIB)
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    originals = {key: (tmp_path / DIRECTORY / f"{key.hex()}.kv").read_bytes() for key in keys}
    for number, key in enumerate(keys):
        file, original = tmp_path / DIRECTORY / f"{key.hex()}.kv", originals[key]
        changed = bytearray(original)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        hostile = [
            bytes(changed),
            original[: rng.randrange(len(original))],
            original + rng.randbytes(1 + rng.randrange(50)),
            originals[keys[number - 1]],
            rng.randbytes(len(original)),
            b"TRKVBLK0" + original[8:],
        ]
        kind = number % 9
        if kind < 6:
            file.write_bytes(hostile[kind])
        else:
            file.unlink()
            if kind == 6:
                file.symlink_to(outside)
            elif kind == 7:
                os.link(outside, file)
            else:
                os.mkfifo(file)
    assert not any(is_loaded(tier, key) for key in keys)
    assert tier.counters.num_errors == 500
    assert tier.counters.num_bytes == 0
    assert files_of(tmp_path) == []
    assert outside.read_bytes() == b"precious"
    tier.close()


def test_a_start_removes_what_is_no_block(tmp_path: Path) -> None:
    (key,) = stored(tmp_path)
    directory = tmp_path / DIRECTORY
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (directory / f"{key_of(1).hex()}.kv").symlink_to(outside)
    (directory / f"tmp-{key_of(2).hex()}-1").write_bytes(b"half of a block")
    (directory / "notes.txt").write_bytes(b"foreign")
    os.mkfifo(directory / f"{key_of(3).hex()}.kv")
    tier = DiskTier(str(tmp_path), GIB)
    assert {file.name for file in directory.iterdir()} == {"lock", f"{key.hex()}.kv"}
    assert is_loaded(tier, key)
    assert tier.counters.num_errors == 3
    assert outside.read_bytes() == b"precious"
    assert directory.stat().st_mode & 0o777 == 0o700
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_another_user_are_refused(tmp_path: Path) -> None:
    first, second = stored(tmp_path, 2)
    os.chown(tmp_path / DIRECTORY / f"{first.hex()}.kv", 12345, -1)
    tier = DiskTier(str(tmp_path), GIB)
    assert tier.num_leading([first]) == 0
    os.chown(tmp_path / DIRECTORY / f"{second.hex()}.kv", 12345, -1)
    assert not is_loaded(tier, second)
    tier.close()
    os.chown(tmp_path / DIRECTORY, 12345, -1)
    with pytest.raises(InvalidSetting, match="user 12345 owns it"):
        DiskTier(str(tmp_path), GIB)


def test_a_directory_is_that_of_one_process(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), GIB)
    with pytest.raises(InvalidSetting, match="in use by another process"):
        DiskTier(str(tmp_path), GIB)
    tier.close()
    DiskTier(str(tmp_path), GIB).close()


def test_a_link_in_the_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"")
    (tmp_path / DIRECTORY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidSetting, match="cannot be used"):
        DiskTier(str(tmp_path), GIB)
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_disk_that_vanishes_costs_one_line_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (key,) = stored(tmp_path)
    tier = DiskTier(str(tmp_path), GIB)
    for file in (tmp_path / DIRECTORY).iterdir():
        file.unlink()
    (tmp_path / DIRECTORY).rmdir()
    with caplog.at_level(logging.WARNING):
        assert not is_loaded(tier, key)
        tier.store(key, content_of(key))
        tier.store(key_of(1), content_of(key_of(1)))
    assert len(caplog.records) == 1
    assert tier.counters.num_errors == 3
    assert tier.counters.num_bytes == 0
    assert not tier.wants(key)  # for a while
    tier.close()


BLOCK = 4
NUM_STAGING = 5


class Machine:
    """A device of stamped blocks under a manager with tiers, as a scheduler uses them."""

    def __init__(self, tiers: list[BlockTier], num_blocks: int, identity: bytes = b"model") -> None:
        self.compute_s = 1e9
        recorder = CacheRecorder()
        config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK)
        self.blocks = BlockManager(config, recorder=recorder)
        self.staging = [bytearray(SIZE) for _ in range(NUM_STAGING)]
        self.device = [bytes(SIZE)] * num_blocks
        self.transfers = TierTransfers(
            self.blocks,
            tiers,
            recorder,
            staging=[[memoryview(block)] for block in self.staging],
            first_host_block=10,
            identity=identity,
        )
        self.now = 0.0
        self.num_steps = 0

    def carry_out(self, outgoing: Copies, incoming: Copies = ()) -> None:
        for src, dst in outgoing:
            self.staging[dst - 10][:] = self.device[src]
        for src, dst in incoming:
            self.device[dst] = bytes(self.staging[src - 10])

    def serve(self, tokens: list[int], salt: str) -> int:
        """Serve a prompt to its end; returns how many of its tokens were not computed."""
        self.num_steps += 1
        keys = self.blocks.hasher(tokens, (salt,))
        shared = keys.blocks[: (len(tokens) - 1) // BLOCK]
        starts = False
        while not starts:
            self.now += 0.001
            outgoing = self.transfers.begin_step(self.now)
            starts, incoming = self.transfers.load_prefix(
                "request", shared, self.compute_s, self.now
            )
            self.carry_out(outgoing, incoming)
            if starts:
                num_cached = self.blocks.allocate(1, tokens, prefix_keys=keys, extra_keys=(salt,))
                self.transfers.forget("request")
            self.transfers.end_scheduling()
            self.transfers.end_step()
            time.sleep(0)
        table = self.blocks.block_table(1).tolist()
        for key, block in zip(keys.blocks, table[: num_cached // BLOCK], strict=False):
            assert self.device[block] == stamp_of(key), "content of another block"
        for key, block in list(zip(keys.blocks, table, strict=False))[num_cached // BLOCK :]:
            self.device[block] = stamp_of(key)
        for block in table[len(keys.blocks) :]:
            self.device[block] = bytes(SIZE)
        self.blocks.mark_computed(1, len(tokens))
        self.blocks.free(1)
        assert self.blocks.pool.num_used_blocks == 0
        return num_cached

    def finish_stores(self) -> None:
        """Let everything that the cache has be stored."""
        for _ in range(50):
            self.now += 0.001
            self.carry_out(self.transfers.begin_step(self.now))
            self.transfers.end_scheduling()
            self.transfers.end_step()
            time.sleep(0.001)


def stamp_of(key: BlockKey) -> bytes:
    return (key.digest * (SIZE // 32))[:SIZE]


PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens
        st.sampled_from([1, 1, 2]),  # what it begins with
        st.integers(0, 6),  # where it goes its own way, in blocks
        st.sampled_from(["", "", "tenant"]),
        st.integers(0, 19),  # 0: a file is changed; 1: the machine starts again
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(prompts=PROMPTS, num_blocks=st.integers(9, 14), limit=st.integers(2, 20))
def test_no_content_is_ever_that_of_another_block(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[tuple[int, int, int, str, int]],
    num_blocks: int,
    limit: int,
) -> None:
    path = tmp_path_factory.mktemp("tiers")
    disk = DiskTier(str(path), limit * (SIZE + HEADER))
    tiers: list[BlockTier] = [HostTier(3 * SIZE), disk]
    machine = Machine(tiers, num_blocks)
    try:
        for length, first, own, salt, event in prompts:
            tokens = [first if i < own * BLOCK else first + 10 * own for i in range(length)]
            machine.serve(tokens, salt)
            if event == 0 and (files := files_of(path)):
                # A store that is under way may replace it meanwhile.
                with suppress(FileNotFoundError), files[0].open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"?")
            elif event == 1:
                assert machine.transfers.close(60)
                machine = Machine(tiers, num_blocks)
            elif event == 2:
                assert machine.transfers.close(60)
                machine = Machine(tiers, num_blocks, identity=b"another model")
            assert disk.counters.num_bytes <= limit * (SIZE + HEADER)
    finally:
        assert machine.transfers.close(60)
        disk.close()


def test_a_prefix_that_left_the_device_comes_back(tmp_path: Path) -> None:
    """Longer than the staging blocks, in parts; and none of another salt or model."""
    prompt = list(range(37))
    disk = DiskTier(str(tmp_path), GIB)
    machine = Machine([disk], 16)
    assert machine.serve(prompt, "") == 0
    machine.finish_stores()
    assert disk.counters.num_stored_blocks == 9
    machine.blocks.reset_prefix_cache()
    assert machine.serve(prompt, "") == 36
    assert disk.counters.num_loaded_blocks == 9
    machine.blocks.reset_prefix_cache()
    assert machine.serve(prompt, "tenant") == 0
    assert machine.transfers.close(60)
    other = Machine([disk], 16, identity=b"other weights")
    assert other.serve(prompt, "") == 0
    assert other.transfers.close(60)
    disk.close()


class HungTier(HostTier):
    """A tier that has everything and gives nothing before it is told."""

    def __init__(self) -> None:
        super().__init__(GIB)
        self.goes_on = threading.Event()

    def num_leading(self, keys: Iterable[bytes]) -> int:
        return len(list(keys))

    def load(self, key: bytes, content: Content) -> bool:
        self.goes_on.wait()
        return super().load(key, content)


def test_a_tier_that_hangs_delays_one_prompt_for_a_second_and_no_other() -> None:
    tier = HungTier()
    machine = Machine([tier], 16)
    machine.compute_s = 1e-3
    machine.serve(list(range(20)), "")
    waited_s = machine.now
    assert 1.0 <= waited_s < 1.1
    machine.serve(list(range(50, 70)), "")
    assert machine.now - waited_s < 0.01
    tier.goes_on.set()
    assert machine.transfers.close(60)


class SlowTier(HostTier):
    """A tier that takes 20 ms for each block."""

    def load(self, key: bytes, content: Content) -> bool:
        time.sleep(0.02)
        return super().load(key, content)


def test_a_tier_that_turns_out_to_be_slow_is_no_longer_waited_for() -> None:
    """A block takes 0.02 s to load and 0.001 s to compute, against what was expected before."""
    tier = SlowTier(GIB)
    machine = Machine([tier], 16)
    machine.compute_s = 0.001 / BLOCK
    cached = []
    for _ in range(2):
        machine.serve(list(range(20)), "")
        machine.finish_stores()
        machine.blocks.reset_prefix_cache()
        cached.append(machine.serve(list(range(20)), ""))
        machine.blocks.reset_prefix_cache()
    assert cached[0] > 0 == cached[1]
    assert machine.transfers.close(60)


def test_half_of_the_staging_blocks_are_loaded_at_once_and_the_others_are_for_stores() -> None:
    machine = Machine([HostTier(GIB)], 16)
    prompt = list(range(37))
    machine.serve(prompt, "")
    machine.finish_stores()
    machine.blocks.reset_prefix_cache()
    keys = machine.blocks.hasher(prompt, ("",)).blocks
    copies: Copies = ()
    ends = time.monotonic() + 60
    while not copies:
        assert time.monotonic() < ends
        machine.transfers.begin_step(machine.now)
        starts, copies = machine.transfers.load_prefix("request", keys, 1.0, machine.now)
        machine.transfers.end_scheduling()
        time.sleep(0)
    assert (starts, len(copies)) == (False, NUM_STAGING // 2)
    assert machine.transfers.close(60)


class UnsureTier(HostTier):
    def wants(self, key: bytes) -> bool:
        raise OSError("no answer")


def test_a_tier_that_cannot_say_whether_it_wants_a_block_gets_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine([UnsureTier(GIB)], 16)
    machine.serve(list(range(20)), "")
    assert machine.transfers.can_store
    assert machine.transfers.begin_step(machine.now) == ()
    assert not machine.transfers.can_store
    assert [record.getMessage() for record in caplog.records] == [
        "A tier raised where it may not: serving goes on without its answer"
    ]
    assert machine.transfers.close(60)


class NegativeTier(HostTier):
    def num_leading(self, keys: Iterable[bytes]) -> int:
        return -1


def test_a_tier_that_answers_with_a_negative_number_has_nothing() -> None:
    machine = Machine([NegativeTier(GIB)], 16)
    assert machine.serve(list(range(20)), "") == 0
    assert machine.transfers.close(60)


def test_what_loads_slower_than_it_is_computed_is_computed() -> None:
    tier = HostTier(GIB)
    machine = Machine([tier], 16)
    prompt = list(range(20))
    machine.serve(prompt, "")
    machine.finish_stores()
    machine.blocks.reset_prefix_cache()
    keys = machine.blocks.hasher(prompt, ("",)).blocks
    machine.transfers.begin_step(machine.now)
    assert machine.transfers.load_prefix("fast", keys, 1e-15, machine.now) == (True, ())
    assert machine.transfers.load_prefix("slow", keys, 1.0, machine.now) == (False, ())
    assert machine.transfers.close(60)
