"""A compiled region: what ``hpu_backend`` makes of a graph of operations.

Sources, in HabanaAI/gaudi-pytorch-bridge 1.19.0 under ``python_packages/habana_frameworks/torch/
dynamo/compile_backend/``: ``backends.py`` (the graph is functionalised, with mutations of inputs
kept as a ``copy_`` at its end), ``passes.py:2575-2635`` (of the operations in place,
``index_copy_`` is restored), ``partitioner.py`` (the recipes, between what `shared_layer` leaves
out), ``passes.py:2398-2446`` (each recipe goes through TorchScript).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch._functorch.compile_utils import strip_overloads
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gaudi_standin.collectives import WAIT, is_collective
from gaudi_standin.kernels import index_copy_, name_of
from gaudi_standin.program import garbage_like
from gaudi_standin.rules import PlacementViolation, ScriptViolation
from gaudi_standin.shared_layer import decompositions, has_no_kernel, why_left_out
from gaudi_standin.traffic import Traffic, traffic_of_graph
from gaudi_standin.tree import map_only

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Region:
    """A graph for one set of shapes.

    ``partitions``: recipes that one call starts. ``copied_bytes``: bytes of inputs that are copied
    whole because their update was not kept in place.
    """

    graph: fx.GraphModule
    signature: tuple[str, ...]
    partitions: int
    copied_bytes: int
    traffic: Traffic
    left_out: Counter[str]
    on_host: Counter[str]
    collectives: int

    @property
    def launches(self) -> int:
        """Recipes, and operations and collective calls outside of them."""
        return self.partitions + self.left_out.total() + self.collectives

    def garbage(
        self, inputs: Sequence[torch.Tensor], place: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """What a call returns that starts no recipe. ``place`` makes a tensor of the device."""
        given = dict(zip(self.graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
        (output,) = self.graph.graph.find_nodes(op="output")

        def result(node: fx.Node) -> torch.Tensor:
            return given[node] if node in given else place(garbage_like(node.meta["val"]))

        return map_only(fx.Node, result, output.args[0])

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Region:
        """Functionalise ``module`` for inputs on the CPU and divide it into recipes.

        Raises `PlacementViolation` for an operation that does not belong in a recipe, unless the
        bridge's ``PT_HPU_USE_EAGER_FALLBACK`` is 1: then it is counted.
        """
        graph = _functionalised(module, inputs)
        between = [node for node in _operations(graph) if is_collective(node.target)]
        others = [node for node in _operations(graph) if node not in between]
        reasons = {node: why_left_out(node) for node in others}
        outside = [node for node, reason in reasons.items() if reason is not None]
        if outside and os.environ.get("PT_HPU_USE_EAGER_FALLBACK", "0") != "1":
            raise PlacementViolation(
                "outside of recipes: "
                + ", ".join(f"{node.target} ({reasons[node]})" for node in outside)
            )
        _restore_index_copies(graph, outside)
        outside_recipes = [*outside, *between]
        operations = [
            node for node in _operations(graph) if _computes(node) or node in outside_recipes
        ]
        _check_script(graph, {node.name for node in outside_recipes})
        region = cls(
            graph,
            (graph.code, *(f"{tuple(x.shape)} {x.stride()} {x.dtype}" for x in inputs)),
            _num_recipes(operations, outside_recipes),
            sum(_size(node.args[0]) for node in operations if node.target is aten.copy_.default),
            traffic_of_graph(graph.graph),
            Counter(name_of(node.target) for node in outside),
            Counter(name_of(node.target) for node in outside if has_no_kernel(node)),
            sum(node.target is not WAIT for node in between),
        )
        for node in graph.graph.find_nodes(op="call_function", target=aten.index_copy_.default):
            if node.meta["val"].itemsize == 1:
                node.target = index_copy_
        graph.recompile()
        return region


def _functionalised(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    on_cpu = copy.deepcopy(module)
    for node in on_cpu.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", torch.device("cpu"))
        node.args = tuple(torch.device("cpu") if _is_device(x) else x for x in node.args)
    on_cpu.recompile()
    functional = torch.func.functionalize(on_cpu, remove="mutations")
    with torch.inference_mode(mode=False), torch.no_grad():
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(x.detach()) for x in inputs]
        with mode:
            traced = make_fx(functional, decomposition_table=decompositions())(*fakes)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _restore_index_copies(graph: fx.GraphModule, outside: Sequence[fx.Node]) -> None:
    """Compute ``index_copy`` in place where its result is copied back to an input.

    Only if the input has no other user, and no operation outside of the recipes reads the result
    (``pass_reinplace_index_copy_ops``, passes.py:2595-2625).
    """
    for node in list(graph.graph.nodes):
        if node.target is not aten.index_copy.default:
            continue
        target = node.args[0]
        copies = [user for user in target.users if user.target is aten.copy_.default]
        if target.op != "placeholder" or len(target.users) != 2 or not copies:
            continue
        if any(user in outside for user in node.users):
            continue
        node.target = aten.index_copy_.default
        copies[0].replace_all_uses_with(node)
        graph.graph.erase_node(copies[0])
    graph.recompile()


def _check_script(graph: fx.GraphModule, outside: set[str]) -> None:
    """Raise `ScriptViolation` where TorchScript makes another operation of one in a recipe.

    The bridge strips the names of overloads and scripts the rest, so that TorchScript chooses the
    overload by the types of the arguments. It has none for a dtype: ``view(x, torch.int32)`` is
    ``view(x, [3])``, a reshape.
    """
    recipes = copy.deepcopy(graph)
    for node in [x for x in recipes.graph.nodes if x.name in outside]:
        # What is left out is not scripted. The rest needs a value in its place.
        with recipes.graph.inserting_before(node):
            node.replace_all_uses_with(recipes.graph.placeholder(f"{node.name}_made"))
        recipes.graph.erase_node(node)
    recipes.graph.eliminate_dead_code()
    expected = [(node.target._schema, _given(node)) for node in _operations(recipes)]
    strip_overloads(recipes)
    recipes.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        nodes = list(torch.jit.script(recipes).graph.nodes())
    calls = [x for x in nodes if not x.kind().startswith(("prim::", "aten::__getitem__"))]
    made = [torch._C.parse_schema(x.schema()) for x in calls]
    for (before, given), after in zip(expected, made, strict=True):
        # Arguments that were not given may be another overload's: ``arange`` without a step.
        if before.name != after.name or not given <= {x.name for x in after.arguments}:
            raise ScriptViolation(f"TorchScript makes {after} of {before}")


def _given(node: fx.Node) -> set[str]:
    """The names of the arguments that an operation is called with."""
    names = [x.name for x in node.target._schema.arguments]  # type: ignore[union-attr]
    return {*names[: len(node.args)], *node.kwargs}


def _num_recipes(operations: Sequence[fx.Node], outside: Sequence[fx.Node]) -> int:
    """Runs of operations between those that are left out; the real partitioner may merge some."""
    recipes, inside = 0, False
    for node in operations:
        recipes += node not in outside and not inside
        inside = node not in outside
    return recipes


def _operations(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def _computes(node: fx.Node) -> bool:
    """Whether the node is an operation; a view of a tensor alone is not work."""
    return not node.target.is_view  # type: ignore[union-attr]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.itemsize)
