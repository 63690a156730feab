"""Decoder-only checkpoints that score: an output head of one or two rows.

A reranker either has a score head of its own (``...ForSequenceClassification``), or was trained to
answer with one of two tokens. Of an output head, the rows of these tokens are kept alone. Both are
applied to the last token of a prompt, as an output head is, so nothing else of the engine changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from trencadis.engine.errors import ModelError
from trencadis.engine.models.packed_weight import QuantizedLinear
from trencadis.engine.models.pooling import decoder_stems, head_name
from trencadis.engine.models.rank_modules import SplitHead

_CLASSIFIER = "ForSequenceClassification"


class ScoreHead(nn.Module):
    """A linear output head that computes in fp32: of few rows, it costs nothing.

    ``weight``: ``[rows, hidden size]``. ``in_features``: the length of a hidden state.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.float(), self.weight, self.bias)


class SequenceScorer(nn.Module):
    """A model with a score head, called as one with an output head.

    transformers applies the head to the last token, too, but chooses the token itself.
    """

    def __init__(self, decoder: nn.Module, head: ScoreHead, config: PreTrainedConfig) -> None:
        super().__init__()
        self.model = decoder
        self.score = head
        self.config = config
        # By it the decoder layers are found, to be compiled.
        self._no_split_modules = getattr(decoder, "_no_split_modules", None)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def get_output_embeddings(self) -> ScoreHead:
        return self.score

    def forward(self, *, logits_to_keep: torch.Tensor, **given: Any) -> CausalLMOutputWithPast:
        hidden = self.model(**given).last_hidden_state
        return CausalLMOutputWithPast(logits=self.score(hidden[:, logits_to_keep, :]))


def is_classifier(config: PreTrainedConfig, architecture: str) -> bool:
    """Whether an architecture is a decoder with a score head, ``...ForSequenceClassification``."""
    return architecture in {f"{stem}{_CLASSIFIER}" for stem in decoder_stems(config)}


def check_labels(config: PreTrainedConfig, name: str) -> None:
    """Raise `ModelError` for a score head with several labels."""
    if config.num_labels != 1:
        raise ModelError(
            f"{name} tells {config.num_labels} labels apart, and a score is the logit of one: "
            "serve a checkpoint with num_labels 1"
        )


def keep_tokens(model: Any, token_ids: Sequence[int]) -> nn.Module:
    """The model with an output head of these tokens alone, in their order."""
    name, head = head_name(model), model.get_output_embeddings()
    rows = list(token_ids)
    if isinstance(head, SplitHead):
        model.set_submodule(name, ScoreHead(*head.rows_of(rows)))
        return model  # type: ignore[no-any-return]
    bias = getattr(head, "bias", None)
    weight = head.packed.unpacked() if isinstance(head, QuantizedLinear) else head.weight
    model.set_submodule(name, ScoreHead(weight[rows], None if bias is None else bias[rows]))
    return model  # type: ignore[no-any-return]


def as_scorer(classifier: Any) -> SequenceScorer:
    """A model of transformers with a score head, as one that the engine can call.

    Raises `ModelError` for a model that computes anything else beside its decoder and one linear
    layer.
    """
    children = dict(classifier.named_children())
    head = children.pop("score", None)
    decoder = children.pop(classifier.base_model_prefix, None)
    if decoder is None or type(head) is not nn.Linear or children:
        listed = ", ".join(dict(classifier.named_children()))
        raise ModelError(
            f"{type(classifier).__name__} consists of {listed}, and scores are computed by a "
            "decoder and the linear layer score alone: serve another checkpoint"
        )
    return SequenceScorer(decoder, ScoreHead(head.weight, head.bias), classifier.config)
