"""A compiled region: what ``hpu_backend`` makes of a graph of operations.

Sources, in HabanaAI/gaudi-pytorch-bridge 1.19.0 under ``python_packages/habana_frameworks/torch/
dynamo/compile_backend/``: ``backends.py`` (the graph is functionalised, with mutations of inputs
kept as a ``copy_`` at its end), ``passes.py:2575-2635`` (of the operations in place,
``index_copy_`` is restored), ``partitioner.py`` and ``shared_layer.py`` (operations that are left
out of the recipes), ``passes.py:2398-2446`` (each recipe goes through TorchScript).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch._functorch.compile_utils import strip_overloads
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gaudi_standin.kernels import name_of, runs_on_host
from gaudi_standin.rules import ScriptViolation

aten = torch.ops.aten

_LEFT_OUT = {"addcmul", "index", "nonzero", "_unique2", "bincount", "slice_backward"}
"""``hpu_fallback_op_list``, shared_layer.py:136-152, without the random number generator's."""

_NO_BOOL_SCALAR = {"full": 1, "mul": 1}
"""``bool_fallback_list``, shared_layer.py:245-249: which argument must not be a bool."""

_INDEX_PUT = (aten.index_put.default, aten.index_put_.default)


@attrs.frozen(eq=False)
class Region:
    """A graph for one set of shapes.

    ``launches``: recipes and operations that one call starts. ``copied_bytes``: bytes of inputs
    that are copied whole because their update was not kept in place.
    """

    graph: fx.GraphModule
    signature: tuple[str, ...]
    launches: int
    copied_bytes: int
    left_out: Counter[str]
    on_host: Counter[str]

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Region:
        """Functionalise ``module`` for inputs on the CPU and divide it into recipes."""
        graph = _functionalised(module, inputs)
        _restore_index_copies(graph)
        operations = [node for node in graph.graph.nodes if _computes(node)]
        outside = [node for node in operations if _is_left_out(node)]
        _check_script(graph, {node.name for node in outside})
        return cls(
            graph,
            (graph.code, *(f"{tuple(x.shape)} {x.stride()} {x.dtype}" for x in inputs)),
            _num_recipes(operations, outside) + len(outside),
            sum(_size(node.args[0]) for node in operations if node.target is aten.copy_.default),
            Counter(name_of(node.target) for node in outside),
            Counter(name_of(node.target) for node in outside if _has_no_kernel(node)),
        )


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
            traced = make_fx(functional)(*fakes)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _restore_index_copies(graph: fx.GraphModule) -> None:
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
        if any(_computes(user) and _is_left_out(user) for user in node.users):
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
    recipes.graph.eliminate_dead_code()
    targets = [node.target for node in recipes.graph.nodes]
    expected = [x._schema for x in targets if isinstance(x, torch._ops.OpOverload)]
    strip_overloads(recipes)
    recipes.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        nodes = list(torch.jit.script(recipes).graph.nodes())
    calls = [x for x in nodes if not x.kind().startswith(("prim::", "aten::__getitem__"))]
    made = [torch._C.parse_schema(x.schema()) for x in calls]
    for before, after in zip(expected, made, strict=True):
        names = [[x.name for x in schema.arguments] for schema in (before, after)]
        if before.name != after.name or names[0] != names[1]:
            raise ScriptViolation(f"TorchScript makes {after} of {before}")


def _num_recipes(operations: Sequence[fx.Node], outside: Sequence[fx.Node]) -> int:
    """Runs of operations between those that are left out; the real partitioner may merge some."""
    recipes, inside = 0, False
    for node in operations:
        recipes += node not in outside and not inside
        inside = node not in outside
    return recipes


def _computes(node: fx.Node) -> bool:
    """Whether the node is an operation; a view of a tensor alone is not work."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view


def _is_left_out(node: fx.Node) -> bool:
    """``is_eager_fallback_required``, shared_layer.py:269-356."""
    name = name_of(node.target)
    if name in _LEFT_OUT or _has_no_kernel(node):
        return True
    if node.target in _INDEX_PUT and any(index is None for index in node.args[1]):
        return True  # index_put_support_check, shared_layer.py:176-205
    if name in _NO_BOOL_SCALAR and isinstance(node.args[_NO_BOOL_SCALAR[name]], bool):
        return True
    return any(
        isinstance(x, float) and math.isnan(x) for x in node.args
    )  # NaN, shared_layer.py:256-266


def _has_no_kernel(node: fx.Node) -> bool:
    leaves = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
    return runs_on_host(node.target, leaves, lazy=True)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.itemsize)
