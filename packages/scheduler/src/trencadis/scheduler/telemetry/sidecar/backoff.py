"""The delay before the next attempt to connect."""

from __future__ import annotations

import random

import attrs

from trencadis.scheduler.validators import POSITIVE, number, setting


@attrs.frozen(kw_only=True)
class Backoff:
    """Exponential backoff with jitter and an upper bound.

    Factor and jitter are those of gRPC's connection backoff protocol,
    https://github.com/grpc/grpc/blob/master/doc/connection-backoff.md. The bound is far below its
    two minutes, because an engine without readings throttles. The metadata of each field has its
    ``help`` text. Raises `ConfigError`.
    """

    initial_s: float = setting(0.5, POSITIVE, "Delay after the first failure, in seconds.")
    factor: float = setting(
        1.6, POSITIVE, "Factor by which the delay grows after each further failure."
    )
    max_s: float = setting(15.0, POSITIVE, "Upper bound of the delay before jitter, in seconds.")
    jitter: float = setting(
        0.2, number(0, 0.99), "Largest random change of the delay, as a share of it, 0 to 0.99."
    )

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` failed attempts in a row; at least one."""
        # The exponent is bounded, so that weeks of failures do not overflow the float.
        grown_s = self.initial_s * self.factor ** min(failures - 1, 64)
        return min(self.max_s, grown_s) * (1 + self.jitter * rng.uniform(-1, 1))
