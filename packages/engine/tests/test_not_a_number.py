"""A model that computes NaN for one token: the requests with that token fail, no others.

Block attention multiplies whole blocks by zeros and ones, so a NaN in the cache or in one row of a
batch could reach every sequence.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, ModelError, SamplingParams
from trencadis.engine.devices import CPUDevice


class DeviceOnCPU(CPUDevice):
    """Samples as a device with memory of its own does."""

    shares_host_memory = False


BROKEN = 77
"""The token whose embedding is not a number."""

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={BROKEN: -100})
OTHERS = {
    "greedy": (range(20), GREEDY),
    "drawn": (
        range(3, 14),
        SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=20,
            seed=3,
            max_tokens=6,
            ignore_eos=True,
            logit_bias={BROKEN: -100},
        ),
    ),
}
REQUESTS = {
    "the end of a prompt": ((5, BROKEN), GREEDY),
    "within a prompt": (range(70, 80), GREEDY),
    "a generated token": (
        range(10),
        SamplingParams(temperature=1, seed=1, max_tokens=6, logit_bias={BROKEN: 100}),
    ),
    "a nucleus": ((BROKEN,), SamplingParams(top_p=0.9, top_k=4, min_p=0.1, seed=1, logprobs=3)),
    "several samples": ((BROKEN,), SamplingParams(temperature=1, seed=1, n=3, logprobs=0)),
    "beams": ((5, BROKEN), SamplingParams(use_beam_search=True, n=2, max_tokens=4)),
}


@pytest.fixture(scope="module")
def make_broken_model(make_tiny_model, tmp_path_factory):
    def make(embedding):
        directory = make_tiny_model(tmp_path_factory.mktemp("broken"))
        model = AutoModelForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            model.get_input_embeddings().weight[BROKEN] = embedding
        model.save_pretrained(directory)
        return str(directory)

    return make


def serve(core, asked):
    for key, (prompt, params) in asked.items():
        core.add(key, GenerateRequest(tuple(prompt), params))
    found, failed = {}, {}
    while core.has_work:
        for token in core.step():
            found.setdefault(token.key, []).append(token.token_id)
        failed |= {failure.key: failure.message for failure in core.take_failures()}
    assert core.blocks.pool.num_used_blocks == 0
    return found, failed


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        *(("cpu", math.nan), ("cpu", math.inf), ("device", math.nan), ("device", math.inf)),
        *(("lazy", math.nan), pytest.param("eager", math.nan, marks=pytest.mark.slow)),
    ],
)
def test_a_request_with_nan_fails_alone(stand_in, name, embedding, make_broken_model):
    on_gaudi = name in ("lazy", "eager")
    config = EngineConfig(
        model=make_broken_model(embedding),
        device=DeviceOnCPU() if name == "device" else "hpu" if on_gaudi else "cpu",
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 40},
        **{"dtype": "float32", "max_num_seqs": 12, "warmup": "none", "compile": False},
        # A prefix that is read from the cache would leave nothing to compute.
        enable_prefix_caching=False,
    )
    with stand_in(name) if on_gaudi else contextlib.nullcontext():
        core = EngineCore(config)
        alone, failed = serve(core, OTHERS)
        assert not failed
        found, failed = serve(core, {**REQUESTS, **OTHERS})
        assert set(failed) == set(REQUESTS)
        for message in failed.values():
            assert "the model computed NaN, or every token is forbidden" in message
        assert found == alone | {"a generated token": [BROKEN]}
        # The blocks of the failed requests have new owners.
        assert serve(core, OTHERS)[0] == alone


def test_weights_that_compute_nan_are_rejected_at_the_start(make_tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path, tie_word_embeddings=False)
    )
    with torch.no_grad():
        model.lm_head.weight[BROKEN] = math.nan
    model.save_pretrained(tmp_path)
    core = EngineCore(EngineConfig(model=str(tmp_path), device="cpu", max_num_seqs=2))
    with pytest.raises(ModelError, match="the model computes NaN for a first token"):
        core.warm_up()


def test_a_request_that_forbids_every_token_says_so(tiny_model):
    core = EngineCore(EngineConfig(model=str(tiny_model), device="cpu", max_num_seqs=2))
    params = {"max_tokens": 4, "min_tokens": 2, "stop_token_ids": range(258)}
    asked = {
        str(temperature): (range(4), SamplingParams(temperature=temperature, **params))
        for temperature in (0.0, 1.0)
    }
    _, failed = serve(core, asked)
    assert set(failed) == set(asked)
    assert "every token is forbidden" in failed["0.0"]


def watch_token_ids(core):
    """The largest token id of each forward pass."""
    forward_runner = core.executor.worker.runner.forward_runner
    run, largest = forward_runner.run, []

    def watched(batch):
        largest.append(int(batch.unpack().token_ids.max()))
        return run(batch)

    forward_runner.run = watched
    return largest


@pytest.mark.parametrize("name", ["cpu", "device", "lazy", "eager"])
def test_a_row_without_a_token_is_followed_by_one_of_the_vocabulary(stand_in, name, tiny_model):
    """Started before the host knows of the failure, on a device that an id past the embeddings
    would break."""
    on_gaudi = name in ("lazy", "eager")
    config = EngineConfig(
        model=str(tiny_model),
        device=DeviceOnCPU() if name == "device" else "hpu" if on_gaudi else "cpu",
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 40},
        **{"dtype": "float32", "max_num_seqs": 4, "warmup": "none", "compile": False},
        async_scheduling=True,
    )
    with stand_in(name) if on_gaudi else contextlib.nullcontext():
        core = EngineCore(config)
        largest = watch_token_ids(core)
        forbids = SamplingParams(
            temperature=0, max_tokens=6, min_tokens=4, stop_token_ids=range(258)
        )
        found, failed = serve(core, {"forbids": ((1, 2, 3), forbids), **OTHERS})
    assert set(failed) == {"forbids"}
    assert set(found) == set(OTHERS)
    assert max(largest) < 258


def test_a_row_that_was_computed_in_vain_ends_no_other_sample(make_broken_model):
    """One sample stops at the broken token, whose row is started before the host knows of it."""
    config = EngineConfig(
        model=make_broken_model(math.nan),
        **{"max_model_len": 48, "block_size": 8, "max_num_batched_tokens": 16, "num_blocks": 40},
        **{"dtype": "float32", "max_num_seqs": 4, "warmup": "none", "async_scheduling": True},
        device="cpu",
    )
    core = EngineCore(config)
    params = {"n": 2, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": (BROKEN,)}
    lengths = set()
    for seed in range(8, 24, 2):
        core.add(
            "both",
            GenerateRequest((1, 2, 3), SamplingParams(seed=seed, logit_bias={BROKEN: 4}, **params)),
        )
        found = {}
        while core.has_work:
            for token in core.step():
                found.setdefault(token.index, []).append(token.token_id)
        assert not core.take_failures()
        for tokens in found.values():
            assert tokens[-1] == BROKEN or len(tokens) == 12
        lengths.add(tuple(len(found[index]) for index in range(2)))
    assert any(first != second for first, second in lengths)
