"""A core that changes its model: nothing of the old one is left, and a failure brings it back."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    ConfigError,
    EngineConfig,
    EngineCore,
    EngineOverloaded,
    EngineStats,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    SwitchFailedError,
)
from trencadis.engine.core import reconfigure
from trencadis.engine.core.config_payload import (
    MAX_PAYLOAD_BYTES,
    config_of_payload,
    config_payload,
)
from trencadis.engine.core.reconfigure import STEPS, ModelSwitcher
from trencadis.engine.runner.cache_sizing import CacheSizing
from trencadis.engine.runner.worker import Worker
from trencadis.kvcache import DefragConfig
from trencadis.warmup import WarmupConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [tuple(range(5, 45)), tuple(range(5, 30)), (7, 8, 9)]
STASH_BYTES = 1 << 30
NO_STASH = 0


@pytest.fixture(scope="module")
def first(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=80,
        warmup="none",
    )


@pytest.fixture(scope="module")
def second(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> EngineConfig:
    """It differs from the first in every size, in the dtype and in its warm-up."""
    model = make_tiny_model(
        tmp_path_factory.mktemp("second"),
        vocab_size=320,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
    )
    return EngineConfig(
        model=str(model),
        dtype="bfloat16",
        max_model_len=200,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        block_size=16,
        num_blocks=60,
        warmup="full",
        bucketing=BucketingConfig(
            prompt_batch=AxisConfig(min=3, step=3, max=3),
            prompt_query=AxisConfig(min=48, step=48, max=48),
            prompt_context=AxisConfig(min=13, step=13, max=13),
            decode_batch=AxisConfig(min=3, step=3, max=3),
            decode_blocks=AxisConfig(min=60, step=60, max=60),
        ),
    )


def started(config: EngineConfig) -> tuple[EngineCore, ModelSwitcher]:
    core = EngineCore(config)
    core.warm_up()
    return core, ModelSwitcher(core)


def switch(switcher: ModelSwitcher, config: EngineConfig, stash_bytes: int = STASH_BYTES):
    return switcher.reconfigure_engine(config_payload(config), stash_bytes)


def serve(core: EngineCore, params: SamplingParams = GREEDY) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        core.add(str(number), GenerateRequest(prompt, params))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    while core.has_work:
        for token in core.step():
            tokens[token.key].append(token.token_id)
    assert not core.take_failures()
    return list(tokens.values())


@pytest.fixture(scope="module")
def alone(first: EngineConfig, second: EngineConfig) -> list[list[list[int]]]:
    """What each model answers in a core of its own."""
    return [serve(started(config)[0]) for config in (first, second)]


@pytest.mark.parametrize("stash_bytes", [STASH_BYTES, NO_STASH])
def test_each_model_answers_as_in_a_core_of_its_own(
    first: EngineConfig, second: EngineConfig, alone: list[list[list[int]]], stash_bytes: int
) -> None:
    core, switcher = started(first)
    assert serve(core) == alone[0]
    for round_number in range(2):
        result = switch(switcher, second, stash_bytes)
        assert result.from_stash == (round_number == 1 and stash_bytes > 0)
        assert (core.max_model_len, core.config.block_size) == (200, 16)
        assert core.executor.worker.dtype is torch.bfloat16
        assert core.stats.num_ready_buckets == core.stats.num_buckets > 0
        assert serve(core) == alone[1]
        assert core.stats.num_used_blocks == 0
        result = switch(switcher, first, stash_bytes)
        assert result.from_stash == (stash_bytes > 0)
        assert (core.max_model_len, core.config.block_size) == (128, 8)
        assert core.executor.worker.dtype is torch.float32
        assert serve(core) == alone[0]


def test_no_prompt_hits_a_prefix_that_another_model_computed(
    first: EngineConfig, tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    """The two models differ in their weights alone: the keys of their blocks are equal."""
    twin = attrs.evolve(first, model=str(make_tiny_model(tmp_path, initializer_range=0.3)))
    expected = serve(started(twin)[0])
    core, switcher = started(first)
    serve(core)
    core.add("again", GenerateRequest(PROMPTS[0], GREEDY))
    assert first_token(core).num_cached_tokens > 0
    core.abort_all()
    switch(switcher, twin)
    core.add("other", GenerateRequest(PROMPTS[0], GREEDY))
    assert first_token(core).num_cached_tokens == 0
    core.abort_all()
    switch(switcher, first)
    core.add("back", GenerateRequest(PROMPTS[0], GREEDY))
    assert first_token(core).num_cached_tokens == 0
    core.abort_all()
    switch(switcher, twin)
    assert serve(core) == expected


def first_token(core: EngineCore):
    while True:
        for token in core.step():
            return token


def test_requests_that_run_end_and_leave_nothing_behind(
    first: EngineConfig, second: EngineConfig, alone: list[list[list[int]]]
) -> None:
    core, switcher = started(first)
    for number in range(6):
        core.add(f"lost {number}", GenerateRequest(PROMPTS[0], GREEDY))
    core.step()
    switch(switcher, second)
    assert not core.has_work
    assert core.step() == []
    assert serve(core) == alone[1]


def test_memory_of_the_old_model_is_freed(first: EngineConfig, second: EngineConfig) -> None:
    core, switcher = started(first)
    cache = weakref.ref(core.executor.worker.cache)
    weights = weakref.ref(next(core.executor.worker._model.parameters()))
    blocks, scheduler = weakref.ref(core.blocks), weakref.ref(core.scheduler)
    switch(switcher, second, NO_STASH)
    assert [ref() for ref in (cache, weights)] == [None] * 2
    gc.collect()
    assert [ref() for ref in (blocks, scheduler)] == [None] * 2


def test_a_stashed_model_keeps_its_weights_and_not_its_cache(
    first: EngineConfig, second: EngineConfig
) -> None:
    core, switcher = started(first)
    cache = weakref.ref(core.executor.worker.cache)
    switch(switcher, second)
    assert cache() is None
    assert core.executor.stash.num_bytes > 0


def test_a_model_that_was_served_before_needs_no_file_and_on_the_cpu_no_warm_up(
    first: EngineConfig,
    second: EngineConfig,
    alone: list[list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = attrs.evolve(second, model=str(shutil.copytree(second.model, tmp_path / "copy")))
    core, switcher = started(first)
    assert switch(switcher, copied).warmup_s > 0
    warmed_up = core.stats.num_ready_buckets
    switch(switcher, first)
    shutil.rmtree(copied.model)
    warmed: list[Worker] = []
    warm_up = Worker.warm_up

    def counted(worker: Worker, stop: Callable[[], bool]) -> Any:
        warmed.append(worker)
        return warm_up(worker, stop)

    monkeypatch.setattr(Worker, "warm_up", counted)
    result = switch(switcher, copied)
    assert result.from_stash
    # Elsewhere the weights have moved, and programs and graphs have their addresses.
    assert len(warmed) == (0 if core.executor.device.shares_host_memory else 1)
    assert core.stats.num_ready_buckets == warmed_up
    assert serve(core) == alone[1]


@pytest.mark.slow  # it compiles
def test_compiled_programs_are_used_again_and_read_the_new_cache(
    first: EngineConfig, second: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"compile": True, "compile_cache": str(tmp_path)}
    compiled = [attrs.evolve(second, **changes), attrs.evolve(second, **changes, max_num_seqs=2)]
    core, switcher = started(compiled[0])
    expected = serve(core)
    switch(switcher, compiled[1])
    monkeypatch.setattr(
        core.executor.device, "compile", None
    )  # from now on nothing can be compiled
    cache = weakref.ref(core.executor.worker.cache)
    for config in compiled * 2:
        assert switch(switcher, config).from_stash
        assert cache() is None
        cache = weakref.ref(core.executor.worker.cache)
        assert serve(core) == expected
        assert core.stats.num_cold_forwards == 0


def test_the_stash_keeps_the_models_that_were_served_last(
    first: EngineConfig, second: EngineConfig
) -> None:
    core, switcher = started(first)
    other = attrs.evolve(first, max_num_seqs=2)
    one_model = core.executor.worker.weight_bytes
    switch(switcher, other, one_model)
    assert not switch(switcher, second, one_model).from_stash
    assert len(core.executor.stash) == 1
    assert switch(switcher, other, one_model).from_stash
    assert not switch(switcher, first, one_model).from_stash


def test_a_model_that_is_too_large_for_the_stash_takes_no_other_out_of_it(
    first: EngineConfig, second: EngineConfig
) -> None:
    core, switcher = started(first)
    of_first = core.executor.worker.weight_bytes
    switch(switcher, second, STASH_BYTES)
    of_second = core.executor.worker.weight_bytes
    assert of_first != of_second
    small, large = (first, second) if of_first < of_second else (second, first)
    core, switcher = started(small)
    limit = min(of_first, of_second)
    switch(switcher, large, limit)
    switch(switcher, attrs.evolve(large, max_num_seqs=2), limit)
    assert switch(switcher, small, limit).from_stash


def failing(step: str, *, after: bool) -> Iterator[tuple[str, reconfigure.Step]]:
    def fail(name: str, own: reconfigure.Step) -> reconfigure.Step:
        def run(switch: reconfigure._Switch) -> None:
            if name == step and not after:
                raise RuntimeError("a fault")
            own(switch)
            if name == step:
                raise RuntimeError("a fault")

        return run

    return ((name, fail(name, own)) for name, own in STEPS)


@pytest.mark.parametrize(
    ("stash_bytes", "after"),
    [
        pytest.param(STASH_BYTES, True, id="after the step", marks=pytest.mark.slow),
        pytest.param(STASH_BYTES, False, id="before the step", marks=pytest.mark.slow),
        pytest.param(NO_STASH, True, id="after the step, no stash", marks=pytest.mark.slow),
        pytest.param(NO_STASH, False, id="before the step, no stash", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_any_step_brings_the_previous_model_back(
    first: EngineConfig,
    second: EngineConfig,
    alone: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
    stash_bytes: int,
) -> None:
    core, switcher = started(first)
    for step, _ in STEPS:
        core.add("lost", GenerateRequest(PROMPTS[0], GREEDY))
        core.step()
        with monkeypatch.context() as patch:
            patch.setattr(reconfigure, "STEPS", tuple(failing(step, after=after)))
            with pytest.raises(SwitchFailedError, match="a fault") as raised:
                switch(switcher, second, stash_bytes)
        assert raised.value.step == step
        assert raised.value.active == first.name
        assert not core.is_asleep
        assert not core.has_work, "its front has parked or ended the request"
        assert serve(core) == alone[0], step
    switch(switcher, second, stash_bytes)
    assert serve(core) == alone[1]


TOTALS = [field.name for field in attrs.fields(EngineStats) if field.metadata.get("is_total")]


def totals(core: EngineCore) -> list[float]:
    return [getattr(core.stats, name) for name in TOTALS]


@pytest.mark.slow
@pytest.mark.parametrize("stash_bytes", [STASH_BYTES, NO_STASH])
def test_totals_of_a_model_go_on_over_switches_sleeps_and_failures(
    first: EngineConfig,
    second: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    stash_bytes: int,
) -> None:
    """Counters never fall, and count everything once, also of workers that wait in the stash."""
    core, switcher = started(first)
    serve(core)
    of_one_run = totals(core)
    generated = len(PROMPTS) * 10
    assert core.stats.num_generation_tokens == generated
    for step, _ in STEPS:
        with monkeypatch.context() as patch:
            patch.setattr(reconfigure, "STEPS", tuple(failing(step, after=True)))
            with pytest.raises(SwitchFailedError):
                switch(switcher, second, stash_bytes)
        assert core.stats.num_generation_tokens == generated
    for level in (1, 2):
        before = totals(core)
        switcher.sleep(level)
        assert totals(core) == before
        switcher.wake_up()
        assert totals(core) == before
    before = totals(core)
    switch(switcher, second, stash_bytes)
    assert core.stats.num_generation_tokens == 0
    serve(core)
    switch(switcher, first, stash_bytes)
    assert totals(core) == before
    serve(core)
    again = dict(zip(TOTALS, totals(core), strict=True))
    for name, once in zip(TOTALS, of_one_run, strict=True):
        if name.endswith(("_tokens", "num_steps")) and "padded" not in name:
            twice = tuple(2 * n for n in once) if isinstance(once, tuple) else 2 * once
            assert again[name] == twice, name
    switch(switcher, second, stash_bytes)
    assert core.stats.num_generation_tokens == generated


@pytest.mark.parametrize(
    ("changes", "step", "message"),
    [
        ({"model": "/no/such/model"}, "load", "no directory"),
        ({"num_blocks": 3}, "load", "max_model_len"),
        ({"max_model_len": 100_000}, "load", "max_model_len"),
        ({"cpu_threads": 7}, "deserialise", "setting of the device"),
    ],
)
def test_a_model_that_cannot_be_served_leaves_the_previous_one_active(
    first: EngineConfig,
    second: EngineConfig,
    alone: list[list[list[int]]],
    changes: dict[str, object],
    step: str,
    message: str,
) -> None:
    core, switcher = started(first)
    with pytest.raises(SwitchFailedError, match=message) as raised:
        switch(switcher, attrs.evolve(second, **changes))
    assert raised.value.step == step
    assert serve(core) == alone[0]


def test_a_core_that_cannot_return_sleeps_until_it_can(
    first: EngineConfig, second: EngineConfig, alone: list[list[list[int]]], tmp_path: Path
) -> None:
    copied = attrs.evolve(first, model=str(shutil.copytree(first.model, tmp_path / "copy")))
    core, switcher = started(copied)
    shutil.rmtree(copied.model)
    with pytest.raises(SwitchFailedError, match=r"max_model_len.*sleeps.*no directory") as raised:
        switch(switcher, attrs.evolve(second, num_blocks=3), NO_STASH)
    assert (raised.value.step, raised.value.active) == ("wake", copied.name)
    assert core.is_asleep
    shutil.copytree(first.model, copied.model)
    switcher.wake_up()
    assert serve(core) == alone[0]


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        pytest.param(CacheSizing, "make_cache", id="cache", marks=pytest.mark.slow),
        pytest.param(Worker, "warm_up", id="warm-up"),
    ],
)
def test_a_core_whose_memory_was_taken_sleeps_on(
    first: EngineConfig,
    alone: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    kind: type,
    part: str,
) -> None:
    core, switcher = started(first)
    switcher.sleep(level)
    own = getattr(kind, part)

    def full(self: object, *args: Any, **fields: Any) -> Any:
        if args[:2] == (1, 0):  # the cache of a core that sleeps
            return own(self, *args, **fields)
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(kind, part, full)
        if part == "warm_up":
            core.executor.worker.is_warm = False
        for _ in range(2):
            with pytest.raises(SwitchFailedError, match="out of memory") as raised:
                switcher.wake_up()
            assert (raised.value.step, raised.value.active) == ("wake", first.name)
            assert core.is_asleep
    switcher.wake_up()
    assert serve(core) == alone[0]


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_core_sleeps_without_its_cache_and_wakes_up_as_it_was(
    first: EngineConfig, alone: list[list[list[int]]], level: int
) -> None:
    core, switcher = started(first)
    serve(core)
    cache = weakref.ref(core.executor.worker.cache)
    weights = weakref.ref(next(core.executor.worker._model.parameters()))
    core.add("lost", GenerateRequest(PROMPTS[0], GREEDY))
    core.step()
    switcher.sleep(level)
    assert core.is_asleep
    assert not core.has_work
    assert cache() is None
    if (
        core.executor.device.shares_host_memory or level == 2
    ):  # otherwise they have moved to the host
        assert (weights() is None) == (level == 2)
    assert core.stats.num_running_seqs == 0
    with pytest.raises(ValueError, match="wake it up"):
        core.add("refused", GenerateRequest(PROMPTS[0], GREEDY))
    switcher.sleep(level)
    switcher.wake_up()
    switcher.wake_up()
    assert serve(core) == alone[0]


def test_a_slow_disk_or_host_is_no_hang(
    first: EngineConfig, second: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of silence: half an hour for loading and sizing, ten minutes for other steps."""
    core, switcher = started(first)
    limits: list[tuple[str, float]] = []
    core.on_busy = lambda reason, limit_s: limits.append((reason.rpartition(": ")[2], limit_s))
    switch(switcher, second, NO_STASH)
    longest = ("load", "cache", "the engine core warms up")
    assert [name for name, _ in limits if name != longest[-1]] == [
        *("deserialise", "pause", "sleep", "unload", "load", "cache", "rebuild", "resume")
    ], "the order of seed 004"
    for name, limit_s in limits:
        assert limit_s >= (1800 if name in longest else 600), name
    limits.clear()
    switcher.sleep(2)
    switcher.wake_up()
    assert limits[0][1] >= 600
    assert limits[1] == ("the engine core wakes up", 1800 + 1800)
    # A large checkpoint, of which each byte takes a second.
    num_bytes = sum(file.stat().st_size for file in Path(first.model).glob("*.safetensors"))
    monkeypatch.setattr(reconfigure, "_READ_BYTES_PER_SECOND", 1.0)
    limits.clear()
    switch(switcher, first, NO_STASH)
    assert dict(limits)["load"] == num_bytes > 1800
    limits.clear()
    monkeypatch.setattr(reconfigure, "STEPS", tuple(failing("load", after=False)))
    with pytest.raises(SwitchFailedError, match="a fault"):
        switch(switcher, second, NO_STASH)
    assert dict(limits)["the engine core returns to the previous model"] == num_bytes + 1800


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_core_switches_to_another_model(
    first: EngineConfig, second: EngineConfig, alone: list[list[list[int]]], level: int
) -> None:
    core, switcher = started(first)
    switcher.sleep(level)
    switch(switcher, second)
    assert not core.is_asleep
    assert serve(core) == alone[1]
    assert switch(switcher, first).from_stash == (level == 1)
    assert serve(core) == alone[0]


def chunk_beside_a_decode(core: EngineCore) -> int:
    """How many tokens of a prompt of 24 a step computes that also decodes."""
    core.add("decodes", GenerateRequest((1,), SamplingParams(max_tokens=20, ignore_eos=True)))
    core.step()
    core.add("prompt", GenerateRequest((2,) * 24, SamplingParams(max_tokens=1)))
    before = core.stats.num_prefill_tokens
    core.step()
    computed = core.stats.num_prefill_tokens - before
    while core.has_work:
        core.step()
    return computed


def test_chunks_beside_decodes_are_those_of_the_active_model(
    first: EngineConfig, second: EngineConfig
) -> None:
    plain = {"device": "cpu", "enable_prefix_caching": False}
    config = attrs.evolve(first, max_mixed_prefill_tokens=5, **plain)
    core, switcher = started(config)
    assert chunk_beside_a_decode(core) == 5
    switcher.sleep(1)
    switcher.wake_up()
    assert chunk_beside_a_decode(core) == 5
    switch(switcher, attrs.evolve(second, **plain))
    assert chunk_beside_a_decode(core) > 5
    switch(switcher, config)
    assert chunk_beside_a_decode(core) == 5


PENALISED = SamplingParams(
    temperature=0.9,
    seed=11,
    max_tokens=10,
    min_tokens=8,
    ignore_eos=True,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
)


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "seed and penalties"])
@pytest.mark.parametrize("num_known", [1, 4, 9])
def test_a_request_goes_on_after_the_tokens_that_it_had(
    first: EngineConfig, params: SamplingParams, num_known: int
) -> None:
    core, _ = started(first)
    core.add("whole", GenerateRequest(PROMPTS[0], params))
    whole = [token.token_id for token in steps(core)]
    core.add("rest", GenerateRequest(PROMPTS[0], params, output_token_ids=whole[:num_known]))
    rest = steps(core)
    assert [token.token_id for token in rest] == whole[num_known:]
    assert rest[-1].finish_reason == "length"
    assert core.stats.num_prompt_tokens == len(PROMPTS[0])


def test_a_grammar_goes_on_where_it_was(first: EngineConfig) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=20,
        structured_output=StructuredOutput(choice=("a long answer", "another answer")),
    )
    core, _ = started(first)
    core.add("whole", GenerateRequest(PROMPTS[0], params))
    whole = [token.token_id for token in steps(core)]
    core.add("rest", GenerateRequest(PROMPTS[0], params, output_token_ids=whole[:5]))
    rest = steps(core)
    assert [token.token_id for token in rest] == whole[5:]
    assert rest[-1].finish_reason == "stop"


def steps(core: EngineCore) -> list:
    tokens = []
    while core.has_work:
        tokens += core.step()
    return tokens


@pytest.mark.parametrize(
    ("params", "known"),
    [
        (attrs.evolve(GREEDY, n=2), [1, 2]),
        (attrs.evolve(GREEDY, max_tokens=2), [1, 2]),
        (GREEDY, [1, 999_999]),
    ],
)
def test_tokens_after_which_no_request_goes_on_are_refused(
    first: EngineConfig, params: SamplingParams, known: list[int]
) -> None:
    core, _ = started(first)
    with pytest.raises(ValueError, match="tokens"):
        core.add("rest", GenerateRequest(PROMPTS[0], params, output_token_ids=known))
    assert not core.has_work


# The configuration on its way.


def test_a_configuration_arrives_as_it_was_sent(first: EngineConfig) -> None:
    config = attrs.evolve(
        first,
        bucketing=BucketingConfig(prompt_batch=AxisConfig(min=1, step=2, max=4)),
        graphs=WarmupConfig(graph_reserved_mem=0.2, enforce_eager=True),
        defrag=DefragConfig(threshold=7),
        thermal_devices=(0, 3),
        thermal_policy_config={"target_temp_c": 80, "names": ["a", "b"]},
    )
    assert config_of_payload(config_payload(config)) == config


def test_defaults_that_a_device_replaces_are_still_replaced() -> None:
    config = EngineConfig(model="m", block_size=32)
    arrived = config_of_payload(config_payload(config)).for_device(
        {"block_size": 128, "max_num_seqs": 99}
    )
    assert (arrived.block_size, arrived.max_num_seqs) == (32, 99)


@pytest.mark.parametrize("value", [lambda: None, (1, 2), {3, 4}, 2**70, float("nan")])
def test_a_configuration_that_would_change_on_its_way_is_refused(value: object) -> None:
    config = EngineConfig(model="m", thermal_policy_config={"key": value})
    with pytest.raises(ConfigError, match="cannot be sent to the engine core"):
        config_payload(config)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80\x04\x95",  # the beginning of a pickle
        msgspec.msgpack.encode(["model", "m"]),
        msgspec.msgpack.encode({"model": "m", "no_such_setting": 1}),
        msgspec.msgpack.encode({"model": "m", "max_num_seqs": -1}),
        msgspec.msgpack.encode({"model": "m", "bucketing": {"prompt_batch": 3}}),
        msgspec.msgpack.encode({}),
        config_payload(EngineConfig(model="m"))[:-3],
        msgspec.msgpack.encode({"model": "m" * (MAX_PAYLOAD_BYTES + 1)}),
    ],
)
def test_a_payload_that_is_no_configuration_is_refused(payload: bytes) -> None:
    with pytest.raises(ConfigError):
        config_of_payload(payload)


# On the stand-in for a Gaudi, whose memory is accounted.


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("lazy", marks=pytest.mark.soak),
        pytest.param("eager", marks=pytest.mark.slow),  # compiles for minutes
    ],
)
def test_a_gaudi_gives_its_memory_back_and_serves_each_model_as_the_cpu_does(
    stand_in: Callable[..., Any], mode: str, first: EngineConfig, second: EngineConfig
) -> None:
    grid = BucketingConfig(
        prompt_batch=AxisConfig(min=4, step=4, max=4),
        prompt_query=AxisConfig(min=32, step=32, max=32),
        prompt_context=AxisConfig(min=8, step=8, max=8),
        decode_batch=AxisConfig(min=4, step=4, max=4),
        decode_blocks=AxisConfig(min=30, step=30, max=30),
    )
    same = {"dtype": "float32", "warmup": "full", "bucketing": grid, "swap_space": 0.0}
    sizes = {"max_model_len": 64, "num_blocks": 30}
    configs = [
        attrs.evolve(first, **same, **sizes),
        attrs.evolve(second, **same, max_model_len=96, num_blocks=30, max_num_batched_tokens=32),
    ]
    on_cpu = [
        serve(started(attrs.evolve(config, device="cpu", warmup="none", bucketing=None))[0])
        for config in configs
    ]
    with stand_in(mode) as bridge:
        on_gaudi = [attrs.evolve(config, device="hpu") for config in configs]
        core, switcher = started(on_gaudi[0])
        assert serve(core) == on_cpu[0]
        in_use = bridge.memory.in_use
        cache_bytes = core.executor.worker.limits.num_blocks * core.executor.worker.block_bytes
        for level in (1, 2):
            freed = switcher.sleep(level)
            assert bridge.memory.in_use == in_use - freed, "what it says"
            assert freed >= core.executor.worker.weight_bytes * (level == 1) + cache_bytes
            gc.collect()
            assert bridge.memory.in_use == in_use - freed
            switcher.wake_up()
            assert serve(core) == on_cpu[0]
            assert bridge.memory.in_use == in_use
        for stash_bytes in (STASH_BYTES, NO_STASH) if mode == "lazy" else (STASH_BYTES,):
            switch(switcher, on_gaudi[1], stash_bytes)
            assert serve(core) == on_cpu[1]
            result = switch(switcher, on_gaudi[0], stash_bytes)
            assert result.from_stash == (stash_bytes > 0)
            assert serve(core) == on_cpu[0]
            assert bridge.memory.in_use == in_use
        assert core.stats.num_compilations == 0, "in live traffic"


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_gaudi_that_is_full_can_sleep_and_wakes_up_when_there_is_memory_again(
    lazy_gaudi: Any, first: EngineConfig, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps what is logged, with the tracebacks, whose frames hold tensors.
    monkeypatch.setattr(reconfigure.logger, "disabled", True)
    memory = lazy_gaudi.memory
    of_others = memory.in_use
    core, switcher = started(attrs.evolve(first, device="hpu", num_blocks=20, swap_space=0.0))
    limit, in_use = memory.limit, memory.in_use
    memory.limit = in_use
    freed = switcher.sleep(level)
    asleep = in_use - freed
    assert memory.in_use == asleep
    assert asleep - of_others < 0.05 * (in_use - of_others)
    memory.limit = asleep + freed // 2  # another process has taken the rest
    with pytest.raises(SwitchFailedError) as raised:
        switcher.wake_up()
    assert raised.value.step == "wake"
    assert memory.in_use == asleep
    memory.limit = limit
    switcher.wake_up()
    gc.collect()
    assert memory.in_use == in_use
    assert all(len(tokens) == 10 for tokens in serve(core))


@pytest.mark.parametrize(
    "stash_bytes", [STASH_BYTES, pytest.param(NO_STASH, marks=pytest.mark.slow)]
)
def test_a_model_too_large_for_a_gaudi_leaves_no_byte_and_the_previous_one_serves(
    lazy_gaudi: Any,
    first: EngineConfig,
    tmp_path: Path,
    make_tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    stash_bytes: int,
) -> None:
    monkeypatch.setattr(reconfigure.logger, "disabled", True)  # as above
    large = make_tiny_model(tmp_path, hidden_size=480, intermediate_size=1920)
    config = attrs.evolve(first, device="hpu", num_blocks=20, swap_space=0.0)
    memory = lazy_gaudi.memory
    of_others = memory.in_use
    core, switcher = started(config)
    fresh, expected = memory.in_use, serve(core)
    gc.collect()
    in_use = memory.in_use  # with graphs, which stay while the weights do
    # What profiling takes, and less than the weights of the large one.
    limit, memory.limit = memory.limit, 5 * in_use - of_others
    with pytest.raises(SwitchFailedError, match="Allocation failed") as raised:
        switch(switcher, attrs.evolve(config, model=str(large)), stash_bytes)
    memory.limit = limit
    assert (raised.value.step, raised.value.active) == ("load", first.name)
    assert not core.is_asleep
    gc.collect()
    if not stash_bytes:
        assert memory.in_use == fresh
    assert serve(core) == expected
    gc.collect()
    if stash_bytes:
        assert memory.in_use == in_use


def test_parked_requests_are_not_refused_because_others_wait(first: EngineConfig) -> None:
    core, _ = started(attrs.evolve(first, max_waiting=1))
    core.add("waits", GenerateRequest(PROMPTS[0], GREEDY))
    with pytest.raises(EngineOverloaded):
        core.add("new", GenerateRequest(PROMPTS[1], GREEDY))
    for number, prompt in enumerate(PROMPTS[1:]):
        core.add(str(number), GenerateRequest(prompt, GREEDY, is_resumed=True))
    finished = set()
    while core.has_work:
        finished |= {token.key for token in core.step() if token.finish_reason}
    assert finished == {"waits", *map(str, range(len(PROMPTS) - 1))}


@pytest.mark.parametrize("limit_of", [1.0, 1.5])
def test_host_memory_is_free_before_the_next_model_needs_it(
    first: EngineConfig, second: EngineConfig, limit_of: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, switcher = started(first)
    stash = core.executor.stash
    third = attrs.evolve(first, max_num_seqs=2)
    limit = int(limit_of * core.executor.worker.weight_bytes)
    held: list[int] = []
    sleep = Worker.sleep

    def asleep(worker: Worker) -> None:
        held.append(stash.num_bytes + worker.weight_bytes)
        sleep(worker)

    monkeypatch.setattr(Worker, "sleep", asleep)
    for config in (third, first, third, second, first):
        switch(switcher, config, limit)
    assert held
    assert max(held) <= limit
