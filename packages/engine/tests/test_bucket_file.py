"""Bucket files: from the command that fits one to an engine that serves with it."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
import numpy as np
import pytest

from trencadis.bucketing import AxisConfig, BucketingConfig, read_bucket_file, write_bucket_file
from trencadis.bucketing.cli import main
from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner.grids import configured_grids, decode_gaps, prompt_gaps, small_grids
from trencadis.engine.runner.limits import ServingLimits

LIMITS = ServingLimits(
    max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4, block_size=8, num_blocks=60
)
SERVER = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 8}
FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in SERVER.items()]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(0).integers(1, 120, 300)
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i / 8},{length}\n" for i, length in enumerate(lengths))
    path.write_text("arrival,length\n" + rows)
    return path


def engine(model: Path, file: Path, **changes: object) -> EngineCore:
    """The engine of ``VLLM_BUCKETING_FROM_FILE=file engine-serve model``, with these limits."""
    settings = {"dtype": "float32", "num_blocks": 60, "warmup": "none", **SERVER, **changes}
    environ = {"VLLM_BUCKETING_FROM_FILE": str(file)}
    core = EngineCore(EngineConfig.from_env(environ, model=str(model), **settings))
    core.warm_up()
    return core


def serve_every_length(core: EngineCore, longest: int) -> None:
    lengths = [*range(1, longest, 5), longest]
    for length in lengths:
        core.add(str(length), GenerateRequest(tuple(range(length)), GREEDY))
    answered: list[str] = []
    while core.has_work:
        answered += [token.key for token in core.step()]
    assert sorted(answered) == sorted([str(length) for length in lengths] * 2)


@pytest.mark.parametrize("window", [[], ["--window", "1"]], ids=["alone", "batched"])
def test_a_server_with_a_fitted_file_has_no_bucket_miss(
    tiny_model: Path,
    trace: Path,
    tmp_path: Path,
    window: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "buckets.txt"
    assert main(["fit", str(trace), *window, *FLAGS, "--step", "8", "--output", str(file)]) == 0
    core = engine(tiny_model, file)
    assert [bucket.shape for bucket in core.executor.worker.grids.prompt] == list(
        read_bucket_file(file).prompt
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    serve_every_length(core, 120)
    assert core.stats.num_bucket_misses == 0


def test_a_server_with_smaller_limits_than_the_file_starts_and_says_what_it_leaves_out(
    tiny_model: Path, trace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A file for a server of 128 tokens a batch: this one exited with an error.
    file = tmp_path / "buckets.txt"
    assert (
        main(["fit", str(trace), "--window", "1", "--block-size", "8", "--output", str(file)]) == 0
    )
    core = engine(tiny_model, file)
    assert "prompt buckets in" in caplog.text
    assert "are above the limits (batch 4, query 32, context_blocks 16)" in caplog.text
    serve_every_length(core, 120)
    assert core.stats.num_bucket_misses == 0


def test_gaps_of_a_file_are_told_at_the_start_and_requests_are_served(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(1, 16, [0, 4])\n(2, 1, 60)\n")
    with caplog.at_level(logging.INFO):
        core = engine(tiny_model, file)
    assert (
        "prompts are computed in chunks of at most 16 tokens, the largest query bucket, instead of "
        "32" in caplog.text
    )
    assert (
        "no prompt bucket holds batch 0 to 1, query 0 to 16, context_blocks 5 to 16" in caplog.text
    )
    assert "no decode bucket holds batch 3 to 4, blocks 0 to 60" in caplog.text
    assert (
        "is a bucket miss, which is compiled in a shape of its own, run eagerly or rejected"
        in caplog.text
    )
    serve_every_length(core, 120)
    assert core.stats.num_bucket_misses > 0


def test_grids_of_settings_have_no_gap_unless_a_maximum_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for strategy in ("lin", "exp", "pad"):
        grids = configured_grids(BucketingConfig(strategy=strategy), LIMITS)
        assert (prompt_gaps(grids, LIMITS), decode_gaps(grids, LIMITS)) == ((), ())
    small = small_grids(LIMITS)
    assert (prompt_gaps(small, LIMITS), decode_gaps(small, LIMITS)) == ((), ())
    assert not caplog.records
    assert {bucket.shape[1] for bucket in small.prompt.buckets} == {32}
    long = small_grids(attrs.evolve(LIMITS, max_num_batched_tokens=200, max_model_len=256))
    assert {bucket.shape[1] for bucket in long.prompt.buckets} == {64, 128, 200}
    limited = BucketingConfig(prompt_context=AxisConfig(max=4), decode_batch=AxisConfig(max=2))
    grids = configured_grids(limited, LIMITS)
    assert prompt_gaps(grids, LIMITS)
    assert {gap.low[0] for gap in decode_gaps(grids, LIMITS)} == {3}
    assert len(caplog.records) == 2


def test_a_grid_of_block_lists_has_no_bucket_that_no_batch_needs() -> None:
    # One sequence has 16 blocks at most, wherever they lie; as a prefix it may reach block 60.
    grids = configured_grids(BucketingConfig(contiguous_pa=False), LIMITS)
    assert decode_gaps(grids, LIMITS) == ()
    assert grids.decode.find((1, 16)) is not None
    assert grids.decode.find((1, 60)).shape[0] > 1
    assert configured_grids(BucketingConfig(), LIMITS).decode.find((1, 60)).shape[0] == 1


def test_the_grids_of_a_server_survive_their_file(tmp_path: Path) -> None:
    made = configured_grids(BucketingConfig(strategy="lin"), LIMITS)
    file = str(tmp_path / "buckets.txt")
    write_bucket_file(file, prompt=made.prompt, decode=made.decode)
    read = configured_grids(BucketingConfig(bucket_file=file), LIMITS)
    assert (read.prompt.buckets, read.decode.buckets) == (made.prompt.buckets, made.decode.buckets)
