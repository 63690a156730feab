"""How many bytes a program reads from memory and writes to it.

An element-wise operation is counted where its result is read, as a compiler fuses it: what lies
between is neither written nor read. The real one fuses less, so the counts are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal

import attrs
import torch
from torch import fx

from gaudi_standin.kernels import name_of
from gaudi_standin.memory import Allocation, Buffer
from gaudi_standin.program import Call

GATHERS = frozenset({"gather", "index", "index_select"})
"""Operations that read rows wherever they lie."""

_ROWS_OF_TABLE = GATHERS | {"embedding"}
"""Of their first argument these read what they return."""

_ROWS_WRITTEN = frozenset({"index_copy_", "index_put_", "scatter_"})
"""Of their first argument these write as much as their last one has."""

_WITHOUT_INPUT = frozenset({"arange", "full", "scalar_tensor"})

_CASTS = frozenset({"_to_copy", "cast_from_fp8"})
"""Element-wise without the tag (``test_hpu_fp8_ops_any_mode.py:253``: «tpc_fuser behavior»)."""

Tensor = tuple[Hashable, int]
"""Which tensor, and its bytes."""


@attrs.frozen
class Traffic:
    """``gathers``: operations that are. Bytes are those of tensors in the device's memory."""

    gathers: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@attrs.frozen
class Access:
    """An operation: what it reads, in its arguments' order, and what it makes or changes."""

    name: str
    reads: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    kind: Literal["compute", "view", "inplace"]
    element_wise: bool


def traffic_of(accesses: Iterable[Access], kept: set[Hashable]) -> Traffic:
    """``kept``: results that the program leaves in memory."""
    needed: dict[Hashable, dict[Hashable, int]] = {}
    in_memory: set[Hashable] = set()
    gathers = read = written = 0
    for access in accesses:
        gathers += access.name in GATHERS
        sources = [needed.get(key, {key: size}) for key, size in access.reads]
        if access.kind == "view":
            (base, _), *_ = access.reads
            for key, size in access.results:
                lies = base not in needed or base in in_memory
                needed[key] = {key: size} if lies else sources[0]
                in_memory.update([key] if lies else [])
            continue
        fused = access.element_wise and access.kind == "compute"
        everything = {key: size for source in sources for key, size in source.items()}
        if fused and not kept.intersection(key for key, _ in access.results):
            needed.update((key, everything) for key, _ in access.results)
            continue
        size_made = sum(size for _, size in access.results)
        if access.name in _ROWS_OF_TABLE:
            others = {key: size for source in sources[1:] for key, size in source.items()}
            read += size_made + sum(others.values())
        elif access.kind == "inplace" and not access.element_wise:
            others = {key: size for source in sources[1:] for key, size in source.items()}
            read += sum(others.values())
            size_made = access.reads[-1][1] if access.name in _ROWS_WRITTEN else size_made
        else:
            read += sum(everything.values())
        written += size_made
        needed.update((key, {key: size}) for key, size in access.results)
        in_memory.update(key for key, _ in access.results)
    return Traffic(gathers, read, written)


def traffic_of_calls(calls: Iterable[Call], is_kept: Callable[[Allocation], object]) -> Traffic:
    """``is_kept``: whether what the program makes stays in memory."""
    accesses: list[Access] = []
    kept: set[Hashable] = set()
    for call in calls:
        given = [x for x in call.leaves if isinstance(x, Buffer)]
        made = given[:1] if call.kind == "inplace" else call.outputs
        kept.update(id(x) for x in made if is_kept(x.allocation))
        accesses.append(
            Access(
                _name(call.func),
                tuple((id(x), _bytes(x.value)) for x in given),
                tuple((id(x), _bytes(x.value)) for x in made),
                call.kind,
                _is_element_wise(call.func),
            )
        )
    return traffic_of(accesses, kept)


def traffic_of_graph(graph: fx.Graph) -> Traffic:
    (output,) = graph.find_nodes(op="output")
    kept = {_root(node) for node in output.all_input_nodes}
    return traffic_of([_access(n) for n in graph.nodes if n.op == "call_function"], kept)


def _access(node: fx.Node) -> Access:
    value = node.meta["val"]
    if not isinstance(node.target, torch._ops.OpOverload):  # an item of a tuple
        owner, place = node.args
        part = ((owner, place), _bytes(value))
        return Access("getitem", (part,), ((node, _bytes(value)),), "view", element_wise=False)
    if isinstance(value, torch.Tensor):
        results: list[Tensor] = [(node, _bytes(value))]
    else:
        results = [((node, i), _bytes(x)) for i, x in enumerate(value)]
    schema = node.target._schema
    kind: Any = "view" if node.target.is_view else "inplace" if schema.is_mutable else "compute"
    reads = tuple((x, _bytes(x.meta["val"])) for x in node.all_input_nodes)
    return Access(name_of(node.target), reads, tuple(results), kind, _is_element_wise(node.target))


def _root(node: fx.Node) -> Hashable:
    """What a chain of views starts from."""
    target = node.target
    if node.op != "call_function":
        return node
    if not isinstance(target, torch._ops.OpOverload):
        owner: Any = node.args[0]
        is_view = isinstance(owner.target, torch._ops.OpOverload) and owner.target.is_view
        return _root(owner.args[0]) if is_view else (owner, node.args[1])
    return _root(node.args[0]) if target.is_view else node  # type: ignore[arg-type]


def _name(func: Any) -> str:
    return name_of(func) if hasattr(func, "_schema") else str(getattr(func, "__name__", func))


def _is_element_wise(func: Any) -> bool:
    name = _name(func)
    return torch.Tag.pointwise in getattr(func, "tags", ()) or name in _WITHOUT_INPUT | _CASTS


def _bytes(value: torch.Tensor) -> int:
    """Bytes of its elements, those that a view repeats counted once."""
    elements = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * value.itemsize
