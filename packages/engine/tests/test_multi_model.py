"""Several models in one engine: switches under load, parked requests, faults, sleep."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from child_processes import children, core_process
from safetensors.torch import load_file, save_file

from trencadis.engine import (
    CompletionDelta,
    ConfigError,
    EngineConfig,
    EngineDead,
    EngineRestarting,
    EngineSleeping,
    GenerateRequest,
    InvalidRequest,
    LogSettings,
    ModelEntry,
    ModelNotActiveError,
    MultiModelEngine,
    SamplingParams,
    SwitchFailedError,
    SwitchInProgressError,
    SwitchReport,
    UnknownModelError,
)
from trencadis.engine.front import core_supervisor

pytestmark = pytest.mark.usefixtures("own_processes")

QUIET = LogSettings(level=logging.CRITICAL)
LIMIT_SECONDS = 600
PROMPT = list(range(5, 25))
LONG = {"temperature": 0.0, "max_tokens": 220, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Path],
) -> tuple[ModelEntry, ModelEntry]:
    """Two models whose sizes, block sizes, lengths, dtypes and chat templates differ."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "warmup": "none"}
    other = make_tiny_model(
        tmp_path_factory.mktemp("other"),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
    )
    first = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=256,
        block_size=8,
        num_blocks=400,
        **settings,
    )
    second = EngineConfig(
        model=str(other),
        dtype="bfloat16",
        max_model_len=200,
        block_size=16,
        num_blocks=60,
        **settings,
    )
    template = "{% for m in messages %}{{ m['content'] + '!' }}{% endfor %}"
    return ModelEntry("first", first), ModelEntry("second", second, chat_template=template)


@asynccontextmanager
async def running(
    models: tuple[ModelEntry, ...], **settings: object
) -> AsyncIterator[MultiModelEngine]:
    engine = await MultiModelEngine.start(models, log=QUIET, **settings)
    try:
        yield engine
    finally:
        await engine.stop()
        assert not children(), "no process is left behind"


def limited(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


async def collect(
    engine: MultiModelEngine, prompt: list[int] = PROMPT, model: str | None = None, **params: object
) -> list[CompletionDelta]:
    stream = engine.generate(GenerateRequest(prompt, SamplingParams(**params), model=model))
    return [delta async for delta in stream]


def tokens(deltas: list[CompletionDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


Answer = asyncio.Task[list[CompletionDelta]]


async def begun(engine: MultiModelEngine, *params: dict[str, object]) -> list[Answer]:
    """Requests that have each generated a token."""

    async def read(has_begun: asyncio.Event, own: dict[str, object]) -> list[CompletionDelta]:
        deltas = []
        async for delta in engine.generate(GenerateRequest(PROMPT, SamplingParams(**own))):
            deltas.append(delta)
            has_begun.set()
        return deltas

    events = [asyncio.Event() for _ in params]
    tasks = [asyncio.create_task(read(*each)) for each in zip(events, params, strict=True)]
    await asyncio.gather(*(event.wait() for event in events))
    return tasks


async def switch_at_once(engine: MultiModelEngine, alias: str, running: str) -> SwitchReport:
    """Switch while requests run: the core generates nothing before it reads of the switch."""
    core = core_process()
    core.suspend()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                engine._changes, "check", no_check
            )  # for which the core would have to run
            switching = asyncio.create_task(
                engine.switch_model(alias, running=running, drain_timeout_s=0)
            )
            while not engine._changes.is_calling and not switching.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        core.resume()
    return await switching


async def no_check(_: EngineConfig) -> None: ...


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def change_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_head(directory: Path, value: float | None) -> None:
    """Set each weight of the head; None: the head is missing."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    if value is not None:
        tensors["lm_head.weight"] = torch.full_like(head, value)
    save_file(tensors, file, {"format": "pt"})


def divide_weights(directory: Path) -> None:
    """Into two files by an index, of which one is missing."""
    file = directory / "model.safetensors"
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    file.rename(directory / "model-1.safetensors")


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


BROKEN: dict[str, Callable[[Path], object]] = {
    "no weights": lambda directory: (directory / "model.safetensors").unlink(),
    "a shard is missing": divide_weights,
    "weights that were cut off": lambda directory: cut_off(directory / "model.safetensors"),
    "an encoder": lambda directory: change_config(directory, architectures=["BertModel"]),
    "no architecture": lambda directory: change_config(directory, model_type="nobody"),
    "no head": lambda directory: change_head(directory, None),
    "head of NaN": lambda directory: change_head(directory, math.nan),
}
"""What makes a copy of a checkpoint that cannot be served, by alias."""


@pytest.mark.slow
def test_life_of_an_engine_with_several_models(
    models: tuple[ModelEntry, ModelEntry], tmp_path: Path
) -> None:
    """One engine for all of it: the start of a core takes seconds."""
    config = models[1].config
    source = Path(config.model)
    entries = (
        *models,
        ModelEntry("no cache", attrs.evolve(config, num_blocks=3)),
        ModelEntry("too long", attrs.evolve(config, max_model_len=100_000)),
        *(
            ModelEntry(alias, attrs.evolve(config, model=str(copied(source, tmp_path / alias))))
            for alias in BROKEN
        ),
        ModelEntry("plain", config, chat_template="{{ messages[0].content }}"),
    )

    async def body() -> None:
        async with running(entries) as engine:
            for alias, break_checkpoint in BROKEN.items():
                break_checkpoint(tmp_path / alias)
            parts = [
                orders_of_a_wrong_type_are_refused,
                each_model_answers_with_its_own_tokenizer_template_and_limits,
                parked_requests_go_on_with_the_same_tokens,
                one_switch_at_a_time_and_requests_that_run_may_end,
                a_model_that_cannot_be_served_costs_no_request,
                the_steps_of_the_caller_are_those_of_the_seed,
                a_failed_switch_leaves_the_previous_model_and_its_parked_requests,
                requests_that_still_run_keep_the_model_or_are_ended,
                a_parked_request_ends_with_its_client,
                a_switch_goes_on_without_its_caller,
                a_sleeping_engine_refuses_requests_until_it_wakes_up,
                a_conversation_is_rendered_to_its_end_while_its_model_leaves,
            ]
            for part in parts:
                await engine.switch_model("first")
                await part(engine)
            await engine.switch_model("first")
            (kept,) = await begun(engine, LONG)
            await switch_at_once(engine, "second", "park")
        with pytest.raises(EngineDead):
            await kept

    limited(body)


async def each_model_answers_with_its_own_tokenizer_template_and_limits(
    engine: MultiModelEngine,
) -> None:
    assert engine.aliases == ("first", "second", "no cache", "too long", *BROKEN, "plain")
    assert await engine.tokenizer_of("first") is engine.tokenizer
    answers = {"first": tokens(await collect(engine, model="first", **SHORT))}
    report = await engine.switch_model("second")
    assert (report.previous, report.active) == ("first", "second")
    assert report.total_s >= report.unload_s + report.load_s + report.warmup_s
    assert report.memory_before_bytes > 0
    assert report.memory_after_bytes > 0
    assert not report.from_stash
    assert engine.active == engine.model_name == "second"
    assert engine.max_model_len == 200
    assert engine.info["dtype"] == "bfloat16"
    assert "!" in str(engine.tokenizer.chat_template)
    answers["second"] = tokens(await collect(engine, model="second", **SHORT))
    assert engine.totals_of("first").num_generation_tokens >= len(answers["first"])
    assert answers["first"] != answers["second"]
    for alias in ("first", "second"):
        assert (await engine.switch_model(alias)).from_stash
        assert tokens(await collect(engine, model=alias, **SHORT)) == answers[alias]
    with pytest.raises(ModelNotActiveError, match="second is"):
        await collect(engine, model="first", **SHORT)
    with pytest.raises(UnknownModelError, match="first, second"):
        await engine.switch_model("third")
    with pytest.raises(UnknownModelError, match="first, second"):
        await collect(engine, model="third", **SHORT)
    assert (await engine.switch_model("second")).total_s == 0.0


async def parked_requests_go_on_with_the_same_tokens(engine: MultiModelEngine) -> None:
    sampled = {**LONG, "temperature": 0.9, "seed": 3, "n": 2, "frequency_penalty": 0.5}
    best = {**LONG, "temperature": 0.8, "seed": 5, "best_of": 2}
    undisturbed = [await collect(engine, **params) for params in (best, sampled, LONG)]
    waiting = asyncio.create_task(collect(engine, **best))
    tasks = [waiting, *await begun(engine, sampled, LONG)]
    report = await switch_at_once(engine, "second", "park")
    assert report.parked == 3
    assert tokens(await collect(engine, **SHORT))
    assert not any(task.done() for task in tasks)
    assert (await engine.switch_model("first")).resumed == 3
    for before, task in zip(undisturbed, tasks, strict=True):
        after = await task
        for index in {delta.index for delta in before}:
            assert tokens(after, index) == tokens(before, index)
        assert text(after) == text(before)
        assert after[-1].finish_reason == "length"


def text(deltas: list[CompletionDelta]) -> dict[int, str]:
    indices = sorted({delta.index for delta in deltas})
    return {i: "".join(delta.text for delta in deltas if delta.index == i) for i in indices}


async def one_switch_at_a_time_and_requests_that_run_may_end(engine: MultiModelEngine) -> None:
    (short,) = await begun(engine, SHORT)
    switching = asyncio.create_task(engine.switch_model("second"))
    while not engine._changes.switching:  # noqa: ASYNC110 - it is a text, not an event
        await asyncio.sleep(0)
    assert engine.is_switching
    with pytest.raises(SwitchInProgressError, match="from first to second"):
        await collect(engine, **SHORT)
    with pytest.raises(SwitchInProgressError, match="another switch"):
        await engine.switch_model("first", wait_for_turn=False)
    with pytest.raises(SwitchInProgressError):
        await engine.sleep()
    second_caller = asyncio.create_task(engine.switch_model("first"))
    await switching
    assert len(tokens(await short)) == SHORT["max_tokens"]
    assert (await second_caller).previous == "second"
    assert not engine.is_switching


async def the_steps_of_the_caller_are_those_of_the_seed(engine: MultiModelEngine) -> None:
    """Validate, prepare, drain, reconfigure the core; then tokenizer and active model change."""
    began: list[str] = []
    (running,) = await begun(engine, LONG)
    first = engine.tokenizer

    def noting(name: str, own: Any) -> Any:
        def noted(*args: object) -> Any:
            if name not in began:
                began.append(name)
                if name not in ("entry_of", "resume"):
                    assert (engine.active, engine.tokenizer) == ("first", first), name
            return own(*args)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            *((engine._models, name) for name in ("entry_of", "prepare")),
            *((engine._requests, name) for name in ("drain", "park", "resume")),
            (engine._changes, "reconfigure"),
        ):
            patch.setattr(owner, name, noting(name, getattr(owner, name)))
        with pytest.raises(UnknownModelError):
            await engine.switch_model("third")
        await engine.switch_model("first")
        assert began == ["entry_of"], "no such model, and nothing to do"
        await engine.switch_model("second", running="park", drain_timeout_s=0)
        assert began == ["entry_of", "prepare", "drain", "park", "reconfigure", "resume"]
    assert engine.active == "second"
    assert engine.tokenizer is not first
    await engine.switch_model("first")
    assert len(tokens(await running)) == LONG["max_tokens"]


async def requests_that_still_run_keep_the_model_or_are_ended(engine: MultiModelEngine) -> None:
    (long,) = await begun(engine, LONG)
    with pytest.raises(SwitchFailedError, match="still run") as raised:
        await switch_at_once(engine, "second", "wait")
    assert (raised.value.step, raised.value.active) == ("drain", "first")
    report = await switch_at_once(engine, "second", "abort")
    assert report.aborted == 1
    assert (await long)[-1].finish_reason == "abort"
    assert engine.stats.num_used_blocks == 0
    await collect(engine, **SHORT)


async def a_parked_request_ends_with_its_client(engine: MultiModelEngine) -> None:
    left, aborted, kept = await begun(engine, *[LONG] * 3)
    await switch_at_once(engine, "second", "park")
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    (name, _) = sorted(r.stream.request_id for r in engine._requests._parked)
    await engine.abort(name)
    assert (await aborted)[-1].finish_reason == "abort"
    assert (await engine.switch_model("first")).resumed == 1
    assert len(tokens(await kept)) == LONG["max_tokens"]


async def a_model_that_cannot_be_served_costs_no_request(engine: MultiModelEngine) -> None:
    """Settings and files tell it before anything of the active model is touched."""
    undisturbed = tokens(await collect(engine, **LONG))
    refused = {
        "no cache": "raise num_blocks",
        "too long": "max_model_len 100000 is above the model's context",
        "no weights": "has no weights",
        "a shard is missing": "lacks the weight file model-2.safetensors",
        "weights that were cut off": "was cut off",
        "an encoder": "not a decoder-only language model",
        "no architecture": "config.json .* cannot be used",
    }
    for alias, reason in refused.items():
        (running,) = await begun(engine, LONG)
        with pytest.raises(SwitchFailedError, match=f"first is still active.*{reason}") as raised:
            await engine.switch_model(alias, running="abort", drain_timeout_s=0)
        assert raised.value.step == "prepare"
        assert tokens(await running) == undisturbed


async def a_failed_switch_leaves_the_previous_model_and_its_parked_requests(
    engine: MultiModelEngine,
) -> None:
    undisturbed = tokens(await collect(engine, **LONG))
    for alias, step in (("no head", "load"), ("head of NaN", "cache")):
        (parked,) = await begun(engine, LONG)
        with pytest.raises(SwitchFailedError, match="first is still active") as raised:
            await switch_at_once(engine, alias, "park")
        assert raised.value.step == step
        assert raised.value.active == engine.active == "first"
        assert not engine.is_switching
        assert tokens(await parked) == undisturbed
        assert tokens(await collect(engine, model="first", **LONG)) == undisturbed
    renderer = (await engine.tokenizer_of("head of NaN"))._renderer
    deadline = time.monotonic() + 120
    while renderer._quick._process is not None:  # a model that is not active renders nothing
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def a_switch_goes_on_without_its_caller(engine: MultiModelEngine) -> None:
    switching = asyncio.create_task(engine.switch_model("second"))
    await asyncio.sleep(0)
    switching.cancel()
    await asyncio.gather(switching, return_exceptions=True)
    assert switching.cancelled()
    assert (await engine.switch_model("second")).previous == "second"
    assert engine.info["block_size"] == 16


async def a_sleeping_engine_refuses_requests_until_it_wakes_up(engine: MultiModelEngine) -> None:
    answer = tokens(await collect(engine, **SHORT))
    for level in (1, 2):
        (running_request,) = await begun(engine, LONG)
        await engine.sleep(level)
        assert engine.is_sleeping
        assert (await running_request)[-1].finish_reason == "abort"
        with pytest.raises(EngineSleeping):
            await collect(engine, **SHORT)
        await engine.check_health()
        await engine.wake_up()
        assert not engine.is_sleeping
        assert tokens(await collect(engine, **SHORT)) == answer
    for wrong in (0, 3, True, "1"):
        with pytest.raises(InvalidRequest, match="level"):
            await engine.sleep(wrong)
    await engine.sleep()
    await engine.switch_model("second")
    assert not engine.is_sleeping
    assert tokens(await collect(engine, **SHORT))


async def a_conversation_is_rendered_to_its_end_while_its_model_leaves(
    engine: MultiModelEngine,
) -> None:
    """Its request is then told of the switch, instead of an internal error."""
    await engine.switch_model("plain")
    tokenizer = engine.tokenizer
    messages = [{"role": "user", "content": "hello"}]
    renderer = tokenizer._renderer._quick
    process = renderer.started().pid
    os.killpg(process, signal.SIGSTOP)  # so that it renders longer than the switch takes
    try:
        rendering = asyncio.create_task(asyncio.to_thread(tokenizer.render_chat, messages))
        while renderer._asked is None:  # noqa: ASYNC110 - another thread asks
            await asyncio.sleep(0.01)
        await engine.switch_model("first")
        assert not rendering.done()
    finally:
        os.killpg(process, signal.SIGCONT)
    assert tokenizer.decode(await rendering) == "hello"
    assert await engine.tokenizer_of("plain") is tokenizer
    with pytest.raises(UnknownModelError):
        await engine.tokenizer_of("third")


@pytest.mark.slow
def test_every_token_that_clients_got_is_in_the_totals_of_its_model(
    models: tuple[ModelEntry, ModelEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those just before a switch, and before the death of a core."""
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.01)

    async def body() -> None:
        got = {"first": 0, "second": 0}
        async with running(models, active="second") as engine:
            assert engine.active == "second"

            def counted() -> dict[str, int]:
                return {alias: engine.totals_of(alias).num_generation_tokens for alias in got}

            async def serve() -> None:
                alias = engine.active
                for deltas in await asyncio.gather(*(collect(engine, **SHORT) for _ in range(3))):
                    got[alias] += len(tokens(deltas))

            for alias in ("first", "second", "first"):
                await serve()
                await engine.switch_model(alias)
                assert counted() == got
                assert engine.stats.num_generation_tokens == got[alias], "no step back at first"
            await serve()
            await engine.sleep(2)
            await engine.wake_up()
            assert counted() == got
            (aborted,) = await begun(engine, LONG)
            await engine.switch_model("second", running="abort", drain_timeout_s=0)
            got["first"] += len(tokens(await aborted))
            assert counted()["first"] >= got["first"], "the core may have been a step ahead"
            got = counted()
            await engine.switch_model("first")
            core_process().kill()
            while engine.is_alive:  # noqa: ASYNC110 - it is not an event
                await asyncio.sleep(0.01)
            await engine.wait_until_recovered()
            assert counted() == got
            await serve()
            await engine.switch_model("second")
            assert counted() == got
            assert engine.stats.num_core_restarts == 1

    limited(body)


@pytest.mark.slow
def test_a_core_that_is_killed_before_it_begins_a_switch_says_nothing_of_the_new_model(
    models: tuple[ModelEntry, ModelEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that runs may have ended it: a server may try the new model again at once."""
    monkeypatch.setattr(core_supervisor, "_MAX_BACKOFF_SECONDS", 0.01)

    async def body() -> None:
        async with running(models) as engine:
            undisturbed = tokens(await collect(engine, **LONG))
            (parked,) = await begun(engine, LONG)
            core = core_process()
            core.send_signal(signal.SIGSTOP)  # so that it has not read the call when it dies
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine._changes, "check", no_check)
                switching = asyncio.create_task(
                    engine.switch_model("second", running="park", drain_timeout_s=0)
                )
                while not engine._changes.is_calling:  # noqa: ASYNC110 - it is not an event
                    await asyncio.sleep(0.01)
            core.kill()
            with pytest.raises(EngineRestarting):
                await switching
            assert tokens(await parked) == undisturbed
            (running_on,) = await begun(engine, LONG)
            switching = asyncio.create_task(engine.switch_model("second", drain_timeout_s=30))
            while not engine.is_switching:  # noqa: ASYNC110 - it is not an event
                await asyncio.sleep(0)
            core_process().kill()  # while it drains
            for ended in (switching, running_on):
                with pytest.raises(EngineRestarting):
                    await ended
            await engine.wait_until_recovered()
            assert (await engine.switch_model("second")).active == "second"

    limited(body)


@pytest.mark.slow
def test_parked_requests_go_on_when_a_model_that_could_not_return_wakes_up(
    models: tuple[ModelEntry, ModelEntry], tmp_path: Path
) -> None:
    first, second = models
    copy = shutil.copytree(first.config.model, tmp_path / "copy")
    first = attrs.evolve(first, config=attrs.evolve(first.config, model=str(copy)))
    broken = copied(Path(second.config.model), tmp_path / "broken")
    change_head(broken, math.nan)
    second = attrs.evolve(second, config=attrs.evolve(second.config, model=str(broken)))

    async def body() -> None:
        async with running((first, second), model_stash_gib=0) as engine:
            undisturbed = tokens(await collect(engine, **LONG))
            (parked,) = await begun(engine, LONG)
            away = copy.rename(tmp_path / "away")
            with pytest.raises(SwitchFailedError, match="first sleeps") as raised:
                await engine.switch_model("second", running="park", drain_timeout_s=0)
            assert raised.value.step == "wake"
            with pytest.raises(EngineSleeping):
                await collect(engine, **SHORT)
            with pytest.raises(SwitchFailedError, match="no directory"):
                await engine.wake_up()
            assert engine.is_sleeping
            assert engine.stats.num_core_restarts == 0
            away.rename(copy)
            await engine.wake_up()
            assert tokens(await parked) == undisturbed

    limited(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda first, second: (), "no model"),
        (lambda first, second: (first, first), "alias 'first'"),
        (lambda first, second: (first, attrs.evolve(second, alias="")), "alias"),
        (
            lambda first, second: (
                first,
                attrs.evolve(second, config=attrs.evolve(second.config, cpu_threads=3)),
            ),
            "cpu_threads",
        ),
        (
            lambda first, second: (
                first,
                attrs.evolve(
                    second,
                    config=attrs.evolve(second.config, thermal_policy_config={"key": {1, 2}}),
                ),
            ),
            "model second: .*cannot be sent",
        ),
    ],
)
def test_models_that_one_engine_cannot_serve_are_refused_before_it_starts(
    models: tuple[ModelEntry, ModelEntry], change: Callable[..., object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(MultiModelEngine.start(change(*models)))


async def orders_of_a_wrong_type_are_refused(engine: MultiModelEngine) -> None:
    with pytest.raises(InvalidRequest, match="running"):
        await engine.switch_model("second", running="kill")
    for limit in (-1, float("nan"), "2"):
        with pytest.raises(InvalidRequest, match="drain_timeout_s"):
            await engine.switch_model("second", drain_timeout_s=limit)
    assert engine.active == "first"


def test_arguments_of_a_wrong_type_are_refused(models: tuple[ModelEntry, ModelEntry]) -> None:
    with pytest.raises(UnknownModelError, match="first, second"):
        asyncio.run(MultiModelEngine.start(models, active="third"))
    for stash in (-1, float("nan"), "2", None):
        with pytest.raises(ConfigError, match="model_stash_gib"):
            asyncio.run(MultiModelEngine.start(models, model_stash_gib=stash))


NUM_SWITCHES = 50


@pytest.mark.soak
def test_many_switches_under_load_change_no_token_and_leak_nothing(
    models: tuple[ModelEntry, ModelEntry],
) -> None:
    # In bf16, company in a batch changes a logit by more than random weights tell tokens apart.
    exact = attrs.evolve(models[1].config, dtype="float32")
    in_fp32 = (models[0], attrs.evolve(models[1], config=exact))

    async def body() -> None:
        async with running(in_fp32) as engine:
            alone = {}
            for alias in ("second", "first"):
                await engine.switch_model(alias)
                alone[alias] = {
                    start: tokens(await collect(engine, prompt_from(start), **LONG_ENOUGH))
                    for start in range(4)
                }
            answered = {"first": 0, "second": 0}
            is_over = asyncio.Event()

            async def ask(alias: str, start: int) -> None:
                while not is_over.is_set():
                    try:
                        answer = await collect(
                            engine, prompt_from(start), model=alias, **LONG_ENOUGH
                        )
                    except (SwitchInProgressError, ModelNotActiveError):
                        await asyncio.sleep(0.01)
                        continue
                    assert tokens(answer) == alone[alias][start], (alias, start)
                    answered[alias] += 1

            clients = [
                asyncio.create_task(ask(alias, start)) for alias in alone for start in range(4)
            ]
            num_tasks, resident = 0, 0
            for number in range(NUM_SWITCHES):
                target = "second" if engine.active == "first" else "first"
                await engine.switch_model(target, running="park", drain_timeout_s=0)
                await asyncio.sleep(0.2)
                if number == NUM_SWITCHES // 5:
                    num_tasks = len(asyncio.all_tasks())
                    resident = core_process().memory_info().rss
            assert len(asyncio.all_tasks()) <= num_tasks + 1
            assert core_process().memory_info().rss < 1.05 * resident
            is_over.set()
            await asyncio.sleep(0)
            for alias in engine.aliases:  # so that the parked requests end
                await engine.switch_model(alias)
            await asyncio.gather(*clients)
            assert min(answered.values()) >= NUM_SWITCHES // 10, answered
            assert engine.stats.num_used_blocks == 0

    asyncio.run(asyncio.wait_for(body(), 600))


LONG_ENOUGH = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}


def prompt_from(start: int) -> list[int]:
    return list(range(40 * start, 40 * start + 20))
