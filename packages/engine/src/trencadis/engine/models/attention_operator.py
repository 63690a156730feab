"""Attention as one operator of a compiled program.

A program that contains attention is compiled for one batch, query length and number of blocks. As
an operator, attention is called by the program and not compiled into it. The program then depends
on the number of tokens only, so that all shapes with as many tokens share it. What the operator
reads besides queries, keys and values is the forward pass of its thread and the layer that runs,
with its spec (`forward_pass`): layers that share a program attend each as its own spec says.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import torch

from trencadis.engine.models.layer_spec import LayerSpec, scaled_by_position
from trencadis.engine.models.paged_context import Attention, PagedContext

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks=None) -> Tensor"
)


class _Current(threading.local):
    """The forward pass and the layer that this thread computes."""

    paged: PagedContext | None = None
    layer = 0
    spec: LayerSpec


_CURRENT = _Current()


@contextlib.contextmanager
def forward_pass(paged: PagedContext, layer: int, spec: LayerSpec) -> Generator[None, None, None]:
    """Programs that run within this context attend as layer ``layer`` of ``paged``."""
    _CURRENT.paged, _CURRENT.layer, _CURRENT.spec = paged, layer, spec
    try:
        yield
    finally:
        _CURRENT.paged = None


def current_layer() -> int:
    """The layer whose program this thread runs, within `forward_pass`."""
    return _CURRENT.layer


def attend_in_program(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call attention as an operator; see `Attention.attend` for the shapes."""
    out: torch.Tensor = torch.ops.trencadis.paged_attention(query, key, value, sinks)
    return out


def attend_with(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    paged: PagedContext,
    spec: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`Attention.attend`, after what is computed alike for all backends."""
    if spec.position_scale is not None and paged.positions is not None:
        query = scaled_by_position(query, paged.positions, spec.position_scale)
    return attention.attend(query, key, value, layer, paged, spec, sinks)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    paged = _CURRENT.paged
    if paged is None or paged.attention is None:
        raise RuntimeError("a program with attention runs outside of `forward_pass`")
    given = (_CURRENT.layer, paged, _CURRENT.spec, sinks)
    # The program was compiled for the strides of `_shape` and does not check them.
    return attend_with(paged.attention, query, key, value, *given).contiguous()


# The KV cache that the operator writes is not among its arguments. Nothing else in a program reads
# it, and the result is used, so that no compiler pass moves or removes the call.
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "paged_attention", _attend, "CompositeExplicitAutograd"
)


def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    del key, sinks
    _, heads, tokens, _ = query.shape
    return query.new_empty((1, tokens, heads, value.shape[3]))


torch.library.register_fake("trencadis::paged_attention", _shape, lib=_LIBRARY)
