from __future__ import annotations

import logging
import pydoc
from typing import Any

import pytest

from trencadis.kvcache import (
    BlockPool,
    CacheConfig,
    DefragConfig,
    HostBlockPool,
    InvalidSetting,
    ceil_div,
)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", 1),
        ("num_blocks", -5),
        ("num_blocks", 2.5),
        ("num_blocks", True),
        ("block_size", 0),
        ("block_size", 24),
        ("block_size", -16),
        ("block_size", "16"),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("watermark", float("nan")),
        ("watermark", "0.1"),
        ("num_host_blocks", -1),
        ("enable_prefix_caching", 1),
        ("decode_buckets", (8, 8)),
        ("decode_buckets", (8, 4)),
        ("decode_buckets", (0, 4)),
    ],
)
def test_a_bad_setting_is_named_with_its_value(setting: str, value: object) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 16, setting: value}
    with pytest.raises(InvalidSetting, match=setting) as error:
        CacheConfig(**settings)
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("setting", "ends", "beyond"),
    [
        ("num_blocks", (2, 1 << 24), (1, (1 << 24) + 1)),
        ("num_host_blocks", (0, 1 << 24), (-1, (1 << 24) + 1)),
        ("block_size", (1, 1 << 24), (0, 1 << 25)),
        ("watermark", (0, 0.999), (-0.001, 1)),
        ("windows", ((1,), (None,) * 256, (None, 4, 4)), ((0,), (None,) * 257, (4, None), (4, 8))),
        ("windows", ((None, None, 4, 1),), ((), (4, None, 4), (True,))),
        ("tokens_ahead", (1, None), (0, 1.5)),
        ("decode_buckets", ((1, 2), ()), ((0, 1), (1, 1))),
    ],
)
def test_the_ends_of_a_setting_are_accepted_and_nothing_beyond(
    setting: str, ends: tuple[Any, ...], beyond: tuple[Any, ...]
) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 16}
    for value in ends:
        assert getattr(CacheConfig(**{**settings, setting: value}), setting) == value
    for value in beyond:
        with pytest.raises(InvalidSetting, match=f"{setting} must be"):
            CacheConfig(**{**settings, setting: value})


def test_what_is_not_set_has_its_documented_default() -> None:
    assert CacheConfig(num_blocks=8, block_size=16) == CacheConfig(
        num_blocks=8,
        block_size=16,
        watermark=0.01,
        num_host_blocks=0,
        enable_prefix_caching=True,
        windows=(None,),
        tokens_ahead=None,
        record_events=False,
        decode_buckets=(),
    )
    assert DefragConfig() == DefragConfig(
        enabled=True, warm_up=True, threshold=32, debug=False, keep_from=0.05
    )
    assert DefragConfig(threshold=0, keep_from=0).threshold == 0


def test_integers_of_numpy_are_kept_as_those_of_python() -> None:
    numpy = pytest.importorskip("numpy")
    config = CacheConfig(
        num_blocks=numpy.int64(8), block_size=numpy.int32(16), decode_buckets=numpy.array([4, 8])
    )
    assert type(config.num_blocks) is type(config.block_size) is int
    assert list(map(type, config.decode_buckets)) == [int, int]


@pytest.mark.parametrize(
    ("topics", "value"),
    [("buckets , defrag", True), ("defrag", True), ("defragment", False), ("", False)],
)
def test_plans_are_logged_where_the_list_of_topics_has_defrag(topics: str, value: bool) -> None:
    assert DefragConfig.from_env({"VLLM_DEBUG": topics}) == DefragConfig(debug=value)


def test_the_variables_of_seed_000_set_the_config() -> None:
    assert DefragConfig.from_env({}) == DefragConfig() == DefragConfig(threshold=32, keep_from=0.05)
    config = DefragConfig.from_env({"VLLM_DEFRAG_THRESHOLD": " 8 ", "VLLM_DEBUG": "defrag"})
    assert config == DefragConfig(threshold=8, debug=True)
    assert DefragConfig.from_env({"VLLM_DEFRAG_THRESHOLD": " "}) == DefragConfig()


@pytest.mark.parametrize(("text", "value"), [("true", True), (" No ", False), ("0", False)])
def test_defragmentation_and_its_warm_up_can_be_turned_off(text: str, value: bool) -> None:
    assert DefragConfig.from_env({"VLLM_DEFRAG": text}) == DefragConfig(enabled=value)
    assert DefragConfig.from_env({"VLLM_DEFRAG_WARMUP": text}) == DefragConfig(warm_up=value)


@pytest.mark.parametrize("value", ["1", "false", "maybe"])
def test_with_graphs_is_accepted_and_logged_as_without_effect(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trencadis.kvcache"):
        assert DefragConfig.from_env({"VLLM_DEFRAG_WITH_GRAPHS": value}) == DefragConfig()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("VLLM_DEFRAG_WITH_GRAPHS has no effect")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_DEFRAG_THRESHOLD", "many"),
        ("VLLM_DEFRAG_THRESHOLD", "-3"),
        ("VLLM_DEFRAG", "perhaps"),
        ("VLLM_DEFRAG_WARMUP", "2"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} .*'{value}'"):
        DefragConfig.from_env({name: value})


@pytest.mark.parametrize("setting", ["threshold", "keep_from"])
@pytest.mark.parametrize("value", [-1, float("nan"), "3"])
def test_a_bad_defrag_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=setting):
        DefragConfig(**{setting: value})


@pytest.mark.parametrize(
    ("dividend", "divisor", "quotient"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)]
)
def test_ceil_div_rounds_up(dividend: int, divisor: int, quotient: int) -> None:
    assert ceil_div(dividend, divisor) == quotient


@pytest.mark.parametrize("setting", ["num_blocks", "num_host_blocks"])
def test_a_thousand_million_blocks_are_refused_with_a_remedy(setting: str) -> None:
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 16, setting: 10**9}
    with pytest.raises(InvalidSetting, match=f"{setting} must be .* got 1000000000: .* larger blo"):
        CacheConfig(**settings)


@pytest.mark.parametrize("pool", [BlockPool, HostBlockPool])
@pytest.mark.parametrize("num_blocks", [10**9, -1, "8", 2.0, None])
def test_a_pool_of_a_wrong_size_is_refused(pool: Any, num_blocks: object) -> None:
    with pytest.raises(InvalidSetting, match="num_blocks must be an integer"):
        pool(num_blocks)


@pytest.mark.parametrize("buckets", [5, None, "48", [4, 4], [[4]], (1.5,)])
def test_decode_buckets_are_ascending_block_counts(buckets: Any) -> None:
    for build in (
        lambda: CacheConfig(num_blocks=8, block_size=16, decode_buckets=buckets),
        lambda: BlockPool(8, buckets),
    ):
        with pytest.raises(InvalidSetting, match="decode_buckets"):
            build()


def test_the_environment_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DEFRAG_THRESHOLD", "8")
    assert DefragConfig.from_env() == DefragConfig(threshold=8)
    monkeypatch.setenv("SECRET", "swordfish")
    assert "swordfish" not in pydoc.render_doc(DefragConfig)


@pytest.mark.parametrize("environ", ["VLLM_DEBUG=defrag", [], 5])
def test_an_environment_is_a_mapping(environ: Any) -> None:
    with pytest.raises(InvalidSetting, match="environ must be of type Mapping"):
        DefragConfig.from_env(environ)


def test_a_threshold_of_too_many_digits_is_named() -> None:
    assert DefragConfig.from_env({"VLLM_DEFRAG_THRESHOLD": "9" * 18}).threshold == 10**18 - 1
    with pytest.raises(InvalidSetting, match="VLLM_DEFRAG_THRESHOLD must be a number of blocks"):
        DefragConfig.from_env({"VLLM_DEFRAG_THRESHOLD": "9" * 19})
    with pytest.raises(InvalidSetting, match="VLLM_DEFRAG_THRESHOLD must be a number of blocks"):
        DefragConfig.from_env({"VLLM_DEFRAG_THRESHOLD": "9" * 5000})
