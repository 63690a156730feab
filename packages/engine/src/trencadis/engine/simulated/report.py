"""The results of a simulation, as values that can be printed, saved as JSON and compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.engine.simulated.records import Sample, StepTimes
from trencadis.engine.simulated.simulation import Simulation
from trencadis.kvcache import Direction
from trencadis.warmup import Phase, WarmupReport, format_bytes

_SHOWN_PARTS = 5
"""The largest parts of a step that the table shows; the JSON file has all."""


@attrs.frozen
class Percentiles:
    """Percentiles of a latency in seconds; all 0 without observations."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Mean and percentiles of latencies in seconds."""
        if not len(values):
            return cls()
        array = np.asarray(values, dtype=np.float64)
        return cls(float(array.mean()), *np.percentile(array, (50, 90, 99)).tolist())


@attrs.frozen(kw_only=True)
class SimulationReport:
    """Result of a simulation. It does not depend on the machine that ran it.

    Times in seconds, energies in joules, temperatures in degrees C. ``seconds`` is from the first
    arrival to the last token, without warm-up. Padding is relative to the real number of prompt
    tokens, decode rows, and blocks of the decode prefix. ``times`` are the seconds of all steps by
    part. A graph miss is a forward pass in live
    traffic whose bucket had no graph; a bucket miss is one larger than every bucket.
    """

    device: str
    requests: int
    refused: int
    seconds: float
    times: StepTimes
    steps: int
    prompt_tokens: int
    asked_tokens: int
    generated_tokens: int
    first_token_s: Percentiles
    between_tokens_s: Percentiles
    latency_s: Percentiles
    prompt_padding: float
    row_padding: float
    block_padding: float
    buckets: int
    graphs: int
    warmup_s: float
    warmup_compilations: int
    live_compilations: int
    graph_replays: int
    graph_misses: int
    bucket_misses: int
    num_blocks: int
    block_bytes: int
    used_blocks_at_end: int
    longest_prefix: int
    preemptions: int
    recomputations: int
    blocks_out: int
    blocks_in: int
    blocks_moved: int
    swap_s: float
    hottest_c: float
    limit_c: float
    joules: float
    samples: tuple[Sample, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def table(self) -> str:
        """The report as text, one figure and its unit per line, in two columns."""
        rows = [
            ("requests", f"{self.requests:,} done, {self.refused:,} rejected"),
            ("time", f"{self.seconds:,.1f} s, {self.steps:,} steps"),
            ("time by part", self._times()),
            ("throughput", self._throughput()),
            ("TTFT", _milliseconds(self.first_token_s)),
            ("ITL", _milliseconds(self.between_tokens_s)),
            ("latency", _milliseconds(self.latency_s)),
            ("padding", self._padding()),
            ("graphs", self._graphs()),
            ("warm-up", f"{self.warmup_s:,.0f} s, {self.warmup_compilations:,} compilations"),
            ("live compilations", f"{self.live_compilations:,}"),
            ("KV cache", self._cache()),
            ("preemptions", self._preemptions()),
            ("swap traffic", self._swap()),
            ("temperature", self._temperature()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {figures}" for name, figures in rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file."""
        content = attrs.asdict(attrs.evolve(self, samples=()))
        content["tokens_per_s"] = self.tokens_per_s
        content["samples"] = _columns(self.samples)
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _times(self) -> str:
        total = self.times.total_s
        if not total:
            return "none"
        shares = ((name, seconds / total) for name, seconds in attrs.asdict(self.times).items())
        largest = sorted(shares, key=lambda part: -part[1])[:_SHOWN_PARTS]
        return ", ".join(
            f"{share:.1%} {name.removesuffix('_s').replace('_', ' ')}" for name, share in largest
        )

    def _throughput(self) -> str:
        if not self.seconds:
            return "none"
        return (
            f"{self.tokens_per_s:,.1f} tokens/s generated, "
            f"{self.prompt_tokens / self.seconds:,.1f} tokens/s of prompts, "
            f"{self.requests / self.seconds:,.2f} requests/s"
        )

    def _padding(self) -> str:
        return (
            f"{self.prompt_padding:.1%} of prompt tokens, {self.row_padding:.1%} of decode rows, "
            f"{self.block_padding:.1%} of prefix blocks"
        )

    def _graphs(self) -> str:
        return (
            f"{self.graphs} of {self.buckets} buckets; {self.graph_replays:,} replays, "
            f"{self.graph_misses:,} graph misses, {self.bucket_misses:,} bucket misses"
        )

    def _cache(self) -> str:
        size = format_bytes(self.num_blocks * self.block_bytes)
        return (
            f"{self.num_blocks:,} blocks, {size}; longest prefix read {self.longest_prefix:,}, "
            f"{self.used_blocks_at_end:,} used at the end, {self.blocks_moved:,} moved"
        )

    def _preemptions(self) -> str:
        return f"{self.preemptions:,}, {self.recomputations:,} of them by recomputation"

    def _swap(self) -> str:
        out, back = (
            format_bytes(count * self.block_bytes) for count in (self.blocks_out, self.blocks_in)
        )
        return f"{out} out, {back} in, {self.swap_s:.2f} s"

    def _temperature(self) -> str:
        watts = self.joules / self.seconds if self.seconds else 0.0
        return (
            f"{self.hottest_c:.1f} °C at most (limit {self.limit_c:.0f}), {watts:.0f} W on average"
        )


def report_of(simulation: Simulation, warmup: WarmupReport) -> SimulationReport:
    """The report of a finished simulation, and of the warm-up before it."""
    records, runner, runtime = simulation.records, simulation.runner, simulation.runtime
    executed = len(warmup.executed)
    graphs = sum(len(warmup.capture.captured(phase)) for phase in Phase) if warmup.capture else 0
    return SimulationReport(
        device=simulation.hardware.name,
        requests=records.num_finished,
        refused=records.refused,
        seconds=max(0.0, records.last_token_s - simulation.started_s),
        times=attrs.evolve(runtime.times),
        steps=simulation.steps,
        prompt_tokens=records.prompt_tokens,
        asked_tokens=records.asked_tokens,
        generated_tokens=records.generated_tokens,
        first_token_s=Percentiles.of(records.first_token_s),
        between_tokens_s=Percentiles.of(records.between_tokens_s),
        latency_s=Percentiles.of(records.latency_s),
        prompt_padding=runner.prompt_tokens.share,
        row_padding=runner.decode_rows.share,
        block_padding=runner.decode_blocks.share,
        buckets=len(simulation.grids.prompt) + len(simulation.grids.decode),
        graphs=graphs,
        warmup_s=warmup.seconds,
        warmup_compilations=executed,
        live_compilations=runtime.compilations - executed,
        graph_replays=runtime.replays,
        graph_misses=runtime.launches - executed,
        bucket_misses=runner.bucket_misses,
        num_blocks=simulation.num_blocks,
        block_bytes=runtime.costs.block_bytes,
        used_blocks_at_end=simulation.blocks.pool.num_used_blocks,
        longest_prefix=runner.longest_prefix,
        preemptions=simulation.scheduler.num_preemptions,
        recomputations=simulation.scheduler.num_recomputes,
        blocks_out=runner.copied_blocks[Direction.OUT],
        blocks_in=runner.copied_blocks[Direction.IN],
        blocks_moved=runner.copied_blocks[Direction.WITHIN],
        swap_s=runner.copy_s[Direction.OUT] + runner.copy_s[Direction.IN],
        hottest_c=simulation.heat.hottest_c,
        limit_c=simulation.hardware.board.max_c,
        joules=simulation.heat.joules,
        samples=tuple(records.samples),
    )


def _milliseconds(values: Percentiles) -> str:
    parts = attrs.asdict(values)
    return ", ".join(f"{name} {seconds * 1e3:,.1f}" for name, seconds in parts.items()) + " ms"


def _columns(samples: Sequence[Sample]) -> Mapping[str, list[Any]]:
    """One list per field: a third of the size of one JSON object per sample."""
    return {name: [sample[i] for sample in samples] for i, name in enumerate(Sample._fields)}
