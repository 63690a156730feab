"""The interface of a device: memory, synchronisation, graphs, compilation."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from trencadis.engine.devices.kernel_trial import KernelTrial
from trencadis.engine.models.adapter_operator import AdapterKernel
from trencadis.engine.models.block_attention import BlockAttention
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.loader import ModelSpec
from trencadis.engine.models.packed_weight import WeightFormat, WeightUse
from trencadis.engine.models.paged_context import Attention, LayerRun
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.models.state_layers import StateLayers


class Graph(abc.ABC):
    """A captured computation for inputs of one shape. It can be replayed on other inputs."""

    @abc.abstractmethod
    def replay(self, inputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> Any:
        """Copy ``inputs`` into the graph's buffers and run it.

        ``own``: what takes the place of those that it was captured with, where
        `Device.graphs_take_tensors`.
        The result is that of the captured function, a tensor or a tuple of tensors. The next replay
        of a graph overwrites it.

        Raises `GraphError` for inputs of another shape or dtype than the captured ones, and after
        `release`.
        """

    def forget(self) -> None:  # noqa: B027 - most graphs cannot
        """Hold no tensor that it was given, until the next replay."""

    @abc.abstractmethod
    def release(self) -> None:
        """Free the graph's memory."""


class PendingCopy:
    """Copies of tensors on their way to the host. ``wait`` blocks until they have arrived."""

    def __init__(self, copies: Sequence[torch.Tensor], wait: Callable[[], object]) -> None:
        self._copies = copies
        self._wait = wait

    def wait(self) -> Sequence[torch.Tensor]:
        """The copies, in host memory."""
        self._wait()
        return self._copies


class Device(abc.ABC):
    """A device that runs a model.

    A subclass sets the four attributes without a value and implements `free_memory`,
    `total_memory` and `synchronize`. The other methods are for a device that is faster with them:
    by default it captures no graphs and compiles nothing.
    """

    name: str
    """Name in logs and in `AsyncEngine.info`."""

    torch_device: torch.device
    """Where the weights, the KV cache and the batches are."""

    preferred_dtype: torch.dtype
    """Type of weights and KV cache where neither settings nor checkpoint name one."""

    dtypes: tuple[torch.dtype, ...] | None = None
    """The dtypes that a model can have; None for all."""

    defaults: Mapping[str, Any] = {}
    """Settings of `EngineConfig` that this device chooses where the user does not."""

    default_kv_cache_memory: int | None
    """Default bytes of KV cache where memory is shared with the host; None for device memory."""

    supports_graphs: bool = False
    """Whether `capture` works."""

    graphs_take_tensors: bool = False
    """Whether weights and KV cache are given to each replay of a graph, which holds neither."""

    dynamic_shapes: bool = True
    """Whether an operation runs on a new shape, or on a shape that depends on data, without being
    compiled first."""

    shares_host_memory: bool = False
    """Whether tensors are in host memory, and an operation is complete when it returns. Then the
    host samples; otherwise the device does."""

    exponential_grid: bool = False
    """Whether the default grid of buckets is the exponential one of Gaudi's plugin for vLLM, for a
    device on which a new shape costs seconds; otherwise it is a small one."""

    compiles_forward: bool = False
    """Whether all of a compiled forward pass is programs, and not its decoder layers alone: where
    each operation outside of a program is a launch that costs as much as a program's."""

    lists_programs: bool = False
    """Whether `is_kept` can tell which programs a cache has."""

    counts_missing: bool = False
    """Whether a program is looked for when it first runs, and `num_compilations` counts those that
    the cache lacks."""

    static_states: bool = False
    """Whether layers with a state compute padded rows, whose slots are tensors of the batch
    (`StateLayers.use_static_shapes`); otherwise the host knows the rows."""

    kv_cache_dtypes: frozenset[str] = frozenset()
    """Values of `EngineConfig.kv_cache_dtype` that it computes beside ``auto``."""

    largest_cached: Mapping[torch.dtype, float] = {}
    """The largest number that a KV cache of each dtype holds, where it has no scales of its own:
    then keys and values are divided by those of the checkpoint (`cache_scales`)."""

    kv_cache_dtype: torch.dtype | None = None
    """That of the KV cache of the model that `optimize` is called with next; None: the model's."""

    attention: Attention = BlockAttention()
    """How the KV cache is laid out, written and read."""

    collectives: str | None = None
    """Backend of torch.distributed between ranks, each with such a device; None: there are none."""

    temperature_source: str | None = None
    """Name of the scheduler's telemetry source that reads this device's temperatures."""

    sensor_indices: tuple[int, ...] | None = None
    """Indices of this device in that source; None if they are unknown: then all of them count."""

    @classmethod
    def rank_environment(cls, rank: int, size: int) -> Mapping[str, str]:
        """Variables of the process of a rank, one of ``size``. Raises `DeviceError`."""
        del rank, size
        return {}

    @classmethod
    def num_nodes(cls) -> int:
        """NUMA nodes of the host, where its memory is this device's; otherwise 1."""
        return 1

    @classmethod
    def rank_cores(cls, size: int) -> Sequence[Sequence[int]]:
        """The host's cores of each of ``size`` ranks; nothing where they may use all."""
        del size
        return ()

    def join_ranks(self, memory: int, part: RankPart, limit_s: float) -> None:  # noqa: B027
        """Called once the process group is made, in each rank.

        ``memory``: a file in memory, without content, that all ranks have open. ``limit_s``: how
        long a collective call may wait.
        """

    @abc.abstractmethod
    def free_memory(self) -> int:
        """Memory available for new tensors, bytes."""

    @abc.abstractmethod
    def total_memory(self) -> int:
        """Total memory of the device, bytes."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all submitted work is done."""

    def product_name(self) -> str:
        """The device's own name, such as that of its maker; ``name`` where it has none."""
        return self.name

    def kernel_trials(self, spec: ModelSpec, dtype: torch.dtype) -> Mapping[str, KernelTrial]:
        """A comparison with the host of each kernel that may compute this model, by its name."""
        del spec, dtype
        return {}

    def supports(self, layer: LayerSpec) -> str | None:
        """Why a layer cannot be served here, in words that follow «layer 0»; None where it can.

        The engine asks this alone. A device overrides it for what is not attention.
        """
        lacking = self.attention.supports(layer)
        if lacking is None:
            return None
        return f"{lacking}, which {type(self.attention).__name__} ({self.name}) does not compute"

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Call ``run`` and return the most memory that it took at any moment, bytes.

        On top of what was in use before. Here what is still in use at its end, for a device that
        cannot tell more.
        """
        before = self.free_memory()
        run()
        self.synchronize()
        return max(0, before - self.free_memory())

    def weight_use(self, form: WeightFormat) -> WeightUse:
        """What this device does with packed weights of linear layers.

        By default `QuantizedLinear` expands them in each call; `optimize` replaces such layers
        where the device multiplies them.
        """
        del form
        return WeightUse.EXPANDED

    def calibrated_as(self) -> str | None:
        """The device in `measured_scales` whose FP8 this one has; None: it has no such scales."""
        return None

    def optimize(self, model: nn.Module) -> None:  # noqa: B027 - a device may have nothing to do
        """Change a loaded model in place for speed: weight layouts, fused kernels."""

    def adapter_kernel(self, dtype: torch.dtype) -> AdapterKernel | None:
        """What computes adapters of this dtype without one product for all slots; None: nothing.

        Only on a device whose tensors are in host memory.
        """
        del dtype
        return None

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A copy of ``host`` on the device, or ``host`` itself where memory is shared.

        The host need not wait for the copy, and must not change ``host`` afterwards.
        """
        return host if self.shares_host_memory else host.to(self.torch_device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        """Start copying ``tensors`` to the host. The host waits once for all of them, later."""
        return PendingCopy([tensor.cpu() for tensor in tensors], self.synchronize)

    def begin_step(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Called before each step of the engine and each run of warm-up, by the thread of both."""

    def mark_step(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Let a lazy device execute the operations collected so far."""

    def capture(
        self,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
    ) -> Graph:
        """Capture ``run(*inputs)`` as a graph. Only where `supports_graphs`.

        ``own``: tensors that it uses, and that others may take the place of in a replay, where
        `graphs_take_tensors`. ``run`` returns a tensor or a tuple of tensors.
        """
        raise NotImplementedError(f"{self.name} captures no graphs")

    def compiler_missing(self) -> str | None:
        """Software that `compile` needs and this machine lacks, as text for a log; else None."""
        return f"a compiler for the device {self.name}"

    def keep_compiled(  # noqa: B027 - see `compile`
        self, directory: Path, *, trusted: bool = False
    ) -> None:
        """Cache compiled programs in ``directory``.

        Only those that this user has made are loaded, unless ``trusted``.
        """

    def is_kept(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether `compile` would find this program in the cache. Only where `lists_programs`."""
        raise NotImplementedError(f"{self.name} does not list what its cache has")

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile ``module``, traced with ``inputs``, for exactly their shapes.

        ``inputs`` may be fake tensors. The program takes the same arguments as the module and
        returns the same result. Only where `compiler_missing` returns None. Raises `CompileError`.
        """
        raise NotImplementedError(f"{self.name} compiles no programs")

    def record_layers(
        self,
        run: LayerRun,
        programs: Sequence[Callable[..., Any]],
        own: Sequence[Sequence[torch.Tensor]],
        specs: Sequence[LayerSpec],
        states: StateLayers | None,
    ) -> LayerRun:
        """A faster way to compute what ``run`` computes, if there is one.

        ``run`` computes each layer by its program in ``programs``, with the weights in ``own``, and
        attends as ``specs`` say. ``states``: those of the model, where layers keep one.
        """
        del programs, own, specs, states
        return run

    def compile_only(self) -> AbstractContextManager[None]:
        """Within it, programs are compiled and may not run: what they compute is not to be read.

        For a full warm-up, which reads nothing. Nothing else uses the device meanwhile.
        """
        return nullcontext()

    def end_warm_up(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Called when a warm-up has ended: few programs are compiled from now on, if any."""

    def num_compilations(self) -> int:
        """Programs that this process has compiled so far, without those loaded from a cache."""
        return 0
