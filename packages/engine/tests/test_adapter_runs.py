"""Random requests over many adapters and few slots, each of which writes tokens of its own.

Whatever is loaded, unloaded, aborted and evicted meanwhile, no request gets the tokens of another
adapter, none starves, and nothing is left behind.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from adapters import pair, write_adapter
from transformers import LlamaForCausalLM

from trencadis.engine import (
    AdapterError,
    BatchControl,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
)

NUM_ADAPTERS, NUM_SLOTS = 64, 4
LAYER = "model.layers.1.mlp.down_proj"
MAX_STEPS_IN_QUEUE = 3000
BASE_PROMPTS = [tuple(range(start, start + 5 + start % 7)) for start in range(0, 200, 20)]


@pytest.fixture(scope="module")
def stamped(make_tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it adapters of which each writes one of two tokens, by a sign.

    The rows of the model's head are of one length, and each odd one is the negative of the one
    before. An adapter adds one of them to the last hidden state, so large that nothing else counts.
    """
    folder = tmp_path_factory.mktemp("stamped")
    make_tiny_model(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = torch.nn.functional.normalize(torch.randn(129, 48, generator=_generator(0))) * 20
    model.lm_head.weight.data = torch.stack((rows, -rows), 1).view(258, 48).contiguous()
    model.save_pretrained(folder / "model")
    for number in range(NUM_ADAPTERS):
        matrices = pair(LAYER, 64, 48, rank=2)
        down, up = matrices
        matrices[down] = torch.randn(2, 64, generator=_generator(number))
        matrices[up] = torch.stack((rows[number], torch.zeros(48)), 1) * 1e4
        write_adapter(folder / f"{number}", matrices, _SETTINGS)
    return folder


_SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"]}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def core_of(folder: Path, **settings: object) -> EngineCore:
    values = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "max_model_len": 64,
        "warmup": "none",
        "enable_lora": True,
        "max_loras": NUM_SLOTS,
        "max_lora_rank": 2,
        "max_cpu_loras": 24,
        "num_blocks": 30,
        "num_host_blocks": 20,
        "max_num_seqs": 10,
        **settings,
    }
    core = EngineCore(EngineConfig(**values))
    core.warm_up()
    return core


@attrs.define
class Asked:
    """A request that was added. ``prompt``: of one without an adapter."""

    adapter: int | None
    prompt: tuple[int, ...]
    added_step: int
    max_tokens: int
    num_samples: int
    tokens: Counter[int] = attrs.field(factory=Counter)


class Run:
    """A core under random calls. ``loaded``: the adapters that requests may name."""

    def __init__(self, core: EngineCore, folder: Path, seed: int) -> None:
        self.core, self.folder = core, folder
        self.draw = random.Random(seed)
        self.loaded: set[int] = set()
        self.open: dict[str, Asked] = {}
        self.step_number = self.num_added = self.longest_wait = self.num_finished = 0
        self.base_tokens: dict[tuple[int, ...], list[int]] = {}

    def load(self, number: int) -> None:
        try:
            self.core.load_adapter(f"{number}", str(self.folder / f"{number}"))
        except AdapterError as error:
            assert "max_cpu_loras" in str(error) or number in self.loaded
        else:
            assert number not in self.loaded
            self.loaded.add(number)

    def unload(self) -> None:
        if self.loaded:
            number = self.draw.choice(sorted(self.loaded))
            self.core.unload_adapter(f"{number}")
            self.loaded.remove(number)

    def add(self) -> None:
        adapter = self.draw.choice([None, *sorted(self.loaded)])
        prompt = self.draw.choice(BASE_PROMPTS)
        samples = self.draw.choice([1, 1, 1, 2, 3]) if adapter is not None else 1
        length = self.draw.randint(1, 20)
        params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            n=samples,
            temperature=0.0 if samples == 1 else 0.5,
            seed=1,
        )
        key = f"r{self.num_added}"
        self.num_added += 1
        name = None if adapter is None else f"{adapter}"
        self.core.add(key, GenerateRequest(prompt, params, lora=name))
        self.open[key] = Asked(adapter, prompt, self.step_number, length, samples)

    def abort(self) -> None:
        if self.open:
            key = self.draw.choice(sorted(self.open))
            self.core.abort(key)
            del self.open[key]

    def evict(self) -> None:
        self.core.control(BatchControl(force_evict=self.draw.randint(0, 6), hold_s=0.0))

    def step(self) -> None:
        self.step_number += 1
        for token in self.core.step():
            asked = self.open.get(token.key)
            if asked is None:
                continue
            asked.tokens[token.index] += 1
            if asked.adapter is None:
                expected = self.base_tokens[asked.prompt][asked.tokens[token.index] - 1]
                assert token.token_id == expected, "the model's own weights"
            else:
                assert token.token_id // 2 == asked.adapter, "another adapter"
            if token.finish_reason is not None:
                assert asked.tokens[token.index] == asked.max_tokens
                if sum(asked.tokens.values()) == asked.max_tokens * asked.num_samples:
                    self.longest_wait = max(self.longest_wait, self.step_number - asked.added_step)
                    self.num_finished += 1
                    del self.open[token.key]
        assert not self.core.take_failures()
        used = self.core.scheduler.adapters
        assert len(used) <= NUM_SLOTS
        named = {each.loaded.digest for each in self.core.adapters}
        held = set(self.core.executor.worker.adapters._adapters)
        assert held - named <= self.core.requests.adapters(), "no request needs it"
        assert len(held) <= 24


def tokens_without_adapters(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """The tokens that each of `BASE_PROMPTS` gets in an engine that serves no adapters."""
    core = core_of(folder, enable_lora=False, num_blocks=100)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found: dict[tuple[int, ...], list[int]] = {prompt: [] for prompt in BASE_PROMPTS}
    for prompt, tokens in found.items():
        core.add("r", GenerateRequest(prompt, greedy))
        while core.has_work:
            tokens += [token.token_id for token in core.step()]
    core.close()
    return found


def run(folder: Path, num_requests: int, seed: int, **settings: object) -> Run:
    core = core_of(folder, **settings)
    test = Run(core, folder, seed)
    test.base_tokens = tokens_without_adapters(folder)
    draw = test.draw
    while test.num_added < num_requests:
        for number in draw.sample(range(NUM_ADAPTERS), draw.choice([0, 0, 0, 1, 3])):
            test.load(number)
        for _ in range(draw.choice([0, 0, 1, 2, 5, 12])):
            test.add()
        if draw.random() < 0.1:
            test.abort()
        if draw.random() < 0.15:
            test.unload()
        if draw.random() < 0.05:
            test.evict()
        for _ in range(draw.choice([1, 2, 4])):
            test.step()
    for _ in range(MAX_STEPS_IN_QUEUE):
        if not test.open:
            break
        test.step()
    assert not test.open, "every request is served"
    while core.has_work:
        core.step()
    assert not core.scheduler.adapters
    assert core.blocks.pool.num_used_blocks == 0
    while test.loaded:
        test.unload()
    assert not core.executor.worker.adapters._adapters
    assert core.stats.num_preemptions > 0
    core.close()
    return test


CASES = {
    "one step": {},
    "two steps": {"async_scheduling": True},
    "priority": {"scheduling_policy": "priority"},
}


@pytest.mark.parametrize("case", CASES)
def test_no_request_gets_the_tokens_of_another_adapter(case: str, stamped: Path) -> None:
    test = run(stamped, 250, seed=len(case), **CASES[case])
    assert test.num_finished > 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_two_thousand_requests(seed: int, stamped: Path) -> None:
    test = run(stamped, 2000, seed)
    assert test.num_finished > 1500
