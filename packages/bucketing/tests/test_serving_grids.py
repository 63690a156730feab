"""The grids of a serving engine: the documented logs, the plugin's defaults, full coverage."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import (
    AxisConfig,
    Bucket,
    BucketGrid,
    BucketingConfig,
    BucketingError,
    TrafficRecorder,
    decode_grid,
    prompt_grid,
    sequence_grid,
)


def batches_of(*groups: tuple[int, range]) -> str:
    return ", ".join(f"({batch}, {seq})" for batch, seqs in groups for seq in seqs)


def test_the_log_lines_of_the_documentation() -> None:
    # Page "Bucketing Mechanism" of the plugin's documentation: 24 prompt and 48 decode buckets.
    config = BucketingConfig(strategy="lin")
    prompt = sequence_grid("prompt", config, max_num_seqs=4, max_model_len=1024, block_size=128)
    seqs = range(128, 1025, 128)
    assert prompt.describe() == (
        "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]",
        f"Generated 24 prompt buckets: [{batches_of((1, seqs), (2, seqs), (4, seqs))}]",
    )
    decode = sequence_grid("decode", config, max_num_seqs=4, max_model_len=2048, block_size=128)
    seqs = range(128, 2049, 128)
    assert decode.describe() == (
        "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]",
        f"Generated 48 decode buckets: [{batches_of((1, seqs), (2, seqs), (4, seqs))}]",
    )
    # The same page: 3 sequences of up to 412 tokens, prefilled, then decoded.
    names = ("batch", "seq")
    assert prompt.find((3, 412)) == Bucket(names, (4, 512))
    path = [decode.find(shape) for shape in ((3, 412), (2, 412), (3, 513))]
    assert path == [Bucket(names, shape) for shape in ((4, 512), (2, 512), (4, 640))]


def test_settings_of_a_published_server_log() -> None:
    # tests/unit_tests/test_bucketing.py of the plugin, from a log of Qwen3-32B on two Gaudis.
    config = BucketingConfig(contiguous_pa=False)
    decode = decode_grid(
        config, max_num_seqs=256, num_blocks=3593, block_size=128, max_model_len=91_964
    )
    assert decode.describe()[0] == (
        "Decode bucket config (min, step, max_warmup, limit) "
        "bs:[1, 2, 256, 9], blocks:[1, 256, 10779, 15]"
    )
    assert decode.values("batch") == (1, 2, 4, 8, 14, 24, 42, 78, 140, 256)
    prompt = prompt_grid(
        config,
        max_model_len=91_964,
        max_num_batched_tokens=2048,
        max_num_seqs=1,
        block_size=128,
    )
    # The plugin stops at 702 blocks of context; a chunk of one token can have 719 behind it.
    assert prompt.describe()[0] == (
        "Prompt bucket config (min, step, max_warmup, limit) "
        "bs:[1, 2, 1, 1], query:[128, 128, 2048, 11], blocks:[0, 1, 719, 11]"
    )


def test_defaults_of_the_padding_aware_strategy() -> None:
    # tests/unit_tests/test_bucketing.py of the plugin, but for the reach of the context.
    prompt = prompt_grid(
        BucketingConfig(strategy="pad"),
        max_model_len=4096,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        block_size=128,
    )
    assert prompt.describe()[0] == (
        "Prompt bucket config (min, step, max_warmup, pad_max, pad_percent) "
        "bs:[1, 1, 16, 4, 25], query:[128, 128, 2048, 512, 25], blocks:[0, 2, 32, 16, 25]"
    )


def least_at_or_above(values: tuple[int, ...], size: int) -> int | None:
    return next((value for value in values if value >= size), None)


limits = st.fixed_dictionaries(
    {
        "max_model_len": st.integers(1, 60),
        "max_num_batched_tokens": st.integers(1, 40),
        "max_num_seqs": st.integers(1, 6),
        "block_size": st.integers(1, 8),
    }
)
small = st.builds(
    AxisConfig,
    min=st.none() | st.integers(0, 9),
    step=st.none() | st.integers(1, 9),
    max=st.none() | st.integers(9, 30),
)
configs = st.builds(
    BucketingConfig,
    strategy=st.sampled_from(["exp", "lin", "pad"]),
    contiguous_pa=st.booleans(),
    **dict.fromkeys(
        ("prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_blocks"), small
    ),
)


@settings(max_examples=60, deadline=None)
@given(configs, limits)
def test_every_reachable_prompt_shape_has_a_bucket(
    config: BucketingConfig, limits: dict[str, int]
) -> None:
    grid = prompt_grid(config, **limits)
    assert grid.coverage_gaps() == ()
    block, model_len = limits["block_size"], limits["max_model_len"]
    batches, queries, contexts = (grid.values(axis) for axis in grid.axes)
    alone = least_at_or_above(batches, 1)
    for context in range(model_len):
        blocks = math.ceil(context / block)
        for query in range(1, min(queries[-1], model_len - context) + 1):
            if blocks > contexts[-1]:
                continue
            assert grid.find((1, query, blocks)) is not None
            padded = least_at_or_above(queries, query) or 0
            for batch in range(1, batches[-1] + 1):
                wide = least_at_or_above(batches, batch) or 0
                fits = wide * padded <= limits["max_num_batched_tokens"] or wide == alone
                assert (grid.find((batch, query, blocks)) is not None) == fits


@settings(max_examples=60, deadline=None)
@given(configs, limits, st.integers(1, 40))
def test_every_reachable_decode_shape_has_a_bucket(
    config: BucketingConfig, limits: dict[str, int], num_blocks: int
) -> None:
    del limits["max_num_batched_tokens"]
    grid = decode_grid(config, num_blocks=num_blocks, **limits)
    assert grid.coverage_gaps() == ()
    batches, counts = (grid.values(axis) for axis in grid.axes)
    most = math.ceil(limits["max_model_len"] / limits["block_size"])
    for batch, blocks in itertools.product(range(1, batches[-1] + 1), range(1, counts[-1] + 1)):
        if config.contiguous_pa or batch <= blocks <= batch * most:
            assert grid.find((batch, blocks)) is not None
    if config.decode_blocks.max is None and config.contiguous_pa:
        assert counts[-1] == num_blocks


def test_a_range_that_ends_below_max_gets_max() -> None:
    config = BucketingConfig(strategy="lin")
    grid = sequence_grid("prompt", config, max_num_seqs=3, max_model_len=1000, block_size=128)
    assert grid.values("seq") == (128, 256, 384, 512, 640, 768, 896, 1000)
    assert grid.values("batch") == (1, 2, 3)


def test_a_maximum_of_the_user_is_kept() -> None:
    config = BucketingConfig(prompt_query=AxisConfig(max=512), prompt_batch=AxisConfig(max=100))
    grid = prompt_grid(
        config, max_model_len=4096, max_num_batched_tokens=2048, max_num_seqs=8, block_size=128
    )
    assert grid.values("query")[-1] == 512
    assert grid.values("batch")[-1] == 8
    assert grid.find((1, 513, 0)) is None
    assert (1, 4096, 32) in grid.coverage_gaps(limits=(1, 4096, 32))


def test_a_minimum_above_the_limits_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    config = BucketingConfig(decode_blocks=AxisConfig(min=4096))
    grid = decode_grid(config, max_num_seqs=8, num_blocks=1519, block_size=128, max_model_len=4096)
    assert grid.values("blocks") == (1519,)
    assert "blocks bucket min 4096 is lowered to 1519, the largest size" in caplog.text


def test_each_phase_can_have_its_own_strategy() -> None:
    config = BucketingConfig(strategy="exp", prompt_strategy="lin", decode_strategy="pad")
    limits = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 128}
    prompt = prompt_grid(config, max_num_batched_tokens=1024, **limits)
    assert "(min, step, max_warmup) " in prompt.describe()[0]
    assert "pad_percent" in decode_grid(config, num_blocks=64, **limits).describe()[0]


def test_more_context_costs_more_and_so_does_padding() -> None:
    grid = prompt_grid(
        BucketingConfig(),
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
        block_size=128,
    )
    assert grid.find((1, 100, 0)) == Bucket(grid.axes, (1, 128, 0))
    assert grid.padding((1, 128, 0)) == 0
    assert 0 < grid.padding((1, 128, 3)) < grid.padding((1, 100, 3))


class FromFile:
    """A bucket file, and the grids made from it."""

    def __init__(self, folder: Path, *lines: str) -> None:
        path = folder / "buckets.txt"
        path.write_text("\n".join(lines))
        self.config = BucketingConfig(bucket_file=str(path))

    def prompt(self) -> BucketGrid:
        return prompt_grid(
            self.config,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=8,
            block_size=128,
        )

    def decode(self) -> BucketGrid:
        return decode_grid(
            self.config, max_num_seqs=8, num_blocks=64, block_size=128, max_model_len=1024
        )


def test_a_bucket_file_makes_both_grids(tmp_path: Path) -> None:
    file = FromFile(tmp_path, "([1, 2], [128, 512], [0, 4])", "([4, 64], 1, [32, 512])")
    assert [bucket.shape for bucket in file.prompt()] == [
        *itertools.product((1, 2), (128, 512), (0, 4))
    ]
    # Clipped to what there is: 8 sequences, 64 blocks.
    assert [bucket.shape for bucket in file.decode()] == [*itertools.product((4, 8), (32, 64))]


def test_shapes_of_a_bucket_file_keep_the_limits(tmp_path: Path) -> None:
    file = FromFile(tmp_path, "([1, 4], [512, 4096], [0, 7, 99])")
    # 4 × 512 new tokens are over the budget; 512 behind 8 blocks are over the model's length,
    # while 7 blocks may hold as little as 6 and a token.
    assert [bucket.shape for bucket in file.prompt()] == [(1, 512, 0), (1, 1024, 0)]


def test_a_phase_that_the_file_does_not_list_uses_its_strategy(tmp_path: Path) -> None:
    file = FromFile(tmp_path, "(1, 128, 0)")
    assert len(file.prompt()) == 1
    assert "Decode bucket config" in file.decode().describe()[0]


def test_a_bucket_file_for_a_sequence_grid_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="unset VLLM_BUCKETING_FROM_FILE"):
        sequence_grid(
            "prompt",
            FromFile(tmp_path, "(1, 128, 0)").config,
            max_num_seqs=8,
            max_model_len=1024,
            block_size=128,
        )


def recorded() -> TrafficRecorder:
    traffic = TrafficRecorder(("batch", "query", "context_blocks"))
    traffic.record((3, 700, 0), 50)
    traffic.record((1, 100, 0), 30)
    traffic.record((1, 130, 5), 1)
    traffic.record((1, 9999, 0), 2)
    return traffic


LIMITS = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 8,
    "block_size": 128,
}


def test_fit_follows_the_traffic(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = str(tmp_path / "traffic.json")
    recorded().save(saved)
    grid = prompt_grid(BucketingConfig(strategy="fit", prompt_traffic=saved), **LIMITS)
    assert grid.coverage_gaps() == ()
    assert grid.find((3, 700, 0)) == Bucket(grid.axes, (3, 768, 0))
    assert grid.values("batch") == (1, 3, 8)
    assert grid.values("query") == (128, 256, 768, 4096)
    assert grid.values("context_blocks") == (0, 5, 32)
    assert "2 of 83 recorded shapes are above the limits" in caplog.text
    again = prompt_grid(BucketingConfig(strategy="fit"), traffic=recorded(), **LIMITS)
    assert again.buckets == grid.buckets


def test_fit_keeps_to_the_budget_and_the_minimum() -> None:
    config = BucketingConfig(
        strategy="fit",
        prompt_batch=AxisConfig(limit=2),
        prompt_query=AxisConfig(limit=2, min=512),
        prompt_context=AxisConfig(limit=1),
    )
    grid = prompt_grid(config, traffic=recorded(), **LIMITS)
    assert grid.values("query")[0] >= 512
    assert len(grid.values("batch")) * len(grid.values("query")) <= 4
    assert grid.values("context_blocks") == (32,)


def test_an_axis_without_recorded_traffic_uses_exp() -> None:
    traffic = TrafficRecorder(("blocks",))
    traffic.record((40,), 9)
    limits = {"max_num_seqs": 8, "num_blocks": 64, "block_size": 128, "max_model_len": 4096}
    grid = decode_grid(BucketingConfig(strategy="fit"), traffic=traffic, **limits)
    assert grid.values("blocks") == (40, 64)
    assert grid.values("batch") == (1, 2, 4, 8)


def test_fit_without_usable_traffic_is_an_error_with_the_remedy() -> None:
    config = BucketingConfig(decode_strategy="fit")
    limits = {"max_num_seqs": 8, "num_blocks": 64, "block_size": 128, "max_model_len": 4096}
    with pytest.raises(BucketingError, match="set VLLM_DECODE_BUCKETING_TRAFFIC to a file"):
        decode_grid(config, **limits)
    with pytest.raises(BucketingError, match="record the axes of the grid"):
        decode_grid(config, traffic=TrafficRecorder(("seq",)), **limits)
    past = TrafficRecorder(("blocks",))
    past.record((65,))
    with pytest.raises(BucketingError, match="within the limits of the grid: raise the max of"):
        decode_grid(config, traffic=past, **limits)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_a_limit_that_is_not_a_positive_integer_is_an_error(name: str, value: object) -> None:
    limits = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 128, name: value}
    for make in (
        lambda: sequence_grid("decode", BucketingConfig(), **limits),
        lambda: prompt_grid(BucketingConfig(), max_num_batched_tokens=1, **limits),
        lambda: decode_grid(BucketingConfig(), num_blocks=1, **limits),
    ):
        with pytest.raises(BucketingError, match=f"{name} {value} must be an integer"):
            make()


def test_a_maximum_of_0_is_an_error() -> None:
    config = BucketingConfig(prompt_batch=AxisConfig(max=0))
    with pytest.raises(BucketingError, match="batch bucket max 0 leaves nothing to run"):
        prompt_grid(config, **LIMITS)


@pytest.mark.parametrize(
    ("config", "variable"),
    [
        (BucketingConfig(bucket_file="/no/such/file"), "VLLM_BUCKETING_FROM_FILE"),
        (
            BucketingConfig(strategy="fit", decode_traffic="/no/such/file"),
            "VLLM_DECODE_BUCKETING_TRAFFIC",
        ),
    ],
)
def test_missing_file_is_an_error_about_the_setting_that_names_it(
    config: BucketingConfig, variable: str
) -> None:
    with pytest.raises(BucketingError, match=f"{variable}=/no/such/file"):
        decode_grid(config, max_num_seqs=4, num_blocks=64, block_size=16, max_model_len=256)
