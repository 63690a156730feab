"""Every program that the engine compiles on a Gaudi passes the bridge's own front.

On the strict stand-in: TorchScript keeps each operation, and none is left out of the recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import save_family

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import EngineConfig, EngineCore, SamplingParams
from trencadis.engine.devices import HPUDevice
from trencadis.engine.grammars.matcher import FixedMask
from trencadis.engine.runner.block_moves import warm_up_copies
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.shapes import DecodeShape, ForwardShape, PromptShape
from trencadis.engine.runner.step import RowRequest, SampleSettings
from trencadis.kvcache import DefragConfig

FAMILIES = ("Llama", "Qwen 2", "Qwen 3", "Mixtral", "Qwen 3 (MoE)", "DeepSeek V3")
LAYERS, BLOCKS = 4, 12

FORWARD: dict[str, ForwardShape] = {
    "prompt": PromptShape(2, 16, 0),
    "prompt with context": PromptShape(1, 16, 4),
    "decode": DecodeShape(2, BLOCKS),
    "decode with blocks of several sequences": DecodeShape(2, BLOCKS, extra=6, shared=4),
    "decode with a shared prefix": DecodeShape(2, BLOCKS, shared=BLOCKS),
    "decode that gathers": DecodeShape(2, 0, extra=6),
}
"""Each takes three programs: before the layers, a layer, after them."""

SAMPLING: dict[str, dict[str, Any]] = {
    "draw GREEDY": {"temperature": 0},
    "draw RANDOM": {"temperature": 0.8, "seed": 1},
    "draw TOP_P": {"temperature": 0.8, "top_p": 0.9},
    "draw TOP_K": {"temperature": 0.8, "top_k": 5},
    "edit": {"temperature": 0, "logit_bias": {3: 2.0}, "repetition_penalty": 1.2},
    "mask": {"temperature": 0},
    "report": {"temperature": 0, "logprobs": 2},
    "report listed": {"temperature": 0, "logprobs": 0, "logprob_token_ids": (7,)},
    "log-softmax": {"use_beam_search": True},
    "rank": {"use_beam_search": True},
}


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:]]


@pytest.fixture(scope="module", params=[FAMILIES[0], *SLOW])
def core(
    request: pytest.FixtureRequest,
    stand_in: Callable[..., Any],
    add_tokenizer: Callable[[Path], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EngineCore, Any]]:
    directory = save_family(request.param, tmp_path_factory.mktemp("family"))
    add_tokenizer(directory)
    with stand_in("eager") as machinery:
        yield engine_core(directory), machinery


def engine_core(directory: Path, **changes: Any) -> EngineCore:
    only = {n: AxisConfig(min=n, step=n, max=n) for n in (1, 2, 16, BLOCKS)}
    config = EngineConfig(
        model=str(directory),
        **{"device": "hpu", "max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 32},
        **{"max_num_seqs": 2, "num_blocks": BLOCKS, "num_host_blocks": 0, "warmup": "none"},
        bucketing=BucketingConfig(
            prompt_batch=only[1],
            prompt_query=only[16],
            decode_batch=only[2],
            decode_blocks=only[BLOCKS],
        ),
        **changes,
    )
    return EngineCore(config)


def check_forward(core: EngineCore, machinery: Any, shape: ForwardShape) -> None:
    runner = core.executor.worker.runner
    batch = runner.batches.dummy(shape)
    runner.forward_runner.prepare(batch)
    before = machinery.counters.copy()
    runner.forward_runner.prepare(batch)
    counted = machinery.counters.since(before)
    assert counted.partitions == 1 + LAYERS + 1
    assert counted.launches == counted.partitions + 1  # a copy of the sampler's numbers
    assert (counted.traces, counted.fallbacks, counted.copied_bytes) == (0, 0, 0)


@pytest.mark.parametrize("kind", FORWARD)
def test_a_forward_pass_is_programs_without_fallbacks(
    core: tuple[EngineCore, Any], kind: str
) -> None:
    check_forward(*core, FORWARD[kind])


def test_shapes_of_as_many_rows_share_the_program_after_the_layers(
    core: tuple[EngineCore, Any],
) -> None:
    """It reads hidden states and rows: four kinds of decode take one."""
    runner, machinery = core[0].executor.worker.runner, core[1]
    runner.forward_runner._programs.clear()
    before = machinery.counters.copy()
    shapes = [shape for shape in FORWARD.values() if isinstance(shape, DecodeShape)]
    for shape in shapes:
        runner.forward_runner.prepare(runner.batches.dummy(shape))
    num_kinds = runner.forward_runner._decoder_layers().num_kinds
    counted = machinery.counters.since(before)
    assert counted.compile_calls == (1 + num_kinds) * len(shapes) + 1


@pytest.mark.parametrize("kind", SAMPLING)
def test_sampling_is_programs_without_fallbacks(stand_in: Callable[..., Any], kind: str) -> None:
    with stand_in("eager") as machinery, torch.inference_mode():
        device = HPUDevice()
        sampler = DeviceSampler(device, 258, num_slots=2, compiled=True)
        params = SamplingParams(**SAMPLING[kind])
        settings = SampleSettings.of(params, 0, (5, 6), 1, frozenset({0}))
        mask = FixedMask(np.full(9, -1, np.int32)) if kind == "mask" else None
        beams = 2 if params.use_beam_search else 0
        rows = [RowRequest(2, (settings,), mask, beams)] * 2
        words = device.upload(torch.from_numpy(sampler.words(rows, 2)))
        before = machinery.counters.copy()
        pending = sampler.launch(device.upload(torch.randn(2, 258)), words, rows)
        pending.read(device.fetch(pending.outputs).wait())
        counted = machinery.counters.since(before)
    names = [name for name, _ in sampler._programs]
    assert kind in names
    assert counted.launches == counted.partitions == counted.traces == len(names)
    assert not counted.fallbacks


def test_copies_of_blocks_run_on_the_device(core: tuple[EngineCore, Any]) -> None:
    worker, machinery = core[0].executor.worker, core[1]
    before = machinery.counters.copy()
    warm_up_copies(worker.runner._cache, worker.device, DefragConfig())
    counted = machinery.counters.since(before)
    assert counted.launches > 0
    assert (counted.fallbacks, counted.copied_bytes) == (0, 0)


def test_embeddings_are_programs_without_fallbacks(
    stand_in: Callable[..., Any], add_tokenizer: Callable[[Path], None], tmp_path: Path
) -> None:
    add_tokenizer(save_family("Qwen 3", tmp_path))
    with stand_in("eager") as machinery:
        check_forward(engine_core(tmp_path, runner="pooling"), machinery, FORWARD["prompt"])
