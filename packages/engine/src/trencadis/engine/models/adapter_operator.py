"""What adapters add to a linear layer, which compiled programs may call as one operator.

What a batch computes of adapters depends on which slots its tokens have, and by a kernel on the
ranks in these slots. As an operator it is called by a program and not compiled into it, so that all
batches with adapters share a program. What the operator reads besides its arguments is what the
decoder layer of its thread was given (`note_slots`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "add_adapters(Tensor rows, Tensor out, Tensor down, Tensor up) -> Tensor"
)

AdapterKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None
]
"""Adds to the results of a linear layer what the adapters of its rows compute.

Arguments: rows ``[..., inputs]``; results of the layer and, perhaps the same tensor, those with
adapters, ``[..., outputs]``; `sorted_slots` of the rows; the layer's ``down`` and ``up``, in which
the R rows of a slot follow each other; R."""


@attrs.frozen(eq=False)
class AdapterProducts:
    """Computes what adapters add, of ``max_rank`` at most."""

    kernel: AdapterKernel | None
    max_rank: int

    def added(
        self,
        rows: torch.Tensor,
        out: torch.Tensor,
        of_tokens: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        *,
        in_place: bool,
    ) -> torch.Tensor:
        """The results ``out`` of a linear layer for ``rows``, and what adapters add to them.

        ``of_tokens``: see `AdapterLayers.rows_of`. ``down``, ``up``: those of an `AdaptedLinear`.
        ``in_place``: ``out`` is needed no longer.
        """
        if self.kernel is not None:
            result = out if in_place else torch.empty_like(out)
            self.kernel(rows, out, result, of_tokens, down, up, self.max_rank)
            return result
        num_rows = of_tokens.shape[-1]
        inner = F.linear(rows, down[:num_rows])
        # Not a product: an overflow in another slot's rows would make it NaN.
        inner = inner.masked_fill(of_tokens.view(*inner.shape[:-1], -1), 0.0)
        return out + inner @ up[:num_rows]


class _Current(threading.local):
    """What the decoder layer that this thread computes was given, and what computes it."""

    rows: torch.Tensor | None = None
    products: AdapterProducts


CURRENT = _Current()


def note_slots(products: AdapterProducts, _: Any, __: Any, arguments: dict[str, Any]) -> None:
    """Before a decoder layer: its linear layers compute with what the forward pass has."""
    CURRENT.rows, CURRENT.products = arguments["paged"].adapter_rows, products


def add_in_program(
    rows: torch.Tensor, out: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """`AdapterProducts.added` as an operator, which changes none of its arguments."""
    added: torch.Tensor = torch.ops.trencadis.add_adapters(rows, out, down, up)
    return added


def _add(
    rows: torch.Tensor, out: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    if CURRENT.rows is None:
        raise RuntimeError("a program with adapters runs in a forward pass without any")
    given = (rows, out.contiguous(), CURRENT.rows, down, up)
    return CURRENT.products.added(*given, in_place=False)


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "add_adapters", _add, "CompositeExplicitAutograd"
)


def _shape(
    rows: torch.Tensor, out: torch.Tensor, down: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    del rows, down, up
    return out.new_empty(out.shape)


torch.library.register_fake("trencadis::add_adapters", _shape, lib=_LIBRARY)
