"""`check_capture`: sound captures pass, and it finds each of the planted faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings

from trencadis.bucketing import Bucket
from trencadis.warmup import GraphBudget, GraphCapture, Phase, capture_order
from trencadis.warmup.testing import DEFAULT_SETTINGS, CaptureFault, GraphDevice, check_capture

FIRST_FAULT = settings(DEFAULT_SETTINGS, max_examples=3000, phases=[HypothesisPhase.generate])
"""Without the search for the smallest example."""

Buckets = Mapping[Phase, Sequence[Bucket]]


def ours(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    capture = GraphCapture(
        device,
        buckets,
        {Phase.PROMPT: capture_order("min_tokens"), Phase.DECODE: capture_order("max_bs")},
        GraphBudget(total=budget, free=budget, prompt_ratio=0.3),
        clock=lambda: device.now,
    )
    for _ in capture.steps():
        pass


def toy(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    """Captures what fits, in the given order, and releases what turns out not to."""
    for phase, bucket in both(buckets):
        device.capture(phase, bucket)
        if device.used > budget:
            device.release(phase, bucket)


def both(buckets: Buckets) -> list[tuple[Phase, Bucket]]:
    return [(phase, bucket) for phase in Phase for bucket in buckets[phase]]


def releases_nothing(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    for phase, bucket in both(buckets):
        if device.used <= budget:
            device.capture(phase, bucket)


def checks_in_the_end(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    for phase, bucket in both(buckets):
        device.capture(phase, bucket)
    for phase, bucket in reversed(both(buckets)):
        if device.used > budget:
            device.release(phase, bucket)


def stops_at_the_first_that_does_not_fit(
    device: GraphDevice, buckets: Buckets, budget: int
) -> None:
    toy(device, {phase: buckets[phase][:1] for phase in Phase}, budget)


def tries_again(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    toy(device, buckets, budget)
    toy(device, {phase: buckets[phase][-1:] for phase in Phase}, budget)


def releases_twice(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    toy(device, buckets, budget)
    for phase, bucket in device.released[:1]:
        device.release(phase, bucket)


def captures_a_padded_bucket(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    padded = Bucket(("batch", "seq"), (1, 1 << 20))
    toy(device, {**buckets, Phase.PROMPT: [*buckets[Phase.PROMPT], padded]}, budget)


def captures_nothing(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    pass


def captures_all_or_nothing(device: GraphDevice, buckets: Buckets, budget: int) -> None:
    if sum(device.cost(phase, bucket) for phase, bucket in both(buckets)) <= budget:
        toy(device, buckets, budget)


def test_the_device_keeps_a_share_of_a_released_graph_and_counts_its_calls() -> None:
    device = GraphDevice(lambda *_: 100, free=1000)
    device.returned = 0.25
    bucket = Bucket(("batch", "seq"), (1, 128))
    device.capture(Phase.PROMPT, bucket)
    assert (device.used, device.free_memory(), device.now) == (100, 900, 1.0)
    device.release(Phase.PROMPT, bucket)
    assert (device.used, device.kept_back, device.free_memory()) == (0, 75, 925)
    device.capture(Phase.DECODE, bucket)
    assert (device.most_held_before_a_capture, device.peak) == (75, 175)
    device.execute(Phase.DECODE, bucket)
    assert (device.executed, device.now) == ([(Phase.DECODE, (1, 128))], 3.0)


@pytest.mark.parametrize("capture", [ours, toy])
def test_a_sound_capture_passes(capture: Any) -> None:
    check_capture(capture)


@pytest.mark.parametrize(
    ("capture", "fault"),
    [
        (releases_nothing, "graphs take"),
        (checks_in_the_end, "a graph is captured where others take"),
        (stops_at_the_first_that_does_not_fit, "graphs are captured, though all"),
        (tries_again, "is captured twice"),
        (releases_twice, "is released and not held"),
        (captures_a_padded_bucket, "buckets that were not given"),
        (captures_nothing, "graphs are captured, though all|none is captured"),
        (captures_all_or_nothing, r"each graph fits in \d+ bytes, and none is captured"),
    ],
)
def test_a_planted_fault_is_found(capture: Any, fault: str) -> None:
    with pytest.raises(CaptureFault, match=fault):
        check_capture(capture, FIRST_FAULT)
