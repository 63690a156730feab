"""What an operation is called with, and what of that it changes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gaudi_standin.program import Call
from gaudi_standin.tensor import HPUTensor


def values_of(leaves: list[Any]) -> list[Any]:
    return [leaf.buffer.value if isinstance(leaf, HPUTensor) else leaf for leaf in leaves]


def buffers_of(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple(leaf.buffer if isinstance(leaf, HPUTensor) else leaf for leaf in leaves)


def with_own_host_values(call: Call) -> Call:
    """The host may change its tensor after the call: the device has its own copy."""
    leaves = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in call.leaves)
    return Call(call.func, leaves, call.spec, call.outputs, call.kind)


@functools.cache
def returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(one.type) for one in returns)


def changed_by(func: Any, args: Any, kwargs: Any) -> list[HPUTensor]:
    """The arguments that the operation changes, in the order of its schema."""
    changed: list[HPUTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        changed.extend(value if isinstance(value, (list, tuple)) else [value])
    return [tensor for tensor in changed if isinstance(tensor, HPUTensor)]
