"""Layers that keep a state: it has each token of its sequence once, whatever the engine does."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import save_family
from request_mix import GREEDY, WAYS, finish, serve
from test_warm_up import Tracing
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from trencadis.engine import (
    LLM,
    BatchControl,
    ConfigError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    ModelError,
    SamplingParams,
    StructuredOutput,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices.cpu import CPUDevice, mamba_mixer
from trencadis.engine.devices.cpu.mamba_mixer import MambaMixer
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.models import decoder_layers
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_weight import QuantizedLinear
from trencadis.engine.models.rounded_weights import round_weights
from trencadis.engine.models.state_layers import StateLayers
from trencadis.engine.runner import background_warmup, host_swap, model_runner
from trencadis.engine.runner.block_moves import copy_blocks
from trencadis.engine.runner.limits import preemption_costs
from trencadis.kvcache import Direction
from trencadis.scheduler import PreemptionCosts

from .conftest import SESSION_DEVICE

FAMILIES = ("Falcon-H1", "Granite 4 (hybrid)", "LFM 2", "Mamba 2", "Qwen 3 Next")
OTHER_FAMILIES = ("Bamba", "Nemotron-H", "OLMo hybrid", "Qwen 3.5 (text)")
if SESSION_DEVICE is None:  # Gaudi refuses Mamba 1
    FAMILIES += ("Jamba",)
    OTHER_FAMILIES += ("Mamba",)
host_rows = pytest.mark.skipif(SESSION_DEVICE is not None, reason="a Gaudi pads rows of states")
HYBRID = "Granite 4 (hybrid)"

SMALL = {
    **{"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "warmup": "none"},
    **{"max_num_batched_tokens": 24, "block_size": 8},
}
AMPLE = {"num_blocks": 129}
SCARCE = {"num_blocks": 19, "num_host_blocks": 0}
SWAPPED = {"num_blocks": 19, "num_host_blocks": 64}

PLAIN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    """Shorter than the inputs that a convolution keeps, and longer than several chunks."""
    rng = random.Random(3)
    return [[rng.randrange(250) for _ in range(rng.randint(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Callable[[Path], None]
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of_family(family: str) -> Path:
        if family not in made:
            made[family] = save_family(family, tmp_path_factory.mktemp("state"))
            add_tokenizer(made[family])
        return made[family]

    return of_family


@pytest.fixture(scope="module")
def hybrid(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(HYBRID)


def make_core(model: Path, **changes: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=str(model), **SMALL | AMPLE | changes))


def greedy_of_transformers(model: Path, given: list[list[int]]) -> list[list[int]]:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for prompt in given:
        ids = torch.tensor([prompt])
        # Without a mask, tokens like that of padding would be hidden.
        whole = own.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def generated(model: Path, given: list[list[int]], **changes: Any) -> tuple[list[Any], LLM]:
    llm = LLM(str(model), **SMALL | AMPLE | changes)
    answers = [list(each.completions[0].token_ids) for each in llm.generate(given, PLAIN)]
    assert llm.core.stats.num_used_blocks == 0
    return answers, llm


@pytest.mark.parametrize(
    ("family", "count"),
    [(HYBRID, 8), *(pytest.param(name, 48, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_tokens_are_those_of_transformers_whatever_the_engine_does(
    checkpoint: Callable[[str], Path], family: str, count: int
) -> None:
    given = prompts(count)
    model = checkpoint(family)
    expected = greedy_of_transformers(model, given)
    ways = {
        "alone": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
        "together": {"max_num_batched_tokens": 512, "max_num_seqs": 48, "num_blocks": 800},
        "in chunks, and recomputed": SCARCE,
        "in chunks, and swapped": SWAPPED,
        "steps in flight": {"async_scheduling": True, **SCARCE},
        "without buckets": {"use_buckets": False, **SCARCE},
    }
    for way, changes in ways.items():
        answers, llm = generated(model, given, **changes)
        assert answers == expected, way
        if "num_blocks" in changes and way != "together":
            assert llm.core.stats.num_preemptions > 0
        assert bool(llm.core.stats.num_swaps) == (changes is SWAPPED)


def by_sample(reported: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
    return {
        key: [
            [token.token_id for token in of_key if token.index == index]
            for index in sorted({token.index for token in of_key})
        ]
        for key, of_key in reported.items()
    }


def evicting(core: EngineCore) -> EngineCore:
    """Has everything evicted again and again."""
    step, count = core.step, 0

    def stepping() -> Any:
        nonlocal count
        count += 1
        if count % 5 == 0:
            core.control(BatchControl(force_evict=99))
            core.control(BatchControl(max_num_seqs=8))  # which lets them resume at once
        return step()

    core.step = stepping  # type: ignore[method-assign]
    return core


PRESSURES = ({"num_host_blocks": 128}, {"num_host_blocks": 0}, {"async_scheduling": True})


@pytest.mark.parametrize(
    ("family", "pressures"),
    [
        (HYBRID, PRESSURES[:1]),
        *(pytest.param(name, PRESSURES, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_samples_and_beams_are_those_of_a_model_that_is_never_preempted(
    checkpoint: Callable[[str], Path], family: str, pressures: Sequence[dict[str, Any]]
) -> None:
    model = checkpoint(family)
    ways = [*WAYS["greedy"], *WAYS["seeds"][:1], *WAYS["samples"], *WAYS["beams"]]
    expected = by_sample(serve(make_core(model), ways, 2 * len(ways)))
    for changes in pressures:
        core = make_core(model, **changes)
        assert by_sample(serve(evicting(core), ways, 2 * len(ways))) == expected, changes
        assert core.stats.num_preemptions > 5
        assert bool(core.stats.num_swaps) == bool(changes.get("num_host_blocks"))
        assert core.stats.num_used_blocks == 0


@pytest.mark.parametrize(
    "family", [HYBRID, *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES)]
)
def test_beams_are_those_of_transformers(checkpoint: Callable[[str], Path], family: str) -> None:
    model = checkpoint(family)
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    params = SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=10)
    given = prompts(6)
    answers = LLM(str(model), **SMALL | AMPLE).generate(given, params)
    for prompt, answer in zip(given, answers, strict=True):
        ids = torch.tensor([prompt])
        theirs = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 10},
            **{"do_sample": False, "pad_token_id": 0},
        )[:, len(prompt) :].tolist()
        for completion, expected in zip(answer.completions, theirs, strict=True):
            ours = list(completion.token_ids)
            assert ours == expected[: len(ours)]


def test_an_abort_leaves_the_states_of_the_others(hybrid: Path) -> None:
    given = prompts(8)
    expected, _ = generated(hybrid, given)
    core = make_core(hybrid, **SWAPPED)
    for number, prompt in enumerate(given):
        core.add(f"{number}", GenerateRequest(tuple(prompt), PLAIN))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(8)}
    for count in range(500):
        if not core.has_work:
            break
        if count and count % 4 == 0:
            core.abort(f"{count // 4}")  # running, waiting or swapped
        if count % 3 == 0 and count < 80:
            core.add(f"late {count}", GenerateRequest(tuple(given[0]), PLAIN))
            tokens[f"late {count}"] = []
        if count % 6 == 1:
            core.abort(f"late {count - 4}")
        for token in core.step():
            tokens[token.key].append(token.token_id)
    assert core.stats.num_used_blocks == 0
    assert tokens["0"] == expected[0]
    for number in range(8):
        got = tokens[f"{number}"]
        assert got == expected[number][: len(got)]
    assert any(len(got) == 16 for key, got in tokens.items() if key.startswith("late"))
    late = [got for key, got in tokens.items() if key.startswith("late")]
    assert all(got == expected[0][: len(got)] for got in late)


def test_structured_answers_are_the_same_under_preemption(hybrid: Path) -> None:
    """Among them chunks of tokens that a grammar forces."""
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"type": "integer", "maximum": 9}, "b": {"type": "boolean"}},
        "required": ["a_long_name", "b"],
    }
    way = {**GREEDY, "max_tokens": 48, "structured_output": StructuredOutput(json_schema=schema)}
    way["ignore_eos"] = False
    expected = by_sample(serve(make_core(hybrid), [way], 4))
    assert by_sample(serve(evicting(make_core(hybrid, num_host_blocks=64)), [way], 4)) == expected
    alone = make_core(hybrid, max_num_seqs=1)
    assert by_sample(serve(alone, [way], 4)) == expected


class Fault(nn.Module):
    """Fails in the last layer, once the states of the others are computed."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.times: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.times and self.times.pop(0):
            raise RuntimeError("a defect of a pass")
        return self.own(hidden)


@pytest.mark.parametrize(
    "failing",
    # A Gaudi computes prompts and decodes apart, so a part that is repeated may be one sequence.
    [[1], [0, 1], *([[1, 1], [1, 0, 1], [0, 0, 1]] if SESSION_DEVICE is None else [])],
)
def test_a_pass_that_is_repeated_in_halves_advances_each_state_once(
    hybrid: Path, failing: list[int]
) -> None:
    given = prompts(6)
    expected, _ = generated(hybrid, given)
    core = make_core(hybrid, max_num_batched_tokens=300)
    model = core.executor.worker._model.model  # type: ignore[attr-defined]
    model.norm = fault = Fault(model.norm)
    for number, prompt in enumerate(given):
        core.add(f"{number}", GenerateRequest(tuple(prompt), PLAIN))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(6)}
    count = 0
    while core.has_work:
        if count in (0, 3, 9):
            fault.times = list(failing)
        count += 1
        for token in core.step():
            tokens[token.key].append(token.token_id)
        assert not core.take_failures()
    assert list(tokens.values()) == expected


def test_a_step_that_fails_as_a_whole_leaves_no_state_behind(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(4)
    expected, _ = generated(hybrid, given)
    core = make_core(hybrid)

    def fail(step: Any, execute: Callable[[Any], Any]) -> Any:
        execute(step)
        raise RuntimeError("the results of a step are lost")

    for number, prompt in enumerate(given):
        core.add(f"lost {number}", GenerateRequest(tuple(prompt), PLAIN))
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "execute", partial(fail, execute=core.executor.execute))
        core.step()
    assert {failure.key for failure in core.take_failures()} >= {"lost 0"}
    while core.has_work:
        core.step()
    for number, prompt in enumerate(given):
        core.add(f"{number}", GenerateRequest(tuple(prompt), PLAIN))
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(4)}
    while core.has_work:
        for token in core.step():
            tokens[token.key].append(token.token_id)
    assert list(tokens.values()) == expected


def limit_steps(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for ever fails."""
    step, left = core.step, iter(range(150))

    def limited() -> Any:
        assert next(left, None) is not None, "no request ends any more"
        return step()

    monkeypatch.setattr(core, "step", limited)


def test_a_second_call_of_one_llm_with_steps_in_flight_returns_the_same(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(6)
    expected, llm = generated(hybrid, given, async_scheduling=True)
    limit_steps(llm.core, monkeypatch)
    for _ in range(2):
        answers = llm.generate(given, PLAIN)
        assert [list(each.completions[0].token_ids) for each in answers] == expected


@pytest.mark.parametrize("family", ["Mamba 2", HYBRID])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_call_after_an_interrupted_one_returns_the_same(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, is_ahead: bool
) -> None:
    given = prompts(6)
    expected, llm = generated(checkpoint(family), given, async_scheduling=is_ahead)
    core, count = llm.core, 0
    limit_steps(core, monkeypatch)

    def interrupt(step: Any, execute: Callable[[Any], Any]) -> Any:
        nonlocal count
        count += 1
        started = execute(step)
        if count == 4:
            raise KeyboardInterrupt
        return started

    with monkeypatch.context() as patch:
        own = core.executor.execute
        patch.setattr(core.executor, "execute", partial(interrupt, execute=own))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(given, PLAIN)
    assert core.stats.num_used_blocks == 0
    answers = llm.generate(given, PLAIN)
    assert [list(each.completions[0].token_ids) for each in answers] == expected


def test_an_interrupted_call_lets_waiting_requests_of_others_be_served(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(4)
    expected, llm = generated(hybrid, given, max_num_seqs=2)
    core = llm.core
    for number, prompt in enumerate(given):
        core.add(f"{number}", GenerateRequest(tuple(prompt), PLAIN))
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "execute", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    core.discard_step()
    assert [failure.key for failure in core.take_failures()] == ["0", "1"]
    limit_steps(core, monkeypatch)
    tokens: dict[str, list[int]] = {"2": [], "3": []}
    while core.has_work:
        for token in core.step():
            tokens[token.key].append(token.token_id)
    assert list(tokens.values()) == expected[2:]


def raise_interrupt(_: Any) -> Any:
    raise KeyboardInterrupt


def test_after_sleep_and_after_a_switch_states_begin_anew(
    hybrid: Path, checkpoint: Callable[[str], Path]
) -> None:
    given = [tuple(prompt) for prompt in prompts(4)]
    other = checkpoint("LFM 2")

    def tokens(core: EngineCore) -> list[list[int]]:
        for number, prompt in enumerate(given):
            core.add(f"{number}", GenerateRequest(prompt, PLAIN))
        found: dict[str, list[int]] = {f"{number}": [] for number in range(4)}
        while core.has_work:
            for token in core.step():
                found[token.key].append(token.token_id)
        return list(found.values())

    core = make_core(hybrid)
    first, second = tokens(core), tokens(make_core(other))
    switcher = ModelSwitcher(core)
    for level in (1, 2):
        core.add("running", GenerateRequest(given[0], PLAIN))
        core.step()
        switcher.sleep(level)
        switcher.wake_up()
        assert tokens(core) == first
    for model, expected in ((other, second), (hybrid, first)):
        config = EngineConfig(model=str(model), **SMALL | AMPLE)
        switcher.reconfigure_engine(config_payload(config), 1 << 30)
        assert tokens(core) == expected


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=host_rows)])
def test_a_switch_frees_the_weights_of_layers_with_a_state(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """Before the next model is loaded: nothing holds the layers of the old one."""
    core = make_core(checkpoint("Mamba 2"), dtype="bfloat16", compile=is_compiled)
    core.add("request", GenerateRequest(tuple(prompts(1)[0]), PLAIN))
    while core.has_work:
        core.step()
    executor: Any = core.executor
    weights = [weakref.ref(each) for each in executor.worker._model.parameters()]
    optimize, left = executor.device.optimize, list[bool]()

    def noted(model: nn.Module) -> None:
        left.append(any(ref() is not None for ref in weights))
        optimize(model)

    monkeypatch.setattr(executor.device, "optimize", noted)
    config = EngineConfig(model=str(checkpoint("LFM 2")), **SMALL | AMPLE)
    gc.disable()
    try:
        ModelSwitcher(core).reconfigure_engine(config_payload(config), 0)
    finally:
        gc.enable()
    assert left == [False]


def test_asleep_there_is_no_memory_for_the_states_of_requests(hybrid: Path) -> None:
    core = make_core(hybrid)
    worker = core.executor.worker  # type: ignore[attr-defined]

    def num_places() -> set[int]:
        return {len(part) for part in worker.cache.states._parts.values()}

    awake = num_places()
    worker.sleep()
    assert max(num_places()) <= 2, "that of padding, on some devices twice"
    worker.wake()
    assert num_places() == awake


@host_rows
def test_a_warm_up_in_the_background_leaves_the_states_of_requests_alone(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StateLayers` are of one forward pass at a time: no other thread begins one."""
    expected = serve(make_core(hybrid), WAYS["greedy"])
    core = make_core(hybrid, warmup="background")
    core.warm_up()
    threads, begin, step = set(), StateLayers.begin, core.step

    def noting(*arguments: Any) -> None:
        threads.add(threading.current_thread())
        begin(*arguments)

    def stepping() -> Any:
        core.advance_warm_up()
        return step()

    monkeypatch.setattr(background_warmup, "_MAX_DELAY_SECONDS", -1.0)
    monkeypatch.setattr(StateLayers, "begin", noting)
    monkeypatch.setattr(core, "step", stepping)
    assert serve(core, WAYS["greedy"]) == expected
    background = core.executor.worker.background
    assert background is not None
    assert not background.is_running, "some buckets are left"
    assert threads == {threading.current_thread()}


def test_a_decode_of_many_sequences_is_one_call_of_each_layer(hybrid: Path) -> None:
    core = make_core(hybrid, max_num_seqs=32, max_num_batched_tokens=600, num_blocks=400)
    calls: list[int] = []
    for layer in core.executor.worker._model.model.layers:  # type: ignore[attr-defined]
        if layer.mamba is not None:
            layer.mamba.in_proj.register_forward_hook(
                lambda _, given, __: calls.append(given[0].shape[0])
            )
    for number in range(32):
        core.add(f"{number}", GenerateRequest((1, 2, number), PLAIN))
    core.step()
    calls.clear()
    core.step()
    assert calls == [32, 32]


def test_the_seconds_of_swaps_are_those_of_states_too(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncounted(*given: Any) -> dict[Direction, float]:
        copy_blocks(*given)
        return {}

    monkeypatch.setattr(model_runner, "copy_blocks", uncounted)
    timings = []
    count_swaps = EngineCore._count_swaps

    def noted(core: EngineCore, output: Any, timing: Any) -> None:
        timings.append((output.state_moves, timing))
        count_swaps(core, output, timing)

    monkeypatch.setattr(EngineCore, "_count_swaps", noted)
    _, llm = generated(hybrid, prompts(8), **SWAPPED)
    assert llm.core.stats.swap_seconds > 0
    for moves, timing in timings:
        directions = {direction for direction, _ in moves}
        assert (Direction.OUT in directions) == bool(timing and timing.swap_out_s)
        assert (Direction.IN in directions) == bool(timing and timing.swap_in_s)


def test_swapped_states_that_the_host_has_no_memory_for_are_rejected(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=1 << 20))
    monkeypatch.setattr(host_swap, "psutil", host)
    make_core(hybrid, max_num_seqs=99, num_host_blocks=0)
    with pytest.raises(ConfigError, match="states of max_num_seqs 99 swapped sequences take"):
        make_core(hybrid, max_num_seqs=99, num_host_blocks=1)


def with_common_beginnings() -> list[tuple[int, ...]]:
    """Prompts of two long beginnings, which end in a block or with one; some come again."""
    rng = random.Random(4)
    first, other = ([rng.randrange(250) for _ in range(42)] for _ in range(2))
    ends = [[rng.randrange(250) for _ in range(length)] for length in (1, 6, 14, 30, 38)]
    found = [(*begin, *end) for end in ends for begin in (first, other, first[:37])]
    return found + found[:3]


def served(core: EngineCore, ways: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is reported of prompts with common beginnings, some of which come while others run."""
    early: list[Any] = []
    for number, prompt in enumerate(with_common_beginnings()):
        params = SamplingParams(**ways[number % len(ways)])
        core.add(f"{number}", GenerateRequest(prompt, params))
        if number % 9 == 8:
            early += core.step()
    found = finish(core)
    for token in reversed(early):
        found.setdefault(token.key, []).insert(0, token)
    return by_sample(found)


@pytest.mark.parametrize(
    ("family", "pressures"),
    [
        (HYBRID, ({"async_scheduling": True},)),
        *(
            pytest.param(name, ({}, *PRESSURES, SCARCE), marks=pytest.mark.slow)
            for name in (*FAMILIES, *OTHER_FAMILIES)
            if name not in ("Jamba", "Mamba")
        ),
    ],
)
@host_rows
def test_prefix_hits_begin_with_the_state_of_their_tokens(
    checkpoint: Callable[[str], Path], family: str, pressures: Sequence[dict[str, Any]]
) -> None:
    model = checkpoint(family)
    ways = [GREEDY, *WAYS["greedy"], *WAYS["seeds"][:1], *WAYS["samples"], *WAYS["beams"]]
    expected = served(make_core(model, enable_prefix_caching=False), ways)
    for changes in pressures:
        core = make_core(model, **changes)
        if changes in PRESSURES:
            core = evicting(core)
        assert served(core, ways) == expected, changes
        stats = core.stats
        assert stats.num_prefix_hit_tokens > stats.num_prefix_query_tokens / 4
        assert stats.num_used_blocks == 0
        assert bool(stats.num_preemptions) == (changes in (*PRESSURES, SCARCE))
        hits = stats.num_prefix_hit_tokens
        assert served(core, ways) == expected
        assert core.stats.num_prefix_hit_tokens > hits


@host_rows
def test_hits_are_those_of_a_salt_and_not_of_a_model_that_has_slept(hybrid: Path) -> None:
    core = make_core(hybrid)
    prompt = with_common_beginnings()[0]

    def num_hits(salt: str | None = None) -> int:
        before = core.stats.num_prefix_hit_tokens
        core.add("0", GenerateRequest(prompt, PLAIN, cache_salt=salt))
        finish(core)
        return core.stats.num_prefix_hit_tokens - before

    assert [num_hits() for _ in range(2)] == [0, 40]
    assert [num_hits(salt) for salt in "abba"] == [0, 0, 40, 40]
    switcher = ModelSwitcher(core)
    for level in (1, 2):
        switcher.sleep(level)
        switcher.wake_up()
        assert [num_hits() for _ in range(2)] == [0, 40]


@host_rows
def test_states_of_prefixes_have_a_part_of_the_memory_of_the_cache(hybrid: Path) -> None:
    ample = make_core(hybrid, num_blocks=None)
    of_state, of_block = ample.facts.state_bytes, ample.facts.block_bytes
    assert ample.facts.num_state_snapshots == 2 * SMALL["max_num_seqs"]
    memory = 20 * of_state
    core = make_core(hybrid, num_blocks=None, kv_cache_memory=memory, max_num_seqs=99)
    assert core.facts.num_state_snapshots == 5
    assert core.facts.limits.num_blocks == 15 * of_state // of_block
    # One sequence of max_model_len precedes.
    scarce = make_core(hybrid, num_blocks=None, kv_cache_memory=17 * of_block + of_state)
    assert (scarce.facts.num_state_snapshots, scarce.facts.limits.num_blocks) == (1, 17)
    none = make_core(hybrid, num_blocks=None, kv_cache_memory=17 * of_block)
    assert (none.facts.num_state_snapshots, none.facts.limits.num_blocks) == (0, 17)
    # So do the blocks that the user asks for.
    asked = make_core(hybrid, num_blocks=25, kv_cache_memory=25 * of_block + of_state)
    assert (asked.facts.num_state_snapshots, asked.facts.limits.num_blocks) == (1, 25)


@pytest.mark.parametrize("family", [HYBRID] if SESSION_DEVICE else ["Jamba"])
def test_prefixes_are_not_cached_where_that_does_not_pay_and_a_line_says_so(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture, family: str
) -> None:
    """The rest of a prompt of Mamba 1 would be computed token by token."""
    caplog.set_level(logging.INFO, "trencadis.engine")
    core = make_core(checkpoint(family), enable_prefix_caching=True)
    assert "Prefixes are not cached: the layers of" in caplog.text
    assert "Layers that keep a state: " in caplog.text
    prompt = tuple(range(60))
    for key in ("a", "b"):
        core.add(key, GenerateRequest(prompt, PLAIN))
        while core.has_work:
            core.step()
    assert core.stats.num_prefix_query_tokens == core.stats.num_prefix_hit_tokens == 0
    assert core.stats.num_prefill_tokens == 120


def compiled_core(model: Path, cache: Path, **changes: Any) -> EngineCore:
    """With warm programs: a pass that ran without would be counted."""
    settings = {"compile": True, "warmup": "full", "compile_cache": str(cache), **changes}
    core = make_core(model, **settings)
    core.warm_up()
    assert core.executor.worker.runner.forward_runner._layer_runs  # type: ignore[attr-defined]
    return core


# Those without experts, which are compiled in bf16 alone.
COMPILED = ("Falcon-H1", "LFM 2", "Mamba 2", "Bamba", "Nemotron-H", "OLMo hybrid", "Mamba")


@host_rows
@pytest.mark.parametrize(
    ("family", "device"),
    [
        ("Mamba 2", Tracing),
        pytest.param("OLMo hybrid", Tracing, marks=pytest.mark.slow),
        *(pytest.param(name, CPUDevice, marks=pytest.mark.slow) for name in COMPILED),
    ],
)
def test_programs_call_the_layers_that_keep_a_state(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, device: type[CPUDevice]
) -> None:
    model = checkpoint(family)
    ways = [*WAYS["greedy"], *WAYS["beams"]]
    if family != "Nemotron-H":  # one draw of hundreds is as near to two tokens as fp32 can tell
        ways += [*WAYS["seeds"][:1], *WAYS["samples"]]
    expected = served(make_core(model), ways)
    pressures = PRESSURES if device is CPUDevice else PRESSURES[2:]
    for changes in pressures:
        core = compiled_core(model, tmp_path, device=device(), **changes)
        calls = core.executor.worker.runner.forward_runner.states  # type: ignore[attr-defined]
        in_programs: list[int] = []
        calls.compute = noting(calls.compute, in_programs)
        # Without prefix hits, a prompt that is evicted again and again is never computed.
        assert served(core if family == "Mamba" else evicting(core), ways) == expected
        assert core.stats.num_cold_forwards == core.stats.num_compilations == 0
        assert {*in_programs} == {*calls._shapes}


def noting(compute: Callable[..., Any], layers: list[int]) -> Callable[..., Any]:
    def noted(layer: int, hidden: torch.Tensor) -> Any:
        layers.append(layer)
        return compute(layer, hidden)

    return noted


@host_rows
@pytest.mark.slow
@pytest.mark.parametrize("family", [HYBRID, "Qwen 3 Next", "Falcon Mamba", "Mamba 2"])
def test_programs_in_bf16_compute_nearly_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Which rounds elsewhere in a program. Experts are compiled in no other type, and the last two
    families pass hidden states on in fp32."""
    settings = {**SMALL, **AMPLE, "dtype": "bfloat16", "runner": "pooling"}
    programs = {"compile": True, "warmup": "full", "compile_cache": str(tmp_path)}
    found = []
    for changes in ({}, programs):
        llm = LLM(str(checkpoint(family)), **settings | changes)
        found.append(torch.tensor([each.vector for each in llm.embed(prompts(8))]))
        assert llm.core.stats.num_cold_forwards == 0
    assert bool(llm.core.executor.device.num_compilations())  # type: ignore[attr-defined]
    assert (found[0] * found[1]).sum(1).min() > 0.99


@host_rows
def test_a_layer_that_returns_another_type_than_it_takes_is_not_compiled(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs look at no dtype: that of the first layer would read what is in fp32 as bf16."""
    forward = decoder_layers._forward

    def as_it_is(number: int, own: Any, results: Any, _: bool, *given: Any, **named: Any) -> Any:
        return forward(number, own, results, False, *given, **named)

    monkeypatch.setattr(decoder_layers, "_forward", as_it_is)
    with pytest.raises(ModelError, match=r"returns torch.float32 for torch.bfloat16"):
        compiled_core(checkpoint("Mamba 2"), tmp_path, device=Tracing(), dtype="bfloat16")


@host_rows
@pytest.mark.slow
def test_programs_stay_over_a_sleep_and_read_the_new_states(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    core = compiled_core(checkpoint("LFM 2"), tmp_path, device=Tracing())
    first = served(core, [GREEDY])
    switcher = ModelSwitcher(core)
    switcher.sleep(1)
    switcher.wake_up()
    assert served(core, [GREEDY]) == first
    assert core.stats.num_cold_forwards == 0


@pytest.mark.parametrize(("setting", "value"), [("enable_lora", True), ("tensor_parallel_size", 2)])
def test_what_states_are_not_computed_under_is_rejected_by_name(
    hybrid: Path, setting: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{setting} {value} does not work with layers that keep"):
        make_core(hybrid, **{setting: value})


@host_rows
def test_states_that_do_not_fit_are_rejected_before_the_weights_are_loaded(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUDevice, "total_memory", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match="the states of max_num_seqs 99 sequences take"):
        make_core(hybrid, max_num_seqs=99)


@pytest.mark.parametrize("family", sorted({"Jamba", HYBRID, "Mamba 2"} & {*FAMILIES}))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(changes, marks=host_rows)
            for changes in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"})
        ),
    ],
    ids=str,
)
def test_states_have_dtypes_of_their_own_whatever_is_rounded(
    checkpoint: Callable[[str], Path], family: str, changes: dict[str, Any]
) -> None:
    _, llm = generated(checkpoint(family), prompts(4), dtype="bfloat16", **changes)
    cache = llm.core.executor.worker.cache.states  # type: ignore[attr-defined]
    assert {part.dtype for part in cache._parts.values()} == {torch.bfloat16, torch.float32}


@host_rows
@pytest.mark.parametrize("has_kernel", [True, False])
def test_mamba_2_is_scanned_by_the_kernel_where_there_is_one(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, has_kernel: bool
) -> None:
    calls: list[tuple[int, int]] = []
    between = MambaMixer._between

    def counted(mixer: MambaMixer, module: Any, projected: torch.Tensor, *given: Any) -> Any:
        calls.append((projected.shape[0], projected.shape[1]))
        return between(mixer, module, projected, *given)

    def absent(*_: Any, **__: Any) -> Any:
        raise NoKernel("there is no C++ compiler")

    monkeypatch.setattr(MambaMixer, "_between", counted)
    if not has_kernel:
        monkeypatch.setattr(mamba_mixer, "load_kernel", absent)
    given = prompts(4)
    expected = greedy_of_transformers(hybrid, given)
    assert generated(hybrid, given)[0] == expected
    assert ({(4, 1), (1, 24)} <= {*calls}) == bool(calls) == has_kernel, calls


@pytest.mark.parametrize("family", [HYBRID, "Mamba 2"])
def test_int8_rounds_all_projections_of_mamba_2(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    """Also the one whose weight the layer's code gives to a kernel of training."""
    spec = inspect_model(str(checkpoint(family)))
    model = load_model(spec, torch.device("cpu"), torch.bfloat16, 64)
    round_weights(model, "int8")
    found = {
        name.rsplit(".", 1)[1]: type(module)
        for name, module in model.named_modules()
        if name.endswith(("in_proj", "out_proj"))
    }
    assert found == dict.fromkeys(("in_proj", "out_proj"), QuantizedLinear)


def test_int4_rounds_the_network_of_a_layer_that_is_called_after_its_attention(
    checkpoint: Callable[[str], Path],
) -> None:
    """OLMo hybrid's layers of one kind are ``OlmoHybridLinearAttentionDecoderLayer``."""
    spec = inspect_model(str(checkpoint("OLMo hybrid")))
    model = load_model(spec, torch.device("cpu"), torch.bfloat16, 64)
    round_weights(model, "int4")
    of_4 = {
        name
        for name, each in model.named_modules()
        if isinstance(each, QuantizedLinear) and each.steps.dtype is torch.uint8
    }
    inner = {
        f"model.layers.{number}.mlp.{name}_proj" for number in (1, 2) for name in ("gate", "up")
    }
    assert inner <= of_4


@pytest.mark.parametrize(
    "family", sorted({*FAMILIES, *OTHER_FAMILIES} - {"Jamba", HYBRID, "Mamba 2"})
)
def test_every_family_is_served_in_bf16(checkpoint: Callable[[str], Path], family: str) -> None:
    """Also where the model keeps some weights of its layers in fp32."""
    answers, llm = generated(checkpoint(family), prompts(2), dtype="bfloat16")
    assert [len(answer) for answer in answers] == [16, 16]
    cache = llm.core.executor.worker.cache.states  # type: ignore[attr-defined]
    assert torch.bfloat16 in {part.dtype for part in cache._parts.values()}


@pytest.mark.parametrize("family", [HYBRID, "Mamba 2"])
def test_embeddings_are_the_last_hidden_states(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    model, given = checkpoint(family), prompts(4)
    own = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    answers = LLM(str(model), runner="pooling", **SMALL | AMPLE).embed(given)
    for prompt, answer in zip(given, answers, strict=True):
        hidden = own(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = hidden / hidden.norm()
        torch.testing.assert_close(torch.tensor(answer.vector), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_bytes", [512, 1 << 20])
def test_before_a_swap_is_measured_a_state_costs_its_bytes(block_bytes: int) -> None:
    """In blocks of any size: 2 MiB take 40 us out and 50 us in, as in seed 003."""
    costs = preemption_costs(block_bytes, 64 << 20)
    per_block = costs.swap_out_s_per_block + costs.swap_in_s_per_block
    assert costs.blocks_per_state * per_block == pytest.approx(32 * 90e-6)
    assert preemption_costs(block_bytes, 0) == PreemptionCosts()
