"""Programs outlive weights: on a Gaudi, a model that comes back is neither traced nor compiled."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from capturing_device import CapturingCPU, CompilingCPU
from torch import nn

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import HPUDevice
from trencadis.engine.runner.cache_sizing import CacheSizing
from trencadis.engine.runner.kept_programs import MAX_KEPT, KeptPrograms, ProgramStore
from trencadis.engine.runner.worker import Worker
from trencadis.kvcache import DefragConfig

STASH_BYTES = 1 << 30
NO_STASH = 0
PROMPTS = (tuple(range(5, 25)), (7, 8, 9))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def grid(**sizes: int) -> BucketingConfig:
    """One bucket for each phase: a compilation takes half a second on the stand-in."""
    return BucketingConfig(
        **{axis: AxisConfig(min=size, step=size, max=size) for axis, size in sizes.items()}
    )


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]
) -> dict[str, Path]:
    """A model, one of its structure with other weights, another one, and one without weights."""
    place = tmp_path_factory.mktemp("kept")
    made = {
        "one": make_tiny_model(place / "one"),
        "twin": make_tiny_model(place / "twin", initializer_range=0.3),
        "other": make_tiny_model(place / "other", hidden_size=96, num_hidden_layers=3),
        "broken": place / "broken",
    }
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(made["one"], made["broken"], ignore=weights)
    return made


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "hpu",
        "dtype": "float32",
        "max_model_len": 32,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "block_size": 8,
        "num_blocks": 8,
        "warmup": "full",
        "bucketing": grid(
            prompt_batch=1, prompt_query=32, prompt_context=3, decode_batch=1, decode_blocks=8
        ),
    }
    return EngineConfig(model=str(model), **settings | changes)


def started(config: EngineConfig) -> tuple[EngineCore, ModelSwitcher]:
    core = EngineCore(config)
    core.warm_up()
    return core, ModelSwitcher(core)


def serve(core: EngineCore) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        core.add(str(number), GenerateRequest(prompt, GREEDY))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    while core.has_work:
        for token in core.step():
            tokens[token.key].append(token.token_id)
    assert not core.take_failures()
    return list(tokens.values())


def switch(switcher: ModelSwitcher, config: EngineConfig, stash_bytes: int = STASH_BYTES) -> Any:
    return switcher.reconfigure_engine(config_payload(config), stash_bytes)


def on_cpu(model: Path) -> list[list[int]]:
    """What a new engine answers."""
    return serve(started(config_of(model, device="cpu"))[0])


def compiled(gaudi: Any) -> tuple[int, int, int]:
    counters = gaudi.counters
    return counters.compile_calls, counters.traces, counters.recipes


@pytest.fixture(scope="module")
def answers(tiny_model: Path) -> list[list[int]]:
    return on_cpu(tiny_model)


class CompilesAll(CompilingCPU):
    """All of a forward pass is programs, which are given weights and cache."""

    compiles_forward = True


@pytest.mark.parametrize(
    ("device", "keeps"),
    [(CapturingCPU, False), (CompilingCPU, False), (CompilesAll, True)],
)
def test_a_device_serves_by_what_its_warm_up_has_made_also_after_a_sleep(
    tiny_model: Path, answers: list[list[int]], device: Any, keeps: bool
) -> None:
    """Programs are kept where they hold neither weights nor cache, and graphs are made again."""
    made = device()
    captures = made.supports_graphs
    config = config_of(tiny_model, device=made, compile=not captures)
    core, switcher = started(config)
    runner = core.executor.worker.runner.forward_runner
    assert runner.keeps_programs is keeps
    assert serve(core) == answers
    assert (core.stats.num_graphs > 0) == (made.num_graphs > 0) == captures
    compiled_once = made.num_compilations()
    assert (compiled_once > 0) != captures
    assert core.stats.num_cold_forwards == core.stats.num_compilations == 0
    graphs = core.stats.num_graphs
    switcher.sleep(1 if captures else 2)
    assert runner.num_graphs == made.num_graphs == 0
    before = made.num_compilations()
    switcher.wake_up()
    assert (made.num_compilations() == before) == (keeps or captures)
    assert serve(core) == answers
    assert core.stats.num_graphs == graphs
    assert core.stats.num_cold_forwards == 0
    core.close()


def test_programs_that_are_dropped_leave_nothing_behind() -> None:
    kept: Any = KeptPrograms()
    shape = object()
    for programs in (kept.forward, kept.sampler, kept.by_operations):
        programs[shape] = object()
    kept.warmed_up.add(shape)
    kept.num_blocks, kept.grids, kept.is_complete = 7, object(), True
    kept.clear()
    assert not any((kept.forward, kept.sampler, kept.by_operations, kept.warmed_up))
    assert (kept.num_blocks, kept.grids, kept.is_complete) == (0, None, False)


@pytest.mark.slow
def test_the_first_requests_after_warm_up_trace_nothing(
    eager_gaudi: Any, models: dict[str, Path]
) -> None:
    core, _ = started(config_of(models["one"]))
    warm = compiled(eager_gaudi)
    serve(core)
    assert compiled(eager_gaudi) == warm


@pytest.mark.slow
def test_a_model_that_wakes_up_traces_nothing_and_a_sleeping_one_holds_no_device_memory(
    eager_gaudi: Any, models: dict[str, Path]
) -> None:
    held_before = eager_gaudi.memory.in_use
    core, switcher = started(config_of(models["one"]))
    expected = serve(core)
    assert expected == on_cpu(models["one"])
    assert core.executor.programs.num_programs > 0
    before, in_use = compiled(eager_gaudi), eager_gaudi.memory.in_use
    for level in (1, 2):
        assert switcher.sleep(level) == in_use - held_before
        assert eager_gaudi.memory.in_use == held_before
        switcher.wake_up()
        assert eager_gaudi.memory.in_use == in_use
        assert core.stats.num_ready_buckets == core.stats.num_buckets > 0
        assert serve(core) == expected
        assert compiled(eager_gaudi) == before, f"compile calls, traces, recipes, level {level}"
        assert core.stats.num_cold_forwards == core.stats.num_compilations == 0


@pytest.mark.slow
def test_a_model_that_wakes_up_has_its_programs_whatever_happened_meanwhile(
    eager_gaudi: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, switcher = started(config_of(models["one"]))
    expected = serve(core)
    switcher.sleep(1)
    for width in range(MAX_KEPT):  # more structures than are kept
        core.executor.programs.of(Net(width), core.config)
    before = compiled(eager_gaudi)
    switcher.wake_up()
    switcher.sleep(2)
    switcher.wake_up()
    assert serve(core) == expected
    assert compiled(eager_gaudi) == before
    switcher.sleep(1)
    worker, num_blocks = core.executor.worker, core.facts.limits.num_blocks
    with monkeypatch.context() as patch:  # a smaller cache, and then none
        patch.setattr(worker, "_fits", lambda _: False)
        patch.setattr(worker._sizing, "num_blocks", lambda *_, **__: num_blocks - 1)
        patch.setattr(worker._sizing, "make_cache", fail_on_device(worker._sizing.make_cache))
        with pytest.raises(SwitchFailedError, match="no memory"):
            switcher.wake_up()
    switcher.wake_up()
    assert serve(core) == expected
    assert core.executor.worker.runner.buckets._num_blocks == core.facts.limits.num_blocks
    assert core.stats.num_compilations == 0, "in live traffic"


def fail_on_device(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(num_blocks: int, num_host_blocks: int, *device: Any) -> Any:
        if not device:
            raise RuntimeError("no memory")
        return make(num_blocks, num_host_blocks, *device)

    return made


@pytest.mark.slow
def test_what_is_ready_is_not_warmed_up_in_the_background_again(
    eager_gaudi: Any, models: dict[str, Path]
) -> None:
    one_bucket = config_of(models["one"]).bucketing
    two = attrs.evolve(one_bucket, prompt_query=AxisConfig(min=16, step=16, max=32))
    changes = {"warmup": "background", "bucketing": two}
    configs = [config_of(models[name], **changes) for name in ("one", "twin")]
    core, switcher = started(configs[0])
    while core.executor.is_warming_up:
        core.advance_warm_up()
    expected, before = serve(core), compiled(eager_gaudi)
    for config in reversed(configs):
        switch(switcher, config, NO_STASH)
        assert not core.executor.is_warming_up
    assert serve(core) == expected
    assert compiled(eager_gaudi) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "stash_bytes", [STASH_BYTES, pytest.param(NO_STASH, marks=pytest.mark.slow)]
)
def test_a_switch_back_traces_nothing_nor_does_a_switch_to_a_model_of_the_same_structure(
    eager_gaudi: Any, models: dict[str, Path], stash_bytes: int
) -> None:
    configs = {name: config_of(models[name]) for name in ("one", "twin", "other")}
    core, switcher = started(configs["one"])
    tokens = {"one": serve(core)}
    one = compiled(eager_gaudi)
    switch(switcher, configs["twin"], stash_bytes)
    tokens["twin"] = serve(core)
    assert tokens["twin"] == on_cpu(models["twin"]) != tokens["one"]
    assert compiled(eager_gaudi) == one
    switch(switcher, configs["other"], stash_bytes)
    tokens["other"] = serve(core)
    assert tokens["other"] == on_cpu(models["other"])
    known = compiled(eager_gaudi)
    in_use: dict[str, set[int]] = {name: set() for name in configs}
    for name in ("one", "other", "twin", "one", "other"):
        result = switch(switcher, configs[name], stash_bytes)
        in_use[name].add(result.memory_after_bytes)
        assert serve(core) == tokens[name]
        assert compiled(eager_gaudi) == known
    assert all(len(sizes) <= 1 for sizes in in_use.values()), in_use


@pytest.mark.slow
def test_any_order_of_sleeps_switches_and_failures_changes_no_token_and_traces_nothing(
    eager_gaudi: Any, models: dict[str, Path]
) -> None:
    names = ("one", "twin", "other")
    configs = {name: config_of(path) for name, path in models.items()}
    expected = {name: on_cpu(models[name]) for name in names}
    core, switcher = started(configs["one"])
    active = "one"
    switch(switcher, configs["other"])
    switch(switcher, configs["one"])
    known = compiled(eager_gaudi)
    choose = random.Random(7)
    num_steps = dict.fromkeys(names, 0)
    for _ in range(40):
        action = choose.choice(("sleep", "wake", "switch", "switch", "fail"))
        stash_bytes = choose.choice((STASH_BYTES, STASH_BYTES, NO_STASH))
        if action == "sleep":
            switcher.sleep(choose.choice((1, 2)))
        elif action == "wake":
            switcher.wake_up()
        elif action == "switch":
            active = choose.choice(names)
            switch(switcher, configs[active], stash_bytes)
        else:
            with pytest.raises(SwitchFailedError):
                switch(switcher, configs["broken"], stash_bytes)
        if not core.is_asleep:
            assert serve(core) == expected[active]
            assert core.stats.num_steps > num_steps[active], "counters go on"
            num_steps[active] = core.stats.num_steps
        assert compiled(eager_gaudi) == known


@pytest.mark.slow
def test_lazy_mode_captures_a_graph_again_only_after_its_weights_were_discarded(
    lazy_gaudi: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay of a graph is given the weights and the cache that there are then."""
    captures, capture = [], HPUDevice.capture

    def counted(*given: Any) -> Any:
        captures.append(given)
        return capture(*given)

    monkeypatch.setattr(HPUDevice, "capture", counted)
    configs = {name: config_of(models[name]) for name in ("one", "other")}
    expected = {name: on_cpu(models[name]) for name in configs}
    core, switcher = started(configs["one"])
    assert serve(core) == expected["one"]
    graphs = {"one": core.stats.num_graphs}
    switch(switcher, configs["other"])
    assert serve(core) == expected["other"]
    graphs["other"] = core.stats.num_graphs
    assert min(graphs.values()) > 0
    for active in ("one", "other", "one"):
        before, recipes = len(captures), compiled(lazy_gaudi)
        switch(switcher, configs[active])
        assert (serve(core), core.stats.num_graphs) == (expected[active], graphs[active])
        for _ in range(2):
            switcher.sleep(1)
            switcher.wake_up()
            assert (serve(core), core.stats.num_graphs) == (expected[active], graphs[active])
        assert (len(captures), compiled(lazy_gaudi)) == (before, recipes)
    switcher.sleep(2)
    switcher.wake_up()
    assert (serve(core), core.stats.num_graphs) == (expected["one"], graphs["one"])
    assert len(captures) == before + graphs["one"]
    assert compiled(lazy_gaudi) == recipes


@pytest.mark.slow
def test_lazy_mode_captures_again_for_a_cache_of_another_size(
    lazy_gaudi: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_seqs": 2, "max_model_len": 256, "num_blocks": None, "num_host_blocks": 0}
    buckets = grid(
        prompt_batch=1, prompt_query=32, prompt_context=32, decode_batch=2, decode_blocks=64
    )
    core, switcher = started(config_of(models["one"], **sizes, bucketing=buckets))
    expected, most = serve(core), core.facts.limits.num_blocks
    planned, fits = CacheSizing.num_blocks, Worker._fits
    switcher.sleep(1)
    with monkeypatch.context() as patch:  # what a device with less memory has space for
        patch.setattr(CacheSizing, "num_blocks", lambda *a, **b: min(most - 5, planned(*a, **b)))
        patch.setattr(Worker, "_fits", lambda worker, n: n <= most - 5 and fits(worker, n))
        switcher.wake_up()
    assert core.facts.limits.num_blocks == most - 5
    assert core.stats.num_graphs > 0
    before = compiled(lazy_gaudi)
    assert serve(core) == expected
    assert compiled(lazy_gaudi) == before
    assert (core.stats.num_cold_forwards, core.stats.num_compilations) == (0, 0)
    switcher.sleep(2)
    assert core.stats.num_ready_buckets == 0, "they went with the weights"


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


def test_programs_are_those_of_a_structure_under_settings_and_of_few_structures() -> None:
    store, config = ProgramStore(), config_of(Path("a"))
    first = store.of(Net(1), config)
    assert store.of(Net(1), attrs.evolve(config, model="b", served_model_name="c")) is first
    assert store.of(Net(1), attrs.evolve(config, block_size=16)) is not first
    assert store.of(Net(2), config) is not first
    for width in range(3, MAX_KEPT):
        store.of(Net(width), config)
    assert store.of(Net(1), config) is first, "the one that was served last is kept"
    store.of(Net(MAX_KEPT + 1), config)
    assert len(store) == MAX_KEPT
    assert store.of(Net(1), config) is first


@pytest.mark.slow
def test_programs_are_dropped_where_the_cache_that_they_read_no_longer_fits(
    eager_gaudi: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized = {
        "num_blocks": None,
        "num_host_blocks": 0,
        "max_num_seqs": 2,
        "max_model_len": 256,
        "defrag": DefragConfig(warm_up=False),
        "bucketing": grid(
            prompt_batch=1, prompt_query=32, prompt_context=32, decode_batch=2, decode_blocks=64
        ),
    }
    configs = {name: config_of(models[name], **sized) for name in ("one", "other")}
    core, switcher = started(configs["one"])
    expected, most = serve(core), core.facts.limits.num_blocks
    own = core.executor.programs.num_programs
    num_programs, num_blocks = set(), []
    planned, fits = CacheSizing.num_blocks, Worker._fits
    for limit in (most - 5, most - 5, most):
        switch(switcher, configs["other"], NO_STASH)
        others = core.executor.programs.num_programs - own
        before = compiled(eager_gaudi)
        with monkeypatch.context() as patch:  # what a device with less memory has space for

            def least(*given: Any, most: int = limit, **more: Any) -> int:
                return min(most, planned(*given, **more))

            def holds(worker: Worker, num_blocks: int, most: int = limit) -> bool:
                return num_blocks <= most and fits(worker, num_blocks)

            patch.setattr(CacheSizing, "num_blocks", least)
            patch.setattr(Worker, "_fits", holds)
            switch(switcher, configs["one"], NO_STASH)
        assert serve(core) == expected
        own = core.executor.programs.num_programs - others
        num_blocks.append(core.facts.limits.num_blocks)
        num_programs.add(core.executor.programs.num_programs)
        is_new = num_blocks[-1] != (most, *num_blocks)[-2]
        assert (compiled(eager_gaudi) != before) == is_new, "they outlive all but another cache"
        new = eager_gaudi.counters.compile_calls - before[0]
        # Of the three of a forward pass the last is shared, and none is of the sampler.
        assert new == 0 or 2 * own < new <= 3 * own
    assert most > num_blocks[0] == num_blocks[1]
    assert num_blocks[2] == num_blocks[1], "a cache that fits has the size of its programs"
    assert len(num_programs) == 1, "none are kept that nothing uses"


def test_only_the_programs_that_a_sleeping_model_may_use_are_renewed() -> None:
    store, config = ProgramStore(), config_of(Path("a"))
    first, second = store.of(Net(1), config), store.of(Net(2), config)
    empty = store.renewed(first)
    assert empty is not first
    assert store.of(Net(1), config) is empty
    assert store.of(Net(2), config) is second
    assert store.of(Net(1), config, first) is empty, "not those of the old size"
    assert ProgramStore().of(Net(1), config, first) is first, "that were dropped meanwhile"
