"""What the core reports of its KV cache and its buckets when it is asked.

Statistics that are sent all the time are `EngineStats`; this is larger, so the core makes it only
when it is asked. Sizes are bounded, whatever the cache and the grids.
"""

from __future__ import annotations

from typing import Literal

import attrs

from trencadis.kvcache import BlockMap

MAX_MAP_CELLS = 512
"""Most cells of the block map."""

MAX_GRID_SIZES = 24
"""Most sizes of an axis of a `GridUsage`; neighbouring sizes of larger grids share a cell."""


@attrs.frozen
class GridUsage:
    """The buckets of a phase in a table of two axes, their state, and how often traffic used them.

    - ``axes``: names of the axes of ``rows`` and ``columns``, which have the sizes, ascending: the
      largest one where neighbouring sizes share a row or column. A third axis is summed up.
    - ``is_padded``: whether batches are padded to these buckets. False: each runs in its own size,
      and the sizes are those that occurred, rounded up to powers of two.
    - ``num_buckets``, ``num_warm``, ``num_captured``, ``num_hits``, of each cell, row after row:
      buckets, those that warm-up has run or traffic has compiled, those with captured graphs, and
      forward passes since the model was loaded: at the start, by a switch or at a wake-up. A bucket
      miss is not a hit.
    """

    phase: Literal["prefill", "decode"]
    axes: tuple[str, str]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    is_padded: bool
    num_buckets: tuple[int, ...]
    num_warm: tuple[int, ...]
    num_captured: tuple[int, ...]
    num_hits: tuple[int, ...]


@attrs.frozen
class AdapterInfo:
    """An adapter that requests may name. ``path``: its directory; ``num_bytes``: of its matrices in
    host memory; ``digest``: of its content."""

    name: str
    path: str
    rank: int
    num_bytes: int
    digest: str = ""


@attrs.frozen
class EngineInspection:
    """The KV blocks of the device, and the grids of prefill and decode."""

    blocks: BlockMap
    grids: tuple[GridUsage, ...]
