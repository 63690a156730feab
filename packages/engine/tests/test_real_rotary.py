"""Rotary embeddings that transformers computes in complex numbers, which a Gaudi does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_family
from torch import nn
from transformers import AutoModelForCausalLM

from trencadis.engine import EngineConfig, EngineCore, ModelError
from trencadis.engine.models import real_rotary
from trencadis.engine.models.loader import inspect_model, load_model

FAMILIES = ("DeepSeek V2", "Llama 4 (text)")
POSITIONS = torch.tensor([[0, 1, 17, 63]])


def loaded(directory: Path) -> Any:
    return load_model(inspect_model(str(directory)), torch.device("cpu"), torch.float32, 64)


def rotary_of(model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """The embedding of a model, and the function of its code that uses the angles."""
    embedding: Any = next(each for each in model.modules() if hasattr(each, "rope_type"))
    return embedding, sys.modules[type(embedding).__module__].apply_rotary_emb


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_real_numbers_give_what_complex_ones_give(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    theirs, _ = rotary_of(AutoModelForCausalLM.from_pretrained(tmp_path))
    ours, rotate = rotary_of(loaded(tmp_path))
    theirs.attention_scaling = ours.attention_scaling = 1.25  # as of YaRN
    angles, expected = ours(torch.zeros(1), POSITIONS), theirs(torch.zeros(1), POSITIONS)
    assert (angles.is_complex(), expected.is_complex()) == (False, True)
    torch.testing.assert_close(angles, torch.view_as_real(expected))
    # Three heads of four tokens, in the order of the family; bf16 stays bf16.
    shape = (1, 3, 4, -1) if family == "DeepSeek V2" else (1, 4, 3, -1)
    width = 2 * angles.shape[-2]
    query = torch.randn(12 * width).view(*shape).bfloat16()
    key = torch.randn(12 * width).view(*shape)
    found = rotate(query, key, angles)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32]
    for ours_of, theirs_of in zip(found, rotate(query, key, expected), strict=True):
        torch.testing.assert_close(ours_of, theirs_of)


@torch.inference_mode()
def test_a_model_of_transformers_in_the_same_process_stays_as_it_is(tmp_path: Path) -> None:
    save_family("Llama 4 (text)", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(20)[None]
    before = model(tokens).logits
    loaded(tmp_path)
    assert isinstance(rotary_of(model)[1], real_rotary.RealRotation)
    assert torch.equal(model(tokens).logits, before)


def test_a_function_that_is_called_in_another_way_is_left_alone() -> None:
    def with_cosine_and_sine(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q * cos + sin, k * cos + sin

    def of_other_halves(q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor) -> Any:
        cos, sin = freqs.real[:, None], freqs.imag[:, None]
        first, second = q.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
        return turned, turned

    assert real_rotary._real_rotation(with_cosine_and_sine) is None
    assert real_rotary._real_rotation(of_other_halves) is None


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_complex_numbers_that_stay_are_refused_before_weights_are_loaded(
    stand_in: Any, mode: str, tmp_path: Path, add_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tokenizer(save_family("Llama 4 (text)", tmp_path))
    monkeypatch.setattr(real_rotary, "_rotary_modules", lambda model: ())
    said = "layer 0 has a rotary embedding of complex numbers, which hpu does not have: serve"
    with stand_in(mode), pytest.raises(ModelError, match=said):
        EngineCore(EngineConfig(model=str(tmp_path), device="hpu", max_model_len=64))
