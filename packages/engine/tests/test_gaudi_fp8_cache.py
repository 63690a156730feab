"""A KV cache of FP8 on a simulated Gaudi."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import save_family
from request_mix import finish
from safetensors.torch import load_file, save_file
from test_gaudi_fp8 import largest_error as error_beside
from test_packed_weights import FORMATS, quantize
from test_quantized_cache import prompt_logprobs
from test_ranks import start  # noqa: F401  (a fixture)
from test_shared_prefix import config_of as config_of_shared
from test_shared_prefix import serve as serve_shared
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trencadis.bucketing import AxisConfig, Bucket, BucketingConfig
from trencadis.engine import ConfigError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import HPUDevice
from trencadis.engine.devices.hpu import cached_rows
from trencadis.engine.devices.hpu.cached_rows import as_kept, as_read
from trencadis.engine.devices.hpu.fp8_linear import FP8Linear
from trencadis.engine.errors import ModelError
from trencadis.engine.models.cache_scales import use_cache_scales
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.simulated import CostModel, find_hardware, read_model_shape
from trencadis.kvcache import DefragConfig
from trencadis.warmup import Phase

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = {"a": tuple(range(1, 41)), "b": (7,), "c": tuple(range(100, 117))}
LARGEST = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}
NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

modes = pytest.mark.parametrize("mode", ["lazy", "eager"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Any) -> Path:
    """With values of which some are beyond the largest number of E4M3."""
    made = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("plain")))
    for layer in made.model.layers:
        layer.self_attn.v_proj.weight.data *= 20
        layer.self_attn.o_proj.weight.data /= 20
    directory: Path = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    return directory


@pytest.fixture
def gaudi(stand_in: Any, mode: str) -> Iterator[Any]:
    with stand_in(mode) as bridge:
        yield bridge


def config_of(model: Path, **settings: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "block_size": 8}
    few = BucketingConfig(
        prompt_batch=AxisConfig(min=1, step=1, max=1),
        prompt_query=AxisConfig(min=16, step=48, max=64),
        prompt_context=AxisConfig(min=0, step=8, max=8),
        decode_batch=AxisConfig(min=4, step=4, max=4),
        decode_blocks=AxisConfig(min=32, step=32, max=32),
    )
    given = {"kv_cache_dtype": "fp8", "dtype": "float32", "num_blocks": 33, "bucketing": few}
    device = {"device": "hpu"}
    return EngineConfig(model=str(model), **{**sizes, **given, **device, **settings})


def core_of(model: Path, **settings: Any) -> EngineCore:
    core = EngineCore(config_of(model, **settings))
    core.warm_up()
    return core


def served_by(core: EngineCore, **changes: Any) -> dict[str, list[Any]]:
    for key, prompt in PROMPTS.items():
        core.add(key, GenerateRequest(prompt, attrs.evolve(GREEDY, **changes)))
    return finish(core)


def tokens_of(core: EngineCore, **changes: Any) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for key, made in served_by(core, **changes).items():
        for token in made:
            found.setdefault((key, token.index), []).append(token.token_id)
    return found


def rounded(rows: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    bounded = (rows / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return bounded.to(dtype).to(rows.dtype) * scale


@pytest.fixture(scope="module")
def with_scales(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with scales of keys and values in its first layer, as if seen up to 3 and 700."""
    directory: Path = tmp_path_factory.mktemp("scales")
    shutil.copytree(model, directory, dirs_exist_ok=True)
    save_scales(directory, k_scale=torch.tensor(3 / 448), v_scale=torch.tensor([700 / 448]))
    return directory


def save_scales(directory: Path, **scales: torch.Tensor) -> None:
    file = directory / "model.safetensors"
    own = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})


def largest_error(
    model: Path,
    served: dict[str, list[Any]],
    dtype: torch.dtype | None,
    scales: Sequence[float] = (1.0, 1.0),
) -> float:
    """Between the log-probabilities of the tokens and those of transformers, which rounds keys and
    values to ``dtype`` before it attends, those of the first layer with ``scales``."""

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            of_layer = (1.0, 1.0) if module.layer_idx else scales
            key, value = (
                rounded(rows, dtype, scale)
                for rows, scale in zip((key, value), of_layer, strict=True)
            )
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("rounds_its_cache", attend)
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="rounds_its_cache"
    )
    return error_beside(reference, served, PROMPTS)


@modes
@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_are_rounded_once_and_nothing_else_is(
    gaudi: Any, model: Path, name: str
) -> None:
    core = core_of(model, kv_cache_dtype=name)
    assert core.executor.worker.cache.key(0).dtype is NAMES[name]
    before = gaudi.counters.copy()
    served = served_by(core)
    assert largest_error(model, served, NAMES[name]) < 0.05 * largest_error(model, served, None)
    assert core.stats.num_compilations == 0
    assert core.stats.num_cold_forwards == 0
    assert gaudi.counters.since(before).fallbacks == 0


@modes
@pytest.mark.parametrize(
    ("name", "powers"),
    [("fp8", (2**-6, 4.0)), pytest.param("fp8_e5m2", (2**-14, 2**-6), marks=pytest.mark.slow)],
)
def test_scales_of_a_checkpoint_are_powers_of_two_for_the_largest_numbers(
    gaudi: Any, with_scales: Path, name: str, powers: tuple[float, float], caplog: Any
) -> None:
    """3 / 240 is below 2**-6, and 700 / 240 below 4."""
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        core = core_of(with_scales, kv_cache_dtype=name)
    assert "with scales of the checkpoint: 1 layers" in caplog.text
    served = served_by(core)
    error = largest_error(with_scales, served, NAMES[name], powers)
    assert error < 0.05 * largest_error(with_scales, served, NAMES[name])
    assert error < 0.05 * largest_error(with_scales, served, None)
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0
    values = core.executor.worker.cache.value(0).cpu().float()
    assert values.abs().max() * powers[1] > 300


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["", "attn.", "k_proj.", "qkv_proj."]), st.floats(1e-3, 1e3))
def test_the_largest_number_of_a_scale_fits_by_less_than_a_power_of_two(
    tmp_path_factory: pytest.TempPathFactory, of: str, scale: float
) -> None:
    directory = tmp_path_factory.mktemp("scale")
    name = f"model.layers.1.self_attn.{of}k_scale"
    save_file({name: torch.tensor(scale)}, directory / "model.safetensors")
    model = nn.ModuleDict({"layers": nn.ModuleList()})
    for _ in range(2):
        attention = nn.Linear(1, 1)
        attention.layer_spec = LayerSpec.of_kind("attention")
        model["layers"].append(nn.ModuleDict({"self_attn": attention}))
    assert use_cache_scales(model, str(directory), 240.0) == 1
    plain, scaled = (layer["self_attn"] for layer in model["layers"])
    assert not plain.layer_spec.scaled_cache
    assert scaled.layer_spec.scaled_cache
    assert scaled.value_scale.item() == 1.0
    power, largest = scaled.key_scale.item(), float(torch.tensor(scale)) * 448
    assert math.frexp(power)[0] == 0.5
    assert largest <= 240 * power < 2 * largest


def test_weights_and_cache_are_both_of_fp8(
    lazy_gaudi: Any, with_scales: Path, tmp_path: Path, caplog: Any
) -> None:
    """The layers that attend have no parameters then."""
    packed = quantize(with_scales, tmp_path, *FORMATS["fp8 by channel"])
    save_scales(packed, k_scale=torch.tensor(3 / 448), v_scale=torch.tensor(700 / 448))
    with caplog.at_level(logging.INFO, "trencadis.engine"):
        core = core_of(packed)
    assert "with scales of the checkpoint: 1 layers" in caplog.text
    both = served_by(core)
    kinds = [type(each) for each in core.executor.worker._model.modules()]
    assert kinds.count(FP8Linear) == 14
    expanded = tmp_path / "expanded"
    assert largest_error(expanded, both, torch.float8_e4m3fn, (2**-6, 4.0)) < 0.1
    assert core.stats.num_compilations == core.stats.num_cold_forwards == 0


@pytest.mark.slow
def test_two_gaudis_keep_their_heads_in_fp8(
    with_scales: Path,
    start: Callable[..., EngineCore],  # noqa: F811
    stand_in_for_cores: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GAUDI_STANDIN_DEVICES", "2")
    with stand_in_for_cores("lazy"):
        core = start(with_scales, device="hpu", kv_cache_dtype="fp8", max_num_batched_tokens=32)
        served = served_by(core)
    error = largest_error(with_scales, served, torch.float8_e4m3fn, (2**-6, 4.0))
    assert error < 0.05 * largest_error(with_scales, served, None)


@pytest.mark.parametrize("scale", [torch.zeros(()), torch.ones(2)], ids=["zero", "by head"])
def test_scales_that_are_not_one_number_are_refused(
    lazy_gaudi: Any, with_scales: Path, tmp_path: Path, scale: torch.Tensor
) -> None:
    shutil.copytree(with_scales, tmp_path, dirs_exist_ok=True)
    save_scales(tmp_path, k_scale=scale)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale of .* is"):
        EngineCore(config_of(tmp_path))
    EngineCore(config_of(tmp_path, kv_cache_dtype="auto", warmup="none"))


@modes
def test_a_step_launches_what_it_did_and_reads_half_as_much_of_the_cache(
    gaudi: Any, model: Path
) -> None:
    """Of a long decode, whose cache has most of the bytes."""
    steps = {}
    for name in ("auto", "fp8"):
        core = core_of(model, kv_cache_dtype=name, dtype="bfloat16")
        core.add("one", GenerateRequest(PROMPTS["a"], GREEDY))
        for _ in range(4):
            before = gaudi.counters.copy()
            core.step()
        steps[name] = gaudi.counters.since(before)
        finish(core)
    found, as_it_was = steps["fp8"], steps["auto"]
    for count in ("launches", "uploads", "upload_bytes", "downloads", "syncs", "gathers"):
        assert getattr(found, count) == getattr(as_it_was, count), count
    assert found.recipes == found.fallbacks == 0
    row = 2 * 2 * 2 * 16  # layers, keys and values, heads, width
    in_prefix, written = 32 * 8 * row, 4 * row  # of a decode of this grid
    assert as_it_was.read_bytes - found.read_bytes == in_prefix - written
    assert found.written_bytes == as_it_was.written_bytes


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_the_simulator_reads_as_much_less_in_fp8_as_the_engine(gaudi: Any, model: Path) -> None:
    """Of weights without their scales and the rounded rows, which it leaves out; of the cache but
    for the rows that the step writes."""
    found, predicted = {}, {}
    shape = attrs.evolve(read_model_shape(model), dtype_bytes=2, matrix_dtype_bytes=2)
    shape = attrs.evolve(shape, kv_dtype_bytes=2)
    kinds = {"bf16": {}, "weights": {"quantization": "fp8"}, "cache": {"kv_cache_dtype": "fp8"}}
    rows = {"cache": 8 * 2 * 2 * 2 * 16}  # layers, keys and values, heads, width
    for kind, changes in kinds.items():
        core = core_of(model, **{"kv_cache_dtype": "auto", "dtype": "bfloat16", **changes})
        layers = [x for x in core.executor.worker._model.modules() if type(x) is FP8Linear]
        if layers:
            rows[kind] = sum(each.scales.nbytes + 8 * each.in_features for each in layers)
        core.add("one", GenerateRequest(PROMPTS["a"], GREEDY))
        for _ in range(4):
            before = gaudi.counters.copy()
            core.step()
        found[kind] = gaudi.counters.since(before)
        own = shape.quantized(matrices=kind == "weights", kv_cache=kind == "cache")
        work = CostModel(own, find_hardware("gaudi3"), 8).work(
            Phase.DECODE, Bucket(("batch", "blocks"), (4, 32))
        )
        predicted[kind] = work.matrices.hbm_bytes + work.attention.hbm_bytes
        assert found[kind].launches == found["bf16"].launches
    for kind in ("weights", "cache"):
        less = found["bf16"].read_bytes - found[kind].read_bytes
        assert 0 <= predicted["bf16"] - predicted[kind] - less <= rows[kind], kind


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_tokens_are_the_same_whatever_moves_the_blocks(gaudi: Any, model: Path) -> None:
    """Samples that part copy on write, evictions swap, and what is left is defragmented."""

    def served(core: EngineCore) -> dict[tuple[str, int], list[int]]:
        core.scheduler.costs.prefill_s_per_token = 1.0  # swapping is cheaper, then
        return tokens_of(core, temperature=0.9, seed=3, n=2)

    expected = served(core_of(model, max_num_seqs=6, warmup="none"))
    moved = core_of(model, num_blocks=11, num_host_blocks=30, defrag=DefragConfig(threshold=1))
    for _ in range(2):
        assert served(moved) == expected
    stats = moved.stats
    assert stats.num_swaps > 0
    assert stats.num_defragmented_blocks > 0
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_compilations == stats.num_cold_forwards == 0
    in_chunks = core_of(model, max_num_batched_tokens=16, warmup="none")
    assert served(in_chunks) == expected


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_shared_blocks_are_scored_once_in_fp8(gaudi: Any, model: Path) -> None:
    given = {"device": "hpu", "kv_cache_dtype": "fp8"}
    found, passes = serve_shared(EngineCore(config_of_shared(model, **given)))
    alone = EngineCore(config_of_shared(model, **given, enable_prefix_caching=False))
    assert found == serve_shared(alone)[0]
    assert any(shape.batch == 4 and shape.shared for shape in passes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "DeepSeek V3", "Gemma 2"])
def test_windows_sinks_and_other_widths_are_near_a_cache_of_the_models_type(
    lazy_gaudi: Any, tmp_path: Path, family: str, add_tokenizer: Any
) -> None:
    add_tokenizer(save_family(family, tmp_path))
    on_gaudi = {"device": "hpu", "max_num_seqs": 4}
    plain, whole, cut_up = (
        prompt_logprobs(tmp_path, **on_gaudi, **changes)
        for changes in (
            {},
            {"kv_cache_dtype": "fp8"},
            {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 12},
        )
    )
    assert not torch.equal(plain, whole)
    # The CPU's cache has as many bits, and a scale for each token.
    on_cpu = [prompt_logprobs(tmp_path, kv_cache_dtype=name) for name in ("auto", "fp8")]
    assert (plain - whole).abs().mean() < 2 * (on_cpu[0] - on_cpu[1]).abs().mean()
    torch.testing.assert_close(cut_up, whole, atol=1e-2, rtol=1e-2)


def test_the_same_memory_has_twice_the_blocks(lazy_gaudi: Any, model: Path) -> None:
    given = {"num_blocks": None, "kv_cache_memory": 1 << 15, "dtype": "bfloat16"}
    found = {}
    for name in ("auto", "fp8"):
        core = EngineCore(config_of(model, kv_cache_dtype=name, warmup="none", **given))
        cache = core.executor.worker.cache
        found[name] = cache.num_blocks, cache.key(0).nbytes // cache.num_blocks
    (blocks, num_bytes), (rounded_blocks, rounded_bytes) = found["auto"], found["fp8"]
    assert rounded_bytes * 2 == num_bytes
    assert rounded_blocks == 2 * blocks


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head", "fp8_per_token_head"])
def test_other_types_are_refused_in_one_line(lazy_gaudi: Any, model: Path, name: str) -> None:
    message = (
        f"kv_cache_dtype {name} is not computed on hpu: leave it out, or use fp8, fp8_e4m3, "
        "fp8_e5m2, fp8_inc"
    )
    with pytest.raises(ConfigError) as raised:
        EngineCore(config_of(model, kv_cache_dtype=name))
    assert str(raised.value) == message


def test_the_plugins_name_is_for_a_gaudi(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8_inc is not computed on cpu"):
        EngineCore(config_of(model, kv_cache_dtype="fp8_inc", device="cpu"))


def test_kernels_that_differ_are_not_used(
    lazy_gaudi: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = cached_rows.cache_trial

    def wrong(*arguments: Any) -> Any:
        found, expected = trial(*arguments)
        return found * 2, expected

    monkeypatch.setattr(cached_rows, "cache_trial", wrong)
    with pytest.raises(ConfigError, match="FP8 needs cast_to_fp8_v2"):
        EngineCore(config_of(model))
    EngineCore(config_of(model, kv_cache_dtype="auto", warmup="none"))


def test_blocks_that_cannot_be_swapped_are_found_at_the_start(
    lazy_gaudi: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = torch.stack

    def without_fp8(tensors: Any, *arguments: Any, **fields: Any) -> torch.Tensor:
        if tensors[0].dtype in LARGEST:
            raise RuntimeError("stack of FP8 is not implemented")
        return stack(tensors, *arguments, **fields)

    monkeypatch.setattr(torch, "stack", without_fp8)
    with pytest.raises(ConfigError, match="stack and copies to the host"):
        EngineCore(config_of(model, warmup="none"))


@pytest.mark.parametrize("name", ["GAUDI2", "GAUDI3"])
@pytest.mark.parametrize("kept", LARGEST)
def test_each_gaudi_reads_what_the_other_has_written(
    name: str, kept: torch.dtype, eager_gaudi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiers may have the blocks of both, and Gaudi 2 reads numbers beyond 240 as NaN."""
    monkeypatch.setenv("GAUDI_STANDIN_NAME", name)
    rows = torch.tensor([[1.0, 239.0, 300.0, -448.0, 1e14]])
    codes = as_kept(rows.to(HPUDevice().torch_device), kept)
    monkeypatch.setenv("GAUDI_STANDIN_NAME", "GAUDI2")
    assert torch.equal(as_read(codes, torch.float32).cpu(), rounded(rows, kept))


def test_switches_and_sleep_keep_the_type_of_each_model(lazy_gaudi: Any, model: Path) -> None:
    in_fp8 = config_of(model, warmup="none")
    configs = [in_fp8, attrs.evolve(in_fp8, kv_cache_dtype="auto")]
    core = EngineCore(in_fp8)
    switcher = ModelSwitcher(core)
    found: list[Any] = [tokens_of(core)]
    for number in (1, 0, 1, 0):
        switcher.reconfigure_engine(config_payload(configs[number]), 1 << 30)
        switcher.sleep(1)
        switcher.wake_up()
        found.append(tokens_of(core))
        held = core.executor.worker.cache.key(0).dtype
        assert (held is torch.float8_e4m3fn) == (number == 0)
    assert found[0] == found[2] == found[4]
    assert found[1] == found[3]
    assert found[0] != found[1]
    core.close()
