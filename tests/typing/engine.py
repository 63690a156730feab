"""A program generates text: a batch in its own process, and streams from an event loop."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future

from typing_extensions import assert_type

from trencadis.engine import (
    LLM,
    AsyncEngine,
    BatchControl,
    BatchControlResult,
    CompletionDelta,
    EngineConfig,
    EngineCore,
    EngineOverloaded,
    FinishReason,
    Generation,
    InvalidRequest,
    SamplingParams,
    ThermalStats,
    default_model,
)
from trencadis.warmup import WarmupConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32, stop=["\n\n"], logit_bias={7: -1})
BEAMS = SamplingParams(n=2, best_of=4, use_beam_search=True, early_stopping="never")


def batch() -> list[str]:
    llm = LLM(default_model(), max_model_len=1024)
    answers = llm.generate(["Once upon a time", [1, 2, 3], (4, 5)], GREEDY)
    assert_type(answers, list[Generation])
    for answer in llm.chat([[{"role": "user", "content": "Count to five."}]], BEAMS):
        completion = answer.completions[0]
        assert_type(completion.text, str)
        assert_type(completion.token_ids, list[int])
        assert_type(completion.finish_reason, FinishReason | None)
        for position in completion.logprobs:
            assert_type(position.chosen.logprob, float)
    return [answer.completions[0].text for answer in answers]


async def stream() -> None:
    config = EngineConfig(
        model=default_model(),
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
        async for delta in engine.generate(prompt, GREEDY, request_id="a", priority=1):
            assert_type(delta, CompletionDelta)
            print(delta.text, end="", flush=True)
        order = BatchControl(force_evict=2, max_num_seqs=4)
        assert_type(await engine.control(order), BatchControlResult)
        assert_type(engine.stats.thermal, ThermalStats | None)
    except InvalidRequest as error:
        assert_type(error.field, str | None)
    except EngineOverloaded:
        print("try again")
    finally:
        await engine.stop()


def own_loop() -> None:
    core = EngineCore(EngineConfig.from_env(os.environ, model=default_model()))
    core.warm_up(stop=lambda: False)
    core.add("a", (1, 2, 3), SamplingParams(stop_token_ids=(2,)))
    while core.has_work:
        for token in core.step():
            assert_type(token.key, str)
    assert_type(core.control(BatchControl()), Future[BatchControlResult])


if __name__ == "__main__":
    batch()
    asyncio.run(stream())
    own_loop()
