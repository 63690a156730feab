"""Decode steps of prepared shapes: that graphs or programs run, what a step starts and takes."""

from __future__ import annotations

import statistics
import time

import attrs

from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.doctor.device_counts import DeviceCounts
from trencadis.engine.doctor.finding import Finding, Status, absent
from trencadis.engine.doctor.predicted_step import predicted_step
from trencadis.engine.doctor.program_runs import GREEDY
from trencadis.engine.doctor.served_engine import ServedEngine

_TOKENS = 8
"""Tokens of an answer whose replays are counted."""

_STEPS, _ROWS = 16, 8
"""Decode steps that are measured, and their sequences."""

_FACTOR = 2.0
"""How many times slower or faster than the simulator a step may be and not differ."""


def check_replay(engine: ServedEngine) -> Finding:
    """Whether each decode step of a prepared shape replays its graph, or runs its programs."""
    captures = engine.worker.captures_graphs
    if not captures and not engine.core.config.compile:
        return absent("nothing is captured or compiled here")
    if not captures and engine.device.shares_host_memory:
        return absent("programs of this device are not counted")
    params = attrs.evolve(GREEDY, max_tokens=_TOKENS)
    # The first answer prepares the shapes; graphs are captured after their first use.
    for _ in range(2):
        before = attrs.evolve(engine.counts)
        engine.answers([GenerateRequest(engine.prompt(5), params)])
    used = engine.counts.since(before)
    num_graphs = engine.core.stats.num_graphs
    values = {"graphs": num_graphs, "replays": used.replays, "programs": used.programs}
    if captures and not num_graphs:
        said = "no graph was captured: the memory for graphs may be 0"
        return Finding(Status.FAILED, said, "see VLLM_GRAPH_RESERVED_MEM", values)
    # The token of the prompt is not decoded. A program runs for each layer.
    steps = _TOKENS - 1
    if captures:
        found, expected, what = used.replays, steps, "graph replays"
    else:
        found, expected, what = used.programs, steps * len(engine.spec.layers), "program runs"
    said = f"{found} {what} in {steps} decode steps"
    if found >= expected:
        return Finding(Status.OK, said, values=values)
    return Finding(Status.FAILED, f"{said}, at least {expected} expected", values=values)


def measure_step(engine: ServedEngine) -> Finding:
    """What a decode step starts and takes, beside the simulator's figures."""
    core, counts = engine.core, engine.counts
    rows = min(_ROWS, core.config.max_num_seqs)
    params = attrs.evolve(GREEDY, max_tokens=_STEPS + rows)
    requests = [GenerateRequest(engine.prompt(5, number=i), params) for i in range(rows)]
    engine.answers(requests)  # prepares the shapes
    seconds: list[float] = []
    started: list[DeviceCounts] = []
    before, began_s = attrs.evolve(counts), time.perf_counter()
    num_blocks = 0

    def on_step(num_tokens: int) -> None:
        nonlocal before, began_s, num_blocks
        if num_tokens == rows:
            seconds.append(time.perf_counter() - began_s)
            started.append(counts.since(before))
            num_blocks = max(num_blocks, core.stats.highest_block_in_use + 1)
        before, began_s = attrs.evolve(counts), time.perf_counter()

    engine.answers(requests, on_step)
    if not seconds:
        return Finding(Status.FAILED, f"no step decoded {rows} sequences")
    names = ("programs", "replays", "uploads", "downloads")
    each = {name: statistics.median(getattr(step, name) for step in started) for name in names}
    measured_ms = round(1000 * statistics.median(seconds), 3)
    counted = ", ".join(f"{value:g} {name}" for name, value in each.items())
    said = f"{measured_ms:.2f} ms, {counted} for {rows} sequences"
    values = {"rows": rows, "blocks": num_blocks, "measured_ms": measured_ms, **each}
    predicted = predicted_step(
        core.spec,
        core.facts.dtype,
        engine.device.product_name(),
        core.config.block_size,
        (rows, num_blocks),
        captured=core.stats.num_graphs > 0,
        compiled=each["programs"] > 0,
        in_fp8=engine.rounds_inputs,
        cache_in_8_bits=engine.rounds_cache,
    )
    if isinstance(predicted, str):
        return absent(f"{said}; {predicted}", **values)
    values |= {"predicted_ms": predicted.milliseconds, "predicted_launches": predicted.launches}
    said += f"; simulated {predicted.milliseconds:.2f} ms, {predicted.launches} launches"
    is_near = 1 / _FACTOR <= measured_ms / predicted.milliseconds <= _FACTOR
    return Finding(Status.OK if is_near else Status.DIFFERS, said, values=values)
