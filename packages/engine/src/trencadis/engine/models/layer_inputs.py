"""What the inputs of linear layers are like: the mean square of each, of random tokens.

An error of a weight changes an output as much as its input is large, so rounding to 4 bits weighs
errors by these squares (AWQ, https://arxiv.org/abs/2306.00978, finds that inputs tell which weights
matter). A few inputs of a model are large whatever is computed, so tokens need be no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_TOKENS, _LENGTH = 512, 256
"""In all, and of a sequence."""

_SEED = 0
"""Of the tokens: each start rounds alike."""


def mean_squares_of_inputs(model: nn.Module) -> Mapping[int, torch.Tensor]:
    """fp32 ``[inputs]`` for each linear layer of a decoder that a forward pass calls, by its id.

    The pass has 512 tokens and no cache; the output head is left out. Models with layers that keep
    a state, and parts of a rank, cannot be called like this. Empty for a module
    that is not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    found: dict[int, torch.Tensor] = {}

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        found[id(layer)] = given[0].detach().flatten(0, -2).float().square().mean(0)

    table: Any = model.get_input_embeddings()
    config = model.config.get_text_config(decoder=True)
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(
        0, table.num_embeddings, (_TOKENS // length, length), generator=generator
    )
    handles = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if type(module) is nn.Linear
    ]
    try:
        with torch.no_grad(), _plain_attention(model):
            model.base_model(input_ids=tokens.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextlib.contextmanager
def _plain_attention(model: PreTrainedModel) -> Generator[None, None, None]:
    """Let a model compute attention without a cache, which every model does in this way."""
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation")
    }
    before = {name: config._attn_implementation for name, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = "eager"
        yield
    finally:
        for name, config in configs.items():
            config._attn_implementation = before[name]
