"""The grids of a serving engine: the documented logs, the plugin's defaults, full coverage."""

from __future__ import annotations

import itertools
import math
import operator
import tempfile
from collections.abc import Iterable
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
    CoverageGap,
    TrafficRecorder,
    decode_grid,
    prompt_grid,
    sequence_grid,
    write_bucket_file,
)
from trencadis.bucketing.serving_grids import grids as serving_grids
from trencadis.bucketing.strategies import STRATEGIES


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


# Settings of 16 sequences of 4,096 tokens, 2,048 tokens of a batch, 600 blocks of 128 tokens. The
# steps and the minima of lin, exp and pad are the plugin's (vllm_gaudi/extension/bucketing).
LOGGED = {
    "lin": (
        "bs:[1, 1, 16], query:[128, 128, 2048], blocks:[0, 1, 32]",
        "bs:[1, 32, 16], blocks:[1, 128, 600]",
        "bs:[1, 32, 16], seq:[128, 128, 4096]",
        "bs:[1, 128, 16], seq:[128, 128, 4096]",
    ),
    "exp": (
        "bs:[1, 2, 16, 5], query:[128, 128, 2048, 11], blocks:[0, 1, 32, 6]",
        "bs:[1, 2, 16, 5], blocks:[1, 16, 600, 11]",
        *["bs:[1, 2, 16, 5], seq:[128, 128, 4096, 13]"] * 2,
    ),
    "pad": (
        "bs:[1, 1, 16, 4, 25], query:[128, 128, 2048, 512, 25], blocks:[0, 2, 32, 16, 25]",
        "bs:[1, 2, 16, 4, 25], blocks:[128, 128, 600, 150, 25]",
        *["bs:[1, 2, 16, 4, 25], seq:[128, 128, 4096, 1024, 25]"] * 2,
    ),
    "fit": (
        "bs:[1, 1, 16, 5], query:[128, 128, 2048, 11], blocks:[0, 1, 32, 6]",
        "bs:[1, 1, 16, 5], blocks:[1, 1, 600, 11]",
        *["bs:[1, 1, 16, 5], seq:[128, 128, 4096, 13]"] * 2,
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_defaults_of_each_strategy_for_each_grid(strategy: str) -> None:
    config = BucketingConfig(strategy=strategy)
    limits = {"max_num_seqs": 16, "max_model_len": 4096, "block_size": 128}

    def traffic(*axes: str) -> TrafficRecorder:
        recorder = TrafficRecorder(axes)
        recorder.record((1,) * len(axes))
        return recorder

    sequences = traffic("batch", "seq")
    grids = (
        prompt_grid(
            config,
            max_num_batched_tokens=2048,
            traffic=traffic("batch", "query", "context_blocks"),
            **limits,
        ),
        decode_grid(config, num_blocks=600, traffic=traffic("batch", "blocks"), **limits),
        sequence_grid("prompt", config, traffic=sequences, **limits),
        sequence_grid("decode", config, traffic=sequences, **limits),
    )
    lines = [grid.describe()[0].partition(") ")[2] for grid in grids]
    assert lines == list(LOGGED[strategy])


@pytest.mark.parametrize(
    ("tokens", "limit"), [(1, 2), (2, 2), (4, 2), (5, 3), (2048, 11), (2049, 12)]
)
def test_the_query_has_a_bucket_per_doubling_and_two_at_least(tokens: int, limit: int) -> None:
    grid = prompt_grid(
        BucketingConfig(),
        max_model_len=4096,
        max_num_batched_tokens=tokens,
        max_num_seqs=1,
        block_size=1,
    )
    assert f"query:[1, 1, {tokens}, {limit}]" in grid.describe()[0]


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
RULES = [name for name, strategy in STRATEGIES.items() if strategy.fit is None]
"""The strategies that need no traffic."""

small = st.builds(
    AxisConfig,
    min=st.none() | st.integers(0, 9),
    step=st.none() | st.integers(1, 9),
    max=st.none() | st.integers(9, 30),
)
configs = st.builds(
    BucketingConfig,
    strategy=st.sampled_from(RULES),
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
    assert grid.coverage_gaps([grid.values(axis)[-1] for axis in grid.axes]) == ()
    block, model_len = limits["block_size"], limits["max_model_len"]
    batches, queries, contexts = (grid.values(axis) for axis in grid.axes)
    for context in range(model_len):
        blocks = math.ceil(context / block)
        for query in range(1, min(queries[-1], model_len - context) + 1):
            if blocks > contexts[-1]:
                continue
            assert grid.find((1, query, blocks)) is not None
            padded = least_at_or_above(queries, query) or 0
            for batch in range(1, batches[-1] + 1):
                wide = least_at_or_above(batches, batch) or 0
                fits = wide * padded <= limits["max_num_batched_tokens"] or wide == 1
                assert (grid.find((batch, query, blocks)) is not None) == fits


@settings(max_examples=60, deadline=None)
@given(configs, limits, st.integers(1, 40))
def test_every_reachable_decode_shape_has_a_bucket(
    config: BucketingConfig, limits: dict[str, int], num_blocks: int
) -> None:
    del limits["max_num_batched_tokens"]
    grid = decode_grid(config, num_blocks=num_blocks, **limits)
    assert grid.coverage_gaps([grid.values(axis)[-1] for axis in grid.axes]) == ()
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
    gaps = grid.coverage_gaps()
    assert gaps[0] == CoverageGap((0, 513, 0), (1, 2048, 0))
    assert {gap.low[1] for gap in gaps} == {513}


def test_the_gaps_of_a_grid_reach_to_the_limits_of_serving() -> None:
    config = BucketingConfig(prompt_batch=AxisConfig(max=2))
    grid = sequence_grid("prompt", config, max_num_seqs=8, max_model_len=256, block_size=128)
    assert {(gap.low[0], gap.high[0]) for gap in grid.coverage_gaps()} == {(3, 8)}


def test_a_minimum_above_the_limits_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    config = BucketingConfig(decode_blocks=AxisConfig(min=4096))
    grid = decode_grid(config, max_num_seqs=8, num_blocks=1519, block_size=128, max_model_len=4096)
    assert grid.values("blocks") == (1512, 1519)
    assert "blocks bucket min 4096 is lowered to 1511, because no size above 1519" in caplog.text


def test_a_cache_smaller_than_a_block_is_long_has_the_decode_buckets_of_the_plugin() -> None:
    # PaddingAwareBucketingStrategy.get_decode_cfgs: min becomes max(1, 60 - 128).
    config = BucketingConfig(strategy="pad")
    grid = decode_grid(config, max_num_seqs=16, num_blocks=60, block_size=128, max_model_len=4096)
    assert grid.values("blocks") == (1, 2, 4, 8, 16, 32, 60)
    assert len(grid) == 7 * len(grid.values("batch"))
    assert grid.coverage_gaps() == ()


def test_decode_pairs_may_be_limited_by_the_sequences_alone() -> None:
    config = BucketingConfig(contiguous_pa=False)
    limits = {"max_num_seqs": 64, "num_blocks": 100, "block_size": 128, "max_model_len": 4096}
    assert decode_grid(config, **limits).values("blocks")[-1] == 300
    grid = decode_grid(config, clamp=False, **limits)
    assert grid.values("blocks")[-1] == 64 * 32
    assert grid.coverage_gaps() == ()
    with pytest.raises(BucketingError, match="clamp must be True or False, got 0"):
        decode_grid(config, clamp=0, **limits)  # type: ignore[arg-type]


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
    # Lowered to 1,024 tokens and 8 blocks. 4 × 512 new tokens are over the budget. A chunk of 513
    # tokens or more can have 3 blocks of context, which pad to 7, but not 8.
    assert [bucket.shape for bucket in file.prompt()] == [
        *((1, 512, context) for context in (0, 7, 8)),
        *((1, 1024, context) for context in (0, 7)),
    ]


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
    assert len(grid) <= 4
    assert grid.values("context_blocks") == (32,)


def test_an_axis_without_recorded_traffic_uses_exp() -> None:
    traffic = TrafficRecorder(("blocks",))
    traffic.record((40,), 9)
    limits = {"max_num_seqs": 8, "num_blocks": 64, "block_size": 128, "max_model_len": 4096}
    grid = decode_grid(BucketingConfig(strategy="fit"), traffic=traffic, **limits)
    assert grid.values("blocks") == (40, 64)
    assert grid.values("batch") == (1, 2, 4, 8)
    traffic = TrafficRecorder(("batch",))
    traffic.record((5,), 9)
    grid = decode_grid(BucketingConfig(strategy="fit"), traffic=traffic, **limits)
    assert grid.values("batch") == (5, 8)


def test_fit_counts_what_is_as_large_as_a_limit_and_any_number_of_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 128}
    traffic = TrafficRecorder(("batch", "seq"))
    traffic.record((5, 128), 9)
    traffic.record((8, 1024), 1)
    grid = sequence_grid("prompt", BucketingConfig(strategy="fit"), traffic=traffic, **limits)
    assert grid.values("batch") == (5, 8)
    assert "ignored" not in caplog.text


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
        with pytest.raises(
            BucketingError, match=f"{name} must be an integer from 1 to 1099511627776, got {value}"
        ):
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


traffic_shapes = st.lists(st.tuples(*(st.integers(0, 6),) * 3), min_size=1, max_size=8)


@settings(max_examples=120)
@given(
    st.builds(
        BucketingConfig,
        strategy=st.sampled_from(sorted(STRATEGIES)),
        contiguous_pa=st.booleans(),
        **dict.fromkeys(
            ("prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_blocks"),
            small,
        ),
    ),
    limits,
    st.integers(1, 40),
    traffic_shapes,
)
def test_grids_survive_their_file(
    tmp_path_factory: pytest.TempPathFactory,
    config: BucketingConfig,
    limits: dict[str, int],
    num_blocks: int,
    shapes: list[tuple[int, int, int]],
) -> None:
    prompt_traffic = TrafficRecorder(("batch", "query", "context_blocks"))
    decode_traffic = TrafficRecorder(("batch", "blocks"))
    for shape in [*shapes, (1, 1, 0)]:
        prompt_traffic.record(shape)
        decode_traffic.record(shape[:2])
    path = str(tmp_path_factory.mktemp("files") / "buckets.txt")

    def both(config: BucketingConfig) -> tuple[BucketGrid, BucketGrid]:
        of_decode = {name: limits[name] for name in limits if name != "max_num_batched_tokens"}
        return (
            prompt_grid(config, traffic=prompt_traffic, **limits),
            decode_grid(config, num_blocks=num_blocks, traffic=decode_traffic, **of_decode),
        )

    try:
        prompt, decode = both(config)
    except BucketingError as error:
        assert "no recorded shape is within the limits" in str(error)
        return
    write_bucket_file(path, prompt=prompt, decode=decode)
    again = both(BucketingConfig(bucket_file=path, contiguous_pa=config.contiguous_pa))
    for made, read in zip((prompt, decode), again, strict=True):
        assert read.buckets == made.buckets
        assert read.coverage_gaps() == () or made.coverage_gaps() != ()
        for shape in itertools.product((0, 1, 2, 5, 30), repeat=len(made.axes)):
            assert read.find(shape) == made.find(shape)


def test_a_grid_with_over_a_thousand_buckets_survives_its_file(tmp_path: Path) -> None:
    limits = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 4,
        "block_size": 128,
    }
    made = prompt_grid(BucketingConfig(strategy="lin"), **limits)
    assert len(made) > 1000
    path = str(tmp_path / "buckets.txt")
    write_bucket_file(path, prompt=made)
    assert prompt_grid(BucketingConfig(bucket_file=path), **limits).buckets == made.buckets


@settings(max_examples=60)
@given(configs, limits, st.data())
def test_a_prompt_has_a_bucket_or_is_in_a_gap(
    config: BucketingConfig, limits: dict[str, int], data: st.DataObject
) -> None:
    # Also in a file that lists some buckets of the grid.
    grid = prompt_grid(config, **limits)
    kept = data.draw(st.sets(st.sampled_from(grid.buckets), min_size=1))
    block = limits["block_size"]
    found = _grid_of_file(kept, limits)
    gaps = found.coverage_gaps()
    longest = min(limits["max_num_batched_tokens"], limits["max_model_len"])
    for context in range(limits["max_model_len"]):
        blocks = math.ceil(context / block)
        for query in range(1, min(longest, limits["max_model_len"] - context) + 1):
            shape = (1, query, blocks)
            in_gap = any(
                all(map(operator.le, gap.low, shape)) and all(map(operator.le, shape, gap.high))
                for gap in gaps
            )
            assert (found.find(shape) is None) == in_gap


def _grid_of_file(kept: Iterable[Bucket], limits: dict[str, int]) -> BucketGrid:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "buckets.txt")
        write_bucket_file(path, prompt=kept)
        return prompt_grid(BucketingConfig(bucket_file=path), **limits)


def test_a_prompt_alone_keeps_the_length_of_the_only_bucket_that_holds_it(tmp_path: Path) -> None:
    # 4 × 512 padded tokens are over the budget of 1,024, but nothing else holds 129 tokens.
    grid = FromFile(tmp_path, "(1, 128, [0, 8])", "(4, 512, [0, 8])").prompt()
    assert grid.find((1, 129, 0)) == Bucket(grid.axes, (1, 512, 0))
    assert grid.find((2, 129, 0)) is None


def test_a_batch_is_not_padded_above_the_token_budget(tmp_path: Path) -> None:
    # The batch of 8 × 100 tokens fits the budget of 1,024, its only bucket has 8 × 512.
    file = FromFile(tmp_path, "(1, [128, 512], 8)", "(8, 512, 8)")
    assert file.prompt().find((8, 100, 0)) is None


@pytest.mark.parametrize(
    ("config", "variable"),
    [
        (BucketingConfig(prompt_query=AxisConfig(step=1), strategy="lin"), "PROMPT_QUERY"),
        (BucketingConfig(prompt_context=AxisConfig(step=1), strategy="lin"), "PROMPT_CTX"),
    ],
)
def test_a_grid_of_too_many_buckets_is_told_with_its_number(
    config: BucketingConfig, variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = prompt_grid(
        config,
        max_model_len=1400 if variable == "PROMPT_CTX" else 700,
        max_num_batched_tokens=700,
        max_num_seqs=8,
        block_size=10 if variable == "PROMPT_CTX" else 32,
    )
    (record,) = caplog.records
    assert f"the prompt grid has {len(grid):,} buckets" in record.getMessage()
    assert f"raise VLLM_{variable}_BUCKET_STEP, or choose the exp strategy" in record.getMessage()


@pytest.mark.parametrize("is_above", [False, True])
def test_every_kind_of_grid_is_told_where_it_has_too_many_buckets(
    is_above: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BucketingConfig(strategy="lin")
    limits = {"max_num_seqs": 4, "max_model_len": 1024, "block_size": 16}
    for make, variable in (
        (lambda: decode_grid(config, num_blocks=400, **limits), "DECODE_BLOCK"),
        (
            lambda: decode_grid(config, num_blocks=20, **{**limits, "max_num_seqs": 900}),
            "DECODE_BS",
        ),
        (lambda: sequence_grid("prompt", config, **limits), "PROMPT_QUERY"),
        (lambda: sequence_grid("decode", config, **limits), "DECODE_SEQ"),
        (
            lambda: prompt_grid(config, max_num_batched_tokens=8, **{**limits, "block_size": 8}),
            "PROMPT_CTX",
        ),
    ):
        caplog.clear()
        most = len(make()) - is_above
        monkeypatch.setattr(serving_grids, "MANY_BUCKETS", most)
        assert len(make()) == most + is_above
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == is_above
        assert all(f"raise VLLM_{variable}_BUCKET_STEP" in line for line in told)
        monkeypatch.undo()


def test_no_grid_has_buckets_for_batches_of_nothing() -> None:
    none = AxisConfig(min=0)
    for strategy in RULES:
        config = BucketingConfig(
            strategy=strategy,
            prompt_batch=none,
            prompt_query=none,
            decode_batch=none,
            decode_blocks=none,
            decode_seq=none,
        )
        for grid in (
            prompt_grid(config, **LIMITS),
            decode_grid(config, max_num_seqs=8, num_blocks=64, block_size=128, max_model_len=1024),
            sequence_grid("decode", config, max_num_seqs=8, max_model_len=512, block_size=128),
        ):
            assert grid.values(grid.axes[0])[0] > 0
            assert grid.values(grid.axes[1])[0] > 0
            assert grid.coverage_gaps() == ()


@pytest.mark.parametrize(
    ("name", "tokens", "blocks"),
    [("min", 33, 3), ("step", 48, 3), ("max", 64, 32), ("pad_max", 33, 3), ("pad_percent", 5, 5)],
)
def test_a_setting_of_the_sequence_length_is_one_of_blocks(
    name: str, tokens: int, blocks: int
) -> None:
    limits = {"max_num_seqs": 8, "num_blocks": 512, "block_size": 16, "max_model_len": 1024}

    def sizes(**axis: AxisConfig) -> tuple[int, ...]:
        return decode_grid(BucketingConfig(strategy="pad", **axis), **limits).values("blocks")

    in_tokens = sizes(decode_seq=AxisConfig(**{name: tokens}))
    assert in_tokens == sizes(decode_blocks=AxisConfig(**{name: blocks})) != sizes()


def test_arguments_of_the_wrong_type_are_an_error() -> None:
    limits = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 128}
    for make in (
        lambda: prompt_grid({}, max_num_batched_tokens=8, **limits),  # type: ignore[arg-type]
        lambda: decode_grid(BucketingConfig(), num_blocks=8, traffic=3, **limits),  # type: ignore[arg-type]
        lambda: sequence_grid("decode", None, **limits),  # type: ignore[arg-type]
    ):
        with pytest.raises(BucketingError, match="must be of type"):
            make()
    with pytest.raises(BucketingError, match="phase must be one of prompt, decode, got 'prefill'"):
        sequence_grid("prefill", BucketingConfig(), **limits)  # type: ignore[arg-type]
    with pytest.raises(
        BucketingError, match=r"block_size must be an integer .*, got an integer of 16610 bits"
    ):
        sequence_grid("decode", BucketingConfig(), **{**limits, "block_size": 10**5000})


def test_prompts_without_context_have_their_own_buckets_where_a_context_has_one_block() -> None:
    grid = prompt_grid(
        BucketingConfig(),
        max_model_len=100,
        max_num_batched_tokens=100,
        max_num_seqs=1,
        block_size=128,
    )
    assert grid.values("context_blocks") == (0, 1)


def test_lists_of_blocks_have_no_bucket_that_no_batch_fills() -> None:
    config = BucketingConfig(strategy="lin", contiguous_pa=False)
    grid = decode_grid(config, max_num_seqs=4, num_blocks=64, block_size=8, max_model_len=64)
    # A sequence has 1 to 8 blocks, so a batch of 2 at most 16.
    assert [bucket.shape for bucket in grid] == [
        *((1, 1), (1, 2), (1, 4), (1, 8)),
        *((2, 2), (2, 4), (2, 8), (2, 16)),
        *((4, 4), (4, 8), (4, 16), (4, 24), (4, 32)),
    ]


def test_no_query_is_longer_than_the_model() -> None:
    grid = prompt_grid(BucketingConfig(), **{**LIMITS, "max_model_len": 1000})
    assert grid.values("query")[-1] == 1000


def test_a_smallest_batch_above_one_keeps_to_the_token_budget(tmp_path: Path) -> None:
    config = BucketingConfig.from_env({"VLLM_PROMPT_BS_BUCKET_MIN": "4"})
    limits = {"max_model_len": 2048, "max_num_seqs": 16, "block_size": 128}
    grid = prompt_grid(config, max_num_batched_tokens=2048, **limits)
    assert grid.find((3, 512, 0)) == Bucket(grid.axes, (4, 512, 0))
    assert grid.find((1, 2000, 0)) == Bucket(grid.axes, (1, 2048, 0))
    assert grid.find((3, 2000, 0)) is None
    assert grid.coverage_gaps() == ()
    file = FromFile(tmp_path, "(4, [256, 4096], 0)")
    assert [bucket.shape for bucket in file.prompt()] == [(1, 1024, 0), (4, 256, 0)]


def test_sizes_of_a_file_that_are_lowered_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = FromFile(tmp_path, "(1, [128, 4096], [0, 8])", "(8, 1, 64)")
    assert file.prompt().values("query") == (128, 1024)
    (record,) = caplog.records
    assert "2 of the 4 prompt buckets" in record.getMessage()
    assert "and lowered to them, and 0 are left out" in record.getMessage()
    caplog.clear()
    file.decode()
    assert not caplog.records


@settings(max_examples=60, deadline=None)
@given(
    configs,
    limits,
    st.sampled_from(["images", "adapter"]),
    st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True).map(sorted),
    st.data(),
)
def test_a_caller_adds_a_named_axis_to_both_grids(
    config: BucketingConfig,
    limits: dict[str, int],
    name: str,
    sizes: list[int],
    data: st.DataObject,
) -> None:
    """Such as the images of a batch, or the largest rank of its adapters."""
    of_decodes = {key: size for key, size in limits.items() if key != "max_num_batched_tokens"}
    both = (prompt_grid(config, **limits), decode_grid(config, num_blocks=40, **of_decodes))
    for base, phase in zip(both, ("prompt", "decode"), strict=True):
        wider = BucketGrid.from_shapes(
            (*base.axes, name),
            [(*bucket.shape, size) for bucket in base for size in sizes],
            phase=phase,
        )
        assert wider.axes == (*base.axes, name)
        assert wider.values(name) == tuple(sizes)
        assert len(wider) == len(base) * len(sizes)
        assert f"Generated {len(wider)} {phase} buckets" in wider.describe()[-1]
        shape = tuple(data.draw(st.integers(0, base.values(axis)[-1] + 1)) for axis in base.axes)
        needed = data.draw(st.integers(0, sizes[-1] + 1))
        found = wider.find((*shape, needed))
        if base.find(shape) is None or needed > sizes[-1]:
            assert found is None
            assert all(map(operator.ge, wider.fallback((*shape, needed)).shape, (*shape, needed)))
        else:
            assert found is not None
            assert found[name] == least_at_or_above(tuple(sizes), needed)
            assert Bucket(base.axes, found.shape[:-1]) in base.buckets
            assert all(map(operator.ge, found.shape, (*shape, needed)))
        recorder = TrafficRecorder(wider.axes)
        recorder.record((*shape, needed))
        assert recorder.shapes()[0].tolist() == [[*shape, needed]]
