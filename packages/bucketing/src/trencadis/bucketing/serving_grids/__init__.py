"""The grids of a serving engine, and the settings of their axes."""

from trencadis.bucketing.serving_grids.axes import prompt_axes
from trencadis.bucketing.serving_grids.grids import (
    decode_grid,
    prompt_grid,
    prompt_grid_of,
    sequence_grid,
)
from trencadis.bucketing.serving_grids.limits import PromptLimits

__all__ = [
    "PromptLimits",
    "decode_grid",
    "prompt_axes",
    "prompt_grid",
    "prompt_grid_of",
    "sequence_grid",
]
