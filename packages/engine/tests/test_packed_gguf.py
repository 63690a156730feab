"""GGUF files whose weights stay packed: the values of their blocks, of each layer, and tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, GgufConfig

from trencadis.engine import LLM, SamplingParams
from trencadis.engine.core.prefix_tiers import model_identity
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.tiled_linear import (
    IntegerLinear,
    TiledEmbedding,
    load_linear_kernel,
)
from trencadis.engine.models import gguf as conversion
from trencadis.engine.models.gguf_blocks import BLOCK_TYPES
from trencadis.engine.models.loader import inspect_model, load_model
from trencadis.engine.models.packed_weight import (
    QuantizedEmbedding,
    QuantizedLinear,
    packed_of,
)

gguf = pytest.importorskip("gguf")

HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 2, 4, 300
FP16 = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q6_K": (208,), "Q2_K": (80, 82)},
}
"""Where a block has numbers of fp16."""
PROMPT = list(range(40, 100))


def random_blocks(name: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bytes are integers; numbers of fp16 are such that weights are about 0.05."""
    draw = np.random.default_rng([seed, outputs])
    inputs_of, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = draw.integers(0, 256, (outputs * inputs // inputs_of, num_bytes), dtype=np.uint8)
    size = 1 if "K" in name else 20 if name == "Q8_0" else 300
    for at in FP16[name]:
        numbers = draw.uniform(1e-5, 2e-5, (len(blocks), 1)) * size
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_block_has_the_values_of_its_definition(name: str) -> None:
    blocks, kind = random_blocks(name, 6, 1024), BLOCK_TYPES[name]
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    weight = kind.packed(torch.from_numpy(blocks))
    assert torch.equal(weight.unpacked(), torch.from_numpy(expected))
    assert (kind.inputs, kind.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (weight.group, weight.steps.dtype is torch.uint8) == (kind.group, kind.bits == 4)


def write_model(file: Path, name: str, *, is_tied: bool, others: str | None = None) -> Path:
    """A Llama with blocks of one type; those that end feed-forward networks are of ``others``."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*map(chr, range(300, 298 + VOCABULARY)), chr(300) + chr(301), "<eos>"])
    writer.add_token_merges([f"{chr(300)} {chr(301)}"])
    writer.add_eos_token_id(VOCABULARY - 1)

    def add(tensor: str, outputs: int, kind: str = name) -> None:
        blocks = random_blocks(kind, outputs, HIDDEN, len(writer.tensors[0]))
        writer.add_tensor(f"{tensor}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    def add_norm(tensor: str) -> None:
        writer.add_tensor(f"{tensor}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", VOCABULARY)
    if not is_tied:
        add("output", VOCABULARY)
    add_norm("output_norm")
    for layer in range(LAYERS):
        for tensor in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{tensor}")
        for tensor in ("attn_q", "attn_output", "ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{tensor}", HIDDEN)
        for tensor in ("attn_k", "attn_v"):
            add(f"blk.{layer}.{tensor}", HIDDEN // 2)
        add(f"blk.{layer}.ffn_down", HIDDEN, others or name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path_factory.getbasetemp() / "converted"
    monkeypatch.setattr(conversion, "cache_directory", lambda: directory)


def dequantized(file: Path) -> Any:
    """transformers' own expansion, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )


def serve(file: Path, **settings: Any) -> LLM:
    given = {"device": "cpu", "max_model_len": 128, "warmup": "none", **settings}
    return LLM(str(file), **given)


def types_of(llm: LLM) -> dict[str, type]:
    modules = llm.core.executor.worker._model.named_modules()
    return {name.rpartition(".")[2]: type(module) for name, module in modules}


def test_what_is_packed_is_out_of_the_way_of_other_programs(tmp_path: Path) -> None:
    """Which load every file of tensors that is beside a configuration, as vLLM does."""
    target = conversion.convert_gguf(write_model(tmp_path / "a.gguf", "Q4_0", is_tied=True))
    files = sorted(str(file.relative_to(target)) for file in target.rglob("*.safetensors"))
    assert files == ["model.safetensors", "packed/model.safetensors"]


def test_a_packed_file_that_is_damaged_is_converted_again(tmp_path: Path) -> None:
    file = write_model(tmp_path / "a.gguf", "Q4_0", is_tied=True)
    packed = conversion.convert_gguf(file) / "packed/model.safetensors"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    conversion.convert_gguf(file)
    found, expected = load_file(packed), load(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("name", "is_tied"), [(name, name != "Q6_K") for name in BLOCK_TYPES])
def test_a_packed_model_has_the_weights_that_transformers_expands(
    tmp_path: Path, name: str, *, is_tied: bool
) -> None:
    file = write_model(tmp_path / f"{name}.gguf", name, is_tied=is_tied)
    expected = dequantized(file)
    model = load_model(inspect_model(str(file)), torch.device("cpu"), torch.float32, 128)
    kinds = (QuantizedLinear, QuantizedEmbedding)
    layers = {n: own for n, own in model.named_modules() if isinstance(own, kinds)}
    assert len(layers) == 7 * LAYERS + 2
    for layer, packed in layers.items():
        weight = expected.get_submodule(layer).weight
        assert torch.equal(packed_of(packed).unpacked(), weight), layer
    table, head = (layers[name] for name in ("model.embed_tokens", "lm_head"))
    assert (table.steps is head.steps) is is_tied


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_K", "Q6_K"])
def test_a_packed_model_computes_what_its_expansion_does(tmp_path: Path, name: str) -> None:
    try:
        for weights in (torch.int8, torch.uint8):
            load_linear_kernel(weights=weights)
    except NoKernel as error:
        pytest.skip(str(error))
    file = write_model(tmp_path / f"{name}.gguf", name, is_tied=True)
    llm = serve(file)
    kinds = types_of(llm)
    assert {kinds["q_proj"], kinds["down_proj"], kinds["lm_head"]} == {IntegerLinear}
    assert kinds["embed_tokens"] is TiledEmbedding
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    result = llm.generate([PROMPT], params)[0]
    assert result.prompt_logprobs is not None
    found = [entry.chosen.logprob for entry in result.prompt_logprobs if entry is not None]
    with torch.no_grad():
        logits = dequantized(file)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"quantization": "int8"}, {"runner": "pooling"}]
)
def test_a_file_is_expanded_for_what_computes_no_packed_weights(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    file = write_model(tmp_path / "model.gguf", "Q4_1", is_tied=True)
    caplog.set_level(logging.INFO)
    llm = serve(file, **settings)
    worker = llm.core.executor.worker
    assert worker.spec.packing is None
    assert "gguf Q4_1 (4 bits, groups of 32) are expanded" in caplog.text
    packed = serve(file).core
    assert packed.executor.worker.spec.packing is not None
    if "quantization" not in settings:
        assert QuantizedLinear not in types_of(llm).values()


def test_blocks_of_a_prefix_cache_are_not_shared_with_the_expansion(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "Q4_0", is_tied=True)
    packed = serve(file).core
    expanded = serve(Path(packed.facts.spec.source)).core
    assert expanded.facts.spec.source == packed.facts.spec.source
    identities = {model_identity(each.facts, "cpu") for each in (packed, expanded)}
    assert len(identities) == 2


def test_types_that_are_not_read_are_expanded_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_model(tmp_path / "model.gguf", "Q4_K", is_tied=True, others="Q2_K")
    caplog.set_level(logging.INFO)
    llm = serve(file)
    kinds = types_of(llm)
    assert kinds["down_proj"] not in (IntegerLinear, QuantizedLinear)
    assert kinds["up_proj"] in (IntegerLinear, QuantizedLinear)
    assert "packed as gguf Q4_K (4 bits, groups of 32), but those of Q2_K" in caplog.text
    weight = dequantized(file).model.layers[0].mlp.up_proj.weight
    model = load_model(inspect_model(str(file)), torch.device("cpu"), torch.float32, 128)
    assert torch.equal(model.model.layers[0].mlp.up_proj.packed.unpacked(), weight)
