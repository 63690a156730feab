"""Zeroed memory, and the copiers of its blocks on the CPU and on accelerators. Needs torch.

A part is the keys or the values of a layer. ``words`` is the device memory of parts,
``[parts, num_blocks, n]``, and ``layers`` in its place a tensor of token rows for each,
``[num_blocks * block_size, ...]``. ``host`` is the host memory, ``[num_host_blocks, parts, n]``, of
the same dtype, or bytes for token rows of 8-bit floats. `trencadis.kvcache.tensors` explains these
shapes and checks the block ids.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from operator import attrgetter
from typing import Any

import torch

from trencadis.kvcache.copy_plan import BlockCopy
from trencadis.kvcache.errors import InvalidSetting, OutOfMemory

STAGING_BYTES = 256 << 20
"""Upper bound in bytes of the temporary device memory of copies; a block may take more. No plan of
the device's memory has it, so it is small beside what plans leave free."""

_HUGE_PAGE = 2 << 20

HostMemory = Callable[[int], mmap.mmap]
"""Gives so many bytes of zeroed memory."""


class DirectCopier:
    """The copier for the CPU: one strided copy of all layers per run of neighbouring blocks.

    A gather and a scatter would copy every byte twice.
    """

    def __init__(self, words: torch.Tensor, host: torch.Tensor) -> None:
        self._blocks = words.transpose(0, 1)
        self.host = host

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, all at once. Repeated copies (padding) cost nothing."""
        distinct = dict.fromkeys(copies)
        written = {copy.dst for copy in distinct}

        # Save every source that another copy overwrites; of two exchanged blocks, save one.
        overwritten = {
            copy
            for copy in distinct
            if copy.src in written and not (copy.src > copy.dst and copy[::-1] in distinct)
        }
        saved = [(dst, self._blocks[src].clone()) for src, dst in overwritten]
        remaining = [copy for copy in distinct if copy not in overwritten]
        _copy_runs(self._blocks, self._blocks, remaining)
        for dst, content in saved:
            self._blocks[dst].copy_(content)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host."""
        _copy_runs(self._blocks, self.host, copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device."""
        _copy_runs(self.host, self._blocks, copies)

    def wait(self) -> None:
        """Does nothing: every copy is complete when its call returns."""


class StagedCopier:
    """The copier for accelerators: one gather and one scatter per batch, swaps on their own stream.

    The shapes depend only on the number of copies, so a graph can be replayed for every batch of
    that size. Swaps of more blocks than `STAGING_BYTES` holds are batches of a power of two.
    """

    _staged_copies = 1
    """How many copies of a block are in the temporary memory at once."""

    def __init__(self, words: torch.Tensor, host: torch.Tensor, swap_stream: SwapStream) -> None:
        self._words = words
        self._blocks = words.transpose(0, 1)
        self._device = words.device
        self.host = host
        self._swap_stream = swap_stream

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, all at once, after the swaps so far."""
        self.wait()
        src = self._ids(copy.src for copy in copies)
        dst = self._ids(copy.dst for copy in copies)
        per_layer = len(copies) * self._words.shape[2] * self._words.itemsize
        for layers in torch.split(self._words, max(1, STAGING_BYTES // per_layer)):
            layers.index_copy_(1, dst, layers.index_select(1, src))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host. The host does not wait; later device work waits only for the gather."""
        with self._swap_stream.after_current():
            for batch in self._batches(copies):
                staged = self._gather(self._ids(copy.src for copy in batch))
                # After the gather the blocks may be overwritten; the transfer can take longer.
                self._swap_stream.record()
                _copy_runs(
                    staged, self.host, [BlockCopy(row, copy.dst) for row, copy in enumerate(batch)]
                )

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device."""
        with self._swap_stream.after_current():
            for batch in self._batches(copies):
                shape = (len(batch), *self.host.shape[1:])
                staged = torch.empty(shape, dtype=self.host.dtype, device=self._device)
                _copy_runs(
                    self.host, staged, [BlockCopy(copy.src, row) for row, copy in enumerate(batch)]
                )
                self._scatter(self._ids(copy.dst for copy in batch), staged)
            self._swap_stream.record()

    def wait(self) -> None:
        """Make later device work wait for the swaps so far."""
        self._swap_stream.join()

    def _batches(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        """The copies in batches whose blocks `STAGING_BYTES` holds."""
        _, num_parts, words = self.host.shape
        per_block = num_parts * words * self.host.itemsize * self._staged_copies
        # A power of two divides the sizes of `PLAN_SIZES`, or is one of them.
        size = 1 << (max(1, STAGING_BYTES // per_block).bit_length() - 1)
        for first in range(0, len(copies), size):
            yield copies[first : first + size]

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(ids)).to(self._device, non_blocking=True)

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        """The blocks in the shape of the host memory: ``[len(ids), parts, n]``."""
        return self._blocks.index_select(0, ids)

    def _scatter(self, ids: torch.Tensor, staged: torch.Tensor) -> None:
        self._blocks.index_copy_(0, ids, staged)


class RowCopier(StagedCopier):
    """A staged copier for separate tensors of each layer, with ``block_size`` rows for each block.

    Blocks are copied as runs of rows, so that no view of a layer is updated in place: Gaudi's
    plugin for vLLM moves its blocks in the same way (vllm_gaudi/extension/defragmentation.py,
    ``CacheSwapUtils.forward``).
    """

    _staged_copies = 2
    """The blocks of each layer, and all of them in the order of the host's."""

    def __init__(self, layers: Sequence[torch.Tensor], host: torch.Tensor, block_size: int) -> None:
        self._layers = layers
        self._device = layers[0].device
        self.host = host
        self._slots = torch.arange(block_size)
        self._swap_stream = _make_swap_stream(self._device)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, after the swaps so far."""
        self.wait()
        src = self._ids(copy.src for copy in copies)
        dst = self._ids(copy.dst for copy in copies)
        for layer in self._layers:
            layer.index_copy_(0, dst, layer.index_select(0, src))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host, a batch in one transfer. The host then scatters the blocks.

        A scatter on the device would need a compiled graph for every pattern of runs.
        """
        with self._swap_stream.after_current():
            for batch in self._batches(copies):
                staged = self._gather(self._ids(copy.src for copy in batch))
                self._swap_stream.record()
                host_blocks = torch.tensor([copy.dst for copy in batch])
                self.host.index_copy_(0, host_blocks, staged.cpu().view(self.host.dtype))

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device, a batch in one transfer."""
        with self._swap_stream.after_current():
            for batch in self._batches(copies):
                host_blocks = torch.tensor([copy.src for copy in batch])
                found = self.host.index_select(0, host_blocks)
                staged = found.view(self._layers[0].dtype).to(self._device)
                self._scatter(self._ids(copy.dst for copy in batch), staged)
            self._swap_stream.record()

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        """The rows of these blocks, in order."""
        blocks = torch.tensor(list(ids))
        rows = (blocks[:, None] * len(self._slots) + self._slots).flatten()
        return rows.to(self._device, non_blocking=True)

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        block_words = self.host.shape[2]
        gathered = [layer.index_select(0, ids).view(-1, block_words) for layer in self._layers]
        return torch.stack(gathered, dim=1)

    def _scatter(self, ids: torch.Tensor, staged: torch.Tensor) -> None:
        for layer, blocks in zip(self._layers, staged.unbind(1), strict=True):
            layer.index_copy_(0, ids, blocks.reshape(-1, *layer.shape[1:]))


class SwapStream:
    """The stream of the swaps, and the event that the compute stream waits for.

    ``module`` is the torch module of the device, for example ``torch.cuda`` or ``torch.hpu``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()
        self._event: Any = None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """A context that runs work on this stream, after the work of the current stream so far."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def record(self) -> None:
        """Record the point after which the blocks may be read and written again."""
        self._event = self._stream.record_event()

    def join(self) -> None:
        """Make the current stream wait for the last recorded point."""
        if self._event is not None:
            self._module.current_stream().wait_event(self._event)
            self._event = None


def copier_for(words: torch.Tensor, host: torch.Tensor) -> DirectCopier | StagedCopier:
    """The copier for the device of ``words``."""
    if words.device.type == "cpu":
        return DirectCopier(words, host)
    return StagedCopier(words, host, _make_swap_stream(words.device))


def zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """A zero tensor, in huge pages if it is on the CPU, not ``pinned`` and 2 MiB or larger.

    Blocks are pieces of some KiB at random addresses. In small pages the address translation of
    such a piece takes as long as the copy of its bytes. In huge pages random blocks are copied
    20 % faster (``benchmarks/kvcache_copies.py``).

    ``pinned`` allocates pinned memory, for asynchronous copies from and to an accelerator.
    """
    num_bytes = prod(shape) * dtype.itemsize
    small_pages = pinned or device.type != "cpu" or num_bytes < _HUGE_PAGE
    if small_pages or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages rejects the advice. The memory is usable in small pages.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


def as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidSetting(f"device {device!r} is not a device of PyTorch: {error}") from error


def allocate(
    name: str,
    num_blocks: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pinned: bool = False,
    host_memory: HostMemory | None = None,
) -> torch.Tensor:
    """Zeroed memory. ``name`` and ``num_blocks`` are the setting to lower in an error.

    ``host_memory``: what gives it, by its bytes, in place of PyTorch.
    """
    try:
        num_bytes = prod(shape) * dtype.itemsize
        if host_memory is not None and num_bytes:
            memory = host_memory(num_bytes)
            return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
        return zeros(shape, dtype, device, pinned=pinned)
    # mmap raises OSError and OverflowError, PyTorch a RuntimeError.
    except (MemoryError, OSError, OverflowError, RuntimeError) as error:
        size = prod(shape) * dtype.itemsize
        raise OutOfMemory(
            f"{name} {num_blocks} needs {size} bytes in one piece on {device}, which cannot be "
            f"allocated ({error}): lower {name}"
        ) from error


def _make_swap_stream(device: torch.device) -> SwapStream:
    return SwapStream(torch.get_device_module(device))


def _copy_runs(source: torch.Tensor, target: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks (the first dimension of both tensors) in the longest possible runs."""
    # Writing in ascending order is slightly faster than reading in ascending order.
    ordered = sorted(copies, key=attrgetter("dst"))
    start = 0
    for end in range(1, len(ordered) + 1):
        (src, dst), length = ordered[start], end - start
        if end == len(ordered) or ordered[end] != (src + length, dst + length):
            target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)
            start = end
