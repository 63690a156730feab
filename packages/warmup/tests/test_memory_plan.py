"""The division of memory, compared with the figures of a logged start on Gaudi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.warmup import ConfigError, GraphBudget, MemoryPlan, MemoryUse, format_bytes

GIB = 1 << 30

# From Intel's "Warm-up" page of the vLLM plugin for Gaudi: the log of Llama 3 8B in bf16,
# 128 tokens per block, 131,072 bytes of keys and values per token.
LOGGED = MemoryPlan.from_profile(
    int(79.16 * GIB),
    gpu_memory_utilization=0.5,
    graph_reserved_mem=0.4,
    graph_prompt_ratio=0.3,
    block_bytes=128 * 131072,
)


def test_memory_is_divided_as_in_the_log() -> None:
    assert LOGGED.usable / GIB == pytest.approx(39.58, abs=0.005)
    assert LOGGED.graphs / GIB == pytest.approx(15.83, abs=0.005)
    assert LOGGED.kv_cache / GIB == pytest.approx(23.75, abs=0.005)
    assert LOGGED.num_blocks == 1519


def test_the_log_line_is_that_of_the_seed() -> None:
    assert LOGGED.describe() == (
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), "
        "15.83 GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), "
        "23.75 GiB reserved for KV cache"
    )


def test_graphs_get_the_free_memory_above_the_margin_as_in_the_log() -> None:
    budget = LOGGED.graph_budget(int(55.43 * GIB))
    assert budget.total / GIB == pytest.approx(15.85, abs=1e-6)
    assert budget.prompt / GIB == pytest.approx(4.755, abs=1e-6)
    assert budget.decode / GIB == pytest.approx(11.095, abs=1e-6)
    assert budget.describe() == (
        "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.755 GiB for prompt and "
        "11.095 GiB for decode (VLLM_GRAPH_PROMPT_RATIO=0.3)"
    )


@given(free=st.integers(0, int(79.16 * GIB)))
def test_graphs_never_get_more_than_their_reserve_and_two_blocks(free: int) -> None:
    # A KV cache that a small max_num_seqs keeps small leaves memory, and it is not the graphs'.
    total = LOGGED.graph_budget(free).total
    assert total <= LOGGED.graphs + 2 * LOGGED.block_bytes
    assert total <= max(0, free - LOGGED.free_after_profile // 2)


def test_no_graph_budget_if_free_memory_is_below_the_margin() -> None:
    assert LOGGED.graph_budget(int(30 * GIB)).total == 0


def test_without_a_reserve_graphs_have_no_budget() -> None:
    plan = MemoryPlan(free_after_profile=100 * GIB, block_bytes=GIB, graph_reserved_mem=0)
    assert plan.graph_budget(100 * GIB) == GraphBudget(total=0, free=100 * GIB)


def test_a_cache_of_two_blocks_is_enough() -> None:
    share_of_all = {"gpu_memory_utilization": 1, "graph_reserved_mem": 0}
    assert MemoryPlan.from_profile(2 * GIB, **share_of_all, block_bytes=GIB).num_blocks == 2
    with pytest.raises(ConfigError, match="2 GiB for the KV cache do not hold two blocks"):
        MemoryPlan.from_profile(2 * GIB - 1, **share_of_all, block_bytes=GIB)


@given(total=st.integers(0, 1 << 45), ratio=st.floats(0, 1))
def test_shares_add_up_to_the_budget(total: int, ratio: float) -> None:
    budget = GraphBudget(total=total, free=total, prompt_ratio=ratio)
    assert budget.prompt + budget.decode == total
    assert budget.prompt == int(total * ratio)
    assert min(budget.prompt, budget.decode) >= 0


def test_a_cache_of_fewer_than_two_blocks_is_an_error_with_a_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"810 MiB .* 1 GiB: raise gpu_memory_utilization \(0.9\)"
    ):
        MemoryPlan.from_profile(1000 << 20, block_bytes=GIB)
    with pytest.raises(ConfigError) as raised:
        MemoryPlan.from_profile(0, block_bytes=GIB)
    assert str(raised.value).startswith("free_after_profile must be an integer from 1 to ")
    assert raised.value.field == "free_after_profile"


def test_memory_use_of_a_step_is_the_log_line_of_the_seed() -> None:
    total, host = int(94.62 * GIB), 1007 * GIB
    before = MemoryUse(
        device_used=0, device_total=total, host_used=int(472.25 * GIB), host_total=host
    )
    after = MemoryUse(
        device_used=int(14.97 * GIB),
        device_total=total,
        host_used=int(475.2 * GIB),
        host_total=host,
    )
    assert after.since(before, "Pre-loading model weights on hpu:0") == (
        "Pre-loading model weights on hpu:0 took 14.97 GiB of device memory "
        "(14.97 GiB/94.62 GiB used) and 2.95 GiB of host memory (475.2 GiB/1007 GiB used)"
    )
    assert after.since(before, "Loading model weights", in_total=True) == (
        "Loading model weights took in total 14.97 GiB of device memory "
        "(14.97 GiB/94.62 GiB used) and 2.95 GiB of host memory (475.2 GiB/1007 GiB used)"
    )
    assert "took -14.97 GiB of device memory (0 B/94.62 GiB used) and -2.95 GiB" in before.since(
        after, "Releasing"
    )


def test_host_memory_is_read_from_linux_and_omitted_elsewhere(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1024 kB\nMemFree: 1 kB\nMemAvailable: 256 kB\nHugePages: 0\n")
    use = MemoryUse.read(device_free=3, device_total=10, meminfo=meminfo)
    assert (use.device_used, use.host_used, use.host_total) == (7, 768 << 10, 1 << 20)
    missing = MemoryUse.read(device_free=3, device_total=10, meminfo=tmp_path / "none")
    assert missing == MemoryUse(device_used=7, device_total=10, host_used=0, host_total=0)
    assert missing == MemoryUse(device_used=7, device_total=10)
    assert missing.since(missing, "Nothing") == "Nothing took 0 B of device memory (7 B/10 B used)"


def test_by_default_nine_tenths_are_usable_and_a_tenth_of_that_is_for_graphs() -> None:
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
def test_the_parts_never_exceed_the_usable_memory(
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
        ("graph_prompt_ratio", 2),
        ("free_after_profile", 0),
        ("block_bytes", -1),
    ],
)
def test_an_invalid_setting_is_named_with_its_value(setting: str, value: float) -> None:
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
def test_bytes_are_formatted_as_in_the_log(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("prompt_ratio", 1.5), ("prompt_ratio", -0.1), ("total", -1), ("free", -1), ("free", 1.5)],
)
def test_a_wrong_part_of_a_budget_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {wrong}"):
        GraphBudget(**{"total": 1, "free": 1, name: wrong})


MOST = (1 << 63) - 1
"""Bytes."""


@pytest.mark.parametrize(
    ("kind", "name", "low", "high"),
    [
        *((GraphBudget, name, 0, MOST) for name in ("total", "free")),
        (GraphBudget, "prompt_ratio", 0, 1),
        *((MemoryPlan, name, 1, MOST) for name in ("free_after_profile", "block_bytes")),
        (MemoryPlan, "gpu_memory_utilization", 0, 1),
        (MemoryPlan, "graph_reserved_mem", 0, 1),
        (MemoryPlan, "graph_prompt_ratio", 0, 1),
        *((MemoryUse, name, -MOST, MOST) for name in ("device_used", "host_used")),
        *((MemoryUse, name, 0, MOST) for name in ("device_total", "host_total")),
    ],
)
def test_both_ends_of_a_range_are_accepted_and_no_more(
    kind: Any, name: str, low: int, high: int
) -> None:
    needed = {
        GraphBudget: {"total": 1, "free": 1},
        MemoryPlan: {"free_after_profile": 1, "block_bytes": 1},
        MemoryUse: {"device_used": 1, "device_total": 1},
    }[kind]
    for end, above in ((low, low - 1), (high, high + 1)):
        assert getattr(kind(**{**needed, name: end}), name) == end
        with pytest.raises(ConfigError, match=f"{name} must be .* from {low} to {high}, got"):
            kind(**{**needed, name: above})


@pytest.mark.parametrize(("name", "low"), [("device_free", -MOST), ("device_total", 0)])
def test_a_size_to_read_has_the_range_of_its_field(name: str, low: int) -> None:
    for end, above in ((low, low - 1), (MOST, MOST + 1)):
        sizes = {"device_free": 0, "device_total": 0, "meminfo": Path("none")}
        if name == "device_total" or end < 0:
            assert MemoryUse.read(**{**sizes, name: end}).device_total in (0, end)
        with pytest.raises(ConfigError, match=f"{name} must be .* from {low} to {MOST}, got"):
            MemoryUse.read(**{**sizes, name: above})


def test_free_memory_may_be_all_that_an_integer_holds_or_none() -> None:
    assert LOGGED.graph_budget(MOST).free == MOST
    assert LOGGED.graph_budget(0).free == 0
    with pytest.raises(ConfigError, match=f"free_memory must be an integer from 0 to {MOST}"):
        LOGGED.graph_budget(MOST + 1)


@pytest.mark.parametrize("free", [-1, None, "1", 1.5, True, float("nan"), 10**400])
def test_free_memory_of_another_type_gives_no_budget(free: Any) -> None:
    with pytest.raises(ConfigError, match="free_memory must be an integer"):
        LOGGED.graph_budget(free)


@pytest.mark.parametrize("setting", ["free_after_profile", "block_bytes"])
def test_more_bytes_than_an_integer_holds_are_refused(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{setting} must be an integer from 1 to 9223372036854775807"
    ):
        MemoryPlan(**{"free_after_profile": GIB, "block_bytes": 1024, setting: 10**400})


@pytest.mark.parametrize("wrong", [None, "1", 1.5, 10**400])
def test_memory_use_is_a_number_of_bytes(wrong: Any) -> None:
    for arguments in ({"device_free": wrong}, {"device_total": wrong}, {"meminfo": wrong}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            MemoryUse.read(**{"device_free": 1, "device_total": 2, **arguments})
    use = MemoryUse(device_used=1, device_total=2)
    with pytest.raises(ConfigError, match="before must be of type MemoryUse"):
        use.since(wrong, "Loading")
