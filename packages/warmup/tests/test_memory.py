"""The division of memory, against the figures of a logged start on Gaudi."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.warmup import ConfigError, MemoryPlan, format_bytes

GIB = 1 << 30

# From Intel's "Warm-up" page of the vLLM plugin for Gaudi: the log of Llama 3 8B in bf16,
# 128 tokens per block, 131,072 bytes of keys and values per token.
LOGGED = MemoryPlan(
    free_after_profile=int(79.16 * GIB),
    block_bytes=128 * 131072,
    gpu_memory_utilization=0.5,
    graph_reserved_mem=0.4,
)


def test_logged_start_is_divided_as_logged() -> None:
    assert LOGGED.usable / GIB == pytest.approx(39.58, abs=0.005)
    assert LOGGED.graphs / GIB == pytest.approx(15.83, abs=0.005)
    assert LOGGED.kv_cache / GIB == pytest.approx(23.75, abs=0.005)
    assert LOGGED.num_blocks == 1519


def test_line_is_the_logged_one() -> None:
    assert LOGGED.describe() == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), "
        "15.83 GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), "
        "23.75 GiB reserved for KV cache"
    )


def test_defaults_are_nine_tenths_usable_and_a_tenth_of_that_for_graphs() -> None:
    plan = MemoryPlan(free_after_profile=100 * GIB, block_bytes=GIB)
    assert plan.usable == pytest.approx(90 * GIB)
    assert plan.graphs == pytest.approx(9 * GIB)
    assert plan.num_blocks == 81


@given(
    free=st.integers(1, 1 << 48),
    block=st.integers(1, 1 << 32),
    utilization=st.floats(0, 1),
    reserved=st.floats(0, 1),
)
def test_parts_never_exceed_what_is_usable(
    free: int, block: int, utilization: float, reserved: float
) -> None:
    plan = MemoryPlan(
        free_after_profile=free,
        block_bytes=block,
        gpu_memory_utilization=utilization,
        graph_reserved_mem=reserved,
    )
    assert plan.num_blocks * block <= plan.kv_cache
    assert plan.kv_cache + plan.graphs <= plan.usable * (1 + 1e-12)
    assert plan.usable <= free


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("graph_reserved_mem", -0.1),
        ("free_after_profile", 0),
        ("block_bytes", -1),
    ],
)
def test_bad_setting_is_named_with_its_value(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{setting}.*{value}"):
        MemoryPlan(**{"free_after_profile": GIB, "block_bytes": 1024, setting: value})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        # Figures as the same log writes them.
        (0, "0 B"),
        (-252 * 1024, "-252 KiB"),
        (int(14.97 * GIB), "14.97 GiB"),
        (504 << 20, "504 MiB"),
        (int(180.9 * (1 << 20)), "180.9 MiB"),
        (1007 * GIB, "1007 GiB"),
        (-int(1.238 * (1 << 20)), "-1.238 MiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_bytes_are_written_as_in_the_log(size: int, text: str) -> None:
    assert format_bytes(size) == text
