"""The functions that transformers' layers with a state call, in static shapes.

A layer of transformers gives its convolution and its scan to functions of its module, which a
kernel may replace. `with_functions` lets a layer call those here instead. They take rows of one
length, each with its tokens first and padding behind, and padding changes no state:
its time step, or its decay and update, is 0.

Sums run over chunks of tokens, as matrix products, and from chunk to chunk: `Mamba 2`_ and the
`gated delta rule`_ in their chunked forms. Everything is computed in fp32. The arguments are those
of transformers' functions of the same names.

.. _Mamba 2: https://arxiv.org/abs/2405.21060, section 6
.. _gated delta rule: https://arxiv.org/abs/2412.06464, section 3
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

_CHUNK = 64
"""Tokens of a chunk. The products within one grow with its square, the steps from one to the next
with their number."""

_NEVER_CALLED = frozenset({"apply_mask_to_padding_states", "mamba2_split_conv1d_scan_combined"})
"""What layers call besides: without effect, as there is no mask, or in training alone."""

_MASKED = -1e30


def functions_of(module: nn.Module) -> frozenset[str]:
    """The functions of its Python module that the ``forward`` of a layer may call, by name."""
    forward = inspect.unwrap(type(module).forward)
    names = (name for name in forward.__code__.co_names if name in forward.__globals__)
    found = ((name, forward.__globals__[name]) for name in names)
    return frozenset(
        name
        for name, value in found
        if callable(value) and getattr(value, "__module__", "") == type(module).__module__
    )


def are_static(names: frozenset[str]) -> bool:
    """Whether `StaticFunctions` has all functions with these names that a layer calls."""
    known = {name for name in names - _NEVER_CALLED if hasattr(StaticFunctions, name)}
    return bool(known) and names - _NEVER_CALLED == known


def with_functions(module: nn.Module, functions: Mapping[str, Any]) -> Callable[..., Any]:
    """The ``forward`` of a module with ``functions`` in place of those of its Python module.

    The Python module, and other layers of the class, keep theirs.
    """
    own: Any = inspect.unwrap(type(module).forward)
    known = {**own.__globals__, **functions}
    bound = types.FunctionType(own.__code__, known, own.__name__, own.__defaults__, own.__closure__)
    bound.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(bound, module)


class StaticFunctions:
    """``lengths``: ``[B]``, the tokens of each row of the next call; None where all have one."""

    lengths: torch.Tensor | None = None

    def in_place_of(self, names: frozenset[str]) -> dict[str, Any]:
        """Those with these names."""
        return {name: getattr(self, name) for name in names if hasattr(type(self), name)}

    def _real(self, length: int) -> torch.Tensor | None:
        """``[B, length]`` bool: true where there is a token."""
        if self.lengths is None:
            return None
        return torch.arange(length, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def causal_conv1d_fn(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """``[B, C, L]`` with the inputs before: ``[B, C, L - K + 1]``, a kernel width K less 1."""
        width = weight.shape[-1]
        length = hidden_states.shape[-1] - width + 1
        known, taps = hidden_states.float(), weight.float()
        out = known.narrow(2, 0, length) * taps[:, :1]
        for tap in range(1, width):
            out = out + known.narrow(2, tap, length) * taps[:, tap : tap + 1]
        if bias is not None:
            out = out + bias.float().unsqueeze(1)
        if activation is not None:
            out = ACT2FN[activation](out)
        return out.to(hidden_states.dtype)

    def causal_conv1d_update(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """A token ``[B, C, 1]`` after the inputs in ``conv_state``, which it is added to."""
        known = torch.cat((conv_state, hidden_states.to(conv_state.dtype)), dim=-1)
        last = known.narrow(2, known.shape[2] - weight.shape[1], weight.shape[1])
        out = self.causal_conv1d_fn(last, weight, bias, activation)
        conv_state.copy_(known.narrow(2, 1, conv_state.shape[2]))
        return out.to(hidden_states.dtype)

    def mamba2_selective_state_update(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 - transformers' names
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One token of each row: ``state`` ``[B, H, P, N]`` is changed; returns ``[B, H, P]``."""
        heads_of_group = hidden_states.shape[1] // B.shape[1]
        step = time_step(dt, dt_bias, dt_softplus)
        value = hidden_states.float()
        read, write = (_by_head(x.float(), heads_of_group, 1).unsqueeze(2) for x in (C, B))
        decay = torch.exp(step.unsqueeze(3) * A.float())
        new = state.float() * decay + (step * value).unsqueeze(3) * write
        state.copy_(new.to(state.dtype))
        out = (new * read).sum(-1)
        if D is not None:
            out = out + value * D.float()
        if z is not None:
            out = out * F.silu(z.float())
        return out.to(hidden_states.dtype)

    def mamba2_chunk_scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of each row: ``[B, L, H, P]``, and new states ``[B, H, P, N]``, in fp32."""
        del chunk_size
        length, heads = hidden_states.shape[1:3]
        heads_of_group = heads // B.shape[2]
        step = time_step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        if (real := self._real(length)) is not None:
            step = torch.where(real.unsqueeze(2), step, 0.0)
        value = hidden_states.float()
        # ``[B, n, H, c, ...]``: chunks of c tokens, by head.
        inputs, reads, writes = (
            _in_chunks(x)
            for x in (
                value * step.unsqueeze(3),
                _by_head(C.float(), heads_of_group, 2),
                _by_head(B.float(), heads_of_group, 2),
            )
        )
        decay = _in_chunks((step * A.float()).unsqueeze(3)).squeeze(4).cumsum(3)
        within = _pairwise(decay)
        weights = torch.matmul(reads, writes.transpose(3, 4)) * within
        out = torch.matmul(weights, inputs)
        end = decay.narrow(3, decay.shape[3] - 1, 1)
        carried = inputs * torch.exp(end - decay).unsqueeze(4)
        added = torch.matmul(carried.transpose(3, 4), writes)
        state = (
            added.new_zeros(added.select(1, 0).shape)
            if initial_states is None
            else initial_states.float()
        )
        kept, starts = torch.exp(end).unsqueeze(4), []
        for number in range(added.shape[1]):
            starts.append(state)
            state = state * kept.select(1, number) + added.select(1, number)
        before = torch.stack(starts, dim=1).transpose(3, 4)
        out = out + torch.matmul(reads * torch.exp(decay).unsqueeze(4), before)
        out = _joined(out, length)
        if D is not None:
            out = out + value * D.float().unsqueeze(1)
        return out, state

    def torch_recurrent_gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of each row: ``[B, 1, H, V]``, and the new states ``[B, H, K, V]``."""
        heads = value.shape[2] // key.shape[2]
        query, key = (_by_head(x.float(), heads, 2).squeeze(1) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            query, key = _normalised(query), _normalised(key)
        query = query * query.shape[-1] ** -0.5
        state = initial_state.float() * torch.exp(g.float()).squeeze(1)[:, :, None, None]
        known = (state * key.unsqueeze(3)).sum(2)
        change = (value.float().squeeze(1) - known) * beta.float().squeeze(1).unsqueeze(2)
        state = state + key.unsqueeze(3) * change.unsqueeze(2)
        out = (state * query.unsqueeze(3)).sum(2)
        return out.unsqueeze(1).to(value.dtype), state

    def torch_chunk_gated_delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of each row: ``[B, L, H, V]``, and the new states ``[B, H, K, V]``."""
        dtype, length = value.dtype, value.shape[1]
        heads = value.shape[2] // key.shape[2]
        query, key = (_by_head(x.float(), heads, 2) for x in (query, key))
        if use_qk_l2norm_in_kernel:
            query, key = _normalised(query), _normalised(key)
        query = query * query.shape[-1] ** -0.5
        g, beta = g.float(), beta.float()
        if (real := self._real(length)) is not None:
            g, beta = (torch.where(real.unsqueeze(2), x, 0.0) for x in (g, beta))
        query, key, value = (_in_chunks(x.float()) for x in (query, key, value))
        share = _in_chunks(beta.unsqueeze(3))
        decay = _in_chunks(g.unsqueeze(3)).squeeze(4).cumsum(3)
        within = _pairwise(decay)
        # What the keys of a chunk have in common is solved for all its tokens at once.
        common = torch.matmul(key * share, key.transpose(3, 4)) * within
        solved = _inverse_of_unit_lower(common)
        grown = torch.exp(decay).unsqueeze(4)
        updates = torch.matmul(solved, value * share)
        known = torch.matmul(solved, key * share * grown)
        weights = torch.matmul(query, key.transpose(3, 4)) * within
        reads = query * grown
        end = decay.narrow(3, decay.shape[3] - 1, 1)
        writes = (key * torch.exp(end - decay).unsqueeze(4)).transpose(3, 4)
        kept = torch.exp(end).unsqueeze(4)
        state = (
            value.new_zeros((*key.select(1, 0).select(2, 0).shape, value.shape[4]))
            if initial_state is None
            else initial_state.float()
        )
        out = []
        for n in range(value.shape[1]):
            change = updates.select(1, n) - torch.matmul(known.select(1, n), state)
            seen = torch.matmul(weights.select(1, n), change)
            out.append(torch.matmul(reads.select(1, n), state) + seen)
            state = state * kept.select(1, n) + torch.matmul(writes.select(1, n), change)
        return _joined(torch.stack(out, dim=1), length).to(dtype), state


def time_step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The time step of Mamba 2 in fp32."""
    step = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(step) if softplus else step


def _by_head(x: torch.Tensor, heads_of_group: int, dim: int) -> torch.Tensor:
    """What each group of heads has, ``[..., G, N]``, for each head: ``[..., H, N]``."""
    if heads_of_group == 1:
        return x
    sizes = list(x.shape)
    expanded = x.unsqueeze(dim + 1).expand(*sizes[: dim + 1], heads_of_group, sizes[-1])
    return expanded.reshape(*sizes[:dim], -1, sizes[-1])


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _in_chunks(x: torch.Tensor) -> torch.Tensor:
    """``[B, L, H, N]`` as ``[B, n, H, c, N]``, with zeros behind the last token."""
    batch, length, heads, width = x.shape
    size = min(_CHUNK, length)
    if missing := -length % size:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return x.reshape(batch, -1, size, heads, width).transpose(2, 3).contiguous()


def _joined(x: torch.Tensor, length: int) -> torch.Tensor:
    """``[B, n, H, c, N]`` as ``[B, L, H, N]``: `_in_chunks` undone."""
    joined = x.transpose(2, 3).reshape(x.shape[0], -1, x.shape[2], x.shape[4])
    return joined.narrow(1, 0, length).contiguous()


def _pairwise(decay: torch.Tensor) -> torch.Tensor:
    """``exp(decay[l] - decay[s])`` for s up to l, else 0: ``[..., c]`` to ``[..., c, c]``."""
    tokens = torch.arange(decay.shape[-1], device=decay.device)
    difference = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    return torch.exp(torch.where(tokens <= tokens.unsqueeze(1), difference, _MASKED))


def _inverse_of_unit_lower(x: torch.Tensor) -> torch.Tensor:
    """The inverse of the part of ``[..., c, c]`` below its diagonal, with a diagonal of ones.

    Blocks of twice the size from those before: with inverses P and Q of the blocks on the diagonal
    and S below, the block below of the inverse is ``-Q S P``. Powers of the matrix in place of this
    would cancel each other out.
    """
    size = x.shape[-1]
    tokens = torch.arange(size, device=x.device)
    row, column = tokens.unsqueeze(1), tokens
    inverse = (row == column).to(x.dtype).expand(x.shape)
    width = 1
    while width < size:
        block, below = row // (2 * width), row // width
        is_below = (block == column // (2 * width)) & (below > column // width)
        between = torch.where(is_below, x, 0.0)
        inverse = inverse - torch.matmul(torch.matmul(inverse, between), inverse)
        width *= 2
    return inverse
