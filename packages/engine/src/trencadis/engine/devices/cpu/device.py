"""The CPU device: PyTorch, eager or compiled, with bf16 weights in a kernel's own order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import torch
from torch import fx, nn

from trencadis.engine.devices.cpu.adapter_products import load_adapter_kernel
from trencadis.engine.devices.cpu.attention import CPUAttention, attention_kernel_of
from trencadis.engine.devices.cpu.expert_products import TiledExperts, load_expert_kernel
from trencadis.engine.devices.cpu.huge_pages import move_to_huge_pages
from trencadis.engine.devices.cpu.mamba_mixer import MambaMixer
from trencadis.engine.devices.cpu.native_calls import Replayer
from trencadis.engine.devices.cpu.native_kernel import NoKernel
from trencadis.engine.devices.cpu.numa import node_cores, rank_cores
from trencadis.engine.devices.cpu.onednn_linear import OneDNNLinear, onednn_packs_bf16
from trencadis.engine.devices.cpu.rank_sums import RankSums
from trencadis.engine.devices.cpu.recorded_layers import RecordedLayers
from trencadis.engine.devices.cpu.router_products import load_router_functions, use_native_routers
from trencadis.engine.devices.cpu.threads import (
    AdaptiveThreads,
    default_num_threads,
    read_core_times,
)
from trencadis.engine.devices.cpu.tiled_linear import (
    ByteLinear,
    IntegerLinear,
    TiledEmbedding,
    TiledLinear,
    group_linears,
    load_byte_kernel,
    load_linear_kernel,
)
from trencadis.engine.devices.device import Device, PendingCopy
from trencadis.engine.devices.inductor import InductorPrograms, cpp_compiler_missing
from trencadis.engine.models.adapter_operator import AdapterKernel
from trencadis.engine.models.layer_spec import LayerSpec, specs_of
from trencadis.engine.models.packed_experts import expand_experts
from trencadis.engine.models.packed_weight import (
    QuantizedEmbedding,
    QuantizedLinear,
    WeightFormat,
    WeightUse,
)
from trencadis.engine.models.paged_context import Attention, LayerRun
from trencadis.engine.models.quantized_cache import CACHE_DTYPES
from trencadis.engine.models.rank_modules import least_over_ranks, use_sums
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.models.replaced_layers import FoundLayer, layers_of, replace_layers
from trencadis.engine.models.state_layers import StateLayers, state_layers_of

logger = logging.getLogger("trencadis.engine")

_CGROUP = Path("/sys/fs/cgroup")
_PAGE_BYTES = 4096
_KV_CACHE_BYTES = 1 << 30

_NO_KERNEL = -1
"""Less than False and True, which say how a kernel of linear layers multiplies."""


class CPUDevice(Device):
    """The host's CPU. Memory is the host's, within the limit of its control group.

    ``num_threads`` is the number of threads of an operation. None: that of ``OMP_NUM_THREADS``, or
    without it as many as cores are free (`AdaptiveThreads`). ``kernels``: the directory of
    compiled kernels, by default in the user's cache directory; ``trusted``: those of other users
    are loaded, too. ``num_ranks``: processes with such a device that share the memory and, where
    ``num_threads`` is None, the cores.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    preferred_dtype = torch.bfloat16
    default_kv_cache_memory: int | None = _KV_CACHE_BYTES
    shares_host_memory = True
    lists_programs = True
    collectives = "gloo"
    kv_cache_dtypes = frozenset(CACHE_DTYPES) - {"fp8_inc"}
    # A chunk of 1,024 tokens takes 7 % less time per token than one of 256, and with a model of 300
    # million parameters more than a second: no answer waits for that between two of its tokens.
    defaults = {"max_mixed_prefill_tokens": 256}  # noqa: RUF012 - as declared by `Device`

    def __init__(
        self,
        num_threads: int | None = None,
        kernels: Path | None = None,
        *,
        trusted: bool = False,
        num_ranks: int = 1,
    ) -> None:
        self._kernels = kernels
        self._trusted = trusted
        self._num_ranks = num_ranks
        if num_ranks > 1:
            self.default_kv_cache_memory = _KV_CACHE_BYTES // num_ranks
            if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
                # Not adapted: the ranks would take the cores from each other.
                num_threads = max(1, default_num_threads() // num_ranks)
        if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
            num_threads = default_num_threads()
            self._threads: AdaptiveThreads | None = AdaptiveThreads(num_threads, read_core_times)
        else:
            self._threads = None
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._programs = InductorPrograms()
        self._replayer: Replayer | None = None
        self.attention: Attention = CPUAttention()

    @classmethod
    def num_nodes(cls) -> int:
        return max(1, len(node_cores()))

    @classmethod
    def rank_cores(cls, size: int) -> Sequence[Sequence[int]]:
        return rank_cores(node_cores(), size)

    def join_ranks(self, memory: int, part: RankPart, limit_s: float) -> None:
        """Sum through shared memory, where each rank has the kernel."""
        sums: RankSums | None = None
        try:
            sums = RankSums(memory, part, limit_s, self._kernels, trusted=self._trusted)
        except NoKernel as error:
            logger.info("Sums over ranks have no kernel of their own and are slower: %s", error)
        if least_over_ranks(int(sums is not None)):
            use_sums(sums)

    def free_memory(self) -> int:
        available = int(psutil.virtual_memory().available)
        limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
        return available // self._num_ranks

    def total_memory(self) -> int:
        total = int(psutil.virtual_memory().total)
        limit = _cgroup_bytes("memory.max")
        return (total if limit is None else min(total, limit)) // self._num_ranks

    def peak_memory(self, run: Callable[[], object]) -> int:
        """The growth of this process's resident memory; 0 where Linux does not tell its peak.

        Not that of `free_memory`, which other processes change.
        """
        try:
            # Resets the peak: proc_pid_clear_refs(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = _resident_bytes("VmRSS")
            run()
            return max(0, _resident_bytes("VmHWM") - before)
        except OSError:
            run()
            return 0

    def synchronize(self) -> None:
        """Nothing to wait for: CPU operations are complete when they return."""

    def begin_step(self) -> None:
        if self._threads is not None:
            self._threads.begin_step()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        return PendingCopy(tensors, self.synchronize)

    def supports(self, layer: LayerSpec) -> str | None:
        """A layer that keeps a state is transformers' own code, which takes any shape."""
        return super().supports(attrs.evolve(layer, states=()))

    def weight_use(self, form: WeightFormat) -> WeightUse:
        if form.is_float:
            return WeightUse.EXPANDED
        try:
            load_linear_kernel(self._kernels, trusted=self._trusted, weights=form.steps_dtype)
        except NoKernel:
            return WeightUse.EXPANDED
        return WeightUse.MULTIPLIED

    def optimize(self, model: nn.Module) -> None:
        """Replace bf16 linear layers by layers with weights in the order of a kernel.

        The kernel is our own where the processor has AVX2 and there is a compiler (`TiledLinear`),
        for an even number of inputs; else oneDNN's (`OneDNNLinear`), which repacks a plain weight
        in every call. Where oneDNN has no bf16 either, layers stay plain, as those of fp32 do, so
        that their results equal those of the unmodified model. Integers are multiplied packed,
        where activations are bf16 and the processor has AVX2. Gated experts of bf16 or int8 are
        computed by a kernel, too (`TiledExperts`).

        Attention becomes a kernel that is compiled for the first layer, where there is a compiler.
        Weights that stay plain are read once: as mapped files they would count as taken by the
        first forward pass, whose memory is measured.
        """
        self.attention = self._attention_of(model)
        if (states := state_layers_of(model)) is not None:
            self._mix_states(states)
        self._multiply_integers(model)
        self._tile_experts(model)
        layers = [
            layer
            for layer in layers_of(model, nn.Linear)
            if layer[2].weight.dtype is torch.bfloat16
        ]
        if layers:
            replace_layers(layers, self._bf16_linear())
        move_to_huge_pages(model)
        for weights in (*model.parameters(), *model.buffers()):
            if not weights.is_mkldnn:  # those that oneDNN has packed are in memory
                weights.detach().flatten().view(torch.uint8)[::_PAGE_BYTES].sum()

    def adapter_kernel(self, dtype: torch.dtype) -> AdapterKernel | None:
        if dtype is not torch.bfloat16:
            return None
        try:
            return load_adapter_kernel(self._kernels, trusted=self._trusted)
        except NoKernel as error:
            logger.info("Adapters have no kernel of their own and are slower: %s", error)
            return None

    def compiler_missing(self) -> str | None:
        return cpp_compiler_missing()

    def keep_compiled(self, directory: Path, *, trusted: bool = False) -> None:
        self._programs.keep(directory, trusted=trusted)

    def is_kept(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        _use_operators(module)
        return self._programs.is_kept(module, inputs)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _use_operators(module)
        return self._programs.compile(module, inputs)

    def record_layers(
        self,
        run: LayerRun,
        programs: Sequence[Callable[..., Any]],
        own: Sequence[Sequence[torch.Tensor]],
        specs: Sequence[LayerSpec],
        states: StateLayers | None,
    ) -> LayerRun:
        if states is not None and not states.are_mixed:
            return run  # transformers' modules make other calls, too
        if self._replayer is None:
            try:
                self._replayer = Replayer(self._kernels, trusted=self._trusted)
            except NoKernel as error:
                logger.info("Decode steps are not recorded: %s", error)
                return run
        return RecordedLayers(run, programs, own, specs, self._replayer, states)

    def end_warm_up(self) -> None:
        self._programs.drop_headers()

    def num_compilations(self) -> int:
        return self._programs.compiled

    def _attention_of(self, model: nn.Module) -> CPUAttention:
        layer = next((spec for spec in specs_of(model) if spec.heads), None)
        if layer is None:
            return CPUAttention()
        dtype = next(model.parameters()).dtype
        try:
            kernel = attention_kernel_of(
                *(layer, dtype, self._kernels), trusted=self._trusted, cached=self.kv_cache_dtype
            )
        except NoKernel as error:
            logger.info("Attention has no kernel of its own and is slower: %s", error)
            return CPUAttention()
        return CPUAttention(kernel)

    def _mix_states(self, states: StateLayers) -> None:
        try:
            mixer = MambaMixer(self._kernels, trusted=self._trusted)
        except NoKernel as error:
            logger.info("Layers that keep a state have no kernel of their own: %s", error)
            return
        states.use_mixer(mixer)

    def _multiply_integers(self, model: nn.Module) -> None:
        """Replace packed layers whose weights the kernel multiplies."""
        layers: dict[torch.dtype, list[FoundLayer]] = {}
        dtype = next(model.parameters()).dtype
        integers = [
            layer for layer in layers_of(model, QuantizedLinear) if layer[2].packed.has_integers
        ]
        if integers and dtype is not torch.bfloat16:
            logger.warning(
                "Packed weights are expanded in each call in %s, and slow: serve in bfloat16", dtype
            )
            return
        for layer in integers:
            packed = layer[2].packed
            if IntegerLinear.fits(packed):
                layers.setdefault(packed.steps.dtype, []).append(layer)
        embeddings = {
            each[2].steps.data_ptr(): each for each in layers_of(model, QuantizedEmbedding)
        }
        asked = {each[2].steps.dtype for each in integers if each[2].rounds_inputs}
        rounding = {weights for weights in asked if self._loads_byte_kernel_of(weights)}

        def tiled(layer: QuantizedLinear) -> IntegerLinear:
            rounds = layer.rounds_inputs and layer.steps.dtype in rounding
            is_rounded = rounds and ByteLinear.fits(layer.packed)
            linear = ByteLinear(layer) if is_rounded else IntegerLinear(layer)
            tied = embeddings.pop(layer.steps.data_ptr(), None)
            if tied is not None:
                name, parent, embedding = tied
                setattr(parent, name, TiledEmbedding(linear, embedding.dtype))
            return linear

        for weights, of_type in layers.items():
            if self._loads_kernel_of(weights):
                replace_layers(of_type, tiled)

    def _tile_experts(self, model: nn.Module) -> None:
        """Replace gated experts that the kernel computes, in all ranks or in none.

        Routers of programs are native then, and all ranks must choose the same experts. Other
        packed experts are expanded for good.
        """
        experts: list[FoundLayer] = [
            (name, parent, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if TiledExperts.fits(child)
        ]
        if experts:
            reason = self._experts_missing({each[2].down_proj.dtype for each in experts})
            if self._num_ranks > 1 and not least_over_ranks(int(reason is None)):
                reason = reason or "another rank has none"
            if reason is None:
                replace_layers(experts, TiledExperts)
            else:
                logger.info("Experts have no kernel of their own and are slower: %s", reason)
        expand_experts(model, next(model.parameters()).dtype)

    def _experts_missing(self, types: set[torch.dtype]) -> str | None:
        """Why there is no kernel for experts with weights of these types; None: there is."""
        try:
            load_router_functions(self._kernels, trusted=self._trusted)
            for weights in types:
                load_expert_kernel(self._kernels, trusted=self._trusted, weights=weights)
        except NoKernel as error:
            return str(error)
        return None

    def _loads_kernel_of(self, weights: torch.dtype) -> bool:
        try:
            load_linear_kernel(self._kernels, trusted=self._trusted, weights=weights)
        except NoKernel as error:
            logger.warning("Packed weights are expanded in each call, and slow: %s", error)
            return False
        return True

    def _loads_byte_kernel_of(self, weights: torch.dtype) -> bool:
        try:
            load_byte_kernel(weights, self._kernels, trusted=self._trusted)
        except NoKernel as error:
            logger.info("Inputs of packed weights stay bf16: %s", error)
            return False
        return True

    def _bf16_linear(self) -> Callable[[nn.Linear], nn.Module]:
        """What replaces a linear layer of bf16: the layer itself where nothing is faster."""
        packs = onednn_packs_bf16()
        choice = _NO_KERNEL
        try:
            choice = int(load_linear_kernel(self._kernels, trusted=self._trusted))
        except NoKernel as error:
            otherwise = "computed by oneDNN" if packs else "plain and slow, oneDNN has no bf16 here"
            logger.info("Linear layers are %s: %s", otherwise, error)

        if self._num_ranks > 1:
            # What each of them computes whole, as a shared expert, must come out alike.
            agreed = least_over_ranks(choice)
            if agreed not in (choice, _NO_KERNEL):
                load_linear_kernel(self._kernels, trusted=self._trusted, widens=bool(agreed))
            choice = agreed
        has_kernel = choice != _NO_KERNEL

        def replacement(layer: nn.Linear) -> nn.Module:
            if has_kernel and _has_kernel(layer):
                return TiledLinear(layer)
            return OneDNNLinear(layer) if packs else layer

        return replacement


def _resident_bytes(name: str) -> int:
    """A figure of ``/proc/self/status`` in bytes. Raises `OSError`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name)), 0
    )


def _use_operators(module: fx.GraphModule) -> None:
    """Let operators of this device compute parts of a traced module, which is changed in place."""
    group_linears(module)
    use_native_routers(module)


def _has_kernel(layer: nn.Linear) -> bool:
    return layer.weight.dtype is torch.bfloat16 and layer.in_features % 2 == 0


def _cgroup_bytes(name: str) -> int | None:
    """A memory figure of the control group in bytes; None without one, or without a limit."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
