"""A program generates text: a batch in its own process, and streams from an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from typing_extensions import assert_type

from trencadis.engine import (
    LLM,
    AsyncEngine,
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    Device,
    Embedding,
    EngineConfig,
    EngineCore,
    EngineOverloaded,
    FinishReason,
    GenerateRequest,
    Generation,
    InvalidRequest,
    NewToken,
    RequestFailed,
    SamplingParams,
    Score,
    Scoring,
    TextPrompts,
    ThermalStats,
    default_model,
)
from trencadis.warmup import WarmupConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32, stop=["\n\n"], logit_bias={7: -1})
STOPPED = SamplingParams(stop="END", stop_token_ids={2, 3}, temperature=1, top_p=0.9, seed=None)
BEAMS = SamplingParams(n=2, best_of=4, use_beam_search=True, early_stopping="never")


class OwnDevice(Device):
    """A device of the user's own, which runs eagerly."""

    name = "own"
    torch_device = torch.device("cpu")
    preferred_dtype = torch.float32
    default_kv_cache_memory = None

    def free_memory(self) -> int:
        return 1 << 30

    def total_memory(self) -> int:
        return 1 << 31

    def synchronize(self) -> None:
        pass


def params_of(stop: Iterable[str], biases: Mapping[int, float], ids: Sequence[int]) -> None:
    SamplingParams(stop=stop, logit_bias=biases, stop_token_ids=ids)
    SamplingParams(stop=None, logit_bias=None, stop_token_ids=None)
    assert_type(STOPPED.stop, tuple[str, ...])
    assert_type(STOPPED.stop_token_ids, tuple[int, ...])
    counts: dict[int, int] = {7: 1}
    SamplingParams(logit_bias=counts)


def batch() -> list[str]:
    llm = LLM(Path(default_model()), max_model_len=1024, device=OwnDevice())
    answers = llm.generate(["Once upon a time", [1, 2, 3], (4, 5)], GREEDY)
    assert_type(answers, list[Generation])
    llm.generate("Once upon a time", GREEDY)
    texts: list[str] = ["a", "b"]
    llm.generate(texts, [GREEDY, STOPPED])
    token_ids: list[list[int]] = [[1, 2], [3]]
    llm.generate(token_ids)
    llm.chat([{"role": "user", "content": "Hello"}])
    for answer in llm.chat([[{"role": "user", "content": "Count to five."}]], BEAMS):
        completion = answer.completions[0]
        assert_type(completion.text, str)
        assert_type(completion.token_ids, list[int])
        assert_type(completion.finish_reason, FinishReason | None)
        assert_type(completion.stop_reason, str | int | None)
        for position in completion.logprobs:
            assert_type(position.chosen.logprob, float)
    return [answer.completions[0].text for answer in answers]


def similarity() -> float:
    llm = LLM("./embedding-model", runner="pooling")
    first, second = embeddings = llm.embed(["a text", [1, 2]])
    assert_type(embeddings, list[Embedding])
    return float(first.vector @ second.vector)


def relevance() -> list[float]:
    llm = LLM("./reranker", runner="pooling", score_prompt="qwen3-reranker")
    scores = llm.score("a query", ["a document", "another"], "an instruction")
    assert_type(scores, list[Score])
    return [score.score for score in scores]


async def relevance_of(engine: AsyncEngine, document: str) -> float:
    assert_type(engine.scoring, Scoring | None)
    assert_type(engine.text_prompts, TextPrompts)
    return (await engine.score("a query", document, use_activation=False)).score


async def stream() -> None:
    config = EngineConfig(
        model=default_model(),
        device="my_device:OwnDevice",
        dtype="bfloat16",
        max_num_seqs=8,
        swap_space=2,
        warmup="background",
        graphs=WarmupConfig(graph_reserved_mem=0.2),
        thermal_policy="proportional",
        thermal_policy_config={"target_temp_c": 80},
    )
    engine = await AsyncEngine.start(config)
    prompt = engine.tokenizer.render_chat([{"role": "user", "content": "Count to five."}])
    assert_type(prompt, list[int])
    try:
        async for delta in engine.generate(
            GenerateRequest(prompt, GREEDY, request_id="a", priority=1)
        ):
            assert_type(delta, CompletionDelta)
            assert_type(delta.stop_reason, str | int | None)
            print(delta.text, end="", flush=True)
        order = BatchControl(force_evict=2, max_num_seqs=4)
        assert_type(await engine.control(order), BatchControlResult)
        assert_type(engine.stats.thermal, ThermalStats | None)
    except InvalidRequest as error:
        assert_type(error.field, str | None)
    except (EngineOverloaded, RequestFailed):
        print("try again")
    finally:
        await engine.stop()


def own_loop() -> None:
    core = EngineCore(EngineConfig.from_env(os.environ, model=default_model()))
    core.warm_up(stop=lambda: False)
    core.add("a", GenerateRequest((1, 2, 3), SamplingParams(stop_token_ids=(2,))))
    while core.has_work:
        tokens: list[NewToken] = core.step()
        for token in tokens:
            assert_type(token.key, str)
    assert_type(core.control(BatchControl()), Future[BatchControlResult])


if __name__ == "__main__":
    batch()
    asyncio.run(stream())
    own_loop()
