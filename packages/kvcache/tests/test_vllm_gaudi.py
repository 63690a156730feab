"""Defragmentation under the names of vLLM's plugin for Gaudi, called as its model runner does.

``gaudi_host`` has the few names of the plugin and of Intel's bridge that the module imports;
``interop/test_vllm_gaudi.py`` runs it in the plugin itself.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from plugin_traffic import SIZE, Traffic, caches

HOST = Path(__file__).parent / "gaudi_host"
THRESHOLD = 3


@pytest.fixture(scope="module")
def host() -> Any:
    """The module under test, imported beside the plugin's names."""
    before = set(sys.modules)
    sys.path.insert(0, str(HOST))
    try:
        yield importlib.import_module("trencadis.kvcache.vllm_gaudi")
    finally:
        sys.path.remove(str(HOST))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("vllm_gaudi", "habana_frameworks") or "vllm_gaudi" in name:
                del sys.modules[name]


def configure(**changes: Any) -> None:
    runtime = importlib.import_module("vllm_gaudi.extension.runtime")
    runtime.CONFIG.__dict__.update(
        defrag=True,
        prefix_caching=False,
        bridge_mode="lazy",
        VLLM_DEFRAG_THRESHOLD=None,
        VLLM_DEFRAG_WITH_GRAPHS=None,
        VLLM_DEBUG=None,
    )
    runtime.CONFIG.__dict__.update(changes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans(), st.integers(8, 60))
def test_each_block_keeps_its_content_and_the_used_ones_stay_low(
    host: ModuleType, seed: int, keeps: bool, num_blocks: int
) -> None:
    configure(prefix_caching=keeps, VLLM_DEFRAG_THRESHOLD=THRESHOLD)
    defragmenter = host.OnlineDefragmenter(caches(num_blocks), SIZE)
    traffic = Traffic(defragmenter, num_blocks, seed, keeps=keeps)
    for _ in range(25):
        traffic.step()
        traffic.check(THRESHOLD)


def test_a_warm_up_changes_nothing(host: ModuleType) -> None:
    configure()
    held = caches(9)
    for keys, values in held:
        keys.copy_(torch.randn_like(keys))
        values.copy_(torch.randn_like(values))
    before = [tensor.clone() for layer in held for tensor in layer]
    host.OnlineDefragmenter(held, SIZE).warmup()
    after = [tensor for layer in held for tensor in layer]
    assert all(map(torch.equal, before, after))


def test_latent_caches_have_no_values(host: ModuleType) -> None:
    configure(VLLM_DEFRAG_THRESHOLD=1)
    held = [(keys, None) for keys, _ in caches(30)]
    defragmenter = host.OnlineDefragmenter(held, SIZE)
    defragmenter.update_state({"a": [1, 2, 3, 4], "b": [9]}, [])
    held[0][0][5 * SIZE : 6 * SIZE] = 7.0
    assert defragmenter.resolve(9) == 5
    defragmenter.update_state({}, ["a"])
    defragmenter.defragment()
    assert defragmenter.resolve(9) == 1
    assert (held[0][0][SIZE : 2 * SIZE] == 7.0).all()


def test_a_block_that_no_request_has_shares_no_place(host: ModuleType) -> None:
    configure()
    defragmenter = host.OnlineDefragmenter(caches(20), SIZE)
    assert defragmenter.resolve_all([[7, 0], [20]]) == [[7, 0], [20]]
    defragmenter.update_state({"a": [7, 0, 9]}, [])
    assert defragmenter.resolve_all([[7, 0, 9], [12]]) == [[1, 0, 2], [12]]
    places = [defragmenter.resolve(block) for block in range(21)]
    assert sorted(places) == list(range(21))


def test_an_id_that_ends_and_comes_again_in_one_step_keeps_its_new_blocks(
    host: ModuleType,
) -> None:
    configure()
    defragmenter = host.OnlineDefragmenter(caches(40), SIZE)
    defragmenter.update_state({"a": [1], "other": [30]}, [])
    defragmenter.update_state({"a": [1, 5]}, ["a"])
    places = [defragmenter.resolve(block) for block in (1, 5, 30)]
    assert len(set(places)) == 3
    defragmenter.update_state({"b": [6, 7]}, [])
    assert [defragmenter.resolve(block) for block in (1, 5, 30)] == places
    assert defragmenter.req_blocks == {"a": [1, 5], "other": [30], "b": [6, 7]}


@pytest.mark.parametrize("rows", [801, 21 * SIZE, 2 * SIZE])
def test_a_model_whose_caches_differ_is_not_defragmented(
    host: ModuleType, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As those with state layers, and one whose cache is no block long."""
    configure()
    held = caches(40)
    if rows != 2 * SIZE:
        held.append((torch.zeros(rows, 3), torch.zeros(rows, 3)))
    else:
        held = [(torch.zeros(rows, 3), None)]
    defragmenter = host.OnlineDefragmenter(held, SIZE)
    assert not defragmenter.enabled
    assert "Defragmentation is off" in caplog.text
    defragmenter.update_state({"a": [7]}, [])
    defragmenter.defragment()
    defragmenter.warmup()
    assert defragmenter.resolve(7) == 7


def test_a_cache_of_three_blocks_is_the_smallest_that_is_defragmented(host: ModuleType) -> None:
    configure()
    for rows, is_moved in ((3 * SIZE, True), (3 * SIZE - 1, False)):
        defragmenter = host.OnlineDefragmenter([(torch.zeros(rows, 3), None)], SIZE)
        assert defragmenter.enabled is is_moved
    defragmenter = host.OnlineDefragmenter([(torch.zeros(1 << 14, 1), None)], 1 << 12)
    assert defragmenter.enabled, "2^26 is more blocks than a pool has, and 4 are not"


def test_the_threshold_is_that_of_the_plugin_unless_it_is_set(host: ModuleType) -> None:
    for threshold, expected in ((None, 32), (0, 0), (7, 7)):
        configure(VLLM_DEFRAG_THRESHOLD=threshold)
        defragmenter = host.OnlineDefragmenter(caches(80), SIZE)
        for above, has_moved in ((expected, False), (expected + 1, True)):
            used = list(range(1, above + 2))
            defragmenter.update_state({"low": used[:-1], "high": used[-1:]}, [])
            defragmenter.update_state({}, ["low"])
            assert defragmenter.resolve(used[-1]) == len(used)
            defragmenter.defragment()
            assert defragmenter.resolve(used[-1]) == (1 if has_moved else len(used))
            defragmenter.update_state({}, ["high"])


def test_layers_that_share_a_cache_move_it_once(host: ModuleType) -> None:
    configure(VLLM_DEFRAG_THRESHOLD=1, prefix_caching=True)
    held = caches(30, layers=1) * 2
    defragmenter = host.OnlineDefragmenter(held, SIZE)
    defragmenter.update_state({"a": [1, 2, 3, 4], "b": [9]}, [])
    held[0][0][5 * SIZE : 6 * SIZE] = 7.0
    defragmenter.update_state({}, ["a"])
    defragmenter.defragment()  # with the content of block 1, which may be wanted
    assert defragmenter.resolve(9) == 1
    assert (held[0][0][SIZE : 2 * SIZE] == 7.0).all()


def test_defragmentation_that_is_off_changes_nothing(host: ModuleType) -> None:
    configure(defrag=False)
    defragmenter = host.OnlineDefragmenter(caches(20), SIZE)
    defragmenter.update_state({"a": [7]}, [])
    defragmenter.defragment()
    defragmenter.warmup()
    assert not defragmenter.enabled
    assert defragmenter.resolve(7) == 7
    assert defragmenter.resolve_all([[7]]) == [[7]]


def test_copies_are_compiled_as_the_plugin_says(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge: Any = importlib.import_module("habana_frameworks.torch")
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda module, **given: compiled.append(given) or module)
    for mode, graphs, expected in (
        ("lazy", None, (0, 0)),
        ("lazy", True, (1, 0)),
        ("eager", None, (0, 1)),
        ("eager", False, (0, 0)),
    ):
        bridge.wrapped.clear()
        compiled.clear()
        configure(bridge_mode=mode, VLLM_DEFRAG_WITH_GRAPHS=graphs)
        host.OnlineDefragmenter(caches(4), SIZE)
        assert (len(bridge.wrapped), len(compiled)) == expected
        assert all(given["fullgraph"] and not given["dynamic"] for given in compiled)


def test_a_plan_is_logged_where_defragmentation_is_debugged(host: ModuleType) -> None:
    configure(VLLM_DEBUG=["defrag"], VLLM_DEFRAG_THRESHOLD=1)
    lines: Any = importlib.import_module("vllm_gaudi.extension.debug").LINES
    lines.clear()
    defragmenter = host.OnlineDefragmenter(caches(30), SIZE)
    defragmenter.update_state({"a": list(range(1, 9)), "b": [20]}, [])
    defragmenter.update_state({}, ["a"])
    defragmenter.defragment()
    assert lines == ["defragmentation done max_id_used=9->1 num_used=1 copied=1/8"]


@pytest.mark.parametrize(
    ("switch", "is_replaced"),
    [("", False), ("buckets", False), ("defragmentation", True), ("a, defragmentation", True)],
)
def test_vllm_s_loader_replaces_the_class_where_the_switch_says_so(
    host: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
    is_replaced: bool,
) -> None:
    from trencadis.kvcache import vllm_plugin

    plugin: Any = importlib.import_module("vllm_gaudi.extension.defragmentation")
    own = plugin.OnlineDefragmenter
    monkeypatch.setattr(plugin, "OnlineDefragmenter", own)
    modules: list[Any] = [plugin]
    for name in ("hpu_model_runner", "hpu_worker"):
        module: Any = ModuleType(f"vllm_gaudi.v1.worker.{name}")
        module.OnlineDefragmenter = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
        modules.append(module)
    monkeypatch.setenv(vllm_plugin.SWITCH, switch)
    vllm_plugin.install()
    expected = host.OnlineDefragmenter if is_replaced else own
    assert all(module.OnlineDefragmenter is expected for module in modules)
    assert ("has ['a']: it may have buckets, defragmentation" in caplog.text) is ("a," in switch)
