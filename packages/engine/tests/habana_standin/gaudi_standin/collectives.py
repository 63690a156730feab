"""Collective calls between processes with a device each, computed by gloo on the CPU's values.

Rules of HabanaAI/gaudi-pytorch-bridge 1.19.0: in eager mode each is an operation of its own, also
of a compiled region, whose partitions lie before and behind it (``tests/pytest_working/compile/
test_hpu_propose_partitions.py:225-260``). In lazy mode they are collected with
``PT_HPU_ENABLE_LAZY_COLLECTIVES`` alone (``distributed/hccl/__init__.py:12-22``), and whoever waits
for one ends a recipe (``process_group_lazy_hccl.cpp:292-297``); otherwise each executes what is
collected first, and a capture cannot have any (``ProcessGroupHCCL.cpp:464-472``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operations

_functional: Any = torch.ops._c10d_functional

WAIT = _functional.wait_tensor.default

CALLS = frozenset({_functional.all_reduce.default, _functional.all_gather_into_tensor.default})
"""Those that the stand-in knows."""


def is_collective(func: Any) -> bool:
    """Whether it is a call between processes, or waits for one."""
    return func in CALLS or func is WAIT


def are_collected() -> bool:
    """Whether lazy mode collects them like other operations."""
    return os.environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "").lower() in ("true", "1")


@functools.cache
def computed(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, which has its result when it returns."""
    return lambda *args: WAIT(func(*args))
