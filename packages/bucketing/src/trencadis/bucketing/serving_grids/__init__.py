"""The grids of a serving engine, and the settings of their axes."""

from trencadis.bucketing.serving_grids.axes import prompt_axes
from trencadis.bucketing.serving_grids.grids import decode_grid, prompt_grid, sequence_grid

__all__ = [
    "decode_grid",
    "prompt_axes",
    "prompt_grid",
    "sequence_grid",
]
