"""How often a program reads its logits, as a compiler reads them that fuses what it can.

An operation that computes each value of one value of each input is part of the operation that reads
it (``FUSER`` of Intel's graph compiler; https://docs.habana.ai/en/latest/Gaudi_Overview/
Intel_Gaudi_Software_Suite.html). Others (sorts, sums, maxima, gathers) read their inputs from
memory, where the inputs of the program and the results of other such operations are. Of a view
only what is in it is read, and a gather reads what it gathers.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
_SHIFTS = (aten.__rshift__, aten.__irshift__, aten.__and__)
_MADE = (aten.full_like, aten.ones_like, aten.zeros_like)
_GATHERS = (aten.gather.default, aten.index_select.default)


def logit_reads(graph: fx.GraphModule, logits: torch.Size) -> float:
    """The bytes that ``graph`` reads, divided by those of fp32 logits of that shape."""
    graph.graph.eliminate_dead_code()
    read = 0
    for node in graph.graph.nodes:
        if node.op == "output" or _is_reader(node):
            sources: dict[fx.Node, int] = {}
            for value in node.all_input_nodes:
                # Of what the program returns, that is read which is computed with the result.
                if node.op != "output" or _is_fused(value):
                    _find_sources(value, _bytes(value), sources)
            found = sum(size for source, size in sources.items() if not _is_fused(source))
            read += min(found, _bytes(node)) if node.target in _GATHERS else found
    return read / (logits.numel() * 4)


def _find_sources(node: fx.Node, most: int, found: dict[fx.Node, int]) -> None:
    """What is read of memory for ``node``: at most ``most`` bytes of each source."""
    most = min(most, _bytes(node))
    if most <= found.get(node, 0):
        return
    found[node] = most
    made = getattr(node.target, "overloadpacket", None) in _MADE
    for value in node.all_input_nodes if _is_fused(node) and not made else ():
        # A conversion reads as many elements as it makes, of another size.
        narrow = most * value.meta["val"].itemsize // node.meta["val"].itemsize
        _find_sources(value, narrow, found)


def _is_reader(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not _is_fused(node)


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.is_view:
        return True
    # Operations in place have no tag of their own.
    packet = getattr(aten, target._schema.name.removeprefix("aten::").rstrip("_"), None)
    packet = target.overloadpacket if packet is None else packet
    if packet in (aten._to_copy, *_MADE, *_SHIFTS):
        return True
    return any(torch.Tag.pointwise in getattr(packet, x).tags for x in packet.overloads())


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return 0
    return value.numel() * value.itemsize
