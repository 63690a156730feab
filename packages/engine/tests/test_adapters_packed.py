"""Adapters over packed and rounded weights: PEFT's results over what these weights mean."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters import Reference, save_adapter
from request_mix import finish
from safetensors.torch import load_file, save_file
from test_packed_weights import FORMATS, quantize
from transformers import AutoModelForCausalLM

from trencadis.engine import LLM, GenerateRequest, SamplingParams
from trencadis.engine.models.layer_inputs import products_of_inputs, text_tokens
from trencadis.engine.models.rounded_weights import rounded_int4, rounded_int8

NAMES = ("a", "b", None)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PROMPTS = [[random.Random(i).randrange(256) for _ in range(4 + 5 * i)] for i in range(6)]
LORAS = [NAMES[i % 3] for i in range(6)]

TOLERANCE = 0.03
"""Largest median error of log-probabilities in bf16. Few tokens are off by more, packed or not."""


def rounded(model: Path, target: Path, name: str) -> tuple[Path, Path]:
    """A model in bf16, and what its weights mean once they are rounded."""
    expanded = Path(shutil.copytree(model, target / "expanded"))
    tensors = load_file(model / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    products = products_of_inputs(plain, text_tokens(str(model)))
    of_layers = {f"{path}.weight": products.get(id(each)) for path, each in plain.named_modules()}
    for key, tensor in tensors.items():
        if tensor.dim() == 2:
            # Attention keeps 8 bits, and so does the last layer of an outer network: both are.
            in_int4 = name == "int4" and key.endswith(("gate_proj.weight", "up_proj.weight"))
            weight = tensor.bfloat16()
            packed = rounded_int4(weight, 32, of_layers[key]) if in_int4 else rounded_int8(weight)
            tensors[key] = packed.unpacked()
    save_file(tensors, expanded / "model.safetensors", {"format": "pt"})
    return model, expanded


SLOW = [each for each in FORMATS if each != "pack-quantized, 4 bits, zeros True, reorders True"]


@pytest.mark.parametrize(
    "form",
    [
        "int8",
        "int4",
        *(pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in FORMATS),
    ],
)
def test_mixed_batches_have_the_results_of_peft(
    form: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", initializer_range=0.1, **SIZES)
    settings = {"device": "cpu", "max_model_len": 64, "warmup": "none", "enable_lora": True}
    if form in FORMATS:
        model = quantize(model, tmp_path, *FORMATS[form])
        expanded = tmp_path / "expanded"
    else:
        model, expanded = rounded(model, tmp_path, form)
        settings |= {"quantization": form}
    folders = {
        name: save_adapter(expanded, tmp_path / name, rank=rank, seed=rank, size=rank**-0.5)
        for name, rank in (("a", 4), ("b", 16))
    }
    reference = Reference(expanded, folders)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    for dtype in ("float32", "bfloat16") if form in FORMATS else ("bfloat16",):
        core = LLM(model, dtype=dtype, max_loras=2, **settings).core
        for name, folder in folders.items():
            core.load_adapter(name, str(folder))
        for number, (prompt, lora) in enumerate(zip(PROMPTS, LORAS, strict=True)):
            core.add(f"{number}", GenerateRequest(tuple(prompt), params, lora=lora))
        results = finish(core)
        errors, changes = [], []
        for number, (prompt, lora) in enumerate(zip(PROMPTS, LORAS, strict=True)):
            tokens = [token.token_id for token in results[f"{number}"]]
            found = torch.tensor([token.logprobs.chosen.logprob for token in results[f"{number}"]])
            expected = reference.logprobs(lora, prompt + tokens)[-8:]
            if dtype == "float32":
                assert tokens == reference.tokens(lora, prompt, 8)
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
            errors.append((found - expected).abs())
            if lora is not None:
                without = reference.logprobs(None, prompt + tokens)[-8:]
                changes.append((without - expected).abs())
        assert torch.cat(errors).median() < TOLERANCE
        assert torch.cat(changes).median() > 20 * TOLERANCE
