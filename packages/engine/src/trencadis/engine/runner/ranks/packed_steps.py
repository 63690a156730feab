"""Steps as plain values, which take a tenth of the time to encode that `StepInput` takes.

The sequences of a step become columns, their block tables one piece of memory. How a sequence is
sampled does not change from step to step: it is sent once, and by its number from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np

from trencadis.engine.runner.step import RowRequest, SampleSettings, StepInput
from trencadis.kvcache import CopyPlan
from trencadis.scheduler import ScheduledSequence

Samples = tuple[SampleSettings, ...]

_MOST_HELD = 1024
"""Samples that both ends remember; beyond it, both forget all and begin again."""

_PACKED = ("number", "prompts", "decodes", "moves", "rows")
_OTHERS = [field.name for field in attrs.fields(StepInput) if field.name not in _PACKED]

_TABLES = ScheduledSequence._fields.index("block_table")


class StepPacker:
    """The end of the core: `packed` has to be called for each step that is sent, in their order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """By the identities of those in ``_held``."""
        self._held: list[Samples] = []

    def packed(self, step: StepInput) -> tuple[Any, ...]:
        """A step as plain values, with the samples that were not sent before."""
        # Also before the first step: a packer may replace another, of which a message was lost.
        forgets = not 0 < len(self._held) <= _MOST_HELD
        if forgets:
            self._held, self._numbers = [], {}
        num_held = len(self._held)
        rows = self._packed_rows(step.rows)
        return (
            step.number,
            _columns(step.prompts),
            _columns(step.decodes),
            step.moves or None,
            forgets,
            self._held[num_held:],
            rows,
            *(getattr(step, name) for name in _OTHERS),
        )

    def _packed_rows(self, rows: Mapping[int, RowRequest]) -> tuple[Any, ...]:
        """Columns of the rows, in that of the samples the numbers of those that stay the same."""
        if not rows:
            return ()
        lengths, samples, masks, candidates = zip(*rows.values(), strict=True)
        numbers: list[Any] = [*map(self._numbers.get, map(id, samples))]
        if None in numbers:
            for row, number in enumerate(numbers):
                if number is None:
                    numbers[row] = self._number(samples[row], candidates[row])
        return tuple(rows), lengths, numbers, masks, candidates

    def _number(self, samples: Samples, num_candidates: int) -> int | Samples:
        """A new number for samples that the next step has, too; otherwise the samples themselves.

        Those of forks and beams are made for a step, and a history gets longer.
        """
        if len(samples) > 1 or num_candidates or samples[0].history:
            return samples
        number = self._numbers[id(samples)] = len(self._held)
        self._held.append(samples)
        return number


class StepUnpacker:
    """The end of a rank."""

    def __init__(self) -> None:
        self._held: list[Samples] = []

    def step(self, packed: tuple[Any, ...]) -> StepInput:
        """The step that `StepPacker.packed` has made so."""
        number, prompts, decodes, moves, forgets, new, rows, *others = packed
        if forgets:
            self._held = []
        self._held += new
        plan = CopyPlan() if moves is None else moves
        return StepInput(
            *(number, _sequences(prompts), _sequences(decodes), plan, self._rows(rows)),
            **dict(zip(_OTHERS, others, strict=True)),
        )

    def _rows(self, packed: tuple[Any, ...]) -> dict[int, RowRequest]:
        if not packed:
            return {}
        seq_ids, lengths, numbers, masks, candidates = packed
        held = self._held
        samples = [held[each] if type(each) is int else each for each in numbers]
        rows = map(RowRequest, lengths, samples, masks, candidates)
        return dict(zip(seq_ids, rows, strict=True))


def _columns(sequences: Sequence[ScheduledSequence]) -> tuple[Any, ...]:
    """The fields of sequences, each a column; block tables as their lengths and their blocks."""
    if not sequences:
        return ()
    columns: list[Any] = [*zip(*sequences, strict=True)]
    tables = columns[_TABLES]
    columns[_TABLES] = [*map(len, tables)], np.concatenate(tables).tobytes()
    return tuple(columns)


def _sequences(columns: tuple[Any, ...]) -> tuple[ScheduledSequence, ...]:
    if not columns:
        return ()
    lengths, packed = columns[_TABLES]
    blocks = np.frombuffer(packed, np.int32)
    ends = accumulate(lengths)
    tables = [blocks[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    unpacked = [*columns[:_TABLES], tables, *columns[_TABLES + 1 :]]
    return tuple(map(ScheduledSequence, *unpacked))
