"""What a simulated device takes of time and memory, against figures worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import Bucket
from trencadis.engine.errors import ConfigError, ModelError
from trencadis.engine.simulated import (
    HARDWARE,
    CostModel,
    MemoryModel,
    find_hardware,
    read_model_shape,
)
from trencadis.engine.simulated.cost_model import NOT_SHARED, Sharing
from trencadis.warmup import Phase

LLAMA = Path(__file__).parent / "data" / "llama-3.1-8b.json"
LLAMA_PARAMETERS = 8_030_261_248
"""Half of the ``total_size`` in the index of the published bf16 checkpoint."""

GIB, MIB = 1 << 30, 1 << 20


def decode(batch: int, blocks: int) -> Bucket:
    return Bucket(("batch", "blocks"), (batch, blocks))


def prompt(batch: int, query: int, context: int = 0) -> Bucket:
    return Bucket(("batch", "query", "context_blocks"), (batch, query, context))


def costs(device: str = "gaudi3", block_size: int = 128) -> CostModel:
    return CostModel(read_model_shape(LLAMA), find_hardware(device), block_size)


def memory(device: str = "gaudi2") -> MemoryModel:
    return MemoryModel(read_model_shape(LLAMA), find_hardware(device))


def test_the_shape_of_llama_is_that_of_its_checkpoint() -> None:
    model = read_model_shape(LLAMA)
    assert model.num_parameters == LLAMA_PARAMETERS
    assert model.weight_bytes == 2 * LLAMA_PARAMETERS
    assert model.kv_bytes_per_token == 131_072  # seed 000: 1,519 blocks of 128 tokens in 23.73 GiB


def test_a_directory_stands_for_the_config_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    assert read_model_shape(tmp_path) == read_model_shape(LLAMA)


def test_a_tied_model_has_one_table_less(tmp_path: Path) -> None:
    config = {**json.loads(LLAMA.read_text()), "tie_word_embeddings": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_model_shape(path).num_parameters == LLAMA_PARAMETERS - 128_256 * 4096


MIXTRAL = Path(__file__).parent / "data" / "mixtral-8x7b.json"
QWEN = Path(__file__).parent / "data" / "qwen3-30b-a3b.json"


@pytest.mark.parametrize(
    ("path", "parameters", "active"),
    [
        (MIXTRAL, 46_702_792_704, 12.9e9),
        # Without its norms of queries and keys, which are left out.
        (QWEN, 30_532_122_624 - 48 * 256, 3.3e9),
    ],
)
def test_the_shape_of_a_mixture_is_that_of_its_checkpoint(
    path: Path, parameters: int, active: float
) -> None:
    model = read_model_shape(path)
    assert model.num_parameters == parameters
    unused = (model.num_experts - model.experts_per_token) * model.expert_matrices
    assert parameters - model.num_layers * unused == pytest.approx(active, rel=0.02)


def test_a_token_reads_its_experts_and_many_read_all() -> None:
    model = read_model_shape(MIXTRAL)
    costs = CostModel(model, find_hardware("gaudi3"), 128)
    one, many = (costs.work(Phase.DECODE, decode(batch, 8)).matrices for batch in (1, 256))
    used = model.dense_matrices + 2 * model.expert_matrices
    assert one.hbm_bytes == pytest.approx(2 * (32 * used + 4096), rel=1e-12)
    assert many.hbm_bytes == pytest.approx(2 * (32 * model.layer_matrices + 256 * 4096), rel=1e-9)
    # Each expert has 64 of 512 rows, and the matrix engine computes 128.
    rows = 256 * model.dense_matrices + 8 * 128 * model.expert_matrices
    assert many.flops == pytest.approx(2 * 32 * rows, rel=1e-9)


GEMMA = Path(__file__).parent / "data" / "gemma-3-27b.json"
MISTRAL = Path(__file__).parent / "data" / "mistral-7b-v0.1.json"


def test_the_shape_of_a_model_with_windows_is_that_of_its_checkpoint() -> None:
    """By hand: 412,876,800 weights in each of 62 layers, 52 of which have the window."""
    gemma, mistral = read_model_shape(GEMMA), read_model_shape(MISTRAL)
    assert gemma.windows == (1024,) * 52
    assert gemma.num_parameters == 62 * (412_876_800 + 2 * 5376) + 262_144 * 5376 + 5376
    assert mistral.windows == (4096,) * 32
    assert mistral.num_parameters == 7_241_732_096  # of the published checkpoint
    # As much as without windows: blocks have all layers.
    assert gemma.kv_bytes_per_token == 2 * 62 * 16 * 128 * 2


def test_layers_with_a_window_gather_what_it_sees_where_that_is_less() -> None:
    """By hand: a window of 1,024 is within 9 blocks of 128, read, written and read again.

    8 sequences of 32,768 tokens have 2,048 blocks: 10 layers read these, and 52 read 3 * 8 * 9.
    """
    model = CostModel(read_model_shape(GEMMA), find_hardware("gaudi3"), 128)
    position = 2 * 16 * 128 * 2  # bytes in one layer
    found = model.work(Phase.DECODE, decode(8, 2048)).attention
    read = 10 * (2048 * 128 + 8) + 52 * (3 * 8 * 9 * 128 + 8)
    assert found.hbm_bytes == read * position
    assert found.flops == 4 * 16 * 128 * 128 * (10 * 2048 + 52 * 8 * 9) * 128
    for blocks, gathered in ((216, 0), (217, 52)):
        work = model.work(Phase.DECODE, decode(8, blocks)).attention
        whole = (62 - gathered) * (blocks * 128 + 8) + gathered * (216 * 128 + 8)
        assert work.hbm_bytes == whole * position


def test_a_prompt_reads_what_a_window_sees_of_its_context() -> None:
    """By hand: all 32 layers of Mistral read 33 of 100 blocks, and no more than there are."""
    model = CostModel(read_model_shape(MISTRAL), find_hardware("gaudi3"), 128)
    for context, read in ((100, 33), (33, 33), (20, 20), (0, 0)):
        found = model.work(Phase.PROMPT, prompt(1, 256, context)).attention
        assert found.hbm_bytes == (read * 128 + 256) * 131_072
        products = 1024 * (read * 128 + 257 / 2)  # 256 tokens of 4 query heads
        assert found.flops == 4 * 32 * 8 * 128 * products


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 64}, 0),  # which Llama's own code does not read
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 16}, 16),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, 24),
        ({"sliding_window": 64, "model_type": "gemma2"}, 16),
        ({"sliding_window": 64, "model_type": "cohere2"}, 24),
        ({"sliding_window": 64, "model_type": "mistral"}, 32),
        ({"sliding_window": 64, "model_type": "qwen2", "use_sliding_window": False}, 0),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, 4),
    ],
)
def test_a_configuration_says_which_layers_have_a_window(
    tmp_path: Path, config: dict[str, object], count: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(LLAMA.read_text()), **config}))
    assert read_model_shape(path).windows == (64,) * count


def test_ranks_divide_experts() -> None:
    whole = read_model_shape(MIXTRAL)
    part = whole.divided(4)
    assert 4 * part.expert_matrices == whole.expert_matrices
    assert (part.num_experts, part.experts_per_token) == (8, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": "32"}, "'32' as num_hidden_layers"),
        ({"vocab_size": 0}, "0 as vocab_size"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
        ({"num_local_experts": 8}, "has no num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "9 as num_experts_per_tok and 8 as num_exp"),
        ({"n_routed_experts": 8}, "a mixture with shared experts is not modelled"),
        ({"mlp_only_layers": [0]}, "a mixture with dense layers is not modelled"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2, and a mixture with dense layers"),
        ({"quantization_config": {"bits": 4}}, "quantised weights is not modelled"),
        ({"sliding_window": "4k"}, "'4k' as sliding_window"),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, "has 1 layer_types for 32"),
    ],
)
def test_what_is_not_modelled_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(LLAMA.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        read_model_shape(path)


@pytest.mark.parametrize("text", ["", "[1]", "{'a': 1}"])
def test_what_is_no_config_is_said_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"give a model's config\.json"):
        read_model_shape(path)


PEAK_BYTES_PER_S = {"gaudi2": 2.46e12, "gaudi3": 3.67e12, "h100": 3.35e12, "h200": 4.8e12}


@pytest.mark.parametrize("device", PEAK_BYTES_PER_S)
@pytest.mark.parametrize(("batch", "blocks"), [(1, 128), (8, 256), (64, 1024), (128, 2048)])
def test_a_decode_step_is_close_to_the_roofline(device: str, batch: int, blocks: int) -> None:
    """By hand: all weights but the embedding table, the prefix of the cache, the logits, at three
    quarters of the peak bandwidth; a decode of Llama 3.1 8B is bound by memory on each of these.
    """
    weights = 2 * (LLAMA_PARAMETERS - 128_256 * 4096)
    prefix = blocks * 128 * 131_072
    logits = 2 * batch * 128_256 * 4  # written by the forward, read by the sampler
    roofline_s = (weights + prefix + logits) / (0.75 * PEAK_BYTES_PER_S[device])
    model = costs(device)
    device_s = model.device_s(Phase.DECODE, decode(batch, blocks))
    step_s = device_s + model.launch_s(device_s, captured=True) + model.sample_s(batch)
    assert step_s == pytest.approx(roofline_s, rel=0.05)
    assert step_s > roofline_s


LAYERS = LLAMA_PARAMETERS - 2 * 128_256 * 4096 - 65 * 4096
"""Weights of the layers' matrices: all without both tables and the norms."""


def test_the_parts_of_a_long_prompt_are_counted() -> None:
    """By hand: two operations per token and weight of the layers, half a triangle of attention."""
    tokens = 2048
    work = costs().work(Phase.PROMPT, prompt(1, tokens))
    assert work.matrices.flops == 2 * tokens * LAYERS
    assert work.attention.flops == pytest.approx(32 * 32 * 4 * 128 * tokens**2 / 2, rel=1e-3)
    assert work.matrices.hbm_bytes == 2 * (LAYERS + tokens * 4096)
    assert work.attention.hbm_bytes == tokens * 131_072
    assert work.head.hbm_bytes == 2 * 128_256 * 4096 + 4 * 128_256
    # 70 % of Gaudi 3's peak in the largest products, two thirds of that in a forward pass.
    seconds = 2 * tokens * LAYERS / (1288.8e12 * 0.67)
    assert costs().forward_times(Phase.PROMPT, prompt(1, tokens)).matrices_s == pytest.approx(
        seconds
    )


def test_the_parts_of_a_decode_are_counted() -> None:
    batch, blocks = 64, 640
    work = costs("gaudi2").work(Phase.DECODE, decode(batch, blocks))
    assert work.matrices.hbm_bytes == 2 * (LAYERS + batch * 4096)
    assert work.attention.hbm_bytes == (blocks * 128 + batch) * 131_072
    assert work.head.hbm_bytes == 2 * 128_256 * 4096 + batch * 128_256 * 4
    # 64 rows, and the 4 query heads of a KV head, fill 128 rows of the matrix engine.
    assert work.matrices.flops == 2 * 128 * LAYERS
    assert work.head.flops == 2 * 128 * 128_256 * 4096
    assert work.attention.flops == blocks * 128 * 32 * 8 * 4 * 128 * 128


def test_a_part_waits_for_the_part_before_it() -> None:
    bucket = decode(64, 640)
    times = costs().forward_times(Phase.DECODE, bucket)
    assert costs().device_s(Phase.DECODE, bucket) == pytest.approx(
        times.matrices_s + times.attention_s + times.head_s
    )


@pytest.mark.parametrize(("device", "rows"), [("gaudi2", 128), ("h100", 64)])
def test_small_products_cost_as_much_as_the_rows_of_the_matrix_engine(
    device: str, rows: int
) -> None:
    model = costs(device)
    flops = [
        model.work(Phase.DECODE, decode(batch, 1)).matrices.flops
        for batch in (1, rows, rows + 1, 2 * rows)
    ]
    assert flops[0] == flops[1] < flops[2] == flops[3] == 2 * flops[0]


def fp8(device: str, *, matrices: bool, kv_cache: bool) -> CostModel:
    model = read_model_shape(LLAMA).quantized(matrices=matrices, kv_cache=kv_cache)
    return CostModel(model, find_hardware(device), 128)


def test_fp8_weights_are_half_of_the_layers_bytes() -> None:
    bucket = decode(16, 1)
    bf16, quantized = costs(), fp8("gaudi3", matrices=True, kv_cache=False)
    assert quantized.model.weight_bytes == 2 * LLAMA_PARAMETERS - LAYERS
    before, after = (model.work(Phase.DECODE, bucket) for model in (bf16, quantized))
    assert before.matrices.hbm_bytes - after.matrices.hbm_bytes == LAYERS
    assert (after.attention, after.head) == (before.attention, before.head)


def test_an_fp8_cache_takes_and_reads_half_the_bytes() -> None:
    bf16, quantized = costs(), fp8("gaudi3", matrices=False, kv_cache=True)
    assert quantized.block_bytes * 2 == bf16.block_bytes
    before, after = (model.work(Phase.DECODE, decode(64, 4096)) for model in (bf16, quantized))
    assert after.attention.hbm_bytes * 2 == before.attention.hbm_bytes
    assert (after.matrices, after.head) == (before.matrices, before.head)
    # The engine multiplies what it reads in bf16; Intel's software in FP8.
    assert after.attention.element_bytes == 2
    model = read_model_shape(LLAMA).quantized(matrices=False, kv_cache=True, attention=True)
    intels = CostModel(model, find_hardware("gaudi3"), 128)
    assert intels.work(Phase.DECODE, decode(1, 8)).attention.element_bytes == 1
    assert quantized.swap_s(7) == pytest.approx(bf16.swap_s(7) / 2)


@pytest.mark.parametrize(("device", "gain"), [("gaudi2", 865 / 432), ("gaudi3", 1.0), ("h100", 2)])
def test_fp8_products_run_at_the_peak_that_the_vendor_gives(device: str, gain: float) -> None:
    bucket = prompt(16, 2048)
    both = (costs(device), fp8(device, matrices=True, kv_cache=True))
    bf16, quantized = (model.forward_times(Phase.PROMPT, bucket) for model in both)
    assert bf16.matrices_s / quantized.matrices_s == pytest.approx(gain, rel=1e-3)
    assert bf16.head_s == quantized.head_s


def test_sampling_on_the_device_sends_only_tokens_over_the_link() -> None:
    model = read_model_shape(LLAMA)
    small, large = (
        CostModel(attrs.evolve(model, vocab_size=size), find_hardware("gaudi3"), 128)
        for size in (32_000, 256_000)
    )
    assert small.fetch_s(128) == large.fetch_s(128)
    assert small.fetch_s(128) == pytest.approx(10e-6 + 4 * 128 / 40e9)
    read_s = 1.1 * 128 * (256_000 - 32_000) * 4 / (3.67e12 * 0.75)
    assert large.sample_s(128) - small.sample_s(128) == pytest.approx(read_s)


def test_what_is_drawn_decides_how_often_the_logits_are_read() -> None:
    greedy = costs("gaudi2")
    top_p = attrs.evolve(greedy, draw="top_p")
    read_s = 128 * 128_256 * 4 / (2.46e12 * 0.75)
    assert top_p.sample_s(128) - greedy.sample_s(128) == pytest.approx(3.8 * read_s)


def test_sampling_on_the_host_copies_all_logits_over_the_link() -> None:
    model = costs("gaudi2")
    assert model.fetch_logits_s(32) == pytest.approx(10e-6 + 32 * 128_256 * 4 / 20e9)
    assert model.host_sample_s(32) == pytest.approx(32 * 128_256 * 1.6e-9)
    on_host_s = model.fetch_logits_s(32) + model.host_sample_s(32)
    assert on_host_s > 50 * (model.fetch_s(32) + model.sample_s(32))


sizes = st.integers(1, 4096)


@given(batch=sizes, blocks=sizes, more=sizes)
def test_a_larger_decode_never_costs_less(batch: int, blocks: int, more: int) -> None:
    model = costs()
    seconds = model.device_s(Phase.DECODE, decode(batch, blocks))
    assert model.device_s(Phase.DECODE, decode(batch + more, blocks)) >= seconds
    assert model.device_s(Phase.DECODE, decode(batch, blocks + more)) > seconds


@given(batch=sizes, query=sizes, context=sizes, more=sizes)
def test_a_larger_prompt_never_costs_less(batch: int, query: int, context: int, more: int) -> None:
    model = costs()
    seconds = model.device_s(Phase.PROMPT, prompt(batch, query, context))
    for larger in ((batch + more, query, context), (batch, query + more, context)):
        assert model.device_s(Phase.PROMPT, prompt(*larger)) > seconds
    assert model.device_s(Phase.PROMPT, prompt(batch, query, context + more)) > seconds


@pytest.mark.parametrize("device", HARDWARE)
def test_a_graph_spares_launches(device: str) -> None:
    model = costs(device)
    assert model.launch_s(1e-6, captured=True) < model.launch_s(1e-6, captured=False)


def test_launches_are_hidden_behind_the_device_where_it_does_not_wait_for_them() -> None:
    launches_s = 10 * 32 * 5e-6
    assert costs("h100").launch_s(0.5e-3, captured=False) == pytest.approx(launches_s - 0.5e-3)
    assert costs("h100").launch_s(1.0, captured=False) == pytest.approx(5e-6)
    assert costs("gaudi2").launch_s(1.0, captured=False) == pytest.approx(2 * launches_s)


def test_a_batch_is_uploaded_as_a_few_numbers_per_token_and_block() -> None:
    model = costs("gaudi3")
    decode_s = model.upload_s(Phase.DECODE, decode(128, 1024))
    assert decode_s == pytest.approx(10e-6 + 4 * (11 * 128 + 2 * 1024) / 40e9)
    prompt_s = model.upload_s(Phase.PROMPT, prompt(4, 512, 3))
    assert prompt_s == pytest.approx(10e-6 + 4 * (3 * 2048 + 2 * 12 + 8 * 4) / 40e9)


def test_swapping_goes_at_the_speed_of_the_link() -> None:
    assert costs("gaudi3").swap_s(100) == pytest.approx(100 * 128 * 131_072 / 40e9)
    assert costs("gaudi2").swap_s(1) == pytest.approx(2 * costs("gaudi3").swap_s(1))


def test_memory_follows_the_log_of_seed_000() -> None:
    """Llama 3 8B on Gaudi 2: weights, profiling run, and the graphs that were captured."""
    model = memory()
    assert model.hardware.hbm_bytes == pytest.approx(94.62 * GIB, rel=1e-6)
    assert model.model.weight_bytes == pytest.approx(14.97 * GIB, rel=0.002)
    assert model.workspace(4 * 1024, 4) == pytest.approx(504 * MIB, rel=0.1)
    assert model.free_after_profile(4 * 1024, 4) == pytest.approx(79.16 * GIB, rel=0.002)
    captured = [(1, 128 * i) for i in range(1, 9)] + [(2, 128 * i) for i in range(1, 6)]
    prompts = [prompt(*shape) for shape in (*captured, (4, 128), (4, 256))]
    used = sum(model.graph_bytes(Phase.PROMPT, bucket) for bucket in prompts)
    assert used == pytest.approx(14.03 * GIB, rel=0.1)
    decodes = [decode(batch, 128 * i) for batch in (1, 2, 4) for i in range(1, 17)]
    used = sum(model.graph_bytes(Phase.DECODE, bucket) for bucket in decodes)
    assert used == pytest.approx(161.9 * MIB, rel=0.1)


def test_graphs_share_a_pool_on_cuda() -> None:
    model = memory("h100")
    sizes = {model.graph_bytes(Phase.PROMPT, prompt(1, length)) for length in (128, 2048)}
    assert sizes == {26 * MIB}


def test_a_model_that_does_not_fit_is_named_with_its_size() -> None:
    large = attrs.evolve(read_model_shape(LLAMA), num_layers=800)
    with pytest.raises(ConfigError, match=r"the model needs .* gaudi2 has 94.62 GiB"):
        MemoryModel(large, find_hardware("gaudi2")).free_after_profile(2048, 128)


def test_an_unknown_device_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match="gaudi2, gaudi3, h100, h200, got 'tpu'"):
        find_hardware("tpu")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: 0} for name in ("flops_per_s", "fp8_flops_per_s", "hbm_bytes")),
        *({name: 0} for name in ("hbm_bytes_per_s", "link_bytes_per_s", "product_rows")),
        *({name: -0.1} for name in ("launch_s", "compile_s", "capture_s", "graph_bytes")),
        *({name: -0.1} for name in ("replay_s", "copy_s", "step_s", "sequence_s")),
        *(
            {name: share}
            for name in ("product_efficiency", "compute_efficiency", "hbm_efficiency")
            for share in (0.0, 1.001)
        ),
    ],
    ids=str,
)
def test_impossible_hardware_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        attrs.evolve(HARDWARE["gaudi3"], **changes)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.4e-3), (32, 1e-3), (128, 2.1e-3)])
def test_a_step_of_the_host_takes_what_was_measured(rows: int, seconds: float) -> None:
    """On an AMD EPYC, 2026-11-21: see `Hardware.step_s`."""
    assert costs("gaudi3").host_s(rows) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("scored", [1, 20, 64])
def test_blocks_that_are_scored_for_all_cost_products_and_no_memory(scored: int) -> None:
    bucket, model = decode(64, 256), costs()
    alone, shared = (
        model.work(Phase.DECODE, bucket, sharing).attention
        for sharing in (NOT_SHARED, Sharing(scored))
    )
    shape, hardware = model.model, model.hardware
    group = shape.num_heads // shape.num_kv_heads
    rows = [math.ceil(n * group / hardware.product_rows) * hardware.product_rows for n in (1, 64)]
    more = scored * 128 * (rows[1] - rows[0])
    width = shape.num_layers * shape.num_kv_heads * shape.head_dim
    assert shared.flops - alone.flops == 4 * width * more
    assert shared.hbm_bytes == alone.hbm_bytes


def test_a_gathered_block_is_read_written_and_read_again() -> None:
    bucket, model = decode(64, 256), costs()
    alone, gathered = (
        model.work(Phase.DECODE, bucket, sharing).attention
        for sharing in (NOT_SHARED, Sharing(0, 10))
    )
    assert gathered.hbm_bytes - alone.hbm_bytes == 3 * 10 * model.block_bytes
    assert gathered.flops / alone.flops == (256 + 10) / 256
