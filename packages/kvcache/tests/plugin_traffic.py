"""Traffic of vLLM's plugin for Gaudi, as its model runner passes it to a defragmenter."""

from __future__ import annotations

import random
from typing import Any

import torch

SIZE = 4
"""Slots of a block."""


def caches(num_blocks: int, layers: int = 2) -> list[tuple[Any, Any]]:
    """Keys and values of slots, and the plugin's padding block."""
    shape = ((num_blocks + 1) * SIZE, 2, 3)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]


class Traffic:
    """vLLM's allocator, as the runner sees it: ids of blocks, some of whose content is kept."""

    def __init__(
        self,
        defragmenter: Any,
        num_blocks: int,
        seed: int,
        *,
        keeps: bool,
        ids_return: bool = True,
    ) -> None:
        self.ids_return = ids_return
        self.defragmenter = defragmenter
        self.rng = random.Random(seed)
        self.keeps = keeps
        self.free = list(range(1, num_blocks))
        self.users: dict[int, int] = {}
        self.stamps: dict[int, float] = {}
        self.requests: dict[str, list[int]] = {}
        self.num_steps = self.num_stamps = 0

    def step(self) -> None:
        rng = self.rng
        finished = [name for name in self.requests if rng.random() < 0.15]
        for name in finished:
            for block in self.requests.pop(name):
                self.users[block] -= 1
                if not self.users[block]:
                    del self.users[block]
                    self.free.append(block)
        self.num_steps += 1
        # An id may come again in the step in which it ends.
        names = [f"{self.num_steps}-{i}" for i in range(rng.randint(0, 3))]
        names += [name for name in finished if self.ids_return and rng.random() < 0.3]
        new = {name: self._given() for name in names}
        more = {name: self._given(1) for name in self.requests if rng.random() < 0.3}
        for name, blocks in (new | more).items():
            self.requests.setdefault(name, []).extend(blocks)
        self.defragmenter.update_state(new | more, [*finished, "never seen"])
        self.defragmenter.defragment()
        self._write()

    def _given(self, most: int = 6) -> list[int]:
        """Ids of blocks, in part with the content of others or of earlier requests."""
        rng, given = self.rng, []
        for _ in range(rng.randint(1, most)):
            known = [b for b in self.stamps if b in self.users or b in self.free]
            block = rng.choice(known) if self.keeps and known and rng.random() < 0.3 else None
            if block is None and not self.free:
                break
            if block is None:
                block = self.free[rng.randrange(len(self.free))]
                self.stamps.pop(block, None)
            if block in self.free:
                self.free.remove(block)
            if block in given:
                continue
            self.users[block] = self.users.get(block, 0) + 1
            given.append(block)
        return given

    def _write(self) -> None:
        """Fill the blocks that have no content yet, through their places."""
        for block in self.users:
            if block not in self.stamps:
                self.num_stamps += 1
                self.stamps[block] = self.num_stamps
                place = self.defragmenter.resolve(block)
                for layer, (keys, values) in enumerate(self.defragmenter.kv_caches):
                    rows = slice(place * SIZE, (place + 1) * SIZE)
                    keys[rows], values[rows] = self.num_stamps + layer / 8, -self.num_stamps

    def check(self, threshold: int) -> None:
        """Each block has its content at its place, and the places in use are low."""
        tables = list(self.requests.values())
        for blocks, places in zip(tables, self.defragmenter.resolve_all(tables), strict=True):
            assert places == [self.defragmenter.resolve(block) for block in blocks]
            for block, place in zip(blocks, places, strict=True):
                for layer, (keys, values) in enumerate(self.defragmenter.kv_caches):
                    rows = slice(place * SIZE, (place + 1) * SIZE)
                    assert (keys[rows] == self.stamps[block] + layer / 8).all()
                    assert (values[rows] == -self.stamps[block]).all()
        highest = max((self.defragmenter.resolve(block) for block in self.users), default=0)
        assert highest <= len(self.users) + threshold
