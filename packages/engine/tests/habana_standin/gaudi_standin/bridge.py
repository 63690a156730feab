"""Takes every operation on a device tensor: collects it, captures it, or computes it at once."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gaudi_standin.arguments import (
    buffers_of,
    changed_by,
    returns_tensors,
    values_of,
    with_own_host_values,
)
from gaudi_standin.collectives import WAIT, are_collected, computed, is_collective
from gaudi_standin.counters import Counters
from gaudi_standin.kernels import RoundedProducts, copied_bytes, kernel_for, name_of, runs_on_host
from gaudi_standin.memory import Allocation, Buffer, DeviceMemory
from gaudi_standin.program import (
    Call,
    Capture,
    FrozenProgram,
    Program,
    compute,
    garbage_like,
    is_transfer,
)
from gaudi_standin.regions import Region
from gaudi_standin.rules import (
    INFERENCE_DOC,
    GraphViolation,
    has_dynamic_shape,
    reads_values,
    takes_host_indices,
)
from gaudi_standin.shapes import TensorOutline, outline
from gaudi_standin.tensor import HPUTensor, on_device
from gaudi_standin.traffic import Traffic, traffic_of_calls
from gaudi_standin.tree import Spec, flatten, map_only, unflatten

_COPY = torch.ops.aten.copy_.default


class Bridge:
    """The state of the device: what is collected, what is compiled, what was counted.

    ``counters`` says what the steps cost. ``computed`` counts operations, ``host_reads`` values
    that the host waited for. ``rounds_products``: see `RoundedProducts`. ``compile_only``: recipes
    are compiled and not started (``PT_COMPILE_ONLY_MODE``), so that results are garbage.
    """

    def __init__(self) -> None:
        self.lazy = True
        self.rounds_products = False
        self.compile_only = False
        self.memory = DeviceMemory()
        self.counters = Counters()
        self.host_reads = 0
        self.computed = 0
        self._recipes: set[Any] = set()
        self._pending = Program()
        self._capture: Capture | None = None

    # What a program calls.

    @property
    def num_pending(self) -> int:
        """Operations that were given and are not computed."""
        return len(self._pending.calls)

    @property
    def compilations(self) -> int:
        """Recipes compiled so far."""
        return self.counters.recipes

    @property
    def capturing(self) -> bool:
        return self._capture is not None

    def flush(self) -> None:
        """Compile, or find, the recipe for what is collected, and run it."""
        program, self._pending = self._pending, Program()
        if not program.is_empty:
            self.compile(program.signature)
            traffic = traffic_of_calls(program.calls, _is_held)
            self._run(program)
            self._count_launch(traffic)

    def synchronize(self) -> None:
        """The host waits for what was started; what is only collected was not."""
        self.counters.syncs += 1

    def mark_step(self) -> None:
        """Within a capture, end one of the graphs that it consists of."""
        if self._capture is not None:
            self._capture.cut()
        else:
            self.flush()

    def begin_capture(self, *, dry_run: bool) -> Capture:
        if self._capture is not None:
            raise RuntimeError("GRAPH:: graph Capture already in progress")
        self.flush()
        self._capture = Capture(dry_run=dry_run)
        return self._capture

    def end_capture(self) -> list[FrozenProgram]:
        """The captured programs, run once unless the capture was dry; none if it was broken."""
        capture, self._capture = self._capture, None
        if capture is None or capture.broken:
            return []
        capture.cut()
        shared = capture.passed_on()

        def is_kept(allocation: Allocation) -> bool:
            return _is_held(allocation) or id(allocation) in shared

        frozen = []
        for program in capture.programs:
            traffic = traffic_of_calls(program.calls, is_kept)
            self.compile(("graph", program.signature))
            if not capture.dry_run:
                self._run(program)
                self._count_launch(traffic)
            inside = capture.made_inside - shared
            frozen.append(FrozenProgram(program, inside, traffic, capture.marked))
        return frozen

    def mark_inputs(self, tensors: Sequence[HPUTensor]) -> None:
        """These are the user's: each replay of what is captured is given others."""
        assert self._capture is not None
        self._capture.marked = [tensor.buffer for tensor in tensors]

    @torch.compiler.disable
    def read(self, tensor: HPUTensor, what: str, *, blocking: bool = True) -> torch.Tensor:
        """A host copy of a tensor's values: everything collected is computed first."""
        self._refuse_inside(f"a host read ({what})")
        tensor.check_current()
        self.flush()
        value = tensor.buffer.value
        self.counters.downloads += 1
        self.counters.download_bytes += self._stored_bytes(value)
        if blocking:
            self.host_reads += 1
            self.counters.syncs += 1
        return value.clone()

    @torch.compiler.disable
    def upload(self, host: torch.Tensor) -> HPUTensor:
        """A device copy of a host tensor."""
        with torch.inference_mode(mode=False), torch.no_grad():
            value = self._sent(host.detach().clone())
        # Outside of that context: in inference mode the caller gets an inference tensor.
        return self.place(value)

    def _sent(self, host: torch.Tensor) -> torch.Tensor:
        """``host`` as the device stores it; counts the copy.

        Lazy mode stores int64 as int32 (``PT_ENABLE_INT64_SUPPORT``, scripts/env_flags.yaml:624).
        """
        self._refuse_inside("a copy from the host")
        self.counters.uploads += 1
        self.counters.upload_bytes += self._stored_bytes(host)
        if self.lazy and host.dtype is torch.int64:
            return host.to(torch.int32).to(torch.int64)
        return host

    def _stored_bytes(self, value: torch.Tensor) -> int:
        narrow = self.lazy and value.dtype is torch.int64
        return value.numel() * (4 if narrow else value.itemsize)

    def place(self, value: torch.Tensor) -> HPUTensor:
        """``value`` as it is, in memory of its own."""
        return HPUTensor(Buffer(value, self._allocate(value.untyped_storage().nbytes())))

    # What PyTorch calls.

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        if func is _COPY and not isinstance(leaves[0], HPUTensor):
            blocking = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            what = "copy_ to a host tensor"
            return leaves[0].copy_(self.read(leaves[1], what, blocking=blocking))
        leaves = [self._admit(func, leaf) for leaf in leaves]
        for leaf in leaves:
            if isinstance(leaf, HPUTensor):
                leaf.check_current()
        if is_collective(func):
            return self._communicate(func, leaves, spec)
        if reads_values(func) or not returns_tensors(func):
            return self._inspect(func, leaves, spec)
        if has_dynamic_shape(func, leaves):
            return self._compute_dynamic(func, leaves, spec)
        if runs_on_host(func, leaves, lazy=self.lazy):
            self._fall_back(func, leaves)
        with torch.inference_mode(mode=False), torch.no_grad():
            if func.is_view:
                made, shape = self._view(func, leaves, spec)
            elif func._schema.is_mutable:
                return self._change(func, args, kwargs, leaves, spec)
            else:
                made, shape = self._compute(func, leaves, spec)
        return unflatten(self._wrap(func, leaves, made), shape)

    # What a compiled region calls.

    @staticmethod
    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor behind a device tensor; host tensors, such as scalars, unchanged."""
        return tensor.buffer.value if isinstance(tensor, HPUTensor) else tensor

    @torch.compiler.disable
    def run_region(self, region: Region, inputs: Sequence[torch.Tensor]) -> Any:
        """Run a compiled region on device tensors, and count what it starts."""
        self.compile(region.signature)
        if self.compile_only:
            return region.garbage(inputs, self.place)
        self.counters.launches += region.launches
        self.counters.partitions += region.partitions
        self.counters.copied_bytes += region.copied_bytes
        self.counters.collectives += region.collectives
        self.counters.move(region.traffic)
        self.counters.eager_fallbacks.update(region.left_out)
        self.counters.cpu_fallbacks.update(region.on_host)
        owners = {
            x.buffer.value.untyped_storage().data_ptr(): x.buffer.allocation
            for x in inputs
            if isinstance(x, HPUTensor)
        }
        with torch.inference_mode(mode=False), torch.no_grad(), self._products():
            results = region.graph(*(self.value_of(x) for x in inputs))

        def made(value: torch.Tensor) -> HPUTensor:
            owner = owners.get(value.untyped_storage().data_ptr())
            return self.place(value) if owner is None else HPUTensor(Buffer(value, owner))

        return map_only(torch.Tensor, made, results)

    # Kinds of operations.

    def _wrap(self, func: Any, leaves: list[Any], made: list[Any]) -> list[Any]:
        if not func.is_view:
            return [HPUTensor(x, self._stamp(x)) if isinstance(x, Buffer) else x for x in made]
        base = next(leaf for leaf in leaves if isinstance(leaf, HPUTensor))
        # A view is an inference tensor where its base is one: PyTorch insists on it.
        with torch.inference_mode(mode=base.is_inference()):
            return [HPUTensor(x, self._stamp(x), is_view=True) for x in made]

    def _view(self, func: Any, leaves: list[Any], spec: Spec) -> tuple[list[Any], Spec]:
        base = next(leaf for leaf in leaves if isinstance(leaf, HPUTensor)).buffer
        result = compute(func, values_of(leaves), spec)
        values, shape = flatten(result)
        buffers = [Buffer(value, base.allocation) for value in values]
        self._record(Call(func, buffers_of(leaves), spec, tuple(buffers), "view"))
        return list(buffers), shape

    def _compute(self, func: Any, leaves: list[Any], spec: Spec) -> tuple[list[Any], Spec]:
        kernel = kernel_for(func, leaves, lazy=self.lazy)
        if not self.lazy and not self.compile_only:
            with self._products():
                values, shape = flatten(compute(kernel, values_of(leaves), spec))
            made = [self._owned(x) if isinstance(x, torch.Tensor) else x for x in values]
            self.computed += 1
        else:
            found = outline(func, list(buffers_of(leaves)), spec)
            made = [self._reserve(x) if isinstance(x, TensorOutline) else x for x in found.leaves]
            if not self.lazy:
                for buffer in (x for x in made if isinstance(x, Buffer)):
                    buffer.value.copy_(garbage_like(buffer.value))
            shape = found.spec
        outputs = tuple(x for x in made if isinstance(x, Buffer))
        self._record(Call(kernel, buffers_of(leaves), spec, outputs, "compute"))
        return made, shape

    def _change(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Spec) -> Any:
        written = changed_by(func, args, kwargs)
        for tensor in written:
            if self._capture is not None and tensor.is_view:
                self._refuse_inside(f"an update in place of a view ({func})")
            if tensor.numel() == 0 and torch.Tag.out in func.tags:
                raise NotImplementedError(f"{func} would resize its output on the stand-in")
        self.counters.copied_bytes += copied_bytes(func, args, lazy=self.lazy)
        kernel = kernel_for(func, leaves, lazy=self.lazy)
        call = Call(kernel, buffers_of(leaves), spec, (), "inplace")
        if not self.lazy and not (self.compile_only and not is_transfer(call)):
            compute(kernel, values_of(leaves), spec)
            self.computed += 1
        self._record(call)
        if len(func._schema.returns) > len(written):
            raise NotImplementedError(f"{func} returns more than it changes")
        return written[0] if len(func._schema.returns) == 1 else tuple(written) or None

    def _communicate(self, func: Any, leaves: list[Any], spec: Spec) -> Any:
        if func is WAIT:
            if self.lazy:
                self.mark_step()
            return leaves[0]
        if self.lazy and not are_collected():
            self._refuse_inside("collective nonSFG")
            self.flush()
        self.counters.collectives += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.lazy and are_collected():
                found = outline(func, list(buffers_of(leaves)), spec)
                made = [self._reserve(x) for x in found.leaves]
                call = Call(computed(func), buffers_of(leaves), spec, tuple(made), "compute")
                self._record(call)
                return HPUTensor(made[0], self._stamp(made[0]))
            self.counters.launches += 1
            return self.place(compute(computed(func), values_of(leaves), spec))

    def _inspect(self, func: Any, leaves: list[Any], spec: Spec) -> Any:
        """An operation that tells the host something; about values only where it must wait."""
        if reads_values(func):
            leaves = [self.read(x, str(func)) if isinstance(x, HPUTensor) else x for x in leaves]
        return compute(func, values_of(leaves), spec)

    def _compute_dynamic(self, func: Any, leaves: list[Any], spec: Spec) -> Any:
        """The host has to wait for the shape: «non-inferable output shapes»."""
        self._refuse_inside(f"an output shape that depends on values ({func})")
        self.host_reads += 1
        self.counters.syncs += 1
        self.flush()
        self.counters.launches += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            result = compute(func, values_of(leaves), spec)
        if func._schema.is_mutable:
            return next(leaf for leaf in leaves if isinstance(leaf, HPUTensor))
        return map_only(torch.Tensor, self.place, result)

    # Helpers.

    def _refuse_inside(self, what: str) -> None:
        if self._capture is not None:
            self._capture.broken = True
            raise GraphViolation(
                f"{what} is not supported during hpu graph capturing: see {INFERENCE_DOC}"
            )

    def _admit(self, func: Any, leaf: Any) -> Any:
        """Reject host tensors among device tensors, except where PyTorch sends them itself."""
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, HPUTensor):
            return leaf
        if takes_host_indices(func):
            return self.upload(leaf)
        if func is _COPY:
            return self._sent(leaf)
        if leaf.dim() == 0:
            return leaf
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found hpu:0 and cpu in {func}"
        )

    def _record(self, call: Call) -> None:
        if self._capture is not None:
            self._capture.append(call)
        elif self.lazy:
            self._pending.append(with_own_host_values(call))
        elif call.kind != "view":
            single = Program()
            single.append(call)
            self.compile(single.signature)
            self._count_launch(traffic_of_calls(single.calls, lambda _: True))

    def _fall_back(self, func: Any, leaves: list[Any]) -> None:
        """The operation runs on the host: its inputs are copied there, its results back.

        ``hpu_ops/cpu_fallback.cpp:90-112``, which asserts that no graph is being captured.
        """
        self._refuse_inside(f"cpu fallback ({func})")
        self.counters.cpu_fallbacks[name_of(func)] += 1
        for leaf in leaves:
            if isinstance(leaf, HPUTensor):
                self.read(leaf, f"cpu fallback of {func}")
        self.counters.uploads += 1

    def compile(self, signature: Any) -> None:
        """Count a recipe, unless one of this signature exists."""
        if signature not in self._recipes:
            self._recipes.add(signature)
            if not _is_on_disk(signature):
                self.counters.recipes += 1
                time.sleep(float(os.environ.get("GAUDI_STANDIN_COMPILE_SECONDS", "0")))

    def _count_launch(self, traffic: Traffic) -> None:
        if not self.compile_only:
            self.counters.launches += 1
            self.counters.move(traffic)

    def _run(self, program: Program) -> None:
        with torch.inference_mode(mode=False), torch.no_grad(), self._products():
            program.run(compile_only=self.compile_only)
        self.computed += len(program.calls)

    def _products(self) -> AbstractContextManager[Any]:
        return RoundedProducts() if self.rounds_products else nullcontext()

    def _allocate(self, nbytes: int) -> Allocation:
        allocation = Allocation(nbytes, self.memory)
        if self._capture is not None:
            self._capture.made_inside.add(id(allocation))
        return allocation

    def _owned(self, value: torch.Tensor) -> Buffer:
        """A result in memory of its own; some operations return their input."""
        return Buffer(value.clone() if value._is_view() else value, self._allocate(value.nbytes))

    def _reserve(self, like: TensorOutline) -> Buffer:
        value = torch.empty_strided(like.size, like.stride, dtype=like.dtype)
        return Buffer(value, self._allocate(like.nbytes))

    def _stamp(self, buffer: Buffer) -> int | None:
        return None if self._capture is not None else buffer.allocation.generation


BRIDGE = Bridge()
on_device(BRIDGE)


def _is_held(allocation: Allocation) -> bool:
    """Whether a program still has a tensor there."""
    return allocation.users > 0


def _is_on_disk(signature: Any) -> bool:
    """Whether the recipe cache has a recipe; if there is one, it has it from now on."""
    place = Path(os.environ.get("PT_HPU_RECIPE_CACHE_CONFIG", "").split(",")[0])
    if not place.name or not place.is_dir():
        return False
    name = hashlib.sha256(repr(signature).encode()).hexdigest()
    recipe = place / f"{name}.recipe"
    if recipe.exists():
        return True
    recipe.write_text(name)
    (place / f"{name}.metadata").write_text("stored")  # it is empty until the recipe is
    return False
