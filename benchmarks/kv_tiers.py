"""Conversations above a device cache that holds a quarter of them: with and without tiers.

    python benchmarks/kv_tiers.py [--users 8] [--turns 5] [--rounds 3]

Each user's prompt holds what the user and the model have said before, and 96 new tokens. Users
take turns, two at a time, so that each finds its prefix evicted from the device. Cores without
tiers, with a host tier, and with a host tier of half the conversations above a disk tier serve the
same turns one after the other; the order changes. A round begins with new conversations.

Printed are the tokens computed, and the time to the first token (with the wait for a tier) of all
turns but each user's first; the ratios to ``none`` are of this run, medians of the rounds. The
model is the small default one, in float32 on one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

import attrs
import numpy as np
import torch

from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    default_model,
)

BLOCK = 16
SAID, HEARD = 96, 16
"""Tokens of a user and of an answer in each turn."""

GIB = 1 << 30


@attrs.define
class Case:
    """A core, what its users have said and heard, and what their turns took in each round."""

    core: EngineCore
    said: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    ttft_s: list[float] = attrs.field(factory=list)
    computed: int = 0
    rounds: list[tuple[int, float, float]] = attrs.field(factory=list)

    def serve(self, users: tuple[int, ...], turn: int, number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=HEARD, ignore_eos=True)
        before = self.core.stats.num_prefill_tokens
        started = time.perf_counter()
        waits: dict[str, float] = {}
        for user in users:
            words = random.Random(f"{number} {turn} {user}").choices(range(1000, 9000), k=SAID)
            self.said[user] = (*self.said.get(user, ()), *words)
            self.core.add(f"{user}", GenerateRequest(self.said[user], params))
        while self.core.has_work:
            for token in self.core.step():
                waits.setdefault(token.key, time.perf_counter() - started)
                self.said[int(token.key)] += (token.token_id,)
            if self.core.pause_s:
                time.sleep(self.core.pause_s)
        if turn:
            self.ttft_s += waits.values()
        self.computed += self.core.stats.num_prefill_tokens - before

    def end_round(self) -> dict[int, tuple[int, ...]]:
        p50, p99 = np.percentile(self.ttft_s, [50, 99])
        self.rounds.append((self.computed, float(p50), float(p99)))
        said, self.said = self.said, {}
        self.ttft_s, self.computed = [], 0
        return said


def make_core(tiers: str, blocks: int, max_model_len: int) -> EngineCore:
    config = EngineConfig(
        model=default_model(),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=2,
        block_size=BLOCK,
        num_blocks=blocks,
        warmup="none",
        kv_tiers=tiers,
    )
    core = EngineCore(config)
    core.warm_up()
    return core


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    longest = options.turns * (SAID + HEARD)
    needed = options.users * (longest // BLOCK + 1)
    blocks = needed // 4
    with tempfile.TemporaryDirectory() as directory:
        none = make_core("", blocks, longest)
        half = needed * none.facts.block_bytes / 2 / GIB
        settings = {
            "host": f"host:{2 * half:.6f}",
            "host and disk": f"host:{half:.6f},disk:{directory}:{8 * half:.6f}",
        }
        cases = {"none": Case(none)}
        cases |= {name: Case(make_core(each, blocks, longest)) for name, each in settings.items()}
        try:
            measure(cases, options.users, options.turns, options.rounds)
        finally:
            for case in cases.values():
                case.core.close()
    show(cases)


def measure(cases: dict[str, Case], users: int, turns: int, rounds: int) -> None:
    order = list(cases.values())
    for number in range(rounds):
        for turn in range(turns):
            for first in range(0, users, 2):
                random.Random(f"{number} {turn} {first}").shuffle(order)
                for case in order:
                    case.serve((first, first + 1), turn, number)
        said = [case.end_round() for case in cases.values()]
        if any(each != said[0] for each in said):
            raise AssertionError("tokens differ")


def show(cases: dict[str, Case]) -> None:
    print("| tiers | tokens computed | ratio | TTFT p50 | ratio | p99 | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    base = cases["none"].rounds
    for name, case in cases.items():
        cells = []
        for index, unit in ((0, ""), (1, " s"), (2, " s")):
            middle = statistics.median(each[index] for each in case.rounds)
            ratios = [own[index] / off[index] for own, off in zip(case.rounds, base, strict=True)]
            shown = f"{middle:,.0f}" if not unit else f"{middle:.3f}{unit}"
            cells.append(f"{shown} | {statistics.median(ratios):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
