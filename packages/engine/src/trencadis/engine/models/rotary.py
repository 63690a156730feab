"""Rotary frequencies that do not depend on the batch.

transformers chooses those of ``longrope`` and ``dynamic`` by the largest position of a forward
pass. A pass computes tokens of many requests: each would be computed by the longest one's
frequencies, and so would the keys that later requests find in the prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trencadis.engine.errors import ModelError

logger = logging.getLogger("trencadis.engine")

_PINNED = "pinned"
"""A type of rotary embedding whose frequencies transformers leaves alone in the forward pass."""


def pin_frequencies(model: nn.Module, max_model_len: int) -> None:
    """Choose the frequencies of all rotary embeddings once, for sequences of ``max_model_len``.

    ``longrope``: the long ones where ``max_model_len`` is above the original context length, as
    vLLM does. ``dynamic``: those of the model's context length, above which there is no sequence.
    Raises `ModelError` for an embedding that scales its results by the batch's longest sequence.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            module.rope_type = _pinned(module, rope_type, None, max_model_len)
        elif isinstance(rope_type, dict):
            module.rope_type = {
                layer_type: _pinned(module, of_layers, layer_type, max_model_len)
                for layer_type, of_layers in rope_type.items()
            }


def _pinned(module: Any, rope_type: str, layer_type: str | None, max_model_len: int) -> str:
    """The type after pinning. ``layer_type``: of embeddings with frequencies for each type."""
    if "dynamic" in rope_type:
        return _PINNED
    if rope_type != "longrope":
        return rope_type
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    original: int = parameters["original_max_position_embeddings"]
    if max_model_len <= original:
        return _PINNED
    if "short_mscale" in parameters:
        raise ModelError(
            f"{type(module).__name__} scales all sequences of a batch by the longest one: lower "
            f"max_model_len from {max_model_len} to {original}, the original context length"
        )
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, torch.device("cpu"), seq_len=original + 1, layer_type=layer_type
    )
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    getattr(module, name).copy_(frequencies)
    logger.info(
        "Rotary frequencies are those of long sequences, for short ones too: max_model_len %d is "
        "above %d, the original context length",
        max_model_len,
        original,
    )
    return _PINNED
