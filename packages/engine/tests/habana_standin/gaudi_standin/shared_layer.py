"""Which operations of a compiled region its compiler leaves out of the recipes.

`why_left_out` is ``is_eager_fallback_required`` of HabanaAI/gaudi-pytorch-bridge 1.19.0 (commit
5a56187), in ``python_packages/habana_frameworks/torch/dynamo/compile_backend/``: ``shared_layer.py:
269-356``, as far as public source goes. Of the operations that it does not name, those have a
kernel that are in ``scripts/hpu_op.yaml`` (``scripts/gen_op.py:2396-2490``,
``shared_layer_bindings.cpp:23-46``). Their dtypes are there, too, unless a closed library checks
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

from gaudi_standin.kernels import KERNELS, name_of, runs_on_host

aten = torch.ops.aten

_SUPPORTED = frozenset(
    {
        *("_to_copy", "_unsafe_view", "alias", "as_strided", "clamp", "clone", "copy", "copy_"),
        *(
            "cast_from_fp8",
            "cast_to_fp8_v2",
            "fp8_gemm_v2",
            "full",
            "mixture_of_experts",
            "rms_norm",
            "rotary_pos_embedding",
            "sdpa_recomp_fwd",
        ),
        *("slice", "slice_scatter", "select_scatter", "split", "squeeze", "sum", "view"),
    }
)
"""``hpu_supported_op_list``, shared_layer.py:30-119, without what inference does not use."""

_NEWER = frozenset({"block_softmax_adjustment"})
"""Kernels of later releases, see `gaudi_standin.custom_ops`."""

_LEFT_OUT = frozenset({"addcmul", "index", "nonzero", "_unique2", "bincount", "slice_backward"})
"""``hpu_fallback_op_list``, shared_layer.py:136-152, without the random number generator's."""

_NO_BOOL_SCALAR = {"full": 1, "mul": 1}
"""``bool_fallback_list``, shared_layer.py:245-249: which argument must not be a bool."""

_INDEX_PUT = (aten.index_put.default, aten.index_put_.default)

_ONLY_OUT = frozenset({"index_add"})
"""In hpu_op.yaml with an overload ``out`` alone, which is another name for the shared layer."""

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})

_DTYPES = {
    "_addmm_activation": _FLOATS,
    "_softmax": _FLOATS,
    "addmm": _FLOATS | _FP8,
    "addmv": _FLOATS,
    "embedding": (_FLOATS | _FP8 | _INTEGERS) - {torch.int64},
    "mean": _FLOATS,
    "mul": _FLOATS | _FP8 | _INTEGERS,
    "nan_to_num": frozenset({torch.bfloat16, torch.float32, torch.float64, torch.int32}),
    "nansum": (_FLOATS | _INTEGERS) - {torch.int64},
    "native_layer_norm": _FLOATS,
    "one_hot": _FLOATS | {torch.int32, torch.int64},
    "pow": _FLOATS | _INTEGERS,
    "prod": _FLOATS | _INTEGERS,
    "repeat": (_FLOATS | _FP8 | _INTEGERS) - {torch.int16, torch.uint8},
    "roll": ((_FLOATS | _FP8 | _INTEGERS) - {torch.float16, torch.int64}),
}
"""``dtypes`` in scripts/hpu_op.yaml where there is no ``op_validator`` (gen_op.py:446-449), for
Gaudi 2 and 3: ``_softmax`` 6136, ``embedding`` 2701, ``mul`` 4591, and so on. fp32 stands for fp64,
and int8 for bool (gen_op.py:235-238)."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What the backend decomposes before it asks: ``decomposition.py:38-258``, 347-371.

    Without what inference does not use.
    """
    found = get_decompositions(
        [
            *(aten.addcdiv.default, aten.addcmul.default, aten.all.default, aten.arange.default),
            *(aten.arange.start, aten.baddbmm, aten.clamp_max.default, aten.clamp_min.default),
            *(aten.detach.default, aten.fill.Scalar, aten.index_add_.default),
            *(aten.logaddexp.default, aten.logsumexp.default, aten.new_empty.default),
            *(
                aten.new_full.default,
                aten.new_ones.default,
                aten.new_zeros.default,
                aten.ones.default,
            ),
            *(aten.ones_like.default, aten.rsub.Tensor, aten.softplus.default, aten.stack.default),
            *(aten.t, aten.unbind.int, aten.zero.default, aten.zeros.default),
            *(aten.zeros_like.default, aten._safe_softmax.default),
        ]
    )
    return {**found, aten.full_like.default: _full_like}


def _full_like(like: torch.Tensor, value: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return torch.full(like.shape, value, dtype=dtype or like.dtype, device=like.device)


def why_left_out(node: fx.Node) -> str | None:
    """Why an operation runs outside of the recipes; None if it is in one."""
    name = name_of(node.target)
    reasons = {
        "the compiler leaves it out": name in _LEFT_OUT,
        # shared_layer.py:235-239
        "int64 is not permuted": name == "permute" and node.meta["val"].dtype is torch.int64,
        "a scalar is a bool": name in _NO_BOOL_SCALAR
        and isinstance(node.args[_NO_BOOL_SCALAR[name]], bool),
        # shared_layer.py:256-266
        "a scalar is NaN": any(isinstance(x, float) and math.isnan(x) for x in node.args),
        # shared_layer.py:176-205
        "an index is None": node.target in _INDEX_PUT and any(x is None for x in node.args[1]),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is not None or name in _SUPPORTED | _NEWER or node.target in _INDEX_PUT:
        return found
    if name not in KERNELS or name in _ONLY_OUT:
        return "it is not in hpu_op.yaml"
    return "it has no kernel for these arguments" if has_no_kernel(node) else _refused(node, name)


def has_no_kernel(node: fx.Node) -> bool:
    """Whether the operation runs on the host."""
    leaves = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
    return runs_on_host(node.target, leaves, lazy=True)


def _refused(node: fx.Node, name: str) -> str | None:
    given = [x.meta["val"] for x in node.args if isinstance(x, fx.Node)]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if name not in _DTYPES or not tensors:
        return None
    # Arguments are converted to a common type first; an embedding's indices are not.
    dtype = tensors[0].dtype
    if name in ("mul", "pow"):
        dtype = torch.result_type(*tensors) if len(tensors) > 1 else dtype
    return None if dtype in _DTYPES[name] else f"its kernel does not take {dtype}"
