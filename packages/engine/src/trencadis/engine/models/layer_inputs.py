"""What the inputs of linear layers are like: how large each is, and which are large together.

An error of a weight changes an output as much as its input is large, and errors of two weights
cancel where their inputs go together: rounding to 4 bits weighs and moves errors accordingly (GPTQ,
https://arxiv.org/abs/2210.17323, within the inputs of one scale). The inputs are those of a text,
``calibration.txt``; of random tokens only their sizes are like those of a text, not their products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS

_TEXT = Path(__file__).parent / "calibration.txt"

_TEXT_TOKENS, _RANDOM_TOKENS, _LENGTH = 1792, 512, 256
"""At most in all, and of a sequence."""

_FEWEST_ROWS = 512
"""Of a layer whose products are used: those of fewer tokens are chance. With 64, errors of outputs
were larger than without products, and smaller with the squares alone."""

_SEED = 0
"""Of random tokens: each start rounds alike."""


def text_tokens(source: str) -> list[int]:
    """The first tokens of the text, by the tokenizer of a checkpoint.

    None where it has no usable tokenizer, which is reported where prompts are encoded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        encoded = tokenizer.encode(_TEXT.read_text("utf-8"), add_special_tokens=False)
    except BROKEN_FILE_ERRORS:
        return []
    return [*encoded[:_TEXT_TOKENS]]


def products_of_inputs(
    model: nn.Module, tokens: list[int], group: int = 32
) -> Mapping[int, torch.Tensor]:
    """fp32 ``[groups, group, group]`` for each linear layer of a decoder, by its id.

    The mean over ``tokens`` of the products of each two inputs of a group. Without tokens, or with
    one that the model lacks, they are random, and only the squares are not 0; nor are others of a
    layer that few tokens reach, such as an expert. The forward pass has
    no cache; the output head is left out, and layers whose inputs are not a multiple of ``group``.
    Models with layers that keep a state, and parts of a rank, cannot be called like this. Empty for
    a module that is not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    table: Any = model.get_input_embeddings()
    is_text = bool(tokens) and max(tokens) < table.num_embeddings
    sums: dict[int, torch.Tensor] = {}
    counts: dict[int, int] = {}

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        rows = given[0].detach().flatten(0, -2).float()
        if rows.shape[1] % group:
            return
        groups = rows.view(len(rows), -1, group).transpose(0, 1)
        if is_text:
            products = groups.transpose(1, 2) @ groups
        else:
            products = torch.diag_embed(groups.square().sum(1))
        sums[id(layer)] = sums.get(id(layer), 0.0) + products
        counts[id(layer)] = counts.get(id(layer), 0) + len(rows)

    config = model.config.get_text_config(decoder=True)
    length = min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH)
    if is_text:
        ids = torch.tensor(tokens)
    else:
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, table.num_embeddings, (_RANDOM_TOKENS,), generator=generator)
    handles = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if type(module) is nn.Linear
    ]
    try:
        with torch.no_grad(), _plain_attention(model):
            for sequence in torch.split(ids, length):
                model.base_model(input_ids=sequence[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for layer, count in counts.items():
        if count < _FEWEST_ROWS:
            sums[layer] = torch.diag_embed(sums[layer].diagonal(dim1=1, dim2=2))
    return {layer: products / max(1, counts[layer]) for layer, products in sums.items()}


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
