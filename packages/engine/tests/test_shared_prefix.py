"""Sequences that share the first blocks of the cache decode in one forward pass on a Gaudi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

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

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

Tokens = dict[tuple[str, int], list[int]]


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_model_len": 64, "block_size": 8, "max_num_batched_tokens": 64}
    settings |= {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 40, "warmup": "full"}
    settings |= {"bucketing": FEW_BUCKETS, "enable_prefix_caching": True, **changes}
    return EngineConfig(model=str(model), **settings)


def serve(core: EngineCore, *, warm_up: bool = True) -> tuple[Tokens, list[DecodeShape]]:
    """A request, then one more and one with two samples, once the prompt is cached.

    Returns their tokens, and the shape of each forward pass of decodes.
    """
    if warm_up:
        core.warm_up()
    runner, passes = core.executor.worker.runner.forward_runner, []
    run = runner.run

    def recording(batch: ModelInput) -> Any:
        if isinstance(batch.shape, DecodeShape):
            passes.append(batch.shape)
        return run(batch)

    runner.run = recording  # type: ignore[method-assign]
    found: Tokens = {}
    is_later = False
    core.add("first", GenerateRequest((*SYSTEM, 1, 2), GREEDY))
    while core.has_work:
        if len(passes) >= 3 and not is_later:
            is_later = True
            core.add("second", GenerateRequest((*SYSTEM, 3), GREEDY))
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
    assert {(bool(shape.shared), bool(shape.extra)) for shape in passes} == {
        (False, False),
        (True, True),
    }


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_shared_blocks_are_brought_among_the_first(
    stand_in, mode, tiny_model: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another request has the first blocks: a second prompt that many begin with."""
    monkeypatch.setattr(shapes, "SHARED_TOKENS", 48)
    first = GenerateRequest(tuple(range(60, 104)), GREEDY)
    five = attrs.evolve(FEW_BUCKETS, decode_batch=AxisConfig(min=5, step=5, max=5))
    with stand_in(mode):
        settings = {"device": HPUDevice(), "max_num_seqs": 5, "bucketing": five}
        core = EngineCore(config_of(tiny_model, **settings))
        core.warm_up()
        core.add("has the first blocks", first)
        core.step()
        found, passes = serve(core, warm_up=False)
    assert found.pop(("has the first blocks", 0))
    assert found == expected
    assert core.stats.num_defragmented_blocks > 0
    gathers = [bool(shape.extra) for shape in passes if shape.shared]
    # The second request starts with a single token, in a batch of decodes that is laid out already.
    assert gathers[0]
    assert len(gathers) > 10
    assert not any(gathers[1:])


def test_without_warm_up_gathered_blocks_are_padded_to_powers_of_two(
    tiny_model: Path, expected: Tokens
) -> None:
    """3 and 10 pairs of a block and a sequence: no more than 8 and 16 are gathered."""
    found, passes = serve(EngineCore(config_of(tiny_model, device="cpu")))
    assert found == expected
    assert {shape.extra for shape in passes} == {0, 8, 16}


BLOCK = 128
PREFIX = tuple(7 + i % 200 for i in range(20 * BLOCK))
"""A prompt of 2,560 tokens: 20 blocks."""


def kv_bytes(region: Any, cache_bytes: int) -> int:
    """Bytes of the KV cache that a program reads: of tensors with the size of a layer's cache."""
    roots = {node: node for node in region.graph.graph.find_nodes(op="placeholder")}
    read = 0
    for node in region.graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.is_view or node.target is torch.ops.aten.index_copy_.default:
            roots[node] = roots.get(node.args[0])
            continue
        for source in node.all_input_nodes:
            root = roots.get(source)
            if root is not None and root.meta["val"].nbytes == cache_bytes:
                gathers = node.target is torch.ops.aten.index_select.default
                read += (node if gathers else source).meta["val"].nbytes
    return read


@pytest.mark.parametrize(
    "num_seqs",
    [pytest.param(64, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.soak)],
)
def test_sequences_on_a_long_system_prompt_take_one_pass_that_reads_each_block_once(
    stand_in, make_tiny_model, tmp_path, num_seqs: int
) -> None:
    model = make_tiny_model(tmp_path, max_position_embeddings=4096)
    samples, blocks = num_seqs // 4, 20 + 2 * num_seqs + 2
    params = SamplingParams(
        temperature=0.8, seed=3, n=samples, max_tokens=6, ignore_eos=True, logprobs=None
    )

    def only(size: int) -> AxisConfig:
        return AxisConfig(min=size, step=size, max=size)

    def serve(device: str) -> tuple[Tokens, list[Any], EngineCore]:
        config = EngineConfig(
            model=str(model),
            **{"device": device, "dtype": "float32", "block_size": BLOCK, "warmup": "none"},
            **{"max_model_len": 22 * BLOCK, "max_num_seqs": num_seqs, "num_host_blocks": 0},
            max_num_batched_tokens=22 * BLOCK,
            num_blocks=blocks * 51 // 50 + 1,
            enable_prefix_caching=True,
            bucketing=BucketingConfig(
                prompt_batch=only(1),
                prompt_query=AxisConfig(min=BLOCK, step=21 * BLOCK, max=21 * BLOCK),
                prompt_context=only(20),
                decode_batch=only(num_seqs),
                decode_blocks=only(20 + num_seqs + 2),
            ),
        )
        core, found, steps = EngineCore(config), {}, []
        core.warm_up()
        runner = core.executor.worker.runner.forward_runner
        run, passes = runner.run, []

        def noting(batch: ModelInput) -> Any:
            passes.append(batch.shape)
            return run(batch)

        runner.run = noting  # type: ignore[method-assign]
        core.add("first", GenerateRequest((*PREFIX, 1), SamplingParams(max_tokens=1)))
        while core.has_work:
            core.step()
        for key in range(num_seqs // samples):
            core.add(str(key), GenerateRequest((*PREFIX, key % 250, 9), params))
        while core.has_work:
            passes.clear()
            tokens = core.step()
            for token in tokens:
                found.setdefault((token.key, token.index), []).append(token.token_id)
            if len(tokens) == num_seqs and all(isinstance(s, DecodeShape) for s in passes):
                steps.append(tuple(passes))
        return found, steps, core

    expected = serve("cpu")[0]
    with stand_in("eager") as machinery:
        regions: list[Any] = []
        run_region = machinery.run_region

        def recording(region: Any, inputs: Any) -> Any:
            regions.append(region)
            return run_region(region, inputs)

        machinery.run_region = recording
        found, steps, core = serve("hpu")
    assert found == expected
    assert len(found) == num_seqs
    assert len(steps) >= 3
    # The first call starts two steps, and the last none.
    assert sum(map(len, steps)) == len(steps), "one forward pass for each token"
    (shape,) = {shape for passes in steps for shape in passes}
    assert (shape.batch, bool(shape.shared), shape.extra) == (num_seqs, True, 0)
    cache = core.executor.worker.cache
    of_layer = cache.key(0).nbytes
    distinct = 2 * (20 + num_seqs) * of_layer // cache.num_blocks
    read = max(kv_bytes(region, of_layer) for region in regions[-8:])
    assert 0.9 * distinct < read <= 1.15 * distinct, (read, distinct)
