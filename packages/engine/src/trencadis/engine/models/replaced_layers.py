"""Finds the layers of a kind in a model, and puts others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

FoundLayer = tuple[str, nn.Module, Any]
"""A layer, with its name in the module that it belongs to, and that module before it."""


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[FoundLayer]:
    """The layers of exactly this type."""
    return [
        (name, parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]


def replace_layers(layers: list[FoundLayer], replacement: Callable[[Any], nn.Module]) -> None:
    """Replace each layer. Empties the list, so that no more than one weight is there twice."""
    while layers:
        name, parent, layer = layers.pop()
        setattr(parent, name, replacement(layer))
