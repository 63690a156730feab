"""The Intel Gaudi device, in eager mode with ``torch.compile`` or in lazy mode.

Eager mode runs operations at once and compiles modules; it is the default. Lazy mode collects
operations until ``mark_step`` and captures HPU graphs. Compilation needs the first mode, graphs
the second.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx, nn

from trencadis.engine.devices.device import Device, Graph, PendingCopy
from trencadis.engine.devices.hpu.attention import RowAttention
from trencadis.engine.devices.hpu.bridge import LAZY_COLLECTIVES, LAZY_MODE, load_bridge
from trencadis.engine.devices.hpu.cached_rows import LARGEST, check_kernels
from trencadis.engine.devices.hpu.experts import use_static_experts
from trencadis.engine.devices.hpu.fp8_linear import use_fp8_products
from trencadis.engine.devices.hpu.graphs import HPUGraph, Results, graphs_take_tensors
from trencadis.engine.devices.hpu.kernel_trials import kernel_trials
from trencadis.engine.devices.hpu.kernels import use_fused_kernels
from trencadis.engine.devices.kernel_trial import KernelTrial
from trencadis.engine.errors import DeviceError
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.loader import ModelSpec
from trencadis.engine.models.packed_weight import WeightFormat, WeightUse
from trencadis.engine.models.paged_context import Attention
from trencadis.engine.models.rank_modules import least_over_ranks
from trencadis.engine.models.state_functions import are_static
from trencadis.engine.models.state_layers import state_layers_of
from trencadis.scheduler import SchedulerError
from trencadis.scheduler.telemetry import HlmlSource

logger = logging.getLogger("trencadis.engine")


class HPUDevice(Device):
    """The Gaudi that the bridge assigns to this process.

    ``recipe_cache``: directory for compiled recipes; ``trusted``: those of other users
    are loaded, too; ``read_only``: none are added. ``num_ranks``: processes with a Gaudi each that
    serve one model, whose memory is that of the fullest. Raises `DeviceError` if there is no Gaudi,
    or one too few, or its software does not load.
    """

    name = "hpu"
    preferred_dtype = torch.bfloat16
    dtypes = (torch.bfloat16,)
    default_kv_cache_memory = None
    dynamic_shapes = False
    exponential_grid = True
    compiles_forward = True
    counts_missing = True
    static_states = True
    kv_cache_dtypes = frozenset({"fp8", "fp8_inc", "fp8_e4m3", "fp8_e5m2"})
    largest_cached = LARGEST
    collectives = "hccl"
    temperature_source = "hlml"

    def __init__(
        self,
        recipe_cache: Path | None = None,
        *,
        fp32_softmax: bool = False,
        trusted: bool = False,
        read_only: bool = False,
        num_ranks: int = 1,
    ) -> None:
        self._bridge = load_bridge(recipe_cache, trusted=trusted, read_only=read_only)
        if (available := int(self._bridge.hpu.device_count())) < num_ranks:
            raise DeviceError(
                f"tensor_parallel_size {num_ranks} needs as many Gaudis, and the bridge finds "
                f"{available}: choose a smaller number, or check `hl-smi`"
            )
        self._num_ranks = num_ranks
        self.torch_device = torch.device("hpu")
        self.attention: Attention = RowAttention()
        self.supports_graphs = lazy = self._bridge.lazy
        self.defaults = {
            # «smaller sizes still work, but very inefficiently»: vllm_gaudi/platform.py:152.
            "block_size": 128,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 128,
            "compile": not lazy,
            "async_scheduling": True,
        }
        self._results: Results = weakref.WeakValueDictionary()
        self._softmax_mode = "fp32" if fp32_softmax else "fast"
        mode = "lazy mode, with HPU graphs" if lazy else "eager mode"
        logger.info("Gaudi in %s (%s=%d)", mode, LAZY_MODE, lazy)
        self.sensor_indices = sensor_indices(os.environ)

    @classmethod
    def rank_environment(cls, rank: int, size: int) -> Mapping[str, str]:
        """The bridge takes the Gaudi of the local rank (``distributed/hccl/__init__.py:25-53``).

        Without lazy collectives, a graph of lazy mode cannot have any
        (``distributed/hccl/ProcessGroupHCCL.cpp:464-466``).
        """
        if module := os.environ.get("HLS_MODULE_ID", "").strip():
            raise DeviceError(
                f"HLS_MODULE_ID={module} gives one Gaudi to all ranks: unset it, and name theirs "
                "in HABANA_VISIBLE_MODULES"
            )
        visible = os.environ.get("HABANA_VISIBLE_MODULES", "")
        if visible and len(visible.split(",")) < size:
            raise DeviceError(
                f"HABANA_VISIBLE_MODULES={visible} names fewer Gaudis than tensor_parallel_size "
                f"{size}: name one for each rank, or unset it"
            )
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        return {**own, LAZY_COLLECTIVES: "true"}

    def supports(self, layer: LayerSpec) -> str | None:
        if layer.complex_rotary:  # «Complex datatype is not supported on HPU device.», the bridge
            return "has a rotary embedding of complex numbers, which hpu does not have"
        if are_static(layer.state_functions):
            layer = attrs.evolve(layer, states=())
        return super().supports(layer)

    def weight_use(self, form: WeightFormat) -> WeightUse:
        return WeightUse.MULTIPLIED if form.is_float else WeightUse.REJECTED

    def calibrated_as(self) -> str:
        return "GAUDI2" if self.product_name() == "GAUDI2" else "GAUDI3"

    def free_memory(self) -> int:
        return self._least(int(self._bridge.hpu.mem_get_info()[0]))

    def total_memory(self) -> int:
        return self._least(int(self._bridge.hpu.mem_get_info()[1]))

    def synchronize(self) -> None:
        """Execute collected operations, then wait for the device."""
        self.mark_step()
        self._bridge.hpu.synchronize()

    def peak_memory(self, run: Callable[[], object]) -> int:
        """The peak of the device's tensors, or what is still in use at the end where that is more.

        The bridge keeps the workspace of its recipes.
        """
        hpu = self._bridge.hpu
        self.synchronize()
        hpu.reset_peak_memory_stats()
        before = int(hpu.memory_allocated())
        taken = super().peak_memory(run)
        return -self._least(-max(taken, int(hpu.max_memory_allocated()) - before))

    def _least(self, number: int) -> int:
        """What all ranks decide by, so that each of them captures the same graphs."""
        return number if self._num_ranks == 1 else least_over_ranks(number)

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # The bridge copies pageable memory to a buffer of its own before it returns, and does not
        # wait for the transfer (backend/synapse_helpers/device.cpp, copy_data_to_device_, 1177).
        return host.to(self.torch_device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        # In lazy mode the bridge waits unless the destination is pinned, and executes what is
        # collected first (habana_kernels/lazy_kernels.cpp, copy_hpu_lazy_D2H, 823 and 846).
        copies = [torch.empty(t.shape, dtype=t.dtype).pin_memory("hpu") for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = self._bridge.hpu.Event()
        arrived.record()
        return PendingCopy(copies, arrived.synchronize)

    def product_name(self) -> str:
        """As the driver says: ``GAUDI2``, ``GAUDI3``."""
        return str(self._bridge.hpu.get_device_name())

    def kernel_trials(self, spec: ModelSpec, dtype: torch.dtype) -> Mapping[str, KernelTrial]:
        return kernel_trials(spec, dtype, self.torch_device, self._softmax_mode)

    def mark_step(self) -> None:
        if self._bridge.lazy:
            self._bridge.core.mark_step()

    def optimize(self, model: nn.Module) -> None:
        """Use Intel's fused kernels where they give the model's own results.

        In lazy mode, end a recipe after each decoder layer: equal layers share one recipe, where a
        recipe of the whole model would be compiled for each bucket.
        """
        dtype = next(model.parameters()).dtype
        is_gaudi2 = self.calibrated_as() == "GAUDI2"
        use_fp8_products(model, self.torch_device, dtype, is_gaudi2=is_gaudi2)
        use_static_experts(model, self.torch_device)
        if self.kv_cache_dtype is not None:
            check_kernels(self.torch_device, dtype, self.kv_cache_dtype)
        if (states := state_layers_of(model)) is not None:
            states.use_static_shapes()
        kernels = use_fused_kernels(model, self.torch_device, self._softmax_mode)
        self.attention = RowAttention(kernels)
        if self._bridge.lazy:
            for layer in decoder_layers(model):
                layer.register_forward_hook(lambda *_: self.mark_step())
            if not self.graphs_take_tensors:  # not in a warm-up, which may compile only
                takes = graphs_take_tensors(self._bridge, self.torch_device)
                self.graphs_take_tensors = bool(self._least(int(takes)))

    def capture(
        self,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
    ) -> Graph:
        """Capture ``run(*inputs)`` as an HPU graph, running it once.

        See `HPUGraph` for what it may contain. ``own`` must be contiguous: of other views the
        bridge takes a copy (``habana_lazy/view_utils.cpp:551-620``). Raises `DeviceError` outside
        lazy mode.
        """
        if not self.supports_graphs:
            raise DeviceError(f"HPU graphs need the bridge's lazy mode: set {LAZY_MODE}=1")
        results = self._results if self.graphs_take_tensors else None
        return HPUGraph(self._bridge, run, inputs, own, results)

    def compiler_missing(self) -> str | None:
        if self._bridge.lazy:
            return "the bridge's eager mode: set PT_HPU_LAZY_MODE=0"
        return None

    def keep_compiled(self, directory: Path, *, trusted: bool = False) -> None:
        """Nothing to do: the bridge caches recipes in the directory given when it was loaded."""

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A module that the bridge's backend compiles in its first call.

        Raises `DeviceError` in lazy mode, which does not support ``torch.compile``
        (``vllm_gaudi/platform.py``, ``set_torch_compile``).
        """
        missing = self.compiler_missing()
        if missing is not None:
            raise DeviceError(f"torch.compile on Gaudi needs {missing}")
        select_rows(module)
        return torch.compile(module, backend="hpu_backend", dynamic=False)

    @contextmanager
    def compile_only(self) -> Generator[None, None, None]:
        """Start no recipes, as vllm-gaudi does (``hpu_model_runner.py:6231``).

        The bridge reads its switch when it starts a recipe, in threads of its own
        (``backend/synapse_helpers/graph.cpp:845``), so the host waits for these before each turn:
        what was given earlier runs, and what is given within does not. ``synchronize_device`` does
        so (``hpu/csrc/bindings.cpp:188-198``).
        """
        self.synchronize()
        self._bridge.set_compile_only(True)
        try:
            yield
        finally:
            try:
                self.synchronize()
            finally:
                self._bridge.set_compile_only(False)

    def num_compilations(self) -> int:
        return self._bridge.num_compilations()


def own_module(environ: Mapping[str, str]) -> int | None:
    """The module id of the Gaudi that this process takes; None if the variables leave it open.

    ``HLS_MODULE_ID``, or the place of the process's local rank in ``HABANA_VISIBLE_MODULES``; a
    process without a rank takes the only one there, or any that is free
    (docs.habana.ai, PyTorch/PyTorch_Scaling_Guide/Gaudi_Assignment.html).
    """
    module = environ.get("HLS_MODULE_ID", "").strip()
    visible = environ.get("HABANA_VISIBLE_MODULES", "").split(",")
    if not module:
        ranks = (environ.get(name, "") for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"))
        rank = next((int(text) for text in ranks if text.isdecimal()), None)
        if rank is None:
            rank = 0 if len(visible) == 1 else len(visible)
        module = visible[rank].strip() if rank < len(visible) else ""
    return int(module) if module.isdecimal() else None


def sensor_indices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The index of this process's Gaudi in HLML, which lists all in an order of its own.

    None if the module id is unknown, or HLML cannot tell: then all devices count.
    """
    module = own_module(environ)
    if module is None:
        return None
    try:
        source = HlmlSource()
        try:
            index = source.index_of_module(module)
        finally:
            source.close()
    except SchedulerError as error:
        logger.info("The temperatures of all devices count: %s", error)
        return None
    return None if index is None else (index,)


def select_rows(module: fx.GraphModule) -> None:
    """Replace indexing with one tensor by ``index_select``, in place.

    The compiler leaves ``index`` out of its recipes (``hpu_fallback_op_list``, ``dynamo/
    compile_backend/shared_layer.py:136-152`` of the bridge 1.19.0).
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        given = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]
        if len(given) == 1 and _is_integer_vector(given[0][1]):
            node.target = aten.index_select.default
            node.args = (node.args[0], *given[0])
    module.recompile()


def _is_integer_vector(index: fx.Node) -> bool:
    value = index.meta["val"]
    return value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
