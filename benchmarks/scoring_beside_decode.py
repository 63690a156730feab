"""What a client that scores prompts takes from others: the decode speed of eight streams beside it.

    python benchmarks/scoring_beside_decode.py --turns 7

One client sends prompts of 400 random tokens without a pause. In turns it asks for their
log-probabilities and does not; eight others decode all the while. The small default model through
an `AsyncEngine` on the CPU. Prints the ratio of the decode speeds, the median of the turns, and how
many prompts the client got through in both cases.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from contextlib import suppress

import attrs

from trencadis.engine import AsyncEngine, EngineConfig, GenerateRequest, SamplingParams
from trencadis.engine.models.default_model import default_model

STREAMS, PROMPT, SCORED = 8, 64, 400
DECODE = SamplingParams(temperature=0.0, max_tokens=192, ignore_eos=True)
ONE = SamplingParams(temperature=0.0, max_tokens=1)
CASES = {"plain": ONE, "scored": attrs.evolve(ONE, prompt_logprobs=0)}
SETTLE_SECONDS = 0.5
"""After a change of what the client asks for: its last prompt is still computed."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a case in each turn")
    parser.add_argument("--compile", action="store_true")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: argparse.Namespace) -> None:
    engine = await AsyncEngine.start(
        EngineConfig(
            model=default_model(),
            device="cpu",
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=STREAMS + 1,
            compile=options.compile,
            warmup="full",
        )
    )
    counts: Counter[str] = Counter()
    asked = ["plain"]
    clients = [asyncio.create_task(_decode(engine, seed, counts)) for seed in range(STREAMS)]
    clients.append(asyncio.create_task(_score(engine, asked, counts)))
    ratios, prompts = [], dict.fromkeys(CASES, 0.0)
    for turn in range(options.turns + 1):
        speeds = {}
        for case in sorted(CASES, reverse=bool(turn % 2)):
            asked[0] = case
            await asyncio.sleep(SETTLE_SECONDS)
            began, before = time.perf_counter(), counts.copy()
            await asyncio.sleep(options.seconds)
            seconds = time.perf_counter() - began
            speeds[case] = (counts["tokens"] - before["tokens"]) / seconds
            if turn:  # the first is not counted
                prompts[case] += (counts["prompts"] - before["prompts"]) / seconds / options.turns
        if turn:
            ratios.append(speeds["scored"] / speeds["plain"])
            print(f"{speeds['plain']:.0f} tok/s, {speeds['scored']:.0f} beside scores", flush=True)
    for client in clients:
        client.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*clients)
    await engine.stop()
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"decode speed beside scores: {middle:.3f} ({low:.3f} to {high:.3f}) of that without")
    print(f"prompts a second: {prompts['plain']:.2f}, {prompts['scored']:.2f} scored")


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(length)]


async def _decode(engine: AsyncEngine, seed: int, counts: Counter[str]) -> None:
    draw = random.Random(seed)
    while True:
        async for delta in engine.generate(GenerateRequest(_prompt(draw, PROMPT), DECODE)):
            counts["tokens"] += len(delta.token_ids)


async def _score(engine: AsyncEngine, asked: list[str], counts: Counter[str]) -> None:
    draw = random.Random(STREAMS)
    while True:
        async for _ in engine.generate(GenerateRequest(_prompt(draw, SCORED), CASES[asked[0]])):
            counts["prompts"] += 1


if __name__ == "__main__":
    main()
