"""The bucketing strategies, in one table: `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from trencadis.bucketing.strategies.axis_settings import AxisSettings
from trencadis.bucketing.strategies.ranges import (
    exponential_range,
    linear_range,
    padding_aware_range,
)
from trencadis.bucketing.strategies.traffic_fit import fit_to_traffic
from trencadis.bucketing.traffic import TrafficRecorder

Range: TypeAlias = Callable[..., tuple[int, ...]]
Fit: TypeAlias = Callable[[Sequence[AxisSettings], TrafficRecorder], Mapping[str, tuple[int, ...]]]
Size: TypeAlias = int | Literal["block_size", "max_num_seqs"]
"""A number, or the serving limit that has it."""


@attrs.frozen(kw_only=True)
class AxisDefaults:
    """What a strategy uses where the user sets no step (or min), as Gaudi's plugin does.

    Attributes:
        prompt_batch_step, context_step: of `prompt_grid`, in sequences and in blocks.
        decode_batch_step, decode_blocks_step, decode_blocks_min: of `decode_grid`, in sequences
            and in blocks.
        sequence_prompt_batch_step, sequence_decode_batch_step: of `sequence_grid`, in sequences,
            for each phase.
    """

    prompt_batch_step: int = 1
    context_step: int = 1
    decode_batch_step: int = 2
    decode_blocks_step: Size = "block_size"
    decode_blocks_min: Size = 1
    sequence_prompt_batch_step: int = 2
    sequence_decode_batch_step: int = 2


@attrs.frozen
class Strategy:
    """One row of `STRATEGIES`.

    Attributes:
        range: the function that computes the values of one axis.
        settings: the names of the `AxisSettings` that are its arguments, in order. The log line
            of a grid shows these.
        defaults: the settings of axes that the user leaves open.
        fit: for a strategy that fits axes to recorded traffic, the function that does so for all
            axes; `range` is then for an axis that was not recorded.
    """

    range: Range
    settings: tuple[str, ...]
    defaults: AxisDefaults = AxisDefaults()
    fit: Fit | None = None

    def values(
        self, axes: Sequence[AxisSettings], traffic: TrafficRecorder | None = None
    ) -> dict[str, tuple[int, ...]]:
        """The values of every axis by name, increasing, each ending at the axis's `max`.

        Args:
            axes: the settings of the axes.
            traffic: recorded traffic; used, and needed, where there is a `fit`.
        """
        values = {
            axis.name: self.range(*(getattr(axis, name) for name in self.settings)) for axis in axes
        }
        if self.fit is not None and traffic is not None:
            values.update(self.fit(axes, traffic))
        return {axis.name: _up_to(axis.max, values[axis.name]) for axis in axes}


def _up_to(max_size: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """A range may end below its `max` or be empty; the largest size still needs a bucket."""
    return values if values and values[-1] >= max_size else (*values, max_size)


STRATEGIES: dict[str, Strategy] = {
    "lin": Strategy(
        linear_range,
        ("min", "step", "max"),
        AxisDefaults(
            decode_batch_step=32, sequence_prompt_batch_step=32, sequence_decode_batch_step=128
        ),
    ),
    "exp": Strategy(
        exponential_range,
        ("min", "step", "max", "limit"),
        AxisDefaults(prompt_batch_step=2, decode_blocks_step="max_num_seqs"),
    ),
    "pad": Strategy(
        padding_aware_range,
        ("min", "step", "max", "pad_max", "pad_percent"),
        AxisDefaults(context_step=2, decode_blocks_min="block_size"),
    ),
    "fit": Strategy(
        exponential_range,
        ("min", "step", "max", "limit"),
        AxisDefaults(
            decode_batch_step=1,
            decode_blocks_step=1,
            sequence_prompt_batch_step=1,
            sequence_decode_batch_step=1,
        ),
        fit=fit_to_traffic,
    ),
}
"""Every bucketing strategy by its name.

The settings, their environment variables, the command's options, the log line and the comparison
read this table.
"""
