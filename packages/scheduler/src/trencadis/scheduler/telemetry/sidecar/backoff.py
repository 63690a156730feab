"""How long to wait before the next attempt to connect."""

from __future__ import annotations

import random
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError


def _above_zero(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not value > 0:
        raise ConfigError(f"backoff {attribute.name} must be above 0, got {value!r}")


def _share(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"backoff {attribute.name} must be at least 0 and below 1, got {value!r}")


@attrs.frozen(kw_only=True)
class Backoff:
    """Exponential, with jitter, bounded. ``initial_s`` and ``max_s`` in seconds.

    Factor and jitter are those of gRPC's connection backoff protocol,
    https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md; the bound is far below its
    two minutes, as an engine without readings throttles. Raises `ConfigError`.
    """

    initial_s: float = attrs.field(default=0.5, validator=_above_zero)
    factor: float = attrs.field(default=1.6, validator=_above_zero)
    max_s: float = attrs.field(default=15.0, validator=_above_zero)
    jitter: float = attrs.field(default=0.2, validator=_share)

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` attempts in a row that failed, at least one."""
        # The exponent is bounded too: a sidecar that is gone for weeks must not overflow a float.
        grown_s = self.initial_s * self.factor ** min(failures - 1, 64)
        return min(self.max_s, grown_s) * (1 + self.jitter * rng.uniform(-1, 1))
