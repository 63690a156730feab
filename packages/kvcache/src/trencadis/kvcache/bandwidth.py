"""A limit on swap traffic, so that it never takes the whole link from the steps themselves."""

from __future__ import annotations

import attrs

from trencadis.kvcache.errors import InvalidSetting

DEFAULT_BYTES_PER_S = 20e9
"""Seed 003: above 20 GB/s, copies between host and device dominate the step time."""


@attrs.define(eq=False)
class BandwidthGovernor:
    """A token bucket: at most ``bytes_per_s * (t + window_s)`` bytes in any ``t`` seconds.

    ``bytes_per_block`` is the size of a block in all layers, keys and values together.
    ``window_s`` is how many seconds of unused rate may be saved up for a burst. Raises
    `InvalidSetting` where a window does not even hold one block.
    """

    bytes_per_block: int = attrs.field()
    bytes_per_s: float = attrs.field(default=DEFAULT_BYTES_PER_S)
    window_s: float = attrs.field(default=0.1)
    _saved: float = attrs.field(init=False)
    _since_s: float | None = attrs.field(init=False, default=None)

    @bytes_per_block.validator
    @bytes_per_s.validator
    @window_s.validator
    def _positive(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not value > 0:
            raise InvalidSetting(f"{attribute.name} must be above 0, got {value!r}")

    @_saved.default
    def _full(self) -> float:
        return self.bytes_per_s * self.window_s

    def __attrs_post_init__(self) -> None:
        if self._saved < self.bytes_per_block:
            raise InvalidSetting(
                f"window_s {self.window_s} at {self.bytes_per_s:.3g} bytes_per_s is "
                f"{self._saved:.3g} bytes, less than one block of {self.bytes_per_block}: "
                "raise window_s or bytes_per_s"
            )

    def grant(self, wanted: int, now: float) -> int:
        """How many of ``wanted`` blocks may be moved at time ``now`` (seconds); spends them.

        A clock that steps back earns nothing until it has caught up.
        """
        if self._since_s is not None and now > self._since_s:
            earned = (now - self._since_s) * self.bytes_per_s
            self._saved = min(self.bytes_per_s * self.window_s, self._saved + earned)
        self._since_s = now if self._since_s is None else max(self._since_s, now)
        granted = min(wanted, int(self._saved // self.bytes_per_block))
        self._saved -= granted * self.bytes_per_block
        return granted
