"""Ranks on NUMA nodes: which cores each gets, by what the kernel tells, and that it is bound."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_mix import GREEDY, SMALL, serve
from test_ranks import _one_thread, assert_equal, start  # noqa: F401  (fixtures)

from trencadis.engine import ConfigError, EngineConfig, EngineCore, ModelError
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices.cpu import numa
from trencadis.engine.devices.cpu.device import CPUDevice
from trencadis.engine.devices.cpu.numa import node_cores, rank_cores
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor

EVERY = frozenset(range(64))


def alone(number: int) -> tuple[int, ...]:
    """The threads of a core that has one."""
    return (number,)


def save_nodes(directory: Path, **lists: str) -> Path:
    """A directory as the kernel's, with a file ``cpulist`` for each node."""
    for name, cores in lists.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "cpulist").write_text(f"{cores}\n")
    (directory / "possible").write_text("0-9\n")
    return directory


def test_nodes_are_read_in_their_order_and_those_without_cores_are_left_out(
    tmp_path: Path,
) -> None:
    nodes = save_nodes(
        tmp_path, node10="32", node2="8-11,40-41", node0="0-3", node3="", node4="damaged"
    )
    expected = [(0, 1, 2, 3), (8, 9, 10, 11, 40, 41), (32,)]
    assert node_cores(nodes, EVERY) == expected
    assert node_cores(nodes, frozenset({1, 2, 40})) == [(1, 2), (40,)]
    assert node_cores(tmp_path / "missing", EVERY) == []


@given(
    st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(1, 8),
)
def test_each_rank_has_cores_of_one_node_and_shares_none(
    sizes: list[list[int]], num_ranks: int
) -> None:
    first, nodes = 0, []
    for size in map(len, sizes):
        nodes.append(tuple(range(first, first + size)))
        first += size
    shares = rank_cores(nodes, num_ranks, alone)
    if len(nodes) == 1:
        assert shares == []
    if not shares:
        return
    assert len(shares) == num_ranks
    assert all(any(set(own) <= set(node) for node in nodes) for own in shares)
    every = [core for own in shares for core in own]
    assert len(every) == len(set(every))
    if num_ranks >= len(nodes):
        assert sorted(every) == sorted(core for node in nodes for core in node)


def test_a_rank_for_each_of_two_nodes() -> None:
    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert rank_cores(nodes, 2, alone) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert rank_cores(nodes, 4, alone) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert rank_cores([(0,), (1,)], 4, alone) == [], "a rank without a core is not bound"


@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=8), min_size=2, max_size=3),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_ranks_share_a_core_only_where_there_are_more_of_them(
    sizes: list[list[int]], num_ranks: int, rng: random.Random
) -> None:
    """``sizes``: the threads of each core of each node, whose numbers are in any order."""
    numbers = list(range(sum(map(sum, sizes))))
    rng.shuffle(numbers)
    cores = [[[numbers.pop() for _ in range(size)] for size in node] for node in sizes]
    core_of = {number: tuple(core) for node in cores for core in node for number in core}
    nodes = [sorted(number for core in node for number in core) for node in cores]
    shares = rank_cores(nodes, num_ranks, core_of.__getitem__)
    if not shares:
        return
    for node in nodes:
        own = [share for share in shares if set(share) <= set(node)]
        used = [core for share in own for core in {core_of[number] for number in share}]
        if len(own) <= len({core_of[number] for number in node}):
            assert len(used) == len(set(used))


def test_the_threads_of_a_core_are_those_that_the_kernel_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux numbers the first threads of all cores, then the second ones."""
    monkeypatch.setattr(numa, "NODES", save_nodes(tmp_path / "nodes", node0="0-3", node1="4-7"))
    monkeypatch.setattr(numa, "CORES", tmp_path)
    for number, listed in enumerate(("0,2", "1,3", "0,2", "1,3", "4,6", "damaged")):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{listed}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    assert CPUDevice.rank_cores(4) == [(0, 2), (1, 3), (4, 5), (6, 7)]
    assert CPUDevice.rank_cores(8) == [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]


def test_on_one_node_nothing_changes(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    monkeypatch.setattr(numa, "NODES", save_nodes(tmp_path / "nodes", node0="0-63"))
    core = start(tiny_model, 1, cpu_numa="auto")
    assert isinstance(core.executor, InProcessExecutor)
    assert core.config.tensor_parallel_size == 1


def test_a_model_that_cannot_be_divided_between_nodes_is_rejected_by_the_setting(
    tmp_path: Path, make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {f"node{number}": f"{number}" for number in range(4)}
    monkeypatch.setattr(numa, "NODES", save_nodes(tmp_path / "nodes", **nodes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(4)))
    model = make_tiny_model(tmp_path / "model")  # of 6 attention heads
    settings = {**SMALL, "device": "cpu", "cpu_numa": "auto"}
    with pytest.raises(ConfigError, match=r"cpu_numa auto sets .* 4, the number of NUMA") as caught:
        EngineCore(EngineConfig(model=str(model), **settings))
    assert "does not divide its 6 attention heads" in str(caught.value)
    assert caught.value.field == "cpu_numa"
    with pytest.raises(ModelError, match="nowhere"):
        EngineCore(EngineConfig(model=str(tmp_path / "nowhere"), **settings))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.slow
def test_each_thread_of_a_rank_is_on_the_cores_of_its_node(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., EngineCore],  # noqa: F811
) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    nodes = save_nodes(tmp_path / "nodes", node0=f"{first}", node1=f"{second}")
    monkeypatch.setattr(numa, "NODES", nodes)
    core = start(tiny_model, 1, cpu_numa="auto", device="cpu")
    assert isinstance(core.executor, RankExecutor)
    expected = serve(start(tiny_model, 1), [GREEDY])
    assert_equal(serve(core, [GREEDY]), expected)
    for pid, own in zip(core.executor.processes.pids, (first, second), strict=True):
        threads = psutil.Process(pid).threads()
        assert len(threads) > 1
        for thread in threads:
            assert os.sched_getaffinity(thread.id) == {own}
    assert os.sched_getaffinity(0) >= {first, second}, "the core may use all"
    # A switch to settings that name no number of ranks either.
    other = attrs.evolve(core.config, tensor_parallel_size=1, block_size=16)
    ModelSwitcher(core).reconfigure_engine(config_payload(other), 0)
    assert core.config.tensor_parallel_size == 2
    assert_equal(serve(core, [GREEDY]), expected)
