"""The plugin's bucket variables and the engine's bucket flags, from the start to what is served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trencadis.engine import ConfigError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import DecodeShape
from trencadis.warmup import Phase

SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 61,
    "warmup": "none",
    "use_buckets": True,
}
COMMON = tuple(range(40, 80))
PROMPTS = [(5,), tuple(range(33)), tuple(range(70)), *((*COMMON, i) for i in range(4))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def started(model: Path, environ: dict[str, str], **changes: object) -> EngineCore:
    core = EngineCore(EngineConfig.from_env(environ, model=str(model), **{**SMALL, **changes}))
    core.warm_up()
    return core


def serve(core: EngineCore) -> dict[str, list[int]]:
    """The tokens of every prompt; the first one leaves its blocks to those that share them."""
    tokens: dict[str, list[int]] = {}
    for batch in ({"first": COMMON}, {str(i): prompt for i, prompt in enumerate(PROMPTS)}):
        for key, prompt in batch.items():
            core.add(key, GenerateRequest(prompt, GREEDY))
        while core.has_work:
            for token in core.step():
                tokens.setdefault(token.key, []).append(token.token_id)
    return tokens


def decode_shapes(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Rows, prefix blocks and gathered blocks of every decode pass from now on."""
    seen: list[tuple[int, int, int]] = []
    run = core.executor.worker.runner.forward_runner.run

    def note(batch: ModelInput) -> object:
        if isinstance(batch.shape, DecodeShape):
            seen.append((batch.shape.batch, batch.shape.blocks, batch.shape.extra))
        return run(batch)

    monkeypatch.setattr(core.executor.worker.runner.forward_runner, "run", note)
    return seen


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return serve(started(tiny_model, {}, use_buckets=False))


@pytest.mark.parametrize(
    "environ",
    [
        {"VLLM_BUCKETING_STRATEGY": "exp"},
        {"VLLM_EXPONENTIAL_BUCKETING": "true"},
        {"VLLM_CONTIGUOUS_PA": "true"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_a_variable_with_the_plugins_default_replaces_the_small_grid(
    tiny_model: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        chosen, default = started(tiny_model, environ), started(tiny_model, {})
    assert (
        chosen.executor.worker.grids.decode.buckets != default.executor.worker.grids.decode.buckets
    )
    assert "Prompt bucket config (min, step, max_warmup, limit) bs:[1, 2, 4, 3]" in caplog.text


def test_a_default_start_says_how_its_buckets_are_made(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = started(tiny_model, {}, device="cpu")
    lines = [message for message in caplog.messages if "bucket" in message]
    prompt, decode = core.executor.worker.grids.prompt, core.executor.worker.grids.decode
    assert lines[:4] == [
        "Prompt bucket config (min, step, max_warmup) bs:[1, 1, 1], query:[32, 32, 32], "
        "blocks:[0, 1, 0]",
        f"Generated {len(prompt)} prompt buckets: {[bucket.shape for bucket in prompt.buckets]}",
        "Decode bucket config (min, step, max_warmup) bs:[1, 4, 4], blocks:[4, x4, 61]",
        f"Generated {len(decode)} decode buckets: {[bucket.shape for bucket in decode.buckets]}",
    ]


@pytest.mark.parametrize("use_buckets", [True, False])
def test_without_contiguous_attention_decode_reads_its_own_blocks_only(
    tiny_model: Path,
    expected: dict[str, list[int]],
    use_buckets: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = started(tiny_model, {"VLLM_CONTIGUOUS_PA": "false"}, use_buckets=use_buckets)
    seen = decode_shapes(core, monkeypatch)
    assert serve(core) == expected
    assert seen
    assert {prefix for _, prefix, _ in seen} == {0}, "nothing is read in place"
    assert core.stats.num_bucket_misses == 0
    assert "VLLM_CONTIGUOUS_PA" not in caplog.text
    monkeypatch.undo()
    contiguous = started(tiny_model, {"VLLM_CONTIGUOUS_PA": "true"}, use_buckets=use_buckets)
    seen = decode_shapes(contiguous, monkeypatch)
    assert serve(contiguous) == expected
    assert 0 not in {prefix for _, prefix, _ in seen}


def test_a_sequence_in_high_blocks_stays_a_batch_of_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its blocks are few, wherever they lie: a contiguous read would reach to block 50.
    core = started(tiny_model, {"VLLM_CONTIGUOUS_PA": "false"}, max_num_seqs=4)
    for _ in range(50):
        core.blocks.pool.allocate()
    seen = decode_shapes(core, monkeypatch)
    core.add("a", GenerateRequest((5, 6, 7), GREEDY))
    while core.has_work:
        core.step()
    assert {(rows, blocks) for rows, _, blocks in seen} == {(1, 1)}


def test_lists_of_blocks_shared_beyond_every_bucket_are_divided(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"VLLM_CONTIGUOUS_PA": "false", "VLLM_DECODE_BLOCK_BUCKET_MAX": "12"}
    core = started(tiny_model, environ)
    seen = decode_shapes(core, monkeypatch)
    for i in range(4):
        core.add(str(i), GenerateRequest((*COMMON, i), GREEDY))  # six blocks each
    while core.has_work:
        core.step()
    assert core.stats.num_bucket_misses == 0
    assert max(blocks for _, _, blocks in seen) == 12


def test_lengths_of_decodes_in_tokens_become_blocks_and_that_is_said_once(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {
        "VLLM_BUCKETING_STRATEGY": "lin",
        "VLLM_DECODE_SEQ_BUCKET_MIN": "16",
        "VLLM_DECODE_SEQ_BUCKET_STEP": "32",
        "VLLM_DECODE_SEQ_BUCKET_MAX": "96",
    }
    core = started(tiny_model, environ)
    assert core.executor.worker.grids.decode.values("blocks") == (2, *range(4, 49, 4))
    said = [message for message in caplog.messages if "VLLM_DECODE_SEQ_BUCKET_*" in message]
    assert said == [
        "VLLM_DECODE_SEQ_BUCKET_* are tokens of one sequence and are read as blocks of 8 tokens, "
        "the largest for each of 4 sequences: VLLM_DECODE_BLOCK_BUCKET_MIN=2 "
        "VLLM_DECODE_BLOCK_BUCKET_STEP=4 VLLM_DECODE_BLOCK_BUCKET_MAX=48"
    ]
    caplog.clear()
    blocks = {
        name.replace("SEQ", "BLOCK"): str(int(value) // 8)
        for name, value in environ.items()
        if "SEQ" in name
    }
    both = started(tiny_model, {**environ, **blocks})
    assert both.executor.worker.grids.decode.values("blocks")[-1] == 12, (
        "settings in blocks come first"
    )
    assert "VLLM_DECODE_SEQ_BUCKET_*" not in caplog.text


# The grids of batch size and sequence length.

SEED_002 = {"VLLM_PROMPT_SEQ_BUCKET_MAX": "1024"}
SEQUENCES = {
    "bucket_grid": "seq",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2048,
    "block_size": 128,
    "num_blocks": None,
}
LENGTHS = {"prompt": range(128, 1025, 128), "decode": range(128, 2049, 128)}
LINES = [
    line
    for phase, config in (
        (
            "prompt",
            "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]",
        ),
        (
            "decode",
            "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]",
        ),
    )
    for line in (
        config,
        f"Generated {3 * len(LENGTHS[phase])} {phase} buckets: "
        f"{[(batch, length) for batch in (1, 2, 4) for length in LENGTHS[phase]]}",
    )
]
"""Seed 002, lines 21 to 24: 24 prompt buckets and 48 decode buckets."""


@pytest.fixture(scope="module")
def long_model(make_tiny_model: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=2048)


def buckets_in_use(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Each change of the bucket that batches are padded to, from now on."""
    seen: list[tuple[str, object]] = []
    buckets = core.executor.worker.runner.buckets
    bucket_of = buckets.find

    def note(phase: Phase, size: tuple[int, ...]) -> tuple[int, ...]:
        found = bucket_of(phase, size)
        if not seen or seen[-1] != (phase.value, found):
            seen.append((phase.value, found))
        return found

    monkeypatch.setattr(buckets, "find", note)
    return seen


def test_the_grids_of_seed_002_can_be_served_with(
    long_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = started(long_model, SEED_002, **SEQUENCES)
    assert [message for message in caplog.messages if "bucket" in message][:4] == LINES
    prompts = [tuple(range(i, i + 206)) * 2 for i in range(3)]  # 412 tokens each
    for ends, buckets in (
        (
            (30, 110, 110),
            [
                ("Prompt", (4, 512)),
                ("Decode", (4, 512)),
                ("Decode", (2, 512)),
                ("Decode", (2, 640)),
            ],
        ),
        ((110, 110, 110), [("Prompt", (4, 512)), ("Decode", (4, 512)), ("Decode", (4, 640))]),
    ):
        core.blocks.reset_prefix_cache()
        seen = buckets_in_use(core, monkeypatch)
        for i, (prompt, length) in enumerate(zip(prompts, ends, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            core.add(str(i), GenerateRequest(prompt, params))
        while core.has_work:
            core.step()
        assert seen == buckets
        monkeypatch.undo()
    assert core.stats.num_bucket_misses == 0


def test_a_grid_of_sequence_lengths_gives_the_same_tokens(
    tiny_model: Path, expected: dict[str, list[int]]
) -> None:
    """Chunks with context and shared blocks included."""
    core = started(tiny_model, {}, bucket_grid="seq")
    assert (
        core.executor.worker.grids.prompt.axes
        == core.executor.worker.grids.decode.axes
        == ("batch", "seq")
    )
    assert serve(core) == expected
    assert core.stats.num_bucket_misses == 0


def test_a_grid_of_sequence_lengths_takes_the_strategy_that_is_set(tiny_model: Path) -> None:
    """``lin``, that of seed 002, where no variable names another."""
    longest = {"VLLM_DECODE_SEQ_BUCKET_MAX": "64"}
    for environ, strategy in (
        (longest, "lin"),
        ({**longest, "VLLM_BUCKETING_STRATEGY": "exp"}, "exp"),
        ({**longest, "VLLM_EXPONENTIAL_BUCKETING": "true"}, "exp"),
    ):
        config = EngineConfig.from_env(environ, model=str(tiny_model), bucket_grid="seq")
        assert config.bucketing is not None
        assert config.bucketing.strategy == strategy


def test_a_variable_chooses_the_grid_of_the_seeds(tiny_model: Path) -> None:
    environ = {"VLLM_BUCKETING_GRID": "seq", "VLLM_DECODE_SEQ_BUCKET_MAX": "64"}
    core = started(tiny_model, environ)
    assert core.executor.worker.grids.decode.axes == ("batch", "seq")
    config = EngineConfig.from_env(environ, model=str(tiny_model))
    assert config.bucketing is not None
    assert config.bucketing.strategy == "lin"
    paged = EngineConfig.from_env(environ, model=str(tiny_model), bucket_grid="paged")
    assert paged.bucketing is not None
    assert (paged.bucket_grid, paged.bucketing.strategy) == ("paged", "exp")
    with pytest.raises(ConfigError, match="bucket_grid must be one of"):
        EngineConfig.from_env({"VLLM_BUCKETING_GRID": "blocks"}, model=str(tiny_model))
