"""The adapters of a model in host memory, which are copied to the slots of its layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from trencadis.engine.errors import AdapterError
from trencadis.engine.models.adapter_files import Adapter, read_adapter
from trencadis.engine.models.adapter_layers import AdapterLayers


class AdapterReader(Protocol):
    """Reads and checks the adapter in a directory, in any thread: see `read_adapter`."""

    def __call__(self, directory: Path, *, within: Sequence[str] = ()) -> Adapter: ...


@attrs.frozen
class LoadedAdapter:
    """An adapter in host memory. ``digest``: of its content. ``num_bytes``: of its matrices."""

    digest: str
    rank: int
    num_bytes: int


class AdapterStore:
    """Holds adapters, at most ``limit`` of them; None for any number.

    An adapter whose content is held already takes nothing more. ``layers``: those of the model.
    ``held``: the store of the same model before its weights were read again.
    """

    def __init__(self, limit: int | None, held: AdapterStore | None = None) -> None:
        self.layers: AdapterLayers | None = None
        self._limit = limit
        self._adapters: dict[str, Adapter] = {} if held is None else held._adapters

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def reader(self) -> AdapterReader:
        """What reads an adapter for these layers. It keeps nothing of the model."""
        layers = self._layers()
        return functools.partial(
            read_adapter, layers=layers.shapes, max_rank=layers.max_rank, dtype=layers.dtype
        )

    def _layers(self) -> AdapterLayers:
        if self.layers is None:
            raise AdapterError("this engine serves no adapters: start it with enable_lora")
        return self.layers

    def hold(self, adapter: Adapter) -> LoadedAdapter:
        """Hold what `reader` has read. Raises `AdapterError` where there are ``limit`` already."""
        is_new = adapter.digest not in self._adapters
        if is_new and self._limit is not None and len(self._adapters) >= self._limit:
            raise AdapterError(
                f"{len(self._adapters)} adapters are in host memory and max_cpu_loras is "
                f"{self._limit}: unload one, or start with more"
            )
        if is_new:
            self._adapters[adapter.digest] = self._layers().part_of(adapter)
        return LoadedAdapter(adapter.digest, adapter.rank, adapter.num_bytes)

    def drop(self, digest: str) -> None:
        """Free the host memory of an adapter that nothing uses."""
        self._adapters.pop(digest, None)

    def place(self, slots: Mapping[str, int]) -> None:
        """Copy adapters to slots, by digest, unless they are there."""
        for digest, slot in slots.items():
            if self.layers is None or digest not in self._adapters:
                raise AdapterError(f"the adapter {digest} is not in host memory")
            self.layers.put(slot, self._adapters[digest])
