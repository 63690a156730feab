from __future__ import annotations

from typing import Any

import pytest

from trencadis.kvcache import CacheConfig, InvalidSetting, UnsupportedLayer, require_paged_attention


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


def test_layers_of_full_attention_are_accepted() -> None:
    require_paged_attention(["full_attention", "attention"])
    require_paged_attention([])


@pytest.mark.parametrize("kind", ["sliding_attention", "mamba", "linear_attention", "recurrent"])
def test_other_layers_are_refused_by_number_and_kind(kind: str) -> None:
    with pytest.raises(UnsupportedLayer, match=f"layer 1 is '{kind}'"):
        require_paged_attention(["full_attention", kind])
