"""Rotary embeddings of complex numbers, in real ones: a Gaudi has none, and compilers avoid them.

DeepSeek V2 and Llama 4 hold pairs of a head's numbers for complex ones, and multiply them by
``torch.polar(1, angle)``. Here the embedding gives cosine and sine, and the function that rotates
queries and keys computes the same product from them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_ROTATE = "apply_rotary_emb"
"""The name that transformers' code gives the function in the families with complex numbers."""

_HEADS_AT = (1, 2)
"""Where queries may have their heads: ``[B, H, T, D]`` in DeepSeek V2, ``[B, T, H, D]`` in
Llama 4."""


class RealRotation:
    """Rotates queries and keys, called like transformers' ``apply_rotary_emb``.

    Angles are ``[B, T, D / 2, 2]``, cosine and sine. The function is shared by all models of an
    architecture, so complex ones, of a model that is not this engine's, go to ``replaced``.
    """

    def __init__(self, replaced: Callable[..., Any], heads_at: int) -> None:
        self.replaced = replaced
        self._heads_at = heads_at

    def __call__(
        self, xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if freqs_cis.is_complex():
            rotated: tuple[torch.Tensor, torch.Tensor] = self.replaced(xq, xk, freqs_cis)
            return rotated
        cos, sin = freqs_cis.unsqueeze(self._heads_at).unbind(-1)
        return _rotated(xq, cos, sin), _rotated(xk, cos, sin)


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours as complex numbers, times ``cos + i sin``."""
    real, imaginary = rows.float().reshape(*rows.shape[:-1], -1, 2).unbind(-1)
    pairs = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(pairs, -1).flatten(-2).type_as(rows)


def use_real_rotary(model: nn.Module) -> None:
    """Let the rotary embeddings of ``model`` that give complex numbers give real ones.

    Where a product of real numbers is found to be that of the model's own code: others stay.
    """
    for module, code in _rotary_modules(model):
        own = getattr(code, _ROTATE)
        real = own if isinstance(own, RealRotation) else _real_rotation(own)
        if real is not None:
            setattr(code, _ROTATE, real)
            module.forward = functools.partial(_in_real_numbers, module.forward)


def _rotary_modules(model: nn.Module) -> Iterator[tuple[Any, ModuleType]]:
    """Rotary embeddings, with the module of code that has the function to use their angles."""
    for module in model.modules():
        code = sys.modules[type(module).__module__]
        if hasattr(module, "rope_type") and hasattr(code, _ROTATE):
            yield module, code


@functools.cache
def _real_rotation(own: Callable[..., Any]) -> RealRotation | None:
    """What computes in real numbers what ``own`` computes in complex ones; None if nothing does."""
    random = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 5, 4, generator=random, device="cpu") * 6
    values = torch.stack((angles.cos(), angles.sin()), -1)
    for heads_at in _HEADS_AT:
        real = RealRotation(own, heads_at)
        rows = torch.randn(1, 5, 3, 8, generator=random, device="cpu")
        rows = rows.transpose(1, 2) if heads_at == 1 else rows
        try:
            expected = own(rows, rows, torch.view_as_complex(values))
            found = real(rows, rows, values)
            if all(map(torch.allclose, found, expected)):
                return real
        except Exception:  # noqa: S112  (a function that is called in another way)
            continue
    return None


def _in_real_numbers(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _CosineAndSine():
        return forward(*args, **kwargs)


class _CosineAndSine(TorchFunctionMode):
    """Gives the two parts of what ``torch.polar`` would give, as a last dimension."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.polar:
            length, angle = args
            return torch.stack((length * angle.cos(), length * angle.sin()), -1)
        return func(*args, **(kwargs or {}))
