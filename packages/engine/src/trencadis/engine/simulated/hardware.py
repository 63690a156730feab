"""The figures of accelerators that the cost, memory and heat models use.

Peak figures are the vendors'. Figures that no vendor publishes are published measurements or
assumptions; a comment gives the source of each.

To add an accelerator: a `Hardware` value here, in `HARDWARE`, and its `Board` in the scheduler's
heat model.
"""

from __future__ import annotations

import attrs

from trencadis.engine.errors import ConfigError
from trencadis.engine.validators import number
from trencadis.scheduler.thermal import BOARDS, Board

_GIB = 1 << 30
_MIB = 1 << 20


@attrs.frozen(kw_only=True)
class Hardware:
    """One accelerator.

    ``flops_per_s`` and ``hbm_bytes_per_s`` are peaks in dense bf16; a forward pass achieves the
    fractions ``compute_efficiency`` and ``hbm_efficiency`` of them. ``hbm_bytes`` is the free
    memory of the empty device. ``link_bytes_per_s`` is the achieved bandwidth of a copy between
    host and device, one direction.

    Seconds of the host: ``launch_s`` per launched operation without a graph, ``replay_s`` per
    graph replay, ``compile_s`` for the first forward pass of a bucket, ``capture_s`` per graph,
    ``sample_s`` per step for sampling. A graph takes ``graph_bytes``, and with
    ``graph_keeps_activations`` also the activations of its forward pass; without, all graphs share
    one pool.
    """

    name: str
    board: Board
    flops_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    hbm_bytes: int = attrs.field(validator=number(0, exclusive_low=True))
    hbm_bytes_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    link_bytes_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    launch_s: float = attrs.field(validator=number(0))
    compile_s: float = attrs.field(validator=number(0))
    capture_s: float = attrs.field(validator=number(0))
    graph_bytes: int = attrs.field(validator=number(0))
    graph_keeps_activations: bool
    compute_efficiency: float = attrs.field(default=0.6, validator=number(0, 1, exclusive_low=True))
    hbm_efficiency: float = attrs.field(default=0.9, validator=number(0, 1, exclusive_low=True))
    replay_s: float = attrs.field(default=50e-6, validator=number(0))
    sample_s: float = attrs.field(default=50e-6, validator=number(0))


# Shares of the peak (defaults above). Compute: 260 of Gaudi 2's 432 TFLOP/s in the training of
# MPT-7B ("LLM Training and Inference with Intel Gaudi 2 AI Accelerators", Databricks, 2024);
# assumed of the others as well, whose large products alone reach more. Bandwidth: assumed, a
# forward being long contiguous reads. Replay and sampling: assumed, a call each.

# Compiling and capturing on Gaudi: the log of seed 000 (Llama 3 8B on Gaudi 2) runs 72 buckets for
# the first time in 28 s and captures 63 graphs in 21 s; a graph occupies its activations there.
_GAUDI_COMPILE_S = 28 / 72
_GAUDI_CAPTURE_S = 21 / 63

# Peak compute and bandwidth of both, PCIe, TDP: Kaplan, "Intel Gaudi 3 AI Accelerator", Hot Chips
# 2024, table of the product generations, which gives PCIe in both directions together.
_GAUDI2 = Hardware(
    name="gaudi2",
    board=BOARDS["gaudi2"],
    flops_per_s=432e12,
    # The log of seed 000 has 94.62 of the 96 GiB.
    hbm_bytes=int(94.62 * _GIB),
    hbm_bytes_per_s=2.46e12,
    # 32 GB/s; the same share of it as below.
    link_bytes_per_s=20e9,
    # Assumed: twice that of CUDA, as a forward without a graph is hashed operation by operation to
    # find its recipe (Gaudi documentation, "Run Inference Using HPU Graphs").
    launch_s=10e-6,
    compile_s=_GAUDI_COMPILE_S,
    capture_s=_GAUDI_CAPTURE_S,
    graph_bytes=0,
    graph_keeps_activations=True,
)
_GAUDI3 = attrs.evolve(
    _GAUDI2,
    name="gaudi3",
    board=BOARDS["gaudi3"],
    flops_per_s=1835e12,
    # Assumed: of 128 GiB as much is free as of Gaudi 2's.
    hbm_bytes=int(128 * _GIB * 94.62 / 96),
    hbm_bytes_per_s=3.67e12,
    # 64 GB/s, of which about 40 are sustained (seed 003, section on swap).
    link_bytes_per_s=40e9,
)
# Compute, bandwidth, PCIe, power: NVIDIA H100 white paper as quoted by glennklockwood.com
# (garden/processors/h100), dense figures.
_H100 = Hardware(
    name="h100",
    board=BOARDS["h100"],
    flops_per_s=989.4e12,
    # What nvidia-smi shows of an SXM5 board (README of digitalocean/do-dcgm-exporter).
    hbm_bytes=81559 * _MIB,
    hbm_bytes_per_s=3.35e12,
    link_bytes_per_s=40e9,
    # 4 to 6 µs for a launch ("pegainfer (3): From Launch Overhead to CUDA Graph", susun-blog.com).
    launch_s=5e-6,
    # Kernels of a shape that was not met before are there already.
    compile_s=0.0,
    # 0.05 to 0.06 s and 24 to 28 MiB a graph, in a pool that all share (the log in pull request
    # 22897 of vllm-project/vllm).
    capture_s=0.056,
    graph_bytes=26 * _MIB,
    graph_keeps_activations=False,
)
_H200 = attrs.evolve(
    _H100,
    name="h200",
    board=BOARDS["h200"],
    # What nvidia-smi shows of an SXM board.
    hbm_bytes=143771 * _MIB,
    # NVIDIA's announcement of 2023-11-13; the chip is the H100's.
    hbm_bytes_per_s=4.8e12,
)

HARDWARE = {hardware.name: hardware for hardware in (_GAUDI2, _GAUDI3, _H100, _H200)}
"""The accelerators by name."""


def find_hardware(name: str) -> Hardware:
    """The accelerator called ``name``. Raises `ConfigError`, which lists the known names."""
    if name not in HARDWARE:
        raise ConfigError(f"device must be one of {', '.join(HARDWARE)}, got {name!r}")
    return HARDWARE[name]
