"""Rotary frequencies that do not depend on the batch.

transformers chooses those of ``longrope`` and ``dynamic`` by the largest position of a forward
pass. A pass computes tokens of many requests: each would be computed by the longest one's
frequencies, and so would the keys that later requests find in the prefix cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trencadis.engine.errors import ModelError

logger = logging.getLogger("trencadis.engine")

_PINNED = "pinned"
"""A type of rotary embedding whose frequencies transformers leaves alone in the forward pass."""


_LARGEST_ERROR = 0.02
"""Of a cosine or sine. The angle of a position that is rounded by 1 gives up to 0.96."""

Angles = Mapping[str, tuple[torch.Tensor, ...]]
"""Cosines and sines of `_probes`, by the name of the embedding and the type of its layers."""


def angles_of(model: nn.Module, max_model_len: int) -> Angles:
    """What the rotary embeddings of ``model`` compute, on the host."""
    positions = _probes(max_model_len)
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        rope_type = getattr(module, "rope_type", None)
        if not isinstance(rope_type, (str, dict)):
            continue
        for layer_type in rope_type if isinstance(rope_type, dict) else [None]:
            given = {} if layer_type is None else {"layer_type": layer_type}
            place = next(iter(module.buffers())).device
            made = module(torch.zeros(1, device=place), positions.to(place), **given)
            parts = made if isinstance(made, tuple) else (made,)
            found[f"{name} {layer_type or ''}".strip()] = tuple(x.cpu() for x in parts)
    return found


def check_angles(model: nn.Module, max_model_len: int, expected: Angles) -> None:
    """Let the embeddings of ``model``, on its device, compute the ``expected`` angles.

    Their products of one term become products of elements, where those differ: nothing is rounded.
    Warns where angles still differ.
    """
    if not (wrong := _differing(model, max_model_len, expected)):
        return
    for name in {key.partition(" ")[0] for key in wrong}:
        module: Any = model.get_submodule(name)
        module.forward = functools.partial(_without_products, module.forward)
    if still := _differing(model, max_model_len, expected):
        logger.warning(
            "Rotary angles differ from the host's by up to %.2g at positions below %d (%s): "
            "answers to long prompts may be wrong; lower max_model_len",
            max(still.values()),
            max_model_len,
            ", ".join(sorted(still)),
        )
        return
    logger.info("Rotary angles are products of elements: the device rounds matrix products")


def _probes(max_model_len: int) -> torch.Tensor:
    """Positions ``[1, n]`` of which some are rounded if any is: both sides of powers of two."""
    powers = [1 << bit for bit in range(max_model_len.bit_length())]
    near = {p + offset for p in powers for offset in (-1, 0, 1)} | {max_model_len - 1}
    return torch.tensor([sorted(p for p in near if p < max_model_len)])


def _differing(model: nn.Module, max_model_len: int, expected: Angles) -> dict[str, float]:
    """The largest error of each embedding whose angles are not the expected ones."""
    errors = {
        name: max(float((a - b).abs().max()) for a, b in zip(made, expected[name], strict=True))
        for name, made in angles_of(model, max_model_len).items()
    }
    return {name: error for name, error in errors.items() if not error <= _LARGEST_ERROR}


def _without_products(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with _ProductsOfElements():
        return forward(*args, **kwargs)


class _ProductsOfElements(TorchFunctionMode):
    """Computes matrix products with one term for each element as products of elements."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("matmul", "__matmul__", "bmm"):
            left, right = args[0], args[-1]
            matrices = isinstance(left, torch.Tensor) and min(left.dim(), right.dim()) > 1
            if matrices and left.shape[-1] == 1:
                return left * right
        return func(*args, **(kwargs or {}))


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
