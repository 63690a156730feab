"""The figures of accelerators that the cost, memory and heat models use.

Peak figures are the vendors'. Figures that no vendor publishes are published measurements or
assumptions; a comment gives the source of each.

To add an accelerator: a `Hardware` value here, in `HARDWARE`, and its `Board` in the scheduler's
heat model.
"""

from __future__ import annotations

import attrs

from trencadis.engine.errors import ConfigError
from trencadis.engine.validators import integer, number
from trencadis.scheduler.thermal import BOARDS, Board

_GIB = 1 << 30
_MIB = 1 << 20

# The two shares that no source gives. Fitted together, once, to the eight FP8 rows of Llama 2 7B
# that optimum-habana's tests hold for Gaudi 2 and Gaudi 3 (`benchmarks/gaudi_published.py --fit`);
# assumed of the other accelerators as well.
_COMPUTE_EFFICIENCY = 0.67
_HBM_EFFICIENCY = 0.75

# Assumed, a call each: a replay, or a program of a compiled model; a copy between host and device,
# its wait included.
_REPLAY_S = 50e-6
_COPY_S = 10e-6

# The one constant of collectives that no source gives: what one takes without its bytes. Fitted to
# nine rows of Llama 2 70B and Llama 3.1 70B (`benchmarks/gaudi_published.py --fit`), in which links
# reach their peak; assumed of the other accelerators as well.
_COLLECTIVE_S = 60e-6

# `EngineCore.step` outside the model's forward pass: scheduler, input, reporting. CPU time of one
# core of an AMD EPYC, 2026-11-21: 0.4 ms for 1 sequence, 1.0 for 32, 2.1 for 128, 8.5 for 512.
_STEP_S = 0.4e-3
_SEQUENCE_S = 15e-6


@attrs.frozen(kw_only=True)
class Hardware:
    """One accelerator and its host.

    - ``flops_per_s``, ``fp8_flops_per_s``: peaks of dense matrix products, with operands of two
      bytes and of one. ``product_efficiency`` is the share of them that the largest products
      reach, ``compute_efficiency`` the share of that which the products of a forward pass reach.
      A product computes a multiple of ``product_rows`` rows.
    - ``hbm_bytes``: free memory of the empty device. ``hbm_bytes_per_s``: its peak bandwidth, of
      which a forward pass reaches ``hbm_efficiency``.
    - ``link_bytes_per_s``: achieved bandwidth of a copy between host and device, one direction.
      ``copy_s``: seconds of such a copy without its bytes.
    - ``peer_bytes_per_s``: bandwidth from a device to all others of its machine, one direction.
      ``num_wired_peers``: over how many of them its links are divided; 1 where a switch connects
      all. ``collective_s``: seconds of a sum over the ranks without its bytes.
    - A graph takes ``graph_bytes``, and with ``graph_keeps_activations`` also the activations of
      its forward pass; without, all graphs share one pool.
    - Seconds of the host: ``launch_s`` per launched operation without a graph, ``replay_s`` per
      graph replay, ``compile_s`` for the first forward pass of a bucket, ``capture_s`` per graph,
      ``step_s`` per step and ``sequence_s`` per sequence in it for everything else.
      ``scores_shared``: how the device's attention reads shared blocks, see ``Attention``.
      ``launches_overlap``: the device computes while the host launches; otherwise it starts when
      all operations of a forward pass are collected.
    """

    name: str
    board: Board
    flops_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    fp8_flops_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    product_efficiency: float = attrs.field(validator=number(0, 1, exclusive_low=True))
    product_rows: int = attrs.field(validator=integer(1))
    hbm_bytes: int = attrs.field(validator=number(0, exclusive_low=True))
    hbm_bytes_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    link_bytes_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    peer_bytes_per_s: float = attrs.field(validator=number(0, exclusive_low=True))
    num_wired_peers: int = attrs.field(validator=integer(1))
    launch_s: float = attrs.field(validator=number(0))
    launches_overlap: bool
    compile_s: float = attrs.field(validator=number(0))
    capture_s: float = attrs.field(validator=number(0))
    graph_bytes: int = attrs.field(validator=number(0))
    graph_keeps_activations: bool
    scores_shared: bool
    compute_efficiency: float = attrs.field(
        default=_COMPUTE_EFFICIENCY, validator=number(0, 1, exclusive_low=True)
    )
    hbm_efficiency: float = attrs.field(
        default=_HBM_EFFICIENCY, validator=number(0, 1, exclusive_low=True)
    )
    replay_s: float = attrs.field(default=_REPLAY_S, validator=number(0))
    copy_s: float = attrs.field(default=_COPY_S, validator=number(0))
    collective_s: float = attrs.field(default=_COLLECTIVE_S, validator=number(0))
    step_s: float = attrs.field(default=_STEP_S, validator=number(0))
    sequence_s: float = attrs.field(default=_SEQUENCE_S, validator=number(0))

    def product_flops_per_s(self, element_bytes: int) -> float:
        """Achieved operations per second of a large product.

        Operands of four bytes are computed at the rate of two: vendors publish too few figures.
        """
        peak = self.fp8_flops_per_s if element_bytes == 1 else self.flops_per_s
        return peak * self.product_efficiency * self.compute_efficiency

    def sum_s(self, num_ranks: int, size: int) -> float:
        """Seconds of a sum of ``size`` bytes over the devices of ``num_ranks`` ranks.

        Each device gets its part of all others, adds up, and sends the result to all others.
        """
        if num_ranks == 1:
            return 0.0
        peers = num_ranks - 1
        bytes_per_s = self.peer_bytes_per_s * min(1.0, peers / self.num_wired_peers)
        return self.collective_s + 2 * size * peers / num_ranks / bytes_per_s

    @property
    def achieved_bytes_per_s(self) -> float:
        """Bytes of device memory that a forward pass reads per second."""
        return self.hbm_bytes_per_s * self.hbm_efficiency


# Compiling and capturing on Gaudi: the log of seed 000 (Llama 3 8B on Gaudi 2) runs 72 buckets for
# the first time in 28 s and captures 63 graphs in 21 s; a graph occupies its activations there.
_GAUDI_COMPILE_S = 28 / 72
_GAUDI_CAPTURE_S = 21 / 63

# Largest products, measured: table "Maximum Achievable Matmul FLOPS" of stas00/ml-engineering
# (compute/accelerator), in bf16. Its FP8 table has no Gaudi; the same share is assumed there.
_GAUDI2_PRODUCT = 429.3 / 432
_GAUDI3_PRODUCT = 1288.8 / 1835
_H100_PRODUCT = 794.5 / 989.4

# Peak compute and bandwidth of both, PCIe, TDP: Kaplan, "Intel Gaudi 3 AI Accelerator", Hot Chips
# 2024, table of the product generations, which gives PCIe in both directions together. Gaudi 3
# has one peak for FP8 and bf16. Its boards run at 1.6 instead of 1.75 GHz (stas00/ml-engineering),
# which `product_efficiency` contains.
_GAUDI2 = Hardware(
    name="gaudi2",
    board=BOARDS["gaudi2"],
    flops_per_s=432e12,
    fp8_flops_per_s=865e12,
    product_efficiency=_GAUDI2_PRODUCT,
    # The matrix engines work as 256 x 256, 128 x 512 or 512 x 128 (rows x columns), as an engineer
    # of Intel says in forum.habana.ai/t/1272; the compiler takes the one with the fewest rows here.
    product_rows=128,
    # The log of seed 000 has 94.62 of the 96 GiB.
    hbm_bytes=int(94.62 * _GIB),
    hbm_bytes_per_s=2.46e12,
    # 32 GB/s; the same share of it as below.
    link_bytes_per_s=20e9,
    # 21 ports of 100 Gb/s, 3 to each of the 7 others (docs.habana.ai, Network_Configuration).
    peer_bytes_per_s=262.5e9,
    num_wired_peers=7,
    # Assumed: twice that of CUDA, as a forward without a graph is hashed operation by operation to
    # find its recipe (Gaudi documentation, "Run Inference Using HPU Graphs").
    launch_s=10e-6,
    # Lazy mode, the one with graphs, collects operations until the end of the forward pass.
    launches_overlap=False,
    compile_s=_GAUDI_COMPILE_S,
    capture_s=_GAUDI_CAPTURE_S,
    graph_bytes=0,
    graph_keeps_activations=True,
    scores_shared=True,
)
_GAUDI3 = attrs.evolve(
    _GAUDI2,
    name="gaudi3",
    board=BOARDS["gaudi3"],
    flops_per_s=1835e12,
    fp8_flops_per_s=1835e12,
    product_efficiency=_GAUDI3_PRODUCT,
    # Assumed: of 128 GiB as much is free as of Gaudi 2's.
    hbm_bytes=int(128 * _GIB * 94.62 / 96),
    hbm_bytes_per_s=3.67e12,
    # 64 GB/s, of which about 40 are sustained (seed 003, section on swap).
    link_bytes_per_s=40e9,
    # As above, with 200 Gb/s.
    peer_bytes_per_s=525e9,
)
# Compute, bandwidth, PCIe, power: NVIDIA H100 white paper as quoted by glennklockwood.com
# (garden/processors/h100), dense figures.
_H100 = Hardware(
    name="h100",
    board=BOARDS["h100"],
    flops_per_s=989.4e12,
    fp8_flops_per_s=1978.9e12,
    product_efficiency=_H100_PRODUCT,
    # Rows of one warp-group product (PTX ISA, wgmma: m64).
    product_rows=64,
    # What nvidia-smi shows of an SXM5 board (README of digitalocean/do-dcgm-exporter).
    hbm_bytes=81559 * _MIB,
    hbm_bytes_per_s=3.35e12,
    link_bytes_per_s=40e9,
    # NVLink through switches: 900 GB/s in both directions together (the same white paper).
    peer_bytes_per_s=450e9,
    num_wired_peers=1,
    # 4 to 6 µs for a launch ("pegainfer (3): From Launch Overhead to CUDA Graph", susun-blog.com).
    launch_s=5e-6,
    launches_overlap=True,
    # Kernels exist already for shapes that have not occurred before.
    compile_s=0.0,
    # 0.05 to 0.06 s and 24 to 28 MiB a graph, in a pool that all share (the log in pull request
    # 22897 of vllm-project/vllm).
    capture_s=0.056,
    graph_bytes=26 * _MIB,
    graph_keeps_activations=False,
    scores_shared=False,
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
