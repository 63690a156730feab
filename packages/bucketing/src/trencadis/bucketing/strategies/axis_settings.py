"""The settings of one axis of a grid, as a strategy gets them."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class AxisSettings:
    """The settings that a strategy computes the values of one axis from.

    Attributes:
        name: the name of the axis in the grid.
        label: its name in the log line, as in Gaudi's plugin.
        min ... pad_percent: as in `AxisConfig`, none of them None.
    """

    name: str
    label: str
    min: int
    step: int
    max: int
    limit: int
    pad_max: int
    pad_percent: int
