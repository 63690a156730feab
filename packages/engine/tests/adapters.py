"""Adapters for tests: random ones as PEFT saves them, and what PEFT computes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: Path,
    directory: Path,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL_LINEAR,
    size: float = 0.3,
    **settings: object,
) -> Path:
    """A random adapter for a checkpoint, saved by PEFT. ``size``: of its numbers."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **settings}
    adapted = get_peft_model(base, LoraConfig(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    adapted.save_pretrained(directory)
    return directory


class Reference:
    """What transformers and PEFT compute in fp32, with each of several adapters."""

    def __init__(self, model: Path, adapters: Mapping[str, Path]) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._adapted: PeftModel | None = None
        for name, directory in adapters.items():
            if self._adapted is None:
                self._adapted = PeftModel.from_pretrained(self._base, directory, name)
            else:
                self._adapted.load_adapter(directory, name)
        self._known: dict[tuple[str | None, tuple[int, ...], int], list[int]] = {}

    def tokens(self, adapter: str | None, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens of greedy generation, without a stop at the end of a text."""
        key = (adapter, tuple(prompt), count)
        if key not in self._known:
            self._known[key] = self._generate(adapter, list(prompt), count)
        return self._known[key]

    def logprobs(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        """Those of the tokens from the second on, each after those before it."""
        logits = self._logits(adapter, tokens)[:-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def _generate(self, adapter: str | None, tokens: list[int], count: int) -> list[int]:
        num_prompt = len(tokens)
        for _ in range(count):
            tokens.append(int(self._logits(adapter, tokens)[-1].argmax()))
        return tokens[num_prompt:]

    @torch.inference_mode()
    def _logits(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        if self._adapted is None:
            logits: torch.Tensor = self._base(ids).logits
        elif adapter is None:
            with self._adapted.disable_adapter():
                logits = self._adapted(ids).logits
        else:
            self._adapted.set_adapter(adapter)
            logits = self._adapted(ids).logits
        return logits[0]


SETTINGS: dict[str, object] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj"],
}
"""The least settings of an adapter."""


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, object] = SETTINGS
) -> Path:
    """An adapter of these tensors, as no tool would save it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def pair(
    layer: str, inputs: int, outputs: int, rank: int = 4, value: float = 0.1
) -> dict[str, torch.Tensor]:
    """The two matrices for a linear layer, by their names in a file."""
    return {
        f"base_model.model.{layer}.lora_A.weight": torch.full((rank, inputs), value),
        f"base_model.model.{layer}.lora_B.weight": torch.full((outputs, rank), value),
    }
