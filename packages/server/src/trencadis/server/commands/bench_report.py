"""The results of ``engine-serve bench``: latencies, throughput, goodput."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import attrs

from trencadis.engine.simulated import Percentiles


@attrs.frozen
class BenchResult:
    """A request that was sent. Times in seconds; of the arrival, since the start.

    ``gaps_s``: times between two events with text. ``error``: "" for an answer.
    """

    arrival_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@attrs.frozen
class Targets:
    """Most milliseconds of a request that counts as good; None for no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def are_met(self, result: BenchResult) -> bool:
        """Whether an answer came within all of them."""
        tpot = result.tpot_s or 0.0
        pairs = (
            (self.ttft_ms, result.ttft_s),
            (self.tpot_ms, tpot),
            (self.e2e_ms, result.e2e_s),
        )
        return not result.error and all(
            target is None or seconds * 1e3 <= target for target, seconds in pairs
        )


@attrs.frozen
class BenchReport:
    """What a run showed. ``seconds`` is from the first request to the last answer.

    ``goodput``: requests per second that met the targets; None without targets. ``errors``: how
    many requests failed, by message, with N for the numbers in it.
    """

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    itl_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    goodput: float | None
    errors: dict[str, int]

    @classmethod
    def of(cls, results: Sequence[BenchResult], seconds: float, targets: Targets) -> BenchReport:
        """The report of these requests."""
        answered = [result for result in results if not result.error]
        good = sum(map(targets.are_met, answered))
        return cls(
            requests=len(results),
            failed=len(results) - len(answered),
            seconds=seconds,
            prompt_tokens=sum(result.prompt_tokens for result in answered),
            output_tokens=sum(result.output_tokens for result in answered),
            ttft_s=Percentiles.of([result.ttft_s for result in answered]),
            itl_s=Percentiles.of([gap for result in answered for gap in result.gaps_s]),
            tpot_s=Percentiles.of([r.tpot_s for r in answered if r.tpot_s is not None]),
            e2e_s=Percentiles.of([result.e2e_s for result in answered]),
            goodput=None if targets == Targets() else good / seconds,
            errors=dict(
                Counter(re.sub(r"\d+", "N", result.error) for result in results if result.error)
            ),
        )

    def table(self) -> str:
        """The report as text."""
        rows = [f"{'milliseconds':<14}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"]
        for name in ("ttft", "itl", "tpot", "e2e"):
            latency: Percentiles = getattr(self, f"{name}_s")
            values = (latency.mean, latency.p50, latency.p90, latency.p99)
            rows.append(f"{name.upper():<14}" + "".join(f"{v * 1e3:>10,.1f}" for v in values))
        answered = self.requests - self.failed
        rows += [
            "",
            f"{answered} of {self.requests} requests answered in {self.seconds:.1f} s: "
            f"{answered / self.seconds:.2f} requests/s, "
            f"{self.output_tokens / self.seconds:,.0f} output tokens/s, "
            f"{self.prompt_tokens / self.seconds:,.0f} prompt tokens/s",
        ]
        if answered:
            rows.append(
                f"mean lengths: {self.prompt_tokens / answered:.0f} prompt tokens, "
                f"{self.output_tokens / answered:.0f} output tokens"
            )
        if self.goodput is not None:
            rows.append(f"goodput: {self.goodput:.2f} requests/s within the targets")
        rows += [f"{count} failed: {message}" for message, count in self.errors.items()]
        return "\n".join(rows)
