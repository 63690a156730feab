"""Records calls of native functions, to make them again without Python between them.

The functions take only integers and addresses. The code that calls one notes it (`note`) in the
recording of the thread, if there is one (`recorded`). A `CallList` makes the calls of a recording
again, with other inputs, and with other memory for what is computed in between.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.engine.devices.cpu.native_kernel import load_kernel
from trencadis.kvcache import ceil_div

_SOURCE = Path(__file__).with_name("native_calls.cpp")
_ALIGNMENT = 64


class Address(int):
    """An argument that is a place in memory; 0 for none."""


Argument = int | Address | Sequence[int | Address]
"""A sequence is passed as the address of an array of its elements."""


class NotRecordable(Exception):
    """What was recorded cannot be computed by its native calls alone; the message says why."""


@attrs.frozen(eq=False)
class NativeCall:
    """A call of a function. ``has_status``: it returns 0 where it succeeded.

    ``changing``: the places of arguments that every run of a `CallList` gives anew.
    """

    function: int
    arguments: Sequence[Argument]
    has_status: bool
    changing: range


@attrs.define(eq=False)
class Recording:
    """Native calls, and the tensors that were made for them."""

    calls: list[NativeCall] = attrs.field(factory=list)
    tensors: list[torch.Tensor] = attrs.field(factory=list)


class _Current(threading.local):
    recording: Recording | None = None


_CURRENT = _Current()


@contextlib.contextmanager
def recorded() -> Generator[Recording, None, None]:
    """Within this context, the native calls of this thread are recorded."""
    _CURRENT.recording = recording = Recording()
    try:
        yield recording
    finally:
        _CURRENT.recording = None


def is_recording() -> bool:
    """Whether the native calls of this thread are recorded."""
    return _CURRENT.recording is not None


def note(
    function: int,
    arguments: Sequence[Argument],
    tensors: Iterable[torch.Tensor],
    *,
    has_status: bool = False,
    changing: range = range(0),
) -> None:
    """Add a call that was made to the recording of this thread, if there is one.

    ``tensors``: those that were made for the call, results and scratch memory.
    """
    recording = _CURRENT.recording
    if recording is not None:
        recording.calls.append(NativeCall(function, tuple(arguments), has_status, changing))
        recording.tensors += tensors


def data_address(tensor: torch.Tensor | None) -> Address:
    """Where the numbers of a tensor are; 0 for None."""
    return Address(0 if tensor is None else tensor.data_ptr())


@functools.lru_cache(maxsize=64)
def float_bits(value: float) -> int:
    """A number in fp32 as an integer, for a function whose arguments are all integers."""
    return int.from_bytes(struct.pack("<f", value), "little")


def address_of(function: Callable[..., object]) -> int:
    """The address of a function of a library that ctypes has loaded."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class Replayer:
    """Makes calls one after the other. ``most_arguments`` is the largest number of a function.

    Raises `NoKernel` where its source cannot be compiled.
    """

    def __init__(self, directory: Path | None = None, *, trusted: bool = False) -> None:
        library = load_kernel(_SOURCE, (), directory, trusted=trusted)
        self.most_arguments = int(library.most_arguments())
        self.call_all = library.call_all
        self.call_all.argtypes = (ctypes.c_void_p, ctypes.c_int64)


class Scratch:
    """Memory for what is computed in between, of several call lists that run one after another."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Have so much at least. The memory may move; nothing in it is kept then.

        Raises `MemoryError`.
        """
        if num_bytes > len(self.memory):
            try:
                self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise MemoryError(str(error)) from error

    def clear(self) -> None:
        """Overwrite everything by values that are not a number."""
        self.memory.fill_(0xFF)


@attrs.frozen
class _Span:
    """The memory of a tensor: of an input by number, or in a half of the scratch memory.

    Neither: of a tensor that stays where it is.
    """

    start: int
    end: int
    given: int | None = None
    half: int | None = None
    offset: int = 0


class CallList:
    """The native calls of a chain of parts, each of which reads the result of the one before.

    `add` the parts in order, then `finish`, then `run` as often as wanted. ``fixed``: tensors that
    stay where they are, and are kept by the caller. Of the scratch memory, parts use two halves in
    turns. Raises `NotRecordable` for a fixed tensor without an address.
    """

    def __init__(self, fixed: Iterable[torch.Tensor], replayer: Replayer, scratch: Scratch) -> None:
        self._scratch = scratch
        self._fixed = sorted((_span(x) for x in fixed), key=operator.attrgetter("start"))
        self._starts = [span.start for span in self._fixed]
        self._replayer = replayer
        self._num_calls = self._num_parts = 0
        self._before: _Span | None = None
        self._sizes = [0, 0]
        self._words: list[int] = []
        # Words that hold an address, by what they point to, with the distance from its beginning.
        self._in_given: list[tuple[int, int, int]] = []
        self._in_scratch: list[tuple[int, int, int]] = []
        self._in_words: list[tuple[int, int]] = []
        self._changing: list[list[int]] = []

    def add(
        self, recording: Recording, given: Sequence[torch.Tensor], result: torch.Tensor
    ) -> None:
        """Add a part that reads the tensors ``given`` and the result of the part before.

        Raises `NotRecordable` for a call that reads or writes anything else.
        """
        if not all(tensor.is_contiguous() for tensor in given):
            raise NotRecordable("an input is not contiguous")
        spans = [_Span(x.data_ptr(), x.data_ptr() + x.nbytes, given=i) for i, x in enumerate(given)]
        if self._before is not None:
            spans.append(self._before)
        half, size = self._num_parts % 2, 0
        for tensor in recording.tensors:
            span = _span(tensor)
            if self._find(span.start, spans) is None:
                spans.append(attrs.evolve(span, half=half, offset=size))
                size += ceil_div(span.end - span.start, _ALIGNMENT) * _ALIGNMENT
        self._sizes[half] = max(self._sizes[half], size)
        for call in recording.calls:
            self._add_call(call, spans)
        self._before = self._find(result.data_ptr(), spans)
        if self._before is None or self._before.half != half or not result.is_contiguous():
            raise NotRecordable("no recorded call has made the result of a layer")
        self._num_parts += 1
        self._result = (half, self._before.offset + result.data_ptr() - self._before.start)
        self._like = (result.shape, result.dtype)

    @property
    def num_changing(self) -> int:
        """Calls with changing arguments."""
        return len(self._changing)

    def finish(self) -> None:
        """To be called after the last part. Raises `MemoryError` without memory for the scratch."""
        self._array = np.array(self._words, dtype=np.int64)
        self._address = self._array.ctypes.data
        for word, target in self._in_words:
            self._array[word] = self._address + 8 * target
        half, offset = self._result
        self._result_offset = half * self._sizes[0] + offset
        self._scratch_words = np.array([word for word, *_ in self._in_scratch], dtype=np.intp)
        self._scratch_offsets = np.array(
            [half * self._sizes[0] + offset for _, half, offset in self._in_scratch], dtype=np.int64
        )
        self._scratch.reserve(sum(self._sizes))
        self._use_memory(self._scratch.memory)
        self._patches = [
            (number, *np.array([(w, d) for w, n, d in self._in_given if n == number]).T)
            for number in sorted({number for _, number, _ in self._in_given})
        ]
        most = max(map(len, self._changing), default=0)
        places = [[*each, *each[-1:] * (most - len(each))] for each in self._changing]
        self._places = np.array(places, dtype=np.intp)
        # Hundreds of call lists may be kept, and Python lists are larger than the arrays.
        self._words.clear()
        self._in_given.clear()
        self._in_scratch.clear()
        self._in_words.clear()
        self._fixed.clear()
        self._starts.clear()

    def _use_memory(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._array[self._scratch_words] = self._scratch_offsets + memory.data_ptr()
        shape, dtype = self._like
        end = self._result_offset + shape.numel() * dtype.itemsize
        self._output = memory[self._result_offset : end].view(dtype).view(shape)

    def run(
        self, given: Sequence[torch.Tensor], changing: npt.NDArray[np.int64]
    ) -> tuple[int, torch.Tensor]:
        """Make the calls; returns the first status that is not 0, and a copy of the result.

        ``given``: in the order, shapes and layouts of `add`. ``changing``: a row for each call with
        changing arguments, or one row for all; the last number of a call with fewer of them is
        repeated. Raises `RuntimeError` where a function has raised
        an exception of C++.
        """
        if self._memory is not self._scratch.memory:
            self._use_memory(self._scratch.memory)
        words = self._array
        for number, places, distances in self._patches:
            words[places] = distances + given[number].data_ptr()
        words[self._places] = changing
        status = self._replayer.call_all(self._address, self._num_calls)
        if status < 0:
            raise RuntimeError("a compiled kernel has failed")
        return status, self._output.clone()

    def _find(self, address: int, spans: Sequence[_Span]) -> _Span | None:
        for span in spans:
            if span.start <= address < span.end:
                return span
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._fixed[place].end:
            return self._fixed[place]
        return None

    def _add_call(self, call: NativeCall, spans: Sequence[_Span]) -> None:
        if len(call.arguments) > self._replayer.most_arguments:
            raise NotRecordable(f"a function takes {len(call.arguments)} arguments")
        words = self._words
        began = len(words)
        words += (0, call.function, int(call.has_status), len(call.arguments))
        first = len(words)
        arrays: list[tuple[int, Sequence[int | Address]]] = []
        for place, argument in enumerate(call.arguments):
            if isinstance(argument, Sequence):
                arrays.append((len(words), argument))
                words.append(0)
            elif place in call.changing:
                words.append(0)
            else:
                self._add_word(argument, spans)
        for word, array in arrays:
            self._in_words.append((word, len(words)))
            for element in array:
                self._add_word(element, spans)
        words[began] = len(words) - began
        if call.changing:
            self._changing.append([first + place for place in call.changing])
        self._num_calls += 1

    def _add_word(self, argument: int | Address, spans: Sequence[_Span]) -> None:
        if isinstance(argument, Address) and argument:
            span = self._find(argument, spans)
            if span is None:
                raise NotRecordable("a function reads what no recorded call has made")
            if span.given is not None:
                self._in_given.append((len(self._words), span.given, argument - span.start))
            elif span.half is not None:
                distance = span.offset + argument - span.start
                self._in_scratch.append((len(self._words), span.half, distance))
        self._words.append(int(argument))


def _span(tensor: torch.Tensor) -> _Span:
    if tensor.layout is not torch.strided:  # as a weight that oneDNN has packed
        raise NotRecordable("a tensor has no address")
    storage = tensor.untyped_storage()
    return _Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
