"""The plugin's bucket variables and the engine's bucket flags, from the start to what is served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trencadis.engine import EngineConfig, EngineCore, SamplingParams
from trencadis.engine.runner.model_input import ModelInput

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
            core.add(key, prompt, GREEDY)
        while core.has_work:
            for token in core.step():
                tokens.setdefault(token.key, []).append(token.token_id)
    return tokens


def decode_shapes(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Rows, prefix blocks and gathered blocks of every decode pass from now on."""
    seen: list[tuple[int, int, int]] = []
    run = core.worker.runner.forward_runner.run

    def note(batch: ModelInput) -> object:
        if hasattr(batch.shape, "extra"):
            seen.append((batch.shape.batch, batch.shape.blocks, batch.shape.extra))
        return run(batch)

    monkeypatch.setattr(core.worker.runner.forward_runner, "run", note)
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
    assert chosen.worker.grids.decode.buckets != default.worker.grids.decode.buckets
    assert "Prompt bucket config (min, step, max_warmup, limit) bs:[1, 2, 4, 3]" in caplog.text


def test_a_default_start_says_how_its_buckets_are_made(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = started(tiny_model, {})
    lines = [message for message in caplog.messages if "bucket" in message]
    prompt, decode = core.worker.grids.prompt, core.worker.grids.decode
    assert lines[:4] == [
        "Prompt bucket config (min, step, max_warmup) bs:[1, 4, 4], query:[32, 32, 32], "
        "blocks:[0, x4, 16]",
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
    core.add("a", (5, 6, 7), GREEDY)
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
        core.add(str(i), (*COMMON, i), GREEDY)  # six blocks each
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
    assert core.worker.grids.decode.values("blocks") == (2, *range(4, 49, 4))
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
    assert both.worker.grids.decode.values("blocks")[-1] == 12, "settings in blocks come first"
    assert "VLLM_DECODE_SEQ_BUCKET_*" not in caplog.text
