"""Layers of different windows have blocks of their own: same tokens, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from model_families import save_family
from request_mix import GREEDY, SMALL, WAYS, serve

from trencadis.bucketing import BucketingConfig
from trencadis.engine import ConfigError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.models.layer_spec import LayerSpec, seen_tokens
from trencadis.engine.runner import cache_sizing
from trencadis.engine.runner.limits import blocks_of_sequence
from trencadis.kvcache import LayerGroups

from .conftest import SESSION_DEVICE

pytestmark = pytest.mark.skipif(SESSION_DEVICE is not None, reason="a Gaudi has one group")

WAYS_OF_ALL = [params for ways in WAYS.values() for params in ways]


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Callable[[Path], None]) -> Path:
    """Three of its four layers have a window of 32 tokens."""
    directory: Path = save_family("OLMo 3", tmp_path_factory.mktemp("olmo"))
    add_tokenizer(directory)
    return directory


def make(model: Path, **changes: Any) -> EngineCore:
    core = EngineCore(EngineConfig(model=str(model), **{**SMALL, "num_blocks": 600, **changes}))
    core.warm_up()
    return core


def tokens(reported: dict[str, list[Any]]) -> dict[str, list[tuple[int, int, int, str]]]:
    return {
        key: sorted(
            (place, each.index, each.token_id, str(each.finish_reason))
            for place, each in enumerate(sorted(of_key, key=lambda each: each.index))
        )
        for key, of_key in reported.items()
    }


def one_group(windows: Sequence[int | None], *_: Any, **__: Any) -> LayerGroups:
    return LayerGroups.single(windows)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="enough blocks"),
        pytest.param({"num_blocks": 70, "swap_space": 0}, id="recomputed", marks=pytest.mark.slow),
        pytest.param({"num_blocks": 70, "num_host_blocks": 300}, id="swapped"),
        pytest.param({"num_blocks": 70, "async_scheduling": True}, id="two steps in flight"),
        pytest.param(
            {"enable_prefix_caching": False}, id="no prefix cache", marks=pytest.mark.slow
        ),
        pytest.param({"kv_cache_dtype": "int8"}, id="cache of codes", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_group(
    olmo: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples, beams and all else, for prompts that share prefixes the second time."""
    core, count = make(olmo, **changes), len(WAYS_OF_ALL)
    assert core.facts.windows == (None, 32, 32, 32)
    core.scheduler.costs.prefill_s_per_token = 1e6  # so that a swap is always cheaper
    found = [tokens(serve(core, WAYS_OF_ALL, count)) for _ in range(2)]
    stats = core.stats
    assert core.blocks.pool.num_used_blocks == 0
    if not changes:
        assert stats.num_prefix_hit_tokens > 0
    if changes.get("num_blocks") == 70:
        assert stats.num_preemptions > 0
        assert (stats.num_swaps > 0) == ("num_host_blocks" in changes)
    monkeypatch.setattr(cache_sizing, "group_layers", one_group)
    alone = make(olmo, **{**changes, "num_blocks": 80})
    assert alone.facts.windows == (None,)
    assert found == [tokens(serve(alone, WAYS_OF_ALL, count)) for _ in range(2)]


@pytest.mark.slow
def test_ranks_have_the_same_groups(
    tmp_path: Path, add_tokenizer: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tokenizer(save_family("Gemma 3 (text)", tmp_path))
    core = make(tmp_path, tensor_parallel_size=2)
    try:
        assert core.facts.windows == (None, 32)
        found = [tokens(serve(core, [GREEDY], 6)) for _ in range(2)]
        assert core.stats.num_prefix_hit_tokens > 0
    finally:
        core.close()
    monkeypatch.setattr(cache_sizing, "group_layers", one_group)
    alone = make(tmp_path, num_blocks=80)
    assert found == [tokens(serve(alone, [GREEDY], 6)) for _ in range(2)]


def test_a_sequence_holds_blocks_of_its_windows(olmo: Path) -> None:
    core = make(olmo, enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)
    core.add("long", GenerateRequest(tuple(range(60, 160)), params))
    held = []
    while core.has_work:
        core.step()
        held.append(core.blocks.pool.num_used_blocks)
    assert max(held[:6]) == 13 + 3 * 4, "of a prompt of 100 tokens, after each chunk"
    assert held[-2] == 16 + 3 * 5, "all of 127 tokens, and a window and a part in each other group"


def test_many_more_long_sequences_fit_into_the_same_memory(
    tmp_path: Path, add_tokenizer: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32,768 tokens, where five of six layers see 1,024: at most 1.1 times the least bytes."""
    sizes = {"num_hidden_layers": 12, "sliding_window": 1024, "max_position_embeddings": 32768}
    directory = save_family("Gemma 3 (text)", tmp_path, sliding_window_pattern=6, **sizes)
    add_tokenizer(directory)
    settings = {"num_blocks": None, "kv_cache_memory": 512 << 20, "max_model_len": 32768}
    fitting = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(cache_sizing, "group_layers", one_group)
        core = make(directory, **settings, block_size=16, max_num_seqs=256)
        facts = core.facts
        per_sequence = blocks_of_sequence(facts.config, 32768, facts.windows)
        fitting.append((facts.limits.num_blocks - 1) // per_sequence)
        if not patched:
            assert facts.windows == (None, *[1024] * 5)
            ideal = (2 * 32768 + 10 * 1024) * facts.block_bytes / 16 / 2
            assert per_sequence * facts.block_bytes <= 1.1 * ideal
    assert fitting[0] >= 4 * fitting[1] > 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kv_tiers": "host:1"}, id="tiers"),
        pytest.param({"use_buckets": False}, id="padded prompts"),
        pytest.param({"bucketing": BucketingConfig()}, id="buckets of the user"),
        pytest.param({"max_model_len": 33}, id="short sequences"),
    ],
)
def test_one_group_serves_where_several_do_not(olmo: Path, changes: dict[str, Any]) -> None:
    core = make(olmo, **changes)
    assert core.facts.windows == (None,)
    assert core.blocks.config.tokens_ahead is None


def test_a_cache_that_is_too_small_says_how_long_a_sequence_may_be(olmo: Path) -> None:
    with pytest.raises(ConfigError, match=r"for 4 block groups .*to 32, .*_batched_tokens \d+, or"):
        make(olmo, num_blocks=20)


def test_a_layer_sees_its_window_or_its_chunk() -> None:
    def layer(**changes: Any) -> LayerSpec:
        sizes = {"heads": 2, "kv_heads": 2, "key_width": 4, "value_width": 4}
        return LayerSpec(**{**sizes, **changes})

    without = LayerSpec.of_kind("attention")
    layers = [layer(window=8), layer(chunk=16), layer(window=40, chunk=20), layer(), without]
    assert seen_tokens(layers, 64) == [8, 16, 20, None, None]
    assert seen_tokens(layers, 16) == [8, None, None, None, None]
    assert seen_tokens([layer(window=8), without, layer(window=4)], 64) == [8, 4, 4]
    assert seen_tokens([without], 64) == [None]


def test_a_switch_of_models_makes_other_groups(olmo: Path, tiny_model: Path) -> None:
    core, expected = make(tiny_model), []
    for model in (olmo, tiny_model, olmo):
        following = EngineConfig(model=str(model), **{**SMALL, "num_blocks": 200})
        ModelSwitcher(core).reconfigure_engine(config_payload(following), stash_bytes=1 << 30)
        assert len(core.facts.windows) == (4 if model is olmo else 1)
        expected.append(tokens(serve(core, [GREEDY], 3)))
    assert expected[0] == expected[2] != expected[1]
