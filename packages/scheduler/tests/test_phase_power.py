"""What a prefill token and a decode sequence cost: the estimate, and what readings cannot do."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.scheduler.thermal import PhasePowerModel
from trencadis.scheduler.thermal.phase_power import (
    PRIOR_BASE_W,
    PRIOR_PREFILL_J,
    PRIOR_SEQUENCE_W,
    StepTimeModel,
)

Costs = tuple[float, float, float]
"""Base watts, joules of a prefill token, watts of a sequence."""


def estimates(model: PhasePowerModel) -> Costs:
    return model.base_w, model.prefill_j, model.sequence_w


def learned(
    model: PhasePowerModel, costs: Costs, seed: int, num_readings: int = 400, noise_w: float = 2.0
) -> Costs:
    """The estimates after readings of a device with these costs under a changing load."""
    rng = random.Random(seed)
    base_w, prefill_j, sequence_w = costs
    for _ in range(num_readings):
        rate, running = rng.uniform(0, 20_000), rng.randint(0, 128)
        watts = base_w + prefill_j * rate + sequence_w * running
        model.observe(max(1.0, rng.gauss(watts, noise_w)), rate, running)
    return estimates(model)


costs_of_devices = st.tuples(st.floats(20, 400), st.floats(0.002, 0.1), st.floats(0.1, 10))


@settings(max_examples=30, deadline=None)
@given(costs=costs_of_devices, seed=st.integers(0, 2**20))
def test_the_costs_of_both_phases_are_recovered_from_noisy_readings(
    costs: Costs, seed: int
) -> None:
    base_w, prefill_j, sequence_w = learned(PhasePowerModel(), costs, seed)
    assert base_w == pytest.approx(costs[0], abs=4.0)
    assert prefill_j == pytest.approx(costs[1], abs=0.0004)
    assert sequence_w == pytest.approx(costs[2], abs=0.06)


@settings(max_examples=15, deadline=None)
@given(before=costs_of_devices, after=costs_of_devices, seed=st.integers(0, 2**20))
def test_another_model_on_the_device_is_learned(before: Costs, after: Costs, seed: int) -> None:
    model = PhasePowerModel()
    learned(model, before, seed)
    base_w, prefill_j, sequence_w = learned(model, after, seed + 1, 800)
    assert base_w == pytest.approx(after[0], abs=4.0)
    assert prefill_j == pytest.approx(after[1], abs=0.0004)
    assert sequence_w == pytest.approx(after[2], abs=0.06)


anything = st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.none() | st.text()


@settings(max_examples=150, deadline=None)
@given(
    readings=st.lists(
        st.tuples(
            anything | st.floats(1, 1e6),
            anything | st.floats(0, 1e8),
            anything | st.floats(0, 1e6),
        ),
        max_size=60,
    )
)
def test_whatever_is_read_the_estimates_are_finite_and_not_negative(
    readings: list[tuple[float, float, float]],
) -> None:
    model = PhasePowerModel()
    for reading in readings:
        before = estimates(model)
        believed_w = model.observe(*reading)
        if believed_w is None:
            assert estimates(model) == before
        else:
            assert 0 <= believed_w <= 1e6 * 1.01 + model.predict(reading[1], reading[2])
        assert all(math.isfinite(value) and value >= 0 for value in estimates(model))


@settings(max_examples=15, deadline=None)
@given(
    costs=costs_of_devices,
    seed=st.integers(0, 1000),
    bad=st.lists(st.sampled_from([math.nan, math.inf, -5.0, 0.0, 1e6, 40_000.0, 1.0]), max_size=3),
)
def test_a_few_bad_readings_move_the_estimates_little(
    costs: Costs, seed: int, bad: list[float]
) -> None:
    model = PhasePowerModel()
    learned(model, costs, seed)
    for watts in bad:
        model.observe(watts, 10_000.0, 64)
    expected = costs[0] + costs[1] * 10_000 + costs[2] * 64
    assert model.predict(10_000.0, 64) == pytest.approx(expected, abs=25.0)
    learned(model, costs, seed + 1)
    assert model.predict(10_000.0, 64) == pytest.approx(expected, abs=4.0)


@pytest.mark.parametrize("bad_w", [65_535.0, 2_000.0, 1.0])
@pytest.mark.parametrize("after", [0, 1, 5, 9, 20])
def test_a_single_bad_reading_changes_nothing(after: int, bad_w: float) -> None:
    model = PhasePowerModel()
    for _ in range(after):
        model.observe(200.0, 0.0, 4)
    before = estimates(model)
    assert model.observe(bad_w, 0.0, 4) == model.predict(0.0, 4)
    assert estimates(model) == before


def test_eight_busy_devices_are_believed_after_a_few_readings() -> None:
    model = PhasePowerModel()
    for _ in range(4):
        believed_w = model.observe(5_600.0, 10_000.0, 64)
    assert believed_w == pytest.approx(5_600.0)


@pytest.mark.parametrize("load", [(0.0, 0), (10_000.0, 64), (0.0, 64)])
def test_a_load_that_does_not_change_for_hours_unlearns_nothing(load: tuple[float, int]) -> None:
    model, costs = PhasePowerModel(), (120.0, 0.03, 2.0)
    learned(model, costs, seed=1)
    rng = random.Random(2)
    watts = costs[0] + costs[1] * load[0] + costs[2] * load[1]
    for _ in range(4_000):
        model.observe(rng.gauss(watts, 2.0), *load)
    # The direction of the load itself is measured; the others stay.
    assert model.predict(*load) == pytest.approx(watts, abs=2.0)
    assert all(math.isfinite(value) for value in estimates(model))
    learned(model, costs, seed=3)
    assert estimates(model) == pytest.approx(costs, rel=0.05)


def test_before_the_first_reading_the_estimates_are_those_of_the_prior() -> None:
    assert estimates(PhasePowerModel()) == (PRIOR_BASE_W, PRIOR_PREFILL_J, PRIOR_SEQUENCE_W)


def test_an_outlier_is_believed_in_part_and_a_lasting_change_in_full() -> None:
    model, costs = PhasePowerModel(), (120.0, 0.03, 2.0)
    learned(model, costs, seed=1)
    expected = model.predict(10_000.0, 64)
    believed = [model.observe(5_000.0, 10_000.0, 64) for _ in range(30)]
    assert believed[0] is not None
    assert believed[0] < expected + 100
    assert believed[-1] == pytest.approx(5_000.0, rel=0.05)


def step_times(fixed_s: float, token_s: float, tokens: list[int]) -> StepTimeModel:
    model = StepTimeModel()
    for count in tokens:
        model.observe(count, fixed_s + token_s * count)
    return model


@settings(max_examples=50, deadline=None)
@given(
    fixed_s=st.floats(0.001, 0.5), token_s=st.floats(1e-6, 1e-3), tokens=st.sampled_from([64, 512])
)
def test_the_time_of_a_step_and_of_a_prompt_token_are_recovered(
    fixed_s: float, token_s: float, tokens: int
) -> None:
    model = step_times(fixed_s, token_s, [0, tokens, 2 * tokens, 0] * 20)
    assert model.fixed_s == pytest.approx(fixed_s, rel=0.02)
    assert model.token_s == pytest.approx(token_s, rel=0.02)
    rate = tokens / (fixed_s + token_s * tokens)
    assert model.tokens_of_rate(rate) == pytest.approx(tokens, rel=0.1)
    assert model.tokens_of_rate(1.1 / token_s) == math.inf
    assert model.tokens_of_rate(0.0) == model.tokens_of_rate(-1.0) == 0.0


def test_steps_of_equal_size_unlearn_nothing() -> None:
    model = step_times(0.02, 1e-4, [0, 512] * 50)
    rng = random.Random(4)
    for _ in range(12_000):  # until rounding is all that is left of their variance
        model.observe(128, rng.gauss(0.02 + 0.0128, 1e-4))
    assert model.token_s == pytest.approx(1e-4, rel=0.1)
    assert model.fixed_s == pytest.approx(0.02, rel=0.1)


def test_an_idle_minute_is_not_taken_for_a_long_step() -> None:
    model = step_times(0.02, 1e-4, [0, 512] * 50)
    model.observe(0, 60.0)
    assert model.fixed_s < 0.03


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-9, 1e9)), max_size=50),
    st.floats(-1e9, 1e9),
)
def test_whatever_steps_take_the_affordable_tokens_are_no_less_than_none(
    steps: list[tuple[int, float]], rate: float
) -> None:
    model = StepTimeModel()
    for tokens, seconds in steps:
        model.observe(tokens, seconds)
    assert 0 <= model.tokens_of_rate(rate) <= math.inf
    assert 0 <= model.fixed_s < math.inf
    assert 0 <= model.token_s < math.inf
