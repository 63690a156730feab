"""What ranks compute together: modules whose weights are divided between them, and their sums.

The ranks are those of the process group of torch.distributed. Each of them runs the same forward
pass on the same tokens, so all come to each of these calls in the same order. A call raises
`RuntimeError` once the time limit of the process group has passed, or another rank has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the shapes of the operations' results
from torch import nn

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]

Sums = Callable[[torch.Tensor], torch.Tensor | None]

_sums: Sums | None = None

_collectives: Any = torch.ops._c10d_functional
"""PyTorch's collective calls as operations, which can be traced into a program."""


def least_over_ranks(number: int) -> int:
    """The smallest of the ranks' numbers, which are on the host."""
    held = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return int(held)


def most_over_ranks(number: int) -> int:
    """The largest of the ranks' numbers, which are on the host."""
    return -least_over_ranks(-number)


def use_sums(sums: Sums | None) -> None:
    """Let `sum_over_ranks` compute by ``sums``, in all ranks; None: by the process group.

    ``sums`` returns None for a tensor that it does not sum.
    """
    global _sums  # noqa: PLW0603  (the process has one group, and so one way)
    _sums = sums


def sum_over_ranks(part: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' tensors."""
    if _sums is not None:
        return torch.ops.trencadis.sum_over_ranks(part)  # type: ignore[no-any-return]
    return _sum_of_group(part)


def _sum_of_group(part: torch.Tensor) -> torch.Tensor:
    summed = _collectives.all_reduce(part.contiguous(), "sum", _all_ranks())
    return _collectives.wait_tensor(summed)  # type: ignore[no-any-return]


def _own_sum(part: torch.Tensor) -> torch.Tensor:
    """`sum_over_ranks` as an operation, which can be traced into a program."""
    summed = None if _sums is None else _sums(part)
    return _sum_of_group(part) if summed is None else summed


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "sum_over_ranks(Tensor part) -> Tensor"
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "sum_over_ranks", _own_sum, "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "trencadis::sum_over_ranks",
    lambda part: torch.empty_like(part, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)


def gather_from_ranks(part: torch.Tensor) -> torch.Tensor:
    """``[ranks * rows, width]``: the ranks' tensors ``[rows, width]``, one below the other."""
    size = dist.get_world_size()
    gathered = _collectives.all_gather_into_tensor(part.contiguous(), size, _all_ranks())
    return _collectives.wait_tensor(gathered)  # type: ignore[no-any-return]


def _all_ranks() -> str:
    """The name of the process group."""
    group = dist.group.WORLD
    assert group is not None  # noqa: S101  (each rank makes it before it loads a model)
    return str(group.group_name)


class RowLinear(nn.Module):
    """A linear layer of which each rank has the columns of weights for its part of the inputs.

    ``linear`` has no bias: that is added once, to the sum.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.bias: nn.Parameter | None = linear.bias
        linear.bias = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs ``[..., outputs]`` of this rank's part of the inputs."""
        outputs = sum_over_ranks(self.linear(inputs))
        return outputs if self.bias is None else outputs + self.bias


class RowExperts(nn.Module):
    """The experts of a layer, of whose inner numbers each rank has a part."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of what their parts give for rows, choices and weights."""
        return sum_over_ranks(self.experts(*given))


class SplitEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some tokens, from ``first`` on."""

    def __init__(self, embedding: nn.Embedding, first: int) -> None:
        super().__init__()
        embedding.padding_idx = None  # of the whole vocabulary; it matters for gradients alone
        self.embedding = embedding
        self.first = first

    @property
    def weight(self) -> torch.Tensor:
        """The rows of this rank."""
        return self.embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vectors ``[..., hidden size]``. Those of other ranks' tokens are 0 here, and added."""
        num_rows = self.embedding.weight.shape[0]
        rows = token_ids - self.first
        is_here = (rows >= 0) & (rows < num_rows)
        vectors = self.embedding(rows.clamp(0, max(0, num_rows - 1)))
        return sum_over_ranks(torch.where(is_here[..., None], vectors, 0))


class SplitHead(nn.Module):
    """An output head of which each rank has the rows of some tokens, the last rank fewer.

    ``num_tokens``: the vocabulary. ``num_rows``: those of the first rank.
    """

    def __init__(self, linear: nn.Linear, num_tokens: int, num_rows: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features = linear.in_features
        self.num_tokens = num_tokens
        self.num_rows = num_rows

    @property
    def weight(self) -> Any:
        """The rows of this rank."""
        return self.linear.weight

    def rows_of(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights ``[tokens, hidden size]`` and the biases of these tokens, on every rank."""
        rows = torch.tensor(token_ids) - dist.get_rank() * self.num_rows
        weight, bias = self.linear.weight, self.linear.bias
        is_here = (rows >= 0) & (rows < weight.shape[0])
        kept = rows.clamp(0, max(0, weight.shape[0] - 1))

        def of_all(own: torch.Tensor) -> torch.Tensor:
            if not own.shape[0]:  # of a last rank without tokens
                return sum_over_ranks(own.new_zeros(len(token_ids), *own.shape[1:]))
            shape = (-1, *[1] * (own.dim() - 1))
            return sum_over_ranks(torch.where(is_here.view(shape), own[kept], 0))

        return of_all(weight), None if bias is None else of_all(bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocabulary]``, on every rank."""
        part = self.linear(hidden)
        part = nn.functional.pad(part, (0, self.num_rows - part.shape[-1]))
        rows, size = part.flatten(0, -2), dist.get_world_size()
        parts = gather_from_ranks(rows).view(size, *rows.shape)  # there may be no rows
        logits = parts.transpose(0, 1).reshape(*part.shape[:-1], size * self.num_rows)
        return logits[..., : self.num_tokens]
