"""The CPU: PyTorch eager with weights packed for oneDNN."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch
from torch import nn

from trencadis.engine.devices.device import Device

logger = logging.getLogger("trencadis.engine")

_CGROUP = Path("/sys/fs/cgroup")


class CPUDevice(Device):
    """Runs everywhere. Memory is the host's, within the limit of its control group."""

    name = "cpu"
    torch_device = torch.device("cpu")
    preferred_dtype = torch.bfloat16
    default_kv_cache_memory = 1 << 30

    def free_memory(self) -> int:
        available = int(psutil.virtual_memory().available)
        limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
        return available

    def total_memory(self) -> int:
        total = int(psutil.virtual_memory().total)
        limit = _cgroup_bytes("memory.max")
        return total if limit is None else min(total, limit)

    def synchronize(self) -> None:
        """Eager CPU operations are done when they return."""

    def optimize(self, model: nn.Module) -> None:
        """Replace bf16 linear layers by ones whose weights lie in oneDNN's blocked layout.

        A decode step reads every weight once, and the plain layout is repacked on each call:
        packed once, a batch of 1 to 32 rows runs 1.3 to 2 times as fast (AMD Zen 4, 2 cores).
        fp32 keeps the plain layout, so that its results are those of the plain model.
        """
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            logger.info("oneDNN is not available: linear weights stay in the plain layout")
            return
        for name, parent, layer in _linear_layers(model):
            if layer.weight.dtype is torch.bfloat16:
                setattr(parent, name, PackedLinear(layer))


class PackedLinear(nn.Module):
    """A linear layer over a weight in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return out


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Module, nn.Linear]]:
    return [
        (name, parent, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def _cgroup_bytes(name: str) -> int | None:
    """A memory figure of the control group, None where there is none or no limit is set."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
