"""Decoder-only checkpoints as embedding models: without their output head.

The embedding of a prompt is the normed hidden state of its last token. A causal model computes it
from all tokens before, so it does not matter which of them were prefix hits or in earlier chunks.
Other ways of pooling are rejected: a mean needs the hidden states of all tokens, which neither the
prefix cache nor an earlier chunk keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from trencadis.engine.errors import ModelError

_CAUSAL = "ForCausalLM"


class HiddenStates(nn.Module):
    """Takes the place of an output head: its result is what the head would have been given.

    ``in_features``: the length of a hidden state. ``weight`` has no elements, and the dtype of the
    head's, which Mamba 2 asks for.
    """

    def __init__(self, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def check_causal(config: PreTrainedConfig, name: str) -> None:
    """Raise `ModelError` for a checkpoint that was trained to look at later tokens, too."""
    text = config.get_text_config(decoder=True)
    is_causal = getattr(text, "is_causal", True) is not False
    if not is_causal or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            f"{name} attends in both directions, and this engine computes causal attention: serve "
            "an embedding model whose tokens attend only to earlier ones"
        )


def is_headless_decoder(config: PreTrainedConfig, architecture: str) -> bool:
    """Whether an architecture is a decoder without its head, as in ``Qwen3Model``."""
    return architecture in {f"{stem}Model" for stem in decoder_stems(config)}


def decoder_stems(config: PreTrainedConfig) -> tuple[str, ...]:
    """What the names of a decoder's classes begin with, as ``Qwen3``; nothing for an encoder."""
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return ()
    whole = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    # A few model types have several classes.
    names = (whole,) if isinstance(whole, str) else tuple(whole)
    return tuple(name.removesuffix(_CAUSAL) for name in names if name.endswith(_CAUSAL))


def head_name(model: Any) -> str:
    """The name of a model's output head. Raises `ModelError` for a model without one."""
    head = model.get_output_embeddings()
    names: list[str] = [name for name, module in model.named_modules() if module is head]
    if not names or not hasattr(head, "in_features"):
        raise ModelError(
            f"{type(model).__name__} has no linear output head that could be left out: its "
            "hidden states cannot be served as embeddings"
        )
    return names[0]


def check_hidden_states(model: Any) -> None:
    """Raise `ModelError` for a model that changes its hidden states before the output head.

    Then what the head is given is not the last hidden state, of which embeddings are made.
    """
    head = head_name(model)
    table = model.get_input_embeddings()
    decoder = next(name for name, child in model.named_children() if table in set(child.modules()))
    between = [
        name
        for name, _ in model.named_modules()
        if not f"{name}.".startswith((f"{decoder}.", f"{head}."))  # in the decoder or the head
        and not f"{head}.".startswith(f"{name}.")  # holds the head
        and name  # the model itself
    ]
    if between:
        raise ModelError(
            f"{type(model).__name__} has the modules {', '.join(between)} between its last hidden "
            "state and its output head: its hidden states cannot be served as embeddings"
        )


def remove_head(model: Any) -> None:
    """Let a model return the hidden states that its head would be given, and no logits."""
    head = model.get_output_embeddings()
    model.set_submodule(head_name(model), HiddenStates(head.in_features, head.weight.dtype))
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "final_logit_softcapping", None) is not None:
        text.final_logit_softcapping = None  # it would bend the hidden states


def embedding_size(model: Any) -> int:
    """Numbers of an embedding: what the head took that `remove_head` has removed.

    It may be less than the hidden size, which OPT-350m projects before its head.
    """
    size: int = model.get_output_embeddings().in_features
    return size
