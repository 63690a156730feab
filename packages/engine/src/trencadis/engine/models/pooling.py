"""Decoder-only checkpoints as embedding models: no output head, and how a checkpoint pools.

The embedding of a prompt is the normed hidden state of its last token. A causal model computes it
from all tokens before, so it does not matter which of them were prefix hits or in earlier chunks.
Other ways of pooling are refused: a mean needs the hidden states of all tokens, which neither the
prefix cache nor an earlier chunk keeps.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file

from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of

_MODULES = "modules.json"
_SUPPORTED = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that an embedding may pass through. All embeddings are
normalised, whether the last one is there or not."""

_LAST_TOKEN = "lasttoken"  # noqa: S105 - no password
_LONG_MODE = {"pooling_mode_lasttoken": _LAST_TOKEN, "pooling_mode_mean_tokens": "mean"}
"""How sentence-transformers before version 5 spells two of its modes: a flag for each."""


class HiddenStates(nn.Module):
    """Takes the place of an output head: its result is what the head would have been given.

    ``in_features``: the length of a hidden state.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def check_causal(config: PreTrainedConfig, name: str) -> None:
    """Raise `ModelError` for a checkpoint that was trained to look at later tokens, too."""
    text = config.get_text_config(decoder=True)
    is_causal = getattr(text, "is_causal", True) is not False
    if not is_causal or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(
            f"{name} attends in both directions, and this engine computes causal attention: serve "
            "an embedding model whose tokens attend to earlier ones alone"
        )


def is_headless_decoder(config: PreTrainedConfig, architecture: str) -> bool:
    """Whether an architecture is a decoder without its head, as in ``Qwen3Model``."""
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:  # an encoder
        return False
    whole = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    # A few model types have several classes.
    names = (whole,) if isinstance(whole, str) else tuple(whole)
    return any(
        each.endswith("ForCausalLM") and architecture == each.removesuffix("ForCausalLM") + "Model"
        for each in names
    )


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
    width = model.get_output_embeddings().in_features
    model.set_submodule(head_name(model), HiddenStates(width))
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "final_logit_softcapping", None) is not None:
        text.final_logit_softcapping = None  # it would bend the hidden states


def embedding_size(model: Any) -> int:
    """Numbers of an embedding: what the head took that `remove_head` has removed.

    It may be less than the hidden size, which OPT-350m projects before its head.
    """
    size: int = model.get_output_embeddings().in_features
    return size


def read_pooling(source: str) -> str:
    """How a checkpoint says that it pools, for the log.

    Read from ``modules.json`` and the file of the pooling module; without them the last token.
    Raises `ModelError` for another way of pooling, and for modules that are not supported.
    """
    modules = _read_json(source, _MODULES)
    if modules is None:
        return f"the last token, because there is no {_MODULES}"
    listed = modules if isinstance(modules, list) else [modules]
    described = [module if isinstance(module, dict) else {} for module in listed]
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in described}
    for kind in kinds:
        if kind not in _SUPPORTED:
            raise ModelError(
                f"{source} needs the module {kind!r} of its {_MODULES}, and embeddings are "
                f"computed with {', '.join(_SUPPORTED)} alone: serve another checkpoint"
            )
    if "Pooling" not in kinds:
        return f"the last token, because {_MODULES} has no pooling"
    file = str(PurePosixPath(str(kinds["Pooling"].get("path", "")), "config.json"))
    pooling = _read_json(source, file)
    modes = _modes(pooling if isinstance(pooling, dict) else {})
    if modes != [_LAST_TOKEN]:
        raise ModelError(
            f"{source} pools by {' and '.join(modes) or 'no known mode'} ({file}), and this "
            "engine by the last token alone: serve a checkpoint that was trained for that"
        )
    return f"the last token ({file})"


def _modes(pooling: dict[str, Any]) -> list[str]:
    """The modes of a pooling module; several are joined."""
    if "pooling_mode" in pooling:
        mode = pooling["pooling_mode"]
        return list(map(str, mode if isinstance(mode, list) else [mode]))
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    return [_LONG_MODE.get(name, name.removeprefix("pooling_mode_")) for name in flags]


def _read_json(source: str, name: str) -> Any:
    """A file of a checkpoint; None where it has none."""
    try:
        path = cached_file(source, name)
    except OSError:
        return None
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except BROKEN_FILE_ERRORS as error:
        raise ModelError(f"the {name} of {source} cannot be used: {reason_of(error)}") from error
