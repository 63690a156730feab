"""Operations in the order in which they were given, to be computed later, once or often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from gaudi_standin.memory import Buffer
from gaudi_standin.tree import Spec, flatten, unflatten

if TYPE_CHECKING:
    from gaudi_standin.traffic import Traffic

Kind = Literal["compute", "view", "inplace"]


@attrs.frozen(eq=False)
class Call:
    """One operation. ``leaves`` are its flattened arguments with a `Buffer` for each tensor."""

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Spec
    outputs: tuple[Buffer, ...]
    kind: Kind


def garbage_like(tensor: torch.Tensor) -> torch.Tensor:
    """What memory may hold that no recipe has written: no number, an index out of range."""
    with torch.inference_mode(mode=False), torch.no_grad():  # as results are made, see `Bridge`
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if made.dtype.is_floating_point:
            return made.fill_(torch.nan)
        return made.fill_(True if made.dtype is torch.bool else 100)


def is_transfer(call: Call) -> bool:
    """Whether the call copies from the host, which no recipe does."""
    return call.func is torch.ops.aten.copy_.default and isinstance(call.leaves[1], torch.Tensor)


def compute(func: Callable[..., Any], values: list[Any], spec: Spec) -> Any:
    """Run an operation on plain CPU tensors."""
    args, kwargs = unflatten(values, spec)
    return func(*args, **kwargs)


class Program:
    """Calls, and the signature by which a recipe for them would be found.

    Two programs share a recipe when they are the same operations on the same shapes, strides,
    types and constants, wired alike. Source: "mark_step", steps 1 to 4,
    https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._slots: dict[int, int] = {}
        self._signature: list[tuple[Any, ...]] = []

    def append(self, call: Call) -> None:
        self.calls.append(call)
        self._signature.append(
            (call.func, *map(self._key, call.leaves), *map(self._key, call.outputs))
        )

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(self._signature)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute; a view alone is not work."""
        return all(call.kind == "view" for call in self.calls)

    def run(self, *, compile_only: bool = False) -> None:
        """Compute every call, each into the buffers that its outputs have.

        With ``compile_only``, results are garbage.
        """
        for call in self.calls:
            if call.kind == "view":
                continue
            if compile_only and not is_transfer(call):
                for buffer in call.outputs:
                    buffer.value.copy_(garbage_like(buffer.value))
                continue
            values = [leaf.value if isinstance(leaf, Buffer) else leaf for leaf in call.leaves]
            results = compute(call.func, values, call.spec)
            if call.kind == "compute":
                for buffer, result in zip(call.outputs, _tensors(results), strict=True):
                    buffer.value.copy_(result)

    def _key(self, leaf: Any) -> Any:
        if not isinstance(leaf, Buffer):
            return constant_key(leaf)
        slot = self._slots.setdefault(id(leaf.allocation), len(self._slots))
        return (slot, *leaf.key)


class Capture:
    """What is recorded between ``capture_begin`` and ``capture_end``."""

    def __init__(self, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.broken = False
        self.marked: list[Buffer] = []
        self.programs: list[Program] = []
        self.made_inside: set[int] = set()
        self._current = Program()

    def append(self, call: Call) -> None:
        self._current.append(call)

    def passed_on(self) -> set[int]:
        """What one of the programs makes and another one reads."""
        users = [
            {id(x.allocation) for c in p.calls for x in (*c.leaves, *c.outputs) if _is_buffer(x)}
            for p in self.programs
        ]
        counts = Counter(allocation for used in users for allocation in used)
        return {allocation for allocation, count in counts.items() if count > 1}

    def cut(self) -> None:
        if not self._current.is_empty:
            self.programs.append(self._current)
        self._current = Program()


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Buffer)


def constant_key(leaf: Any) -> Any:
    """A value that is part of a recipe: with its type, since 1 and 1.0 give different kernels."""
    if isinstance(leaf, torch.Tensor):
        value = leaf.item() if leaf.dim() == 0 else None
        return ("from the host", leaf.dtype, tuple(leaf.shape), value)
    return (type(leaf), leaf if getattr(type(leaf), "__hash__", None) else repr(leaf))


@attrs.frozen
class _Slot:
    index: int


@attrs.frozen
class _Given:
    """A user's input, or a view of it: the number of the input, and where the view lies in it."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, number: int, marked: Buffer, buffer: Buffer) -> _Given:
        value = buffer.value
        offset = value.storage_offset() - marked.value.storage_offset()
        return cls(number, tuple(value.shape), value.stride(), offset, value.dtype)

    def within(self, given: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype)
        at = self.offset + given.storage_offset()
        return made.set_(given.untyped_storage(), at, self.size, self.stride)  # type: ignore[arg-type]


class FrozenProgram:
    """A captured program, run again on the same memory.

    What was there before and what the host can still see after the capture keeps its place, but
    for inputs that were ``marked`` as the user's: those are given to each run, and not held
    (``lazy_executor.cpp:140-168``, ``HPUGraph.cpp:540-545, 567-592``). The rest exists during a
    replay alone.
    """

    def __init__(
        self,
        program: Program,
        made_inside: set[int],
        traffic: Traffic,
        marked: Sequence[Buffer] = (),
    ) -> None:
        self.traffic = traffic
        places = enumerate(marked)
        self._marked = {id(buffer.allocation): (number, buffer) for number, buffer in places}
        self._given: dict[int, _Given] = {}
        self._fixed: dict[int, Buffer] = {}
        self._indices: dict[int, int] = {}
        self._made_inside = made_inside
        self._steps = [self._step(call) for call in program.calls]
        self._marked = {}
        first = (leaves[0] for call, leaves, _ in self._steps if call.kind == "inplace")
        self.written = {
            self._given[slot.index].number
            for slot in first
            if isinstance(slot, _Slot) and slot.index in self._given
        }
        """The numbers of the user's inputs that it writes."""
        self._last_use = self._find_last_uses()
        fixed = [buffer.allocation for buffer in self._fixed.values()]
        self.inputs = {a for a in fixed if id(a) not in made_inside}
        """What it reads or writes that existed before it."""
        self.outputs = {a for a in fixed if id(a) in made_inside}
        """What it makes that keeps its place."""

    def run(self, given: Sequence[torch.Tensor] = ()) -> None:
        """``given``: the user's inputs."""
        passing = {index: own.within(given[own.number]) for index, own in self._given.items()}
        for number, (call, leaves, outputs) in enumerate(self._steps):
            if call.kind != "view" or not self._has_place(outputs[0]):
                self._run_step(call, leaves, outputs, passing)
            for index in self._last_use.get(number, ()):
                if index not in self._given:
                    passing.pop(index, None)

    def _run_step(
        self,
        call: Call,
        leaves: tuple[Any, ...],
        outputs: tuple[_Slot, ...],
        passing: dict[int, torch.Tensor],
    ) -> None:
        values = [self._value(leaf, passing) for leaf in leaves]
        results = compute(call.func, values, call.spec)
        if call.kind == "inplace":
            return
        for slot, result in zip(outputs, _tensors(results), strict=True):
            if self._is_fixed(slot):
                self._fixed[slot.index].value.copy_(result)
            else:
                passing[slot.index] = result

    def _value(self, leaf: Any, passing: dict[int, torch.Tensor]) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        fixed = self._fixed.get(leaf.index)
        return passing[leaf.index] if fixed is None else fixed.value

    def _is_fixed(self, slot: _Slot) -> bool:
        return slot.index in self._fixed

    def _has_place(self, slot: _Slot) -> bool:
        return self._is_fixed(slot) or slot.index in self._given

    def _step(self, call: Call) -> tuple[Call, tuple[Any, ...], tuple[_Slot, ...]]:
        leaves = tuple(
            self._slot(x, is_read=True) if isinstance(x, Buffer) else x for x in call.leaves
        )
        outputs = tuple(self._slot(x, is_read=False) for x in call.outputs)
        return attrs.evolve(call, leaves=(), outputs=()), leaves, outputs

    def _slot(self, buffer: Buffer, *, is_read: bool) -> _Slot:
        is_new = id(buffer) not in self._indices
        index = self._indices.setdefault(id(buffer), len(self._indices))
        if id(buffer.allocation) in self._marked:
            self._given[index] = _Given.of(*self._marked[id(buffer.allocation)], buffer)
            return _Slot(index)
        stays = id(buffer.allocation) not in self._made_inside or buffer.allocation.users > 0
        if stays or (is_read and is_new):  # read before any call has made it: it was allocated only
            self._fixed[index] = buffer
        return _Slot(index)

    def _find_last_uses(self) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for number, (_, leaves, outputs) in enumerate(self._steps):
            for slot in (*leaves, *outputs):
                if isinstance(slot, _Slot):
                    last[slot.index] = number
        by_step: dict[int, list[int]] = {}
        for index, number in last.items():
            by_step.setdefault(number, []).append(index)
        return by_step


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(results)[0] if isinstance(leaf, torch.Tensor)]
