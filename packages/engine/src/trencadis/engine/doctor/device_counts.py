"""Counts what an engine starts on its device: programs, graph replays, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from trencadis.engine.devices import Device, Graph, PendingCopy


@attrs.define
class DeviceCounts:
    """Totals since `count_calls`, or the difference between two moments.

    ``compiled`` and ``captured``: programs and graphs that were made; ``programs`` and ``replays``:
    how often they were started. ``uploads`` and ``downloads``: copies from and to the host.
    """

    compiled: int = 0
    programs: int = 0
    captured: int = 0
    replays: int = 0
    uploads: int = 0
    downloads: int = 0

    def since(self, before: DeviceCounts) -> DeviceCounts:
        """What was counted after ``before``, an earlier copy (`attrs.evolve`)."""
        names = [field.name for field in attrs.fields(DeviceCounts)]
        return DeviceCounts(**{name: getattr(self, name) - getattr(before, name) for name in names})


def count_calls(device: Device) -> DeviceCounts:
    """Counts that grow with each call of ``device``, whose methods are replaced.

    Programs of a device that shares the host's memory are not counted: they start no work
    elsewhere, and are more than functions there.
    """
    counts = DeviceCounts()
    compile_, capture, upload, fetch = device.compile, device.capture, device.upload, device.fetch

    def counted_compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        program = compile_(module, inputs)
        counts.compiled += 1

        def counted_program(*given: Any) -> Any:
            counts.programs += 1
            return program(*given)

        return counted_program

    def counted_capture(
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
    ) -> Graph:
        graph = _CountedGraph(capture(run, inputs, own), counts)
        counts.captured += 1
        return graph

    def counted_upload(host: torch.Tensor) -> torch.Tensor:
        counts.uploads += 1
        return upload(host)

    def counted_fetch(tensors: Sequence[torch.Tensor]) -> PendingCopy:
        counts.downloads += 1
        return fetch(tensors)

    replaced = {"capture": counted_capture, "upload": counted_upload, "fetch": counted_fetch}
    if not device.shares_host_memory:
        replaced["compile"] = counted_compile
    for name, method in replaced.items():
        setattr(device, name, method)
    return counts


class _CountedGraph(Graph):
    def __init__(self, graph: Graph, counts: DeviceCounts) -> None:
        self._graph = graph
        self._counts = counts

    def replay(self, inputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> Any:
        self._counts.replays += 1
        return self._graph.replay(inputs, own)

    def forget(self) -> None:
        self._graph.forget()

    def release(self) -> None:
        self._graph.release()
