"""What chooses experts, as native calls: a router's product, and the largest numbers of a row.

A program computes both by functions of PyTorch that no recording of a decode step can have. They
are replaced where experts of `expert_products` depend on them (`use_native_routers`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import fx

from trencadis.engine.devices.cpu.native_calls import (
    address_of,
    data_address,
    is_recording,
    note,
)
from trencadis.engine.devices.cpu.native_kernel import NoKernel, load_kernel

_SOURCE = Path(__file__).with_name("router_products.cpp")

_TOLERANCE = 0.02
"""Largest difference to the product in fp32 in a trial, beside the largest value."""

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64

_DTYPES = (torch.bfloat16, torch.float32)

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("plain_product(Tensor rows, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "largest_of_rows(Tensor rows, int count) -> (Tensor, Tensor)"
)

_FUNCTIONS: dict[str, Callable[..., None]] = {}


def load_router_functions(directory: Path | None = None, *, trusted: bool = False) -> None:
    """Load what `use_native_routers` puts in the place of PyTorch's functions; tried first.

    Raises `NoKernel`. ``directory`` and ``trusted`` are those of `load_kernel`.
    """
    library = load_kernel(_SOURCE, (), directory, trusted=trusted)
    product, largest = library.plain_product, library.largest_of_rows
    product.argtypes, product.restype = (*[_POINTER] * 3, *[_INTEGER] * 5), None
    largest.argtypes, largest.restype = (*[_POINTER] * 3, *[_INTEGER] * 4), None
    found = {"product": product, "largest": largest}
    _try(found)
    _FUNCTIONS.update(found)


def use_native_routers(module: fx.GraphModule) -> None:
    """Let native functions compute what experts' numbers and weights depend on, up to the product.

    Changes a traced module in place. The product is by a weight, an input of the module.
    """
    graph = module.graph
    experts = [
        node for node in graph.nodes if node.target is torch.ops.trencadis.tiled_experts.default
    ]
    seen: set[fx.Node] = set()
    waiting = [given for node in experts for given in node.args[1:3]]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.target is torch.ops.aten.mm.default:
            _replace_product(graph, node)
            continue  # what is before it is of the layer
        if node.target is torch.ops.aten.topk.default:
            _replace_largest(graph, node)
        waiting += node.all_input_nodes
    if experts:
        graph.eliminate_dead_code()
        module.recompile()


def _replace_product(graph: fx.Graph, node: fx.Node) -> None:
    rows, turned = node.args
    weight = turned.args[0] if isinstance(turned, fx.Node) and _is_turned(turned) else None
    if not isinstance(weight, fx.Node) or node.meta["val"].dtype not in _DTYPES:
        return
    with graph.inserting_before(node):
        ours = graph.call_function(torch.ops.trencadis.plain_product.default, (rows, weight))
    ours.meta = dict(node.meta)
    node.replace_all_uses_with(ours)


def _is_turned(node: fx.Node) -> bool:
    """Whether it is a matrix with rows and columns exchanged."""
    return node.target is torch.ops.aten.t.default


def _replace_largest(graph: fx.Graph, node: fx.Node) -> None:
    rows, count, *others = node.args
    named = dict(zip(("dim", "largest"), others, strict=False)) | node.kwargs
    given = rows.meta["val"] if isinstance(rows, fx.Node) else None
    if (
        given is None
        or given.dtype is not torch.float32
        or named.get("dim", -1) not in (-1, given.dim() - 1)
        or not named.get("largest", True)
    ):
        return
    with graph.inserting_before(node):
        ours = graph.call_function(torch.ops.trencadis.largest_of_rows.default, (rows, count))
    ours.meta = dict(node.meta)
    node.replace_all_uses_with(ours)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _multiplied(_FUNCTIONS["product"], rows, weight)


def _multiplied(
    function: Callable[..., None], rows: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    rows, weight = rows.contiguous(), weight.contiguous()
    (num_rows, inputs), outputs = rows.shape, len(weight)
    out = rows.new_empty(num_rows, outputs)
    addresses = tuple(map(data_address, (rows, weight, out)))
    is_bf16 = int(rows.dtype is torch.bfloat16)
    sizes = (num_rows, outputs, inputs, is_bf16, torch.get_num_threads())
    function(*addresses, *sizes)
    if is_recording():
        note(address_of(function), (*addresses, *sizes), (out,))
    return out


def _largest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _chosen(_FUNCTIONS["largest"], rows, count)


def _chosen(
    function: Callable[..., None], rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.contiguous()
    *batch, size = rows.shape
    values = rows.new_empty(*batch, count)
    indices = rows.new_empty((*batch, count), dtype=torch.int64)
    addresses = tuple(map(data_address, (rows, values, indices)))
    sizes = (rows.numel() // size, size, count, torch.get_num_threads())
    function(*addresses, *sizes)
    if is_recording():
        note(address_of(function), (*addresses, *sizes), (values, indices))
    return values, indices


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "plain_product", _product, "CompositeExplicitAutograd"
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "largest_of_rows", _largest, "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "trencadis::plain_product",
    lambda rows, weight: rows.new_empty(rows.shape[0], weight.shape[0]),
    lib=_LIBRARY,
)


def _shapes(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*rows.shape[:-1], count)
    return rows.new_empty(shape), rows.new_empty(shape, dtype=torch.int64)


torch.library.register_fake("trencadis::largest_of_rows", _shapes, lib=_LIBRARY)


def _try(functions: Mapping[str, Callable[..., None]]) -> None:
    """Raise `NoKernel` where results are not those of PyTorch."""
    values = torch.Generator().manual_seed(1)
    for dtype in _DTYPES:
        weight = torch.randn(9, 40, generator=values).to(dtype)
        for num_rows in (1, 7):
            rows = torch.randn(num_rows, 40, generator=values).to(dtype)
            expected = rows.float() @ weight.float().t()
            product = _multiplied(functions["product"], rows, weight).float()
            error = ((product - expected).abs().max() / expected.abs().max()).item()
            if not error <= _TOLERANCE:
                raise NoKernel(f"the product of {num_rows} rows of {dtype} is off by {error:.3g}")
    numbers = torch.rand(6, 33, generator=values)
    found = _chosen(functions["largest"], numbers, 8)
    if not all(map(torch.equal, found, numbers.topk(8))):
        raise NoKernel("the largest numbers of a row are not those of topk")
