"""The buckets under the names of vLLM's plugin for Gaudi, called as its model runner does.

``gaudi_host`` has the few names of the plugin that the module imports. The plugin itself has it in
``interop/test_vllm_gaudi.py``, with the plugin's own tests.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trencadis.bucketing import BucketingError

HOST = Path(__file__).parent / "gaudi_host"
LIMITS = {
    "max_num_seqs": 16,
    "max_num_prefill_seqs": 4,
    "block_size": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
}


@pytest.fixture(scope="module")
def host() -> Iterator[ModuleType]:
    """The module under test, imported beside the plugin's names."""
    before = set(sys.modules)
    sys.path.insert(0, str(HOST))
    try:
        yield importlib.import_module("trencadis.bucketing.vllm_gaudi")
    finally:
        sys.path.remove(str(HOST))
        for name in set(sys.modules) - before:
            if "vllm_gaudi" in name:
                del sys.modules[name]


def made(host: ModuleType, num_blocks: int = 600, **changes: Any) -> Any:
    configured = {"merged_prefill": False, "use_contiguous_pa": True, "enable_fsdpa_slicing": False}
    config = importlib.import_module("vllm_gaudi.extension.runtime").CONFIG
    given = {name: changes.pop(name) for name in configured if name in changes}
    config.__dict__.update({**configured, **given})
    manager = host.BucketingManager()
    manager.initialize(**{**LIMITS, **changes})
    manager.num_hpu_blocks = num_blocks
    manager.generate_prompt_buckets()
    manager.generate_decode_buckets()
    return manager


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_shape_within_the_limits_has_a_bucket_that_was_prepared(
    host: ModuleType, contiguous: bool
) -> None:
    manager, rng = made(host, use_contiguous_pa=contiguous), random.Random(0)
    prompts, decodes = list(manager.prompt_buckets), list(manager.decode_buckets)
    for _ in range(3000):
        query = rng.randint(1, 2048)
        context = rng.randint(0, (4096 - query) // 128)
        bucket = manager.find_prompt_bucket(1, query, context)
        assert all(have >= need for have, need in zip(bucket, (1, query, context), strict=True))
        batch = rng.randint(1, 16)
        blocks = rng.randint(1 if contiguous else batch, min(599, 32 * batch))
        bucket = manager.find_decode_bucket(batch, blocks)
        assert bucket[1] == 1
        assert bucket[0] >= batch
        assert bucket[2] >= blocks
        assert contiguous or bucket[0] <= bucket[2]
    assert (manager.prompt_buckets, manager.decode_buckets) == (prompts, decodes)
    assert not manager.asked
    assert manager.logged == [True, False]


def test_decode_buckets_end_with_the_cache_or_with_three_times_its_pairs(host: ModuleType) -> None:
    assert max(made(host).decode_buckets)[2] == 600
    pairs = made(host, num_blocks=50, use_contiguous_pa=False)
    assert max(blocks for _, _, blocks in pairs.decode_buckets) == 150
    pairs.skip_decode_block_clamp = True
    pairs.generate_decode_buckets()
    assert max(blocks for _, _, blocks in pairs.decode_buckets) == 16 * 32


@pytest.mark.parametrize("strategy", ["exp", "lin", "pad"])
def test_a_bucket_of_pairs_has_a_block_for_each_sequence(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The plugin's warm-up asserts it."""
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", strategy)
    manager = made(host, num_blocks=50, max_num_seqs=256, use_contiguous_pa=False)
    assert all(batch <= blocks for batch, _, blocks in manager.decode_buckets)
    assert manager.find_decode_bucket(256, 256) in manager.decode_buckets


@pytest.mark.parametrize(
    ("variable", "value", "is_wrong"),
    [
        ("VLLM_BUCKETING_STRATEGY", "pad", False),
        ("VLLM_BUCKETING_STRATEGY", "exp", True),
        ("VLLM_PROMPT_BUCKETING_STRATEGY", "lin", True),
        ("VLLM_BUCKETING_FROM_FILE", "buckets.txt", True),
    ],
)
def test_slices_of_fused_attention_need_the_strategy_that_they_mask(
    host: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    value: str,
    is_wrong: bool,
) -> None:
    (tmp_path / "buckets.txt").write_text("(1, [256, 2048], [0, 32])\n([1, 16], 1, [100, 600])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", "pad")
    monkeypatch.setenv(variable, value)
    if not is_wrong:
        assert made(host, enable_fsdpa_slicing=True).prompt_buckets
        return
    with pytest.raises(BucketingError, match="slices of FusedSDPA"):
        made(host, enable_fsdpa_slicing=True)
    assert made(host).prompt_buckets


def test_a_plugin_without_slices_has_the_buckets_of_any_strategy(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", "exp")
    manager = made(host)
    config = importlib.import_module("vllm_gaudi.extension.runtime").CONFIG
    del config.enable_fsdpa_slicing
    manager.generate_prompt_buckets()
    assert manager.prompt_buckets


def test_the_variables_of_this_library_are_read(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(1, [256, 2048], [0, 32])\n([1, 16], 1, [100, 600])\n")
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", str(file))
    manager = made(host)
    assert manager.prompt_buckets == [(1, 256, 0), (1, 256, 32), (1, 2048, 0), (1, 2048, 32)]
    assert manager.decode_buckets == [(1, 1, 100), (1, 1, 600), (16, 1, 100), (16, 1, 600)]
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", "")
    monkeypatch.setenv("VLLM_DECODE_BUCKETING_STRATEGY", "slow")
    with pytest.raises(BucketingError, match="VLLM_DECODE_BUCKETING_STRATEGY"):
        made(host)


def test_a_miss_gets_the_plugin_s_fallback_once(
    host: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    manager = made(host)
    for _ in range(2):
        assert manager.find_prompt_bucket(9, 512, 4) == (10, 522, 7)
    assert manager.asked == [((9, 512, 4), True)]
    assert (10, 522, 7) in manager.prompt_buckets
    assert [record.getMessage() for record in caplog.records] == [
        "Prompt bucket for (9, 512, 4) was not prepared. Adding new bucket: (10, 522, 7)"
    ]
    assert manager.find_decode_bucket(17, 20) == (18, 1, 23)
    assert manager.decode_buckets == sorted(manager.decode_buckets)


def test_more_blocks_than_were_prepared_get_the_largest_bucket(host: ModuleType) -> None:
    manager = made(host)
    assert manager.find_decode_bucket(3, 10_000)[2] == 600


def test_the_runner_may_change_the_lists(host: ModuleType) -> None:
    """As it does for a profile of one shape, and for models that pool."""
    manager = made(host)
    assert manager.find_decode_bucket(5, 77) != (5, 1, 77)
    manager.decode_buckets.insert(0, (5, 1, 77))
    assert manager.find_decode_bucket(5, 77) == (5, 1, 77)
    manager.decode_buckets = [(2, 1, 9)]
    assert manager.find_decode_bucket(1, 9) == (2, 1, 9)
    manager.prompt_buckets = []
    assert manager.find_prompt_bucket(1, 1) == (2, 11, 3)


def test_speculative_decoding_has_seeds_and_more(host: ModuleType) -> None:
    manager = made(host, num_speculative_tokens=1)
    seeds = made(host).decode_buckets
    assert manager.seed_decode_buckets == seeds
    assert set(manager.decode_buckets) == {*seeds, *((2 * b, 1, 2 * n) for b, _, n in seeds)}
    manager.decode_buckets.insert(0, (3, 1, 5))
    assert manager.find_decode_bucket(3, 5) == (3, 1, 5)
    assert manager.find_decode_bucket(3, 5, seed_buckets=True) in seeds
    assert made(host).seed_decode_buckets is None


def test_a_rank_without_requests_has_the_smallest_bucket(host: ModuleType) -> None:
    manager = made(host)
    assert manager.find_decode_bucket(0, 0) == min(manager.decode_buckets)
    assert manager.find_prompt_bucket(0, 0) == min(manager.prompt_buckets)


def test_without_decode_buckets_blocks_are_not_lowered(host: ModuleType) -> None:
    for has_largest in (True, False):
        manager = host.BucketingManager()
        manager.initialize(**LIMITS)
        if not has_largest:
            del manager._fallback_max_ctx
        assert manager.find_decode_bucket(3, 100) == (4, 1, 103)
        assert manager.asked == [((3, 1, 100), False)]


def test_queries_are_whole_chunks_and_slices(host: ModuleType) -> None:
    limits = {"mamba_chunk_size": 256, "mamba_chunk_size_is_explicit": True}
    assert all(query % 256 == 0 for _, query, _ in made(host, **limits).prompt_buckets)
    plain = made(host).prompt_buckets
    assert made(host, **{**limits, "mamba_chunk_size_is_explicit": False}).prompt_buckets == plain
    assert made(host, **{**limits, "mamba_chunk_size": 0}).prompt_buckets == plain
    sliced = made(host, use_sliding_window=True, slice_thld=512, slice_size=1024).prompt_buckets
    assert all(query < 512 or query % 1024 == 0 for _, query, context in sliced if not context)
    assert any(query % 1024 for _, query, context in sliced if context)


@pytest.mark.parametrize("most", [2000, 1100])
def test_no_query_is_longer_than_a_sequence(host: ModuleType, most: int) -> None:
    limits = {"mamba_chunk_size": 256, "mamba_chunk_size_is_explicit": True, "max_model_len": most}
    sliced = {"use_sliding_window": True, "slice_thld": 512, "slice_size": 1024}
    for changes in (limits, {**sliced, "max_model_len": most}):
        assert max(query for _, query, _ in made(host, **changes).prompt_buckets) <= most


def test_merged_prefill_has_the_plugin_s_buckets(host: ModuleType) -> None:
    assert made(host, merged_prefill=True).prompt_buckets == [(1, 7, 0)]


def test_a_manager_that_is_off_finds_what_it_is_asked(host: ModuleType) -> None:
    manager = host.BucketingManager()
    assert manager.find_prompt_bucket(3, 100, 2) == (3, 100, 2)
    assert manager.find_decode_bucket(3, 100) == (3, 1, 100)
    manager.generate_decode_buckets()
    assert manager.decode_buckets == []


@pytest.mark.parametrize(
    ("switch", "is_replaced"),
    [
        ("", False),
        ("defragmentation", False),
        ("buckets", True),
        ("other, buckets", True),
    ],
)
def test_vllm_s_loader_replaces_the_class_where_the_switch_says_so(
    host: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
    is_replaced: bool,
) -> None:
    from trencadis.bucketing import vllm_plugin

    plugin: Any = importlib.import_module("vllm_gaudi.extension.bucketing.common")
    own = plugin.HPUBucketingManager
    monkeypatch.setattr(plugin, "HPUBucketingManager", own)
    modules: list[Any] = [plugin]
    for name in ("hpu_model_runner", "hpu_worker"):
        module: Any = ModuleType(f"vllm_gaudi.v1.worker.{name}")
        module.HPUBucketingManager = own
        monkeypatch.setitem(sys.modules, module.__name__, module)
        modules.append(module)
    monkeypatch.setenv(vllm_plugin.SWITCH, switch)
    vllm_plugin.install()
    expected = host.BucketingManager if is_replaced else own
    assert all(module.HPUBucketingManager is expected for module in modules)
    assert ("has ['other']: it may have buckets" in caplog.text) is ("other" in switch)
