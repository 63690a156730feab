"""What a causal model computes after its decoder: logits from hidden states.

A forward pass computes the logits of one token of each sequence. Log-probabilities of a prompt need
those of all its tokens, which are too many to compute at once: the pass keeps the last hidden
states, and the head computes the logits of some of them. The head is the model's own code, because
an architecture may scale its logits or cap them after the output matrix, as Granite and Gemma 2 do.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn


class _Last(threading.local):
    """The hidden states that this thread computed last."""

    hidden: torch.Tensor | None = None


_LAST = _Last()


class LogitHead(nn.Module):
    """Computes logits as a model does, from hidden states.

    It shares the modules of the model, and so follows them when their weights move.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = _without_decoder(model, _decoder_name(model).split("."))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden size]``."""
        # Not a call: hooks of the model are of whole forward passes.
        out = self.model.forward(inputs_embeds=hidden[None], use_cache=False, logits_to_keep=0)
        logits: torch.Tensor = out.logits[0].float()
        return logits


def keep_last_hidden(model: nn.Module) -> None:
    """Let each forward pass of a causal model keep what its head is given. Call it once."""

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        del module, given
        _LAST.hidden = output[0]

    model.get_submodule(_decoder_name(model)).register_forward_hook(keep)


def take_last_hidden() -> torch.Tensor | None:
    """The last hidden states ``[1, tokens, hidden size]`` that this thread has computed, once.

    None for a model of which `keep_last_hidden` was not asked.
    """
    hidden, _LAST.hidden = _LAST.hidden, None
    return hidden


class _GivenStates(nn.Module):
    """Takes the place of a decoder: its output is what the head is to be given.

    It has the decoder's numbers, as Falcon-H1's has one that scales the logits.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        numbers = {k: v for k, v in vars(decoder).items() if isinstance(v, (int, float))}
        vars(self).update(numbers)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """The output of a decoder that computed nothing else, such as attention weights."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _decoder_name(model: Any) -> str:
    decoder = model.get_decoder()
    if decoder is model:  # it names none, as that of Llama 4
        table = model.get_input_embeddings()
        decoder = next(child for child in model.children() if table in set(child.modules()))
    names: list[str] = [name for name, module in model.named_modules() if module is decoder]
    return names[0]


def _without_decoder(module: nn.Module, path: list[str]) -> nn.Module:
    """A copy of ``module``, which shares all but the decoder at ``path``."""
    copied = copy.copy(module)
    name, *rest = path
    child = module.get_submodule(name)
    child = _without_decoder(child, rest) if rest else _GivenStates(child)
    copied._modules = {**module._modules, name: child}
    return copied
