"""The adapters of a model by name, as requests name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import attrs

from trencadis.engine.api.inspection import AdapterInfo
from trencadis.engine.errors import AdapterError, shown
from trencadis.engine.runner.adapter_store import LoadedAdapter


@attrs.frozen
class NamedAdapter:
    """An adapter under its name. ``path``: the directory from which it was read."""

    name: str
    path: str
    loaded: LoadedAdapter

    @property
    def info(self) -> AdapterInfo:
        """What clients are told of it."""
        loaded = self.loaded
        return AdapterInfo(self.name, self.path, loaded.rank, loaded.num_bytes, loaded.digest)


class AdapterTable:
    """Names of adapters. Several may have the same content, which is held once.

    A name that is removed leaves its content in use by the requests that had it: `unused` tells
    what is needed no longer.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, NamedAdapter] = {}
        self._retired: dict[str, str] = {}
        """The last name of each content that has none any more."""

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(tuple(self._by_name.values()))

    @property
    def has_retired(self) -> bool:
        """Whether the content of a removed name is still held."""
        return bool(self._retired)

    @property
    def names(self) -> dict[str, str]:
        """A name of each content that requests use: of several the first, of none its last."""
        names = dict(self._retired)
        for adapter in self:
            names.setdefault(adapter.loaded.digest, adapter.name)
        return names

    def digest_of(self, name: str | None) -> str:
        """The content that a request with this adapter uses; empty for None.

        Raises `AdapterError` for a name that is not loaded.
        """
        if name is None:
            return ""
        if name not in self._by_name:
            listed = ", ".join(map(shown, self._by_name)) or "none"
            raise AdapterError(
                f"the adapter {shown(name)} is not loaded: load it, or name one of {listed}", "lora"
            )
        return self._by_name[name].loaded.digest

    def check_free(self, name: str) -> None:
        """Raise `AdapterError` for a name that is taken."""
        if name in self._by_name:
            raise AdapterError(
                f"the adapter {shown(name)} has already been loaded: unload it first", "lora_name"
            )

    def add(self, name: str, path: str, loaded: LoadedAdapter) -> NamedAdapter:
        """Add what was read from ``path`` under a name that is free."""
        added = self._by_name[name] = NamedAdapter(name, path, loaded)
        self._retired.pop(loaded.digest, None)
        return added

    def remove(self, name: str) -> NamedAdapter:
        """Remove a name. Raises `AdapterError` for one that is not loaded."""
        if name not in self._by_name:
            raise AdapterError(f"the adapter {shown(name)} is not loaded", "lora_name")
        removed = self._by_name.pop(name)
        if removed.loaded.digest not in self._digests():
            self._retired[removed.loaded.digest] = name
        return removed

    def unused(self, in_use: Set[str]) -> list[str]:
        """The contents without a name that no request uses, once each."""
        unused = sorted(self._retired.keys() - in_use)
        for digest in unused:
            del self._retired[digest]
        return unused

    def remove_lost(self, holds: Callable[[str], bool]) -> dict[str, str]:
        """Remove what is no longer held, as after another model was served.

        Returns the directories by the names.
        """
        lost = {each.name: each.path for each in self if not holds(each.loaded.digest)}
        for name in lost:
            del self._by_name[name]
        return lost

    def _digests(self) -> set[str]:
        return {adapter.loaded.digest for adapter in self._by_name.values()}
