"""A KV cache in 8 bits: what it stores, who reads it, and what it changes for a user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import save_family

from trencadis.engine import LLM, ConfigError, EngineConfig, GenerateRequest, SamplingParams
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.cpu import attention as cpu_attention
from trencadis.engine.devices.cpu.attention import CPUAttention, attention_kernel
from trencadis.engine.models.quantized_cache import CACHE_DTYPES, QuantizedPart, with_scales
from trencadis.kvcache.copy_plan import BlockCopy
from trencadis.kvcache.tensors import KVCache, LayerShape

CODES = list(dict.fromkeys(CACHE_DTYPES.values()))
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [[5, *range(60, 60 + n)] for n in (3, 25, 31, 40)] + [
    [*range(100, 124), n] for n in (1, 2, 3)
]

kinds = pytest.mark.parametrize("codes", CODES, ids=lambda codes: str(codes).split(".")[1])


def all_numbers(codes: torch.dtype) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The finite numbers that the 256 codes mean, by the definition of their format."""
    if codes is torch.int8:
        return np.arange(-127, 128).astype(np.float64)
    mantissa, bias = (3, 7) if codes is torch.float8_e4m3fn else (2, 15)
    code = np.arange(128)
    exponent, fraction = code >> mantissa, code % (1 << mantissa) / (1 << mantissa)
    numbers = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    numbers = numbers[numbers <= LARGEST[codes]]
    return np.concatenate((-numbers[::-1], numbers[1:]))


rows = st.tuples(st.sampled_from([8, 16, 20]), st.integers(-100, 100), st.integers(0, 2**31))


@kinds
@settings(max_examples=150, deadline=None)
@given(rows)
def test_a_number_becomes_the_nearest_multiple_of_the_scale(
    codes: torch.dtype, drawn: tuple[int, int, int]
) -> None:
    width, exponent, seed = drawn
    row = torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    held = torch.zeros(3, 2, 4, width + 2, dtype=codes)
    part = QuantizedPart(held, torch.float32)
    part[torch.tensor([2]), :, torch.tensor([3])] = torch.stack((row, 0 * row))[None]
    found = part[torch.tensor([2])][0, :, 3]
    # The scale that the row's largest number asks for, up to the next number of 8 bits.
    least = row.abs().max().double().item() / LARGEST[codes]
    step = 2.0 ** (np.floor(np.log2(least)) - 7)
    for scale in (np.ceil(least / step * (1 - 1e-7)) * step, np.ceil(least / step) * step):
        near = scale * all_numbers(codes)
        error = np.abs(row.double().numpy()[:, None] - near).min(1)
        if np.allclose(np.abs(found[0].double().numpy() - row.double().numpy()), error, rtol=1e-4):
            break
    else:
        raise AssertionError((row, found[0]))
    assert not found[1].any()
    assert not part[torch.tensor([0, 1])].any()


@pytest.mark.parametrize(
    ("codes", "dtype", "width", "groups"),
    [
        *((codes, torch.bfloat16, 64, 3) for codes in CODES),
        (torch.int8, torch.float32, 48, 1),
        *(
            pytest.param(codes, dtype, width, groups, marks=pytest.mark.slow)
            for codes in CODES
            for dtype in (torch.bfloat16, torch.float32)
            for width, groups in ((16, 1), (80, 3), (128, 8), (192, 1))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_store_the_same_bytes_and_attend_alike(
    codes: torch.dtype, dtype: torch.dtype, width: int, groups: int, threads: int
) -> None:
    kernel = attention_kernel(groups, 1, width, dtype, cached=codes)
    spec, held = cpu_attention._trial_spec(kernel), cpu_attention._trial_cache(kernel)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for make_context, tokens in (
            (cpu_attention._trial_decode, 3),
            (cpu_attention._trial_prefill, 40),
        ):
            given_rows = cpu_attention._trial_rows(kernel, tokens)
            given_rows[1][0, 0, 1] = 0.0
            given_rows[2][0, 1, 2] *= 1e-30
            caches = held.clone(), held.clone()
            outs = [
                attention.attend(*given_rows, 0, make_context(cache), spec)
                for attention, cache in zip(
                    (CPUAttention(), CPUAttention(kernel)), caches, strict=True
                )
            ]
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-3
            torch.testing.assert_close(*outs, atol=tolerance, rtol=tolerance)
            written = [cache[:, 1:].view(torch.uint8) for cache in caches]  # without padding
            assert torch.equal(*written)
            assert not torch.equal(written[0], held[:, 1:].view(torch.uint8))
    finally:
        torch.set_num_threads(before)


@kinds
def test_a_query_that_is_not_a_number_gives_none(codes: torch.dtype) -> None:
    kernel = attention_kernel(3, 1, 64, torch.bfloat16, cached=codes)
    query, key, value = cpu_attention._trial_rows(kernel, 3)
    query[0, 1, 1, 5] = torch.nan
    context = cpu_attention._trial_decode(cpu_attention._trial_cache(kernel))
    spec = cpu_attention._trial_spec(kernel)
    out = CPUAttention(kernel).attend(query, key, value, 0, context, spec)
    assert out[0, 1, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[0, 2].isfinite().all()


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_numbers_stay_finite(codes: torch.dtype, dtype: torch.dtype) -> None:
    """A block's next owner multiplies by 0 what it has not overwritten yet."""
    largest = torch.finfo(dtype).max
    rows = (torch.linspace(0.9, 1.0, 400, dtype=torch.float64) * largest).to(dtype)
    part = QuantizedPart(torch.zeros(100, 1, 4, 18, dtype=codes), dtype)
    slots = torch.arange(400)
    part[slots // 4, :, slots % 4] = rows[:, None, None].expand(400, 1, 16)
    assert part[:].isfinite().all()
    assert part.rounded(rows[:, None]).isfinite().all()


@pytest.mark.parametrize(("dtype", "outlier"), [(torch.bfloat16, 20.0), (torch.float32, 300.0)])
def test_an_outlier_of_a_query_costs_no_more_than_its_dtype_does(
    dtype: torch.dtype, outlier: float
) -> None:
    """In fp32 the steps of an integer query would be coarser than those of its numbers."""
    kernel = attention_kernel(3, 1, 64, dtype, cached=torch.int8)
    query, key, value = cpu_attention._trial_rows(kernel, 3)
    query[..., 7], key[..., 7] = outlier, 0.0
    context = cpu_attention._trial_decode(cpu_attention._trial_cache(kernel))
    spec = cpu_attention._trial_spec(kernel)
    out, plain = (
        attention.attend(query, key, value, 0, context, spec)
        for attention in (CPUAttention(kernel), CPUAttention())
    )
    atol = 1e-4 if dtype is torch.float32 else 0.04
    torch.testing.assert_close(out, plain, atol=atol, rtol=0.01)


@kinds
def test_scales_move_with_their_blocks(codes: torch.dtype) -> None:
    layers = [LayerShape(2, 16, 8), LayerShape(1, 20, 20)]
    cache = KVCache(
        layers=with_scales(layers), num_blocks=6, block_size=4, dtype=codes, num_host_blocks=3
    )
    expected = {}
    for layer in range(2):
        for held in (cache.key(layer), cache.value(layer)):
            part = QuantizedPart(held, torch.float32)
            blocks, _, size, width = part.shape
            slots = torch.arange(blocks * size)
            numbers = (
                torch.randn(len(slots), part.shape[1], width) * 10.0 ** (slots % 7)[:, None, None]
            )
            part[slots // size, :, slots % size] = numbers
            expected[held.data_ptr()] = part[:].clone()
    cache.swap_out([BlockCopy(1, 2), BlockCopy(5, 0)])
    cache.copy([BlockCopy(2, 1), BlockCopy(1, 2), BlockCopy(3, 5)])
    cache.swap_in([BlockCopy(2, 3), BlockCopy(0, 4)])
    for layer in range(2):
        for held in (cache.key(layer), cache.value(layer)):
            moved = expected[held.data_ptr()][[0, 2, 1, 1, 5, 3]]
            assert torch.equal(QuantizedPart(held, torch.float32)[:], moved)


def serve(model: Path, **changes: Any) -> LLM:
    given_settings = {
        **{"dtype": "float32", "max_model_len": 64, "warmup": "none", "block_size": 8},
        **{"num_blocks": 80, "device": "cpu", **changes},
    }
    return LLM(str(model), **given_settings)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[tuple[int, ...]]]:
    answers = llm.generate(PROMPTS, params)
    return [[tuple(one.token_ids) for one in answer.completions] for answer in answers]


def prompt_logprobs(model: Path, **changes: Any) -> torch.Tensor:
    """Those of all tokens of `PROMPTS` but the first of each."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    return torch.tensor(
        [
            position.chosen.logprob
            for answer in serve(model, **changes).generate(PROMPTS, params)
            for position in answer.prompt_logprobs or ()
            if position is not None
        ]
    )


@pytest.mark.parametrize("name", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_tokens_are_the_same_whatever_moves_the_blocks(tiny_model: Path, name: str) -> None:
    expected = tokens(serve(tiny_model, kv_cache_dtype=name))
    for changes in (
        {"num_blocks": 19, "num_host_blocks": 40},
        {"num_blocks": 19, "swap_space": 0},
        {"max_num_batched_tokens": 12},
        {"warmup": "full"},
    ):
        llm = serve(tiny_model, kv_cache_dtype=name, **changes)
        for _ in range(2):
            assert tokens(llm) == expected
        stats = llm.core.stats
        assert (stats.num_swaps > 0) == ("num_host_blocks" in changes)
        assert stats.num_prefix_hit_tokens > 0
    forked = attrs.evolve(GREEDY, n=2)
    assert tokens(serve(tiny_model, kv_cache_dtype=name), forked) == [2 * one for one in expected]


@pytest.mark.parametrize(
    "family",
    [
        "gpt-oss",
        "DeepSeek V3",
        pytest.param("Mistral v0.1", marks=pytest.mark.slow),
        pytest.param("Gemma 2", marks=pytest.mark.slow),
    ],
)
def test_windows_sinks_and_other_widths_are_near_a_cache_of_the_models_dtype(
    family: str, tmp_path: Path, add_tokenizer: Callable[[Path], None]
) -> None:
    add_tokenizer(save_family(family, tmp_path))
    plain = prompt_logprobs(tmp_path)
    whole = prompt_logprobs(tmp_path, kv_cache_dtype="int8")
    cut_up = prompt_logprobs(tmp_path, kv_cache_dtype="int8", max_num_batched_tokens=12)
    assert not torch.equal(plain, whole)
    assert (plain - whole).abs().mean() < 0.05 * plain.abs().mean()
    torch.testing.assert_close(cut_up, whole, atol=1e-2, rtol=1e-2)


def test_the_same_memory_has_nearly_twice_the_blocks(tiny_model: Path) -> None:
    plain, coded = (
        serve(tiny_model, dtype="bfloat16", num_blocks=None, kv_cache_memory=1 << 18, **changes)
        for changes in ({}, {"kv_cache_dtype": "int8"})
    )
    ratio = 2 * 16 / (16 + 2)  # heads of 16
    found = [llm.core.executor.worker.cache.num_blocks for llm in (plain, coded)]
    assert found[1] == int((1 << 18) // (plain.core.facts.block_bytes / ratio))
    assert coded.core.facts.block_bytes * ratio == plain.core.facts.block_bytes


class HalfDevice(CPUDevice):
    """A device whose attention has no cache of codes."""

    name = "half"
    kv_cache_dtypes = frozenset()


def test_a_device_without_such_a_cache_refuses_it(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 is not computed on half: leave it"):
        serve(tiny_model, kv_cache_dtype="fp8", device=HalfDevice())


def test_keys_of_the_prefix_cache_differ_by_dtype(tiny_model: Path) -> None:
    digests: list[set[bytes]] = []
    names = ("auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_per_token_head")
    for name in names:
        core = EngineCore(
            EngineConfig(model=str(tiny_model), max_model_len=64, block_size=8, kv_cache_dtype=name)
        )
        core.add("one", GenerateRequest(tuple(range(40)), GREEDY))
        while core.has_work:
            core.step()
        index = core.blocks.pool.prefix_index
        keys = [index.key_of(block) for block in range(core.blocks.config.num_blocks)]
        digests.append({key.digest for key in keys if key is not None})
    assert all(len(each) > 4 for each in digests)
    plain, int8, other_int8, *fp8 = digests
    assert int8 == other_int8, "two names of one dtype"
    assert fp8 == [fp8[0]] * 3
    distinct = (plain, int8, fp8[0])
    assert len(set().union(*distinct)) == sum(map(len, distinct))


@pytest.mark.slow
@pytest.mark.parametrize("stash_bytes", [0, 1 << 30], ids=["loaded again", "from the stash"])
def test_switches_and_sleep_keep_the_dtype_of_each_model(
    tiny_model: Path, stash_bytes: int
) -> None:
    """Both have the same weights, so only what the cache holds may differ."""
    configs = [
        EngineConfig(
            **{"model": str(tiny_model), "served_model_name": name, "dtype": "float32"},
            **{"max_model_len": 64, "block_size": 8, "num_blocks": 80, "warmup": "none"},
            kv_cache_dtype=name,
        )
        for name in ("fp8_e5m2", "auto")
    ]
    expected = [core_tokens(EngineCore(config)) for config in configs]
    assert expected[0] != expected[1]
    core = EngineCore(configs[0])
    switcher = ModelSwitcher(core)
    for number in (1, 0, 1, 0):
        switcher.reconfigure_engine(config_payload(configs[number]), stash_bytes)
        switcher.sleep(1)
        switcher.wake_up()
        assert core_tokens(core) == expected[number]
        held = core.executor.worker.cache.key(0).dtype
        assert (held is torch.float8_e5m2) == (number == 0)


def core_tokens(core: EngineCore) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    core.add("one", GenerateRequest(tuple(range(3, 35)), params))
    found = []
    while core.has_work:
        found += [token.token_id for token in core.step()]
    return found
