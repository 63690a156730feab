"""Finds the layers of a kind in a model, and puts others in their place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

FoundLayer = tuple[str, nn.Module, Any]
"""A layer, with its name in the module that it belongs to, and that module before it."""


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[FoundLayer]:
    """The layers of exactly this type, but those whose weight the model's own code reads."""
    return [
        (name, parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind and not _reads_weight(type(parent).forward, name)
    ]


@functools.lru_cache(maxsize=4096)
def _reads_weight(forward: Callable[..., Any], name: str) -> bool:
    """Whether a module multiplies or asks a layer's weight itself, as Jamba's does `dt_proj`'s.

    What replaces a layer may have no weight of this form. Mamba 2 gives a weight to a kernel of
    training alone, by this name.
    """
    try:
        source = inspect.getsource(forward).replace(f"outproj_weight=self.{name}.weight", "")
        return f"self.{name}.weight" in source
    except (OSError, TypeError):  # there is no source
        return False


def replace_layers(layers: list[FoundLayer], replacement: Callable[[Any], nn.Module]) -> None:
    """Replace each layer. Empties the list, so that no more than one weight is there twice."""
    while layers:
        name, parent, layer = layers.pop()
        setattr(parent, name, replacement(layer))
