"""The requests of a trace: recorded arrival times and lengths, random prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.bucketing import BucketingError, read_trace
from trencadis.engine.errors import ConfigError
from trencadis.engine.validators import integer
from trencadis.scheduler import Request

MAX_PREFIX = 1 << 24
"""Most tokens that prompts share."""

_PREFIX = integer(0, MAX_PREFIX, remedy="pass the tokens of the system prompt")


@attrs.frozen(eq=False)
class Workload:
    """Requests in order of arrival: ``float64`` seconds since the first, ``int64`` tokens.

    A trace has lengths but no content, so prompts are random. The first ``shared_prefix`` tokens
    of all prompts are the same, as a system prompt.
    """

    arrivals_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    shared_prefix: int = attrs.field(default=0, kw_only=True)

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def requests(self, vocab_size: int, seed: int) -> Iterator[tuple[float, Request]]:
        """Each request with its arrival time in seconds, generated lazily."""
        rng = np.random.default_rng(seed)
        shared = rng.integers(vocab_size, size=self.shared_prefix).tolist()
        lengths = zip(
            self.arrivals_s.tolist(),
            self.prompt_tokens.tolist(),
            self.output_tokens.tolist(),
            strict=True,
        )
        for number, (arrival_s, prompt, output) in enumerate(lengths):
            token_ids = rng.integers(vocab_size, size=prompt).tolist()
            token_ids[: len(shared)] = shared[:prompt]
            yield (
                arrival_s,
                Request(request_id=str(number), prompt_token_ids=token_ids, max_tokens=output),
            )


def read_workload(
    path: str | os.PathLike[str],
    *,
    rate_scale: float = 1.0,
    num_requests: int | None = None,
    shared_prefix: int = 0,
) -> Workload:
    """The first ``num_requests`` requests of a trace file (None: all).

    ``rate_scale`` multiplies the arrival rate. All prompts have the same first ``shared_prefix``
    tokens. Requests without generated tokens are skipped.
    Raises `ConfigError` for a trace without arrivals or outputs, `BucketingError` for an
    unreadable trace, `OSError` for a missing file.
    """
    if not 0 < rate_scale < float("inf"):
        raise ConfigError(f"rate_scale must be above 0, got {rate_scale!r}: 2 doubles the load")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests!r}")
    shared_prefix = _PREFIX.checked("shared_prefix", shared_prefix)
    trace = read_trace(path)
    if trace.arrivals is None or trace.outputs is None:
        raise ConfigError(
            f"{path} lacks arrivals or outputs: give a trace with columns such as TIMESTAMP, "
            "ContextTokens, GeneratedTokens"
        )
    served = np.flatnonzero(trace.outputs)
    if not len(served):
        raise BucketingError(f"{path} has no request that generated a token: give another trace")
    order = served[np.argsort(trace.arrivals[served], kind="stable")][:num_requests]
    arrivals = trace.arrivals[order]
    return Workload(
        arrivals_s=(arrivals - arrivals[0]) / rate_scale,
        prompt_tokens=trace.lengths[order],
        output_tokens=trace.outputs[order],
        shared_prefix=shared_prefix,
    )
