"""Tensor parallelism with a simulated Gaudi for each rank: the tokens of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from adapters import Reference, save_adapter
from model_families import save_family
from request_mix import GREEDY, SMALL, finish, serve
from test_ranks import assert_equal, start, ways  # noqa: F401  (a fixture)

from trencadis.engine import DeviceError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.kvcache import DefragConfig

Start = Callable[..., EngineCore]


@pytest.fixture(autouse=True)
def _two_gaudis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GAUDI_STANDIN_DEVICES", "2")


@pytest.mark.parametrize(
    "mode",
    [pytest.param("eager", marks=pytest.mark.slow), "lazy"],  # eager compiles for half a minute
)
def test_two_gaudis_serve_what_one_process_serves(
    tiny_model: Path,
    start: Start,  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    mode: str,
) -> None:
    """Each prompt has another kind of request beside it in the batches."""
    changes = {
        **{"num_blocks": 24, "num_host_blocks": 64},
        **{"defrag": DefragConfig(enabled=True, threshold=1)},
    }
    mixed = [params for way in ways() for params in way]
    alone = start(tiny_model, 1, device="cpu", **changes)
    with stand_in_for_cores(mode):
        core = start(tiny_model, device="hpu", **changes)
        assert_equal(serve(core, mixed, 16), serve(alone, mixed, 16))
    assert core.stats.num_preemptions > 0
    assert core.stats.num_swap_in_bytes > 0
    assert core.stats.num_defragmented_blocks > 0
    assert core.stats.num_compilations > 0
    assert core.executor.device_facts.name == "hpu"


def test_gaudis_with_other_memory_capture_the_same_graphs(
    tiny_model: Path,
    start: Start,  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each graph has collective calls: a rank that captures one alone would wait for ever."""
    monkeypatch.setenv("GAUDI_STANDIN_MEMORY", "16000000,5200000")
    alone = start(tiny_model, 1, device="cpu")
    with stand_in_for_cores("lazy"):
        core = start(tiny_model, device="hpu", warmup="full", num_blocks=None)
        assert 0 < core.executor.counters().num_graphs < core.facts.num_buckets
        expected = serve(alone, [GREEDY])
        assert_equal(serve(core, [GREEDY]), expected)
        switcher = ModelSwitcher(core)
        switcher.sleep(1)
        switcher.wake_up()
        assert_equal(serve(core, [GREEDY]), expected)
        first = core.config
        other = attrs.evolve(first, max_num_seqs=4)
        for config, was_in_memory in ((other, False), (first, True), (other, True)):
            result = switcher.reconfigure_engine(config_payload(config), 1 << 30)
            assert result.from_stash is was_in_memory
            assert_equal(serve(core, [GREEDY]), expected)


def test_gaudis_may_compile_in_live_traffic_for_longer_than_a_step_takes(
    tiny_model: Path,
    start: Start,  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GAUDI_STANDIN_COMPILE_SECONDS", "0.4")
    reasons: list[str] = []
    with stand_in_for_cores("lazy"):
        core = start(tiny_model, device="hpu", hang_timeout=4.0, hang_restart_timeout=4.0)
        core.on_busy = lambda reason, limit_s: reasons.append(f"{reason}, {limit_s:.0f} s")
        began = time.monotonic()
        assert_equal(
            serve(core, [GREEDY], 1), serve(start(tiny_model, 1, device="cpu"), [GREEDY], 1)
        )
        assert time.monotonic() - began > 4.0, "or this test cannot fail"
    assert reasons[0].startswith("the engine core compiles PromptShape(batch=1, query=32, ")
    assert reasons.count(reasons[0]) > 2, "by each rank for a pass, and then for its graph"
    assert reasons[0].endswith(f", {BUSY_SECONDS:.0f} s")


@pytest.mark.parametrize("family", ["Gemma 3 (text)", "Mixtral"])
def test_windows_and_experts_are_divided_between_gaudis(
    tmp_path: Path,
    start: Start,  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    family: str,
) -> None:
    model = save_family(family, tmp_path)
    alone = start(model, 1, device="cpu")
    with stand_in_for_cores("lazy"):
        core = start(model, device="hpu")
        assert_equal(serve(core, [GREEDY], 4), serve(alone, [GREEDY], 4))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HLS_MODULE_ID": "3"}, "HLS_MODULE_ID=3 gives one Gaudi to all ranks"),
        ({"HABANA_VISIBLE_MODULES": "4"}, "HABANA_VISIBLE_MODULES=4 names fewer Gaudis than"),
        ({"GAUDI_STANDIN_DEVICES": "1"}, "size 2 needs as many Gaudis, and the bridge finds 1"),
    ],
)
def test_each_rank_needs_a_gaudi(
    tiny_model: Path,
    own_processes: None,
    stand_in_for_cores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    text: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = {**SMALL, "device": "hpu", "tensor_parallel_size": 2}
    with stand_in_for_cores("lazy"), pytest.raises(DeviceError, match=text):
        EngineCore(EngineConfig(model=str(tiny_model), **settings))


def test_no_adapter_compiles_anything(
    tiny_model: Path,
    tmp_path: Path,
    start: Start,  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
) -> None:
    folders = {name: save_adapter(tiny_model, tmp_path / name, seed=ord(name)) for name in "abc"}
    reference = Reference(tiny_model, folders)
    prompts = [tuple(range(3 + i, 9 + 3 * i)) for i in range(8)]
    names = ("a", "b", "c", None)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "warmup": "full"}
    with stand_in_for_cores("lazy"):
        core = start(tiny_model, device="hpu", max_model_len=64, **settings)
        for _ in range(2):
            for name, folder in folders.items():
                core.load_adapter(name, str(folder))
            for number, prompt in enumerate(prompts):
                lora = names[number % 4]
                core.add(f"{number}", GenerateRequest(prompt, greedy, lora=lora))
            for key, tokens in finish(core).items():
                number = int(key)
                expected = reference.tokens(names[number % 4], prompts[number], 8)
                assert [token.token_id for token in tokens] == expected
            for name in folders:
                core.unload_adapter(name)
    assert core.stats.num_compilations == 0
