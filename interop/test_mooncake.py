"""Engines that share Mooncake's store as a tier: ``nox -s "interop(mooncake)"``.

``INTEROP_MODEL`` is the directory of the small model.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

store = pytest.importorskip("mooncake.store")

from mooncake_tier import MooncakeTier  # noqa: E402

from trencadis.engine import (  # noqa: E402
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
)

MODEL = os.environ.get("INTEROP_MODEL", "")
TIER = "mooncake_tier:MooncakeTier:0.25"
LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    port = free_port()
    program = Path(store.__file__).with_name("mooncake_master")
    program.chmod(0o755)
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    process = subprocess.Popen([*command, "--rpc_address=127.0.0.1"], stderr=subprocess.DEVNULL)
    monkeypatch.setenv("MOONCAKE_MASTER", f"127.0.0.1:{port}")
    ends = time.monotonic() + LIMIT_S
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < ends
        assert process.poll() is None
        time.sleep(0.1)
    yield process
    process.kill()
    process.wait()


def core(tiers: str = "") -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=MODEL,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=2,
            num_blocks=40,
            block_size=16,
            warmup="none",
            kv_tiers=tiers,
        )
    )


def tokens(engine: EngineCore, key: str, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add(key, GenerateRequest(tuple(prompt), params))
    found = []
    while engine.has_work:
        found += [token.token_id for token in engine.step()]
        if engine.pause_s:
            time.sleep(engine.pause_s)
    return found


@pytest.mark.usefixtures("master")
def test_an_engine_loads_what_another_one_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not MODEL:
        pytest.skip("INTEROP_MODEL names no model")
    made: list[MooncakeTier] = []
    make = MooncakeTier.__init__

    def recorded(tier: MooncakeTier, limit_bytes: int) -> None:
        make(tier, limit_bytes)
        made.append(tier)

    monkeypatch.setattr(MooncakeTier, "__init__", recorded)
    prompt = random.Random(1).choices(range(1000, 9000), k=320)
    plain, first, second = core(), core(TIER), core(TIER)
    try:
        expected = tokens(plain, "a", prompt)
        assert tokens(first, "a", prompt) == expected
        ends = time.monotonic() + LIMIT_S
        while made[0].counters.num_stored_blocks < 320 // 16:
            assert time.monotonic() < ends
            first.step()
            time.sleep(0.01)
        assert made[0].counters.num_errors == 0
        # A tier is asked once the time of a computed prompt has been measured.
        tokens(second, "b", random.Random(2).choices(range(1000, 9000), k=64))
        before = second.stats.num_prefill_tokens
        assert tokens(second, "a", prompt) == expected
        assert made[1].counters.num_loaded_blocks >= 15
        assert second.stats.num_prefill_tokens - before < 320 - 15 * 16 + 16
    finally:
        for engine in (plain, first, second):
            engine.close()


def test_a_full_store_and_a_master_that_ends_lose_blocks_alone(
    master: subprocess.Popen[bytes],
) -> None:
    tier = MooncakeTier(16 << 20)
    content = [memoryview(bytearray(b"a" * 1_000_000)), memoryview(bytearray(b"b" * 1_000_000))]
    keys = [number.to_bytes(32, "big") for number in range(20)]
    for key in keys:
        assert tier.wants(key)
        tier.store(key, content)
    kept = [key for key in keys if tier.num_leading([key])]
    assert 0 < len(kept) < len(keys)  # of some it was full, or they were dropped for others
    found = [memoryview(bytearray(1_000_000)) for _ in range(2)]
    assert tier.load(kept[-1], found)
    assert found == content
    assert not tier.load(kept[-1], found[:1])  # of another size
    assert not tier.load(b"x" * 32, found)
    master.kill()
    master.wait()
    tier.store(b"x" * 32, content)
    assert tier.num_leading([b"x" * 32]) == 0
