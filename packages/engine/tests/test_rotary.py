"""Rotary embeddings of long contexts: a request is computed alike whoever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trencadis.engine import LLM, ModelError, SamplingParams
from trencadis.engine.models.loader import inspect_model, load_model

CPU = torch.device("cpu")
SHORT, LONG = list(range(1, 12)), [3 + i % 90 for i in range(80)]
SIZES = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def longrope_model(
    tmp_path_factory: pytest.TempPathFactory, add_tokenizer: Callable[[Path], None]
) -> Path:
    """A Phi-3 of 128 positions, trained on 32 (so its configuration says)."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("longrope")
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    config = Phi3Config(
        **SIZES,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.6,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )
    Phi3ForCausalLM(config).save_pretrained(directory)
    add_tokenizer(directory)
    return directory


def generate(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    llm = LLM(str(model), device="cpu", dtype="float32", max_model_len=128, warmup="none")
    return [tuple(result.completions[0].token_ids) for result in llm.generate(prompts, greedy)]


def test_a_short_request_is_computed_alike_beside_a_long_one(longrope_model: Path) -> None:
    alone = generate(longrope_model, [SHORT])
    assert generate(longrope_model, [SHORT, LONG])[0] == alone[0]


def frequencies(model: Path, max_model_len: int) -> torch.Tensor:
    """The model's frequencies after a short forward pass."""
    loaded = load_model(inspect_model(str(model)), CPU, torch.float32, max_model_len)
    rotary = loaded.model.rotary_emb
    rotary(torch.zeros(1), torch.tensor([[3]]))
    assert isinstance(rotary.inv_freq, torch.Tensor)
    return rotary.inv_freq


def test_the_longest_sequence_of_the_settings_decides_which_frequencies(
    longrope_model: Path,
) -> None:
    original = 10000.0 ** -(torch.arange(8) / 8)
    long = original / torch.tensor([4.0 + i for i in range(8)])
    torch.testing.assert_close(frequencies(longrope_model, 32), original)
    torch.testing.assert_close(frequencies(longrope_model, 33), long)


def test_a_long_request_of_the_settings_is_that_of_transformers(longrope_model: Path) -> None:
    model = Phi3ForCausalLM.from_pretrained(longrope_model, dtype=torch.float32)
    with torch.inference_mode():
        tokens = model.generate(
            torch.tensor([LONG]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
    assert generate(longrope_model, [LONG])[0] == tuple(tokens[0, len(LONG) :].tolist())


def test_dynamic_frequencies_are_those_of_the_context_length(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    make_tiny_model(tmp_path, rope_parameters=rope)
    rotary = load_model(inspect_model(str(tmp_path)), CPU, torch.float32, 256).model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1), torch.tensor([[5000]]))
    assert torch.equal(rotary.inv_freq, before)
    assert LlamaForCausalLM.from_pretrained(tmp_path).model.rotary_emb.rope_type == "dynamic"


def test_an_embedding_that_scales_by_the_longest_of_a_batch_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.1, "long_mscale": 1.2}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    original = {"original_max_position_embeddings": 32}
    config = PhimoeConfig(
        **SIZES, num_local_experts=2, rope_parameters={**rope, **factors, **original}
    )
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    spec = inspect_model(str(tmp_path))
    with pytest.raises(ModelError, match="lower max_model_len from 33 to 32"):
        load_model(spec, CPU, torch.float32, 33)
    load_model(spec, CPU, torch.float32, 32)


def _by_matrix_product(self, x: torch.Tensor, position_ids: torch.Tensor):
    """``LlamaRotaryEmbedding.forward`` of transformers up to 5.22 or so."""
    frequencies = self.inv_freq[None, :, None].float().expand(len(position_ids), -1, 1)
    angles = (frequencies.to(x.device) @ position_ids[:, None, :].float()).transpose(1, 2)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_positions_are_exact_where_the_device_rounds_products(
    stand_in, mode, make_tiny_model, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", _by_matrix_product)
    model = make_tiny_model(tmp_path / "long", max_position_embeddings=8192)
    positions = torch.tensor([[255, 2047, 2049, 4099, 8191]])
    loaded = load_model(inspect_model(str(model)), CPU, torch.float32, 8192).model
    expected = loaded.rotary_emb(torch.zeros(1), positions)
    with stand_in(mode) as bridge, caplog.at_level("INFO", "trencadis.engine"):
        monkeypatch.setattr(bridge, "rounds_products", True)
        hpu = torch.device("hpu", 0)
        rotary = load_model(inspect_model(str(model)), hpu, torch.float32, 8192).model.rotary_emb
        found = rotary(torch.zeros(1).to(hpu), positions.to(hpu))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours.cpu(), theirs, atol=1e-4)
    assert "the device rounds matrix products" in caplog.text
