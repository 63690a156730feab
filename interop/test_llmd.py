"""What llm-d's adapter for vLLM reads in our KV events.

``LLMD_ADAPTER`` is the program of ``interop/llmd_adapter.go`` (llm-d-router ebab687, Go 1.27), and
``INTEROP_MODEL`` the directory of the small model.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("trencadis.engine")

import zmq

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

ADAPTER, MODEL = os.environ.get("LLMD_ADAPTER", ""), os.environ.get("INTEROP_MODEL", "")
BLOCK = 16
LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(
    not (ADAPTER and MODEL), reason="LLMD_ADAPTER or INTEROP_MODEL is not set"
)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[EngineCore]:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "topic": "kv@pod-1@small",
    }
    config = EngineConfig(
        model=MODEL,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        num_blocks=20,
        block_size=BLOCK,
        warmup="none",
        kv_events_config=events,
    )
    engine = EngineCore(config)
    yield engine
    engine.close()


def serve(core: EngineCore, first: int, salt: str | None = None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = tuple(range(first, first + 3 * BLOCK))
    core.add(f"{first}", GenerateRequest(prompt, params, cache_salt=salt))
    while core.has_work:
        core.step()


def published(core: EngineCore, endpoint: str) -> list[list[bytes]]:
    """The messages of requests that fill the cache, with and without a salt, and of its end."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(endpoint)
    ends = time.monotonic() + LIMIT_S
    first = 1000
    while not subscriber.poll(200):  # until it has connected
        assert time.monotonic() < ends
        serve(core, first)
        first += 100
    for number in range(8):
        serve(core, first + 100 * number, salt="tenant" if number % 2 else None)
    core.blocks.reset_prefix_cache()
    serve(core, 5000)
    messages = []
    while subscriber.poll(1000):
        messages.append(subscriber.recv_multipart())
    subscriber.close(0)
    return messages


def test_llmd_reads_what_a_core_publishes(core: EngineCore, tmp_path: Path) -> None:
    messages = published(core, f"ipc://{tmp_path}/events")
    lines = [
        json.dumps({"Topic": topic.decode(), "Payload": base64.b64encode(payload).decode()})
        for topic, _, payload in messages
    ]
    done = subprocess.run(
        [ADAPTER], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(messages)
    seen: dict[str, int] = {}
    salts = set()
    for (_, _, payload), answer in zip(messages, answers, strict=True):
        assert (answer["Pod"], answer["Model"], answer["Error"]) == ("pod-1", "small", "")
        ours = msgspec.msgpack.decode(payload)[1]
        assert [read["Type"] for read in answer["Events"]] == [each["type"] for each in ours]
        for told, read in zip(ours, answer["Events"], strict=True):
            seen[told["type"]] = seen.get(told["type"], 0) + 1
            assert_equal(told, read["Fields"])
            salts |= {repr(told["extra_keys"][0])} if told.get("extra_keys") else set()
    assert set(seen) == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert salts == {"['tenant']"}
    print(f"llm-d read {seen}")


def assert_equal(told: dict[str, Any], read: dict[str, Any]) -> None:
    hashes = told.get("block_hashes", [])
    assert read.get("BlockHashes", []) == [as_uint64(each) for each in hashes]
    if told["type"] == "BlockStored":
        assert read["Tokens"] == told["token_ids"]
        assert read["BlockSize"] == told["block_size"] == BLOCK
        parent = told["parent_block_hash"]
        assert read["ParentHash"] == (0 if parent is None else as_uint64(parent))
        assert (read["DeviceTier"] or None) == told.get("medium")
        assert read["ExtraKeys"] == told.get("extra_keys")


def as_uint64(value: bytes | int) -> int:
    """As llm-d's ``getHashAsUint64``: the last eight bytes, or the number."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value
