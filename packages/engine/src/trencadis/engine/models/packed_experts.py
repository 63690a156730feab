"""Fused experts of a layer with packed weights: checkpoints of FP8, and rounding at load.

transformers keeps the matrices of all experts in two parameters. In their place come steps of FP8
or int8, with scales of outputs or groups beside them. Not for experts with biases, with matrices
the other way round or without a gate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from trencadis.engine.errors import ModelError
from trencadis.engine.models.layer_spec import is_replaceable
from trencadis.engine.models.packed_weight import PackedWeight, rounded_fp8

MATRICES = ("gate_up_proj", "down_proj")
"""``[experts, outputs, inputs]``. The outputs of the first are those of gates, then the others."""

_NAME = re.compile(r"^(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
"""Where the weight of an expert comes, by its names in checkpoints (Mixtral's are the short ones).
"""


def experts_in(model: nn.Module) -> list[nn.Module]:
    """The modules of experts whose weights are packed."""
    return [module for module in model.modules() if are_packed(module)]


def are_packed(module: nn.Module) -> bool:
    """Whether a module has experts with packed weights."""
    return is_replaceable(module) and scales_of(MATRICES[0]) in module._buffers


def scales_of(matrix: str) -> str:
    """The name of the scales of one of `MATRICES`, ``[experts, outputs, groups]``."""
    return f"{matrix}_scales"


def have_plain_weights(experts: Any) -> bool:
    """Whether they are gated products without more, with gate and up one after the other."""
    return (
        is_replaceable(experts)
        and experts.has_gate
        and experts.is_concatenated
        and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
    )


def is_gated_silu(experts: Any) -> bool:
    """Whether they have plain weights, and their gates are SiLU and nothing more."""
    gate = getattr(type(experts), "_apply_gate", None)
    activation = getattr(experts, "act_fn", None)
    return (
        have_plain_weights(experts)
        and (activation is F.silu or type(activation) in (nn.SiLU, type(ACT2FN["silu"])))
        and getattr(gate, "__name__", "") == "_default_apply_gate"
    )


def packed_weight(experts: Any, matrix: str, number: int) -> PackedWeight:
    """The weight of one expert."""
    return PackedWeight(
        getattr(experts, matrix)[number], getattr(experts, scales_of(matrix))[number]
    )


def put_weights(experts: nn.Module, matrix: str, weights: Iterable[PackedWeight]) -> None:
    """Replace a matrix of all experts by packed weights, one of each."""
    made = list(weights)
    for name in (matrix, scales_of(matrix)):
        if name in experts._parameters:
            del experts._parameters[name]
        experts._buffers.pop(name, None)
    for name, tensors in (
        (matrix, [each.steps for each in made]),
        (scales_of(matrix), [each.scales.float() for each in made]),
    ):
        experts.register_buffer(name, torch.stack(tensors), persistent=False)


def round_experts(
    modules: Iterable[nn.Module], rounded: Callable[[torch.Tensor], PackedWeight] = rounded_fp8
) -> None:
    """Round the experts among modules, each matrix by ``rounded``: with a scale for each output."""
    for experts in modules:
        if not have_plain_weights(experts) or are_packed(experts):
            continue
        for matrix in MATRICES:
            weights = getattr(experts, matrix).detach()
            put_weights(experts, matrix, map(rounded, weights))


def expand_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Give packed experts their weights in ``dtype`` for good, one layer after the other."""
    for experts in experts_in(model):
        for matrix in MATRICES:
            numbers = range(len(getattr(experts, matrix)))
            whole = torch.stack(
                [packed_weight(experts, matrix, n).unpacked(dtype) for n in numbers]
            )
            del experts._buffers[matrix], experts._buffers[scales_of(matrix)]
            setattr(experts, matrix, nn.Parameter(whole, requires_grad=False))


class AwaitedExperts(nn.Module):
    """Takes the place of a layer's experts while transformers loads the other weights.

    ``layers``: for each expert the checkpoint's names of gate, up and down.
    """

    def __init__(self, experts: nn.Module, layers: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self._experts = [experts]  # not a module of this one
        self.layers = layers

    def filled(self, read: Callable[[str, tuple[int, int]], PackedWeight]) -> nn.Module:
        """The experts; ``read`` gives the weight of a name, of outputs and inputs."""
        (experts,) = self._experts
        shapes = {matrix: tuple(getattr(experts, matrix).shape[1:]) for matrix in MATRICES}
        (both, inputs), down = shapes["gate_up_proj"], shapes["down_proj"]
        half = both // 2, inputs

        def gate_up(names: Sequence[str]) -> PackedWeight:
            gate, up = (read(name, half) for name in names[:2])
            return PackedWeight(
                torch.cat((gate.steps, up.steps)), torch.cat((gate.scales, up.scales))
            )

        put_weights(experts, "gate_up_proj", map(gate_up, self.layers))
        put_weights(experts, "down_proj", (read(names[2], down) for names in self.layers))
        return experts


def await_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Put `AwaitedExperts` into a model for packed layers of these names; returns which they are.

    Raises `ModelError` for a layer that lacks the weights of an expert.
    """
    found: dict[str, dict[tuple[int, int], str]] = {}
    for name in names:
        if (place := _NAME.match(name)) is not None:
            path = place[1].replace(".block_sparse_moe.", ".mlp.")
            found.setdefault(path, {})[int(place[2]), _PARTS[place[3]]] = name
    known = dict(model.named_modules())
    taken: set[str] = set()
    for path, parts in found.items():
        experts: Any = known.get(path)
        if experts is None or not have_plain_weights(experts):
            continue
        wanted = [(number, part) for number in range(experts.num_experts) for part in range(3)]
        if missing := [each for each in wanted if each not in parts]:
            raise ModelError(
                f"{path} has no packed weights of {len({n for n, _ in missing})} of "
                f"{experts.num_experts} experts: give the whole checkpoint"
            )
        layers = [
            [parts[number, part] for part in range(3)] for number in range(experts.num_experts)
        ]
        model.set_submodule(path, AwaitedExperts(experts, layers))
        taken.update(parts.values())
    return taken


def unexpected_keys(names: Iterable[str]) -> set[str]:
    """Patterns of what transformers would make of the checkpoint's names of experts."""
    paths: Mapping[str, None] = dict.fromkeys(place[1] for n in names if (place := _NAME.match(n)))
    return {rf"^{re.escape(path.replace('.block_sparse_moe.', '.mlp.'))}\." for path in paths} | {
        rf"^{re.escape(path)}\." for path in paths
    }
