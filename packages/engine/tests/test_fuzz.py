"""Random wrong types, odd values and wrong orders, beside right calls.

The law: only this package's errors leave, nothing hangs, what was rejected leaves nothing behind,
and a well-behaved caller gets the answers that it gets alone. The default suite takes a second or
two of it; the soak makes `SOAK_CALLS` calls. A failure names its seed and the number of its call:
``FUZZ_SEED=7 pytest ... -m soak`` repeats it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch

from trencadis.engine import (
    LLM,
    AsyncEngine,
    BatchControl,
    ConfigError,
    EngineConfig,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    SamplingParams,
)
from trencadis.engine.errors import shown

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SOAK_CALLS = 100_000
CALL_SECONDS = 300.0


class Unruly:
    """Its methods raise errors of their own."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


PLAIN: tuple[Any, ...] = (
    *(None, True, False, ..., NotImplemented, 1j, int, len, object(), Exception("odd"), Path("a")),
    *(-1, 0, 1, 2, 3, 7, 77, 257, 258, 1000, 2**31, 2**63, -(2**63), 2**64),
    *(10**400, -(10**400), 10**5000),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1e300, math.nan, math.inf),
    *("", "END", "77", "never", "\ud800", "\0", "x" * 999, b"", b"bytes", memoryview(b"ab")),
    *(np.int64(3), np.float32(0.5), np.bool_(True), Fraction(1, 3), Decimal("0.5"), range(3)),
    *(SamplingParams(max_tokens=1), BatchControl(dry_run=True), Unruly()),
)
FRESH: tuple[Callable[[], Any], ...] = (
    lambda: [],
    lambda: [1, 2, 3],
    lambda: [[1, 2], [3]],
    lambda: (1.5,),
    lambda: {},
    lambda: {7: 1.5},
    lambda: {1.5: 2},
    lambda: {"7": 1},
    lambda: {7: math.nan},
    lambda: {"a", "b"},
    lambda: bytearray(b"a"),
    lambda: iter(["a", 1]),
    lambda: (token for token in (1, 2)),
    lambda: np.arange(3),
    lambda: np.ones((2, 2)),
    lambda: torch.arange(3),
)
"""Odd values; those of `FRESH` can be changed or used up, so each call gets its own."""


def odd(rng: random.Random) -> Any:
    """An odd value, or a list, tuple or dict of odd values."""
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(PLAIN)
    if kind < 0.75:
        return rng.choice(FRESH)()
    values = [odd(rng) for _ in range(rng.randrange(4))]
    if kind < 0.95:
        return values if kind < 0.85 else tuple(values)
    return dict.fromkeys(map(str, range(len(values))), values)


def odd_fields(rng: random.Random, cls: type, right: dict[str, Any]) -> dict[str, Any]:
    """Values for some fields of ``cls``, right or odd ones."""
    names = [field.name for field in attrs.fields(cls)]
    chosen = rng.sample(names, rng.choice((1, 1, 2, 4)))
    return {
        name: right[name] if name in right and rng.random() < 0.3 else odd(rng) for name in chosen
    }


@contextmanager
def call(number: int, arguments: object) -> Iterator[None]:
    """Prints the call that an error leaves."""
    try:
        yield
    except BaseException:
        print(f"seed {SEED}, call {number}: {shown(arguments)}")
        raise


RIGHT: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.7,
    "top_p": 0.5,
    "seed": 5,
    "max_tokens": 3,
    "min_tokens": 1,
    "stop": "END",
    "stop_token_ids": [7],
    "logprobs": 2,
    "logit_bias": {7: 1},
    "ignore_eos": True,
}


def fuzz_values(calls: int) -> int:
    """Construct values of settings and parameters; returns how many were accepted."""
    accepted = 0
    for number in range(calls):
        rng = random.Random(f"{SEED} {number}")
        cls, error = rng.choice(((SamplingParams, InvalidRequest), (EngineConfig, ConfigError)))
        fields = odd_fields(rng, cls, RIGHT)
        if cls is EngineConfig:
            fields = {"model": "m", **fields}
        with call(number, fields):
            try:
                value = cls(**fields)
            except error as refusal:
                assert len(str(refusal)) < 600
                continue
            accepted += 1
            if isinstance(value, SamplingParams):
                content = msgspec.msgpack.encode(value)
                assert msgspec.msgpack.decode(content, type=SamplingParams) == value
    return accepted


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 80,
    "warmup": "none",
    "max_waiting": 16,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
QUICK = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
GENERATE = ("prompt_token_ids", "params", "request_id", "priority", "client")


def odd_params(rng: random.Random) -> Any:
    """Right parameters of a short request, or what is none."""
    try:
        return attrs.evolve(QUICK, **odd_fields(rng, SamplingParams, {**RIGHT, "n": 1}))
    except InvalidRequest:
        return odd(rng)


class EngineFuzzer:
    """Random calls of an `AsyncEngine`, while a well-behaved client asks again and again."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.refused = self.served = self.answers = 0
        self._is_done = False

    async def run(self, calls: int) -> None:
        expected = await self._answer([5, 6, 7])
        client = asyncio.create_task(self._client(expected))
        try:
            await self._call(calls)
        finally:
            self._is_done = True
            await asyncio.wait_for(client, CALL_SECONDS)
        await self.engine.check_health()
        assert await self._answer([5, 6, 7]) == expected
        for _ in range(3000):
            if not (self.engine.stats.num_used_blocks or self.engine.stats.num_running_reqs):
                break
            await asyncio.sleep(0.1)
        assert self.engine.stats.num_used_blocks == self.engine.stats.num_running_reqs == 0

    async def _call(self, calls: int) -> None:
        for number in range(calls):
            rng = random.Random(f"{SEED} {number}")
            action = rng.choices((self._generate, self._control, self._abort), (8, 1, 1))[0]
            with call(number, action.__name__):
                try:
                    await asyncio.wait_for(action(rng), CALL_SECONDS)
                    self.served += 1
                except EngineError:
                    self.refused += 1
            await asyncio.sleep(0)

    async def _client(self, expected: list[int]) -> None:
        while not self._is_done:
            answer = asyncio.wait_for(self._answer([5, 6, 7]), CALL_SECONDS)
            assert await answer == expected, f"seed {SEED}: another caller's answer changed"
            self.answers += 1

    async def _answer(self, prompt: list[int]) -> list[int]:
        stream = self.engine.generate(GenerateRequest(prompt, GREEDY))
        return [token async for delta in stream for token in delta.token_ids]

    async def _generate(self, rng: random.Random) -> None:
        arguments: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "params": QUICK}
        for name in rng.sample(GENERATE, 2):
            arguments[name] = odd_params(rng) if name == "params" else odd(rng)
        stream = self.engine.generate(GenerateRequest(**arguments))
        closes_after = rng.choice((0, 1, 99, 99))
        async for _ in stream:
            closes_after -= 1
            if closes_after < 0:
                break
        await stream.aclose()

    async def _control(self, rng: random.Random) -> None:
        order = odd(rng)
        if rng.random() < 0.5:
            right = {"max_num_seqs": 4, "force_evict": 1, "policy": "lru", "target_temp_c": 60.5}
            names = rng.sample(sorted(right), 2)
            order = BatchControl(**{name: right[name] for name in names}, dry_run=True)
        await self.engine.control(order)

    async def _abort(self, rng: random.Random) -> None:
        await self.engine.abort(odd(rng))
        await self.engine.check_health()


def fuzz_engine(model: Path, calls: int) -> EngineFuzzer:
    async def body() -> EngineFuzzer:
        config = EngineConfig(model=str(model), **SETTINGS)
        engine = await AsyncEngine.start(config, LogSettings(level=logging.CRITICAL))
        try:
            fuzzer = EngineFuzzer(engine)
            await fuzzer.run(calls)
            return fuzzer
        finally:
            await engine.stop()

    return asyncio.run(body())


def fuzz_llm(model: Path, calls: int) -> int:
    """Random calls of an `LLM`, with right ones between them; returns how many were served."""
    llm = LLM(str(model), **SETTINGS)
    expected = llm.generate(["one", [5, 6, 7]], GREEDY)
    served = 0
    for number in range(calls):
        rng = random.Random(f"{SEED} {number}")
        message = {"role": rng.choice(("user", odd(rng))), "content": rng.choice(("a", odd(rng)))}
        prompts = rng.choice(("text", ["a", [1, 2]], [message], odd(rng)))
        params = rng.choice((QUICK, odd_params(rng), odd(rng)))
        method = rng.choice((llm.generate, llm.generate, llm.chat))
        with call(number, (method.__name__, prompts, params)):
            try:
                method(prompts, params)
                served += 1
            except EngineError:
                pass
            assert not llm.core.has_work
            assert llm.core.stats.num_used_blocks == 0
        if number % 100 == 0:
            assert llm.generate(["one", [5, 6, 7]], GREEDY) == expected
    assert llm.generate(["one", [5, 6, 7]], GREEDY) == expected
    return served


def test_odd_values_are_refused_by_name() -> None:
    assert 0 < fuzz_values(2000) < 1500


@pytest.mark.slow
def test_odd_calls_of_an_engine_hurt_no_other_caller(tiny_model: Path) -> None:
    fuzzer = fuzz_engine(tiny_model, 600)
    assert fuzzer.refused > 100
    assert fuzzer.served > 10
    assert fuzzer.answers > 1


def test_odd_calls_leave_an_llm_as_it_was(tiny_model: Path) -> None:
    assert fuzz_llm(tiny_model, 300) > 10


@pytest.mark.soak
def test_odd_values_for_long() -> None:
    fuzz_values(SOAK_CALLS)


@pytest.mark.soak
def test_odd_calls_of_an_engine_for_long(tiny_model: Path) -> None:
    fuzz_engine(tiny_model, SOAK_CALLS)


@pytest.mark.soak
def test_odd_calls_of_an_llm_for_long(tiny_model: Path) -> None:
    fuzz_llm(tiny_model, SOAK_CALLS)
