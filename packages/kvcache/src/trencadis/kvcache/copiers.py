"""How blocks are copied: in place on the processor, through a staging buffer on an accelerator.

Both see the device as ``words``, ``[2 * layers, num_blocks, n]``, or as that many tensors of
``[num_blocks, ...]``, and the host as ``host``, ``[num_host_blocks, 2 * layers, n]``, of one dtype.
`trencadis.kvcache.tensors` says why, and checks the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from trencadis.kvcache.moves import BlockCopy

STAGING_BYTES = 1 << 30
"""Most device memory that a copy within the device takes while it lasts."""


class DirectCopier:
    """One strided copy, of all layers, per run of neighbouring blocks; for the processor.

    A gather and a scatter would move every byte twice.
    """

    def __init__(self, words: torch.Tensor, host: torch.Tensor) -> None:
        self._blocks = words.transpose(0, 1)
        self._host = host

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, all at once; repeats, as in a padded plan, cost nothing."""
        plan = dict.fromkeys(copies)
        written = {copy.dst for copy in plan}

        # What is overwritten before it is read is put aside; of two blocks that change places, one.
        aside = {
            copy
            for copy in plan
            if copy.src in written and not (copy.src > copy.dst and copy[::-1] in plan)
        }
        saved = [(dst, self._blocks[src].clone()) for src, dst in aside]
        _copy_runs(self._blocks, self._blocks, [copy for copy in plan if copy not in aside])
        for dst, content in saved:
            self._blocks[dst].copy_(content)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host."""
        _copy_runs(self._blocks, self._host, copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device."""
        _copy_runs(self._host, self._blocks, copies)

    def wait(self) -> None:
        """Nothing is ever under way."""


class StagedCopier:
    """Gathers and scatters whole plans, swaps on a stream of their own; for accelerators.

    The number of copies alone decides the shapes, so that a graph can be replayed for any plan of
    that size.
    """

    def __init__(self, words: torch.Tensor, host: torch.Tensor, side: SideStream) -> None:
        self._words = words
        self._blocks = words.transpose(0, 1)
        self._device = words.device
        self._host = host
        self._side = side

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, all at once, after the swaps asked for so far."""
        self.wait()
        src = self._ids(copy.src for copy in copies)
        dst = self._ids(copy.dst for copy in copies)
        per_layer = len(copies) * self._words.shape[2] * self._words.itemsize
        for layers in torch.split(self._words, max(1, STAGING_BYTES // per_layer)):
            layers.index_copy_(1, dst, layers.index_select(1, src))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host; the device does not wait for the link, the host for nothing."""
        with self._side.after_current():
            staged = self._gather(self._ids(copy.src for copy in copies))
            # The blocks may be overwritten once they are staged; the link can take longer.
            self._side.mark()
            _copy_runs(
                staged, self._host, [BlockCopy(at, copy.dst) for at, copy in enumerate(copies)]
            )

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device."""
        shape = (len(copies), *self._host.shape[1:])
        with self._side.after_current():
            staged = torch.empty(shape, dtype=self._host.dtype, device=self._device)
            _copy_runs(
                self._host, staged, [BlockCopy(copy.src, at) for at, copy in enumerate(copies)]
            )
            self._scatter(self._ids(copy.dst for copy in copies), staged)
            self._side.mark()

    def wait(self) -> None:
        """Let what the device does next wait for the swaps asked for so far."""
        self._side.join()

    def _ids(self, ids: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(ids)).to(self._device, non_blocking=True)

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Blocks as the host has them: ``[len(ids), 2 * layers, n]``."""
        return self._blocks.index_select(0, ids)

    def _scatter(self, ids: torch.Tensor, staged: torch.Tensor) -> None:
        self._blocks.index_copy_(0, ids, staged)


class LayerwiseCopier(StagedCopier):
    """A staged copier over a tensor for each layer's keys and values, none of them a view."""

    def __init__(
        self, layers: Sequence[torch.Tensor], host: torch.Tensor, side: SideStream
    ) -> None:
        self._layers = layers
        self._device = layers[0].device
        self._host = host
        self._side = side

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy within the device, after the swaps asked for so far."""
        self.wait()
        src = self._ids(copy.src for copy in copies)
        dst = self._ids(copy.dst for copy in copies)
        for layer in self._layers:
            layer.index_copy_(0, dst, layer.index_select(0, src))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the host, which puts the blocks in their places: the device copies one piece,
        because where a plan's runs begin and end would be one more shape to compile."""
        with self._side.after_current():
            staged = self._gather(self._ids(copy.src for copy in copies))
            self._side.mark()
            places = torch.tensor([copy.dst for copy in copies])
            self._host.index_copy_(0, places, staged.cpu())

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy to the device, as one piece."""
        with self._side.after_current():
            places = torch.tensor([copy.src for copy in copies])
            staged = self._host.index_select(0, places).to(self._device)
            self._scatter(self._ids(copy.dst for copy in copies), staged)
            self._side.mark()

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        chosen = [layer.index_select(0, ids).flatten(1) for layer in self._layers]
        return torch.stack(chosen, dim=1)

    def _scatter(self, ids: torch.Tensor, staged: torch.Tensor) -> None:
        for layer, blocks in zip(self._layers, staged.unbind(1), strict=True):
            layer.index_copy_(0, ids, blocks.reshape(-1, *layer.shape[1:]))


class SideStream:
    """A stream beside the one that computes, and the event at which the two meet.

    ``module`` is that of the process's current device, such as ``torch.cuda`` or ``torch.hpu``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stream = module.Stream()
        self._event: Any = None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Work on this stream, after what the current one has been given so far."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def mark(self) -> None:
        """From here on, the blocks may be used again."""
        self._event = self._stream.record_event()

    def join(self) -> None:
        """Let the current stream wait for the last mark."""
        if self._event is not None:
            self._module.current_stream().wait_event(self._event)
            self._event = None


def copier_for(
    words: torch.Tensor | Sequence[torch.Tensor], host: torch.Tensor
) -> DirectCopier | StagedCopier:
    """What suits the device on which ``words`` is: one tensor, or one for each part of a layer."""
    if not isinstance(words, torch.Tensor):
        return LayerwiseCopier(words, host, _side_stream(words[0].device))
    if words.device.type == "cpu":
        return DirectCopier(words, host)
    return StagedCopier(words, host, _side_stream(words.device))


def _side_stream(device: torch.device) -> SideStream:
    return SideStream(torch.get_device_module(device))


def _copy_runs(source: torch.Tensor, target: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks, the first dimension of both, in runs as long as they come."""
    # Memory is written in order: of scattered places that is a little faster than reading in order.
    ordered = sorted(copies, key=attrgetter("dst"))
    start = 0
    for end in range(1, len(ordered) + 1):
        (src, dst), length = ordered[start], end - start
        if end == len(ordered) or ordered[end] != (src + length, dst + length):
            target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)
            start = end
