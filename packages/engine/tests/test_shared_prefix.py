"""Sequences that share the first blocks of the cache decode in one forward pass on a Gaudi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.devices.hpu import HPUDevice
from trencadis.engine.runner import shapes
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import DecodeShape

SYSTEM = tuple(range(100, 124))
"""Three blocks that all prompts begin with."""

FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=4, max=4),
    prompt_query=AxisConfig(min=64, step=64, max=64),
    decode_batch=AxisConfig(min=1, step=4, max=4),
    decode_blocks=AxisConfig(min=40, step=40, max=40),
)

Tokens = dict[tuple[str, int], list[int]]


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_model_len": 64, "block_size": 8, "max_num_batched_tokens": 64}
    settings |= {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 40, "warmup": "full"}
    settings |= {"bucketing": FEW_BUCKETS, "enable_prefix_caching": True, **changes}
    return EngineConfig(model=str(model), **settings)


def serve(core: EngineCore) -> tuple[Tokens, list[DecodeShape]]:
    """A request, then one more and one with two samples, once the prompt is cached.

    Returns their tokens, and the shape of each forward pass of decodes.
    """
    core.warm_up()
    runner, passes = core.executor.worker.runner.forward_runner, []
    run = runner.run

    def recording(batch: ModelInput) -> Any:
        if isinstance(batch.shape, DecodeShape):
            passes.append(batch.shape)
        return run(batch)

    runner.run = recording  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found: Tokens = {}
    is_later = False
    core.add("first", GenerateRequest((*SYSTEM, 1, 2), params))
    while core.has_work:
        if len(passes) >= 3 and not is_later:
            is_later = True
            core.add("second", GenerateRequest((*SYSTEM, 3), params))
            sampled = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
            core.add("samples", GenerateRequest((*SYSTEM, *range(9)), sampled))
        for token in core.step():
            found.setdefault((token.key, token.index), []).append(token.token_id)
    assert core.stats.num_compilations == 0
    assert core.stats.num_cold_forwards == 0
    assert len(passes) <= core.stats.num_steps
    return found, passes


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tokens:
    core = EngineCore(config_of(tiny_model, device="cpu", enable_prefix_caching=False))
    return serve(core)[0]


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_shared_blocks_are_read_in_place_in_one_forward_pass(
    stand_in, mode, tiny_model: Path, expected: Tokens
) -> None:
    with stand_in(mode):
        found, passes = serve(EngineCore(config_of(tiny_model, device=HPUDevice())))
    assert found == expected
    assert any(shape.batch == 4 and shape.shared for shape in passes)
    assert not any(shape.extra for shape in passes)


def test_at_most_8192_tokens_of_a_prefix_are_scored_for_every_sequence() -> None:
    assert shapes.with_shared(DecodeShape(4, 1000), 32).shared == 256
    assert shapes.with_shared(DecodeShape(4, 100), 32).shared == 100


def test_shared_blocks_beyond_the_limit_are_gathered(
    stand_in, tiny_model: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "SHARED_TOKENS", 16)
    with stand_in("lazy"):
        found, passes = serve(EngineCore(config_of(tiny_model, device=HPUDevice())))
    assert found == expected
    assert any(shape.extra for shape in passes)
    assert not any(shape.shared for shape in passes)


def test_without_warm_up_gathered_blocks_are_padded_to_powers_of_two(
    tiny_model: Path, expected: Tokens
) -> None:
    """3 and 10 pairs of a block and a sequence: no more than 8 and 16 are gathered."""
    found, passes = serve(EngineCore(config_of(tiny_model, device="cpu")))
    assert found == expected
    assert {shape.extra for shape in passes} == {0, 8, 16}
