"""Strategies on real traffic: the padding that a fit to the first half saves on the second."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import numpy as np
import pytest

from trencadis.bucketing import (
    BucketingError,
    StrategyResult,
    Trace,
    compare_strategies,
    fitted_range,
)

# Azure LLM inference trace 2023, CC-BY 4.0: data/README.md has the attribution.
LENGTHS = np.load(Path(__file__).parent / "data" / "azure_2023_lengths.npz")
MODEL_CONTEXT = 131_072


def halves(name: str) -> tuple[np.ndarray, np.ndarray]:
    rows = Trace(LENGTHS[f"{name}_lengths"].astype(np.int64)).requests()
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def compared(name: str, longest: int | None = None) -> dict[str, StrategyResult]:
    seen, later = halves(name)
    own = math.ceil(max(seen.max(), later.max()) / 128) * 128
    rows = compare_strategies(seen, later, step=128, maxima=(1, longest or own))
    return {row.strategy: row for row in rows}


@pytest.mark.parametrize("name", ["code", "conv"])
def test_a_fit_to_the_past_saves_where_the_grid_ends_at_the_model_context(name: str) -> None:
    found = compared(name, MODEL_CONTEXT)
    assert found["fit as exp"].graphs <= found["exp"].graphs
    assert found["fit as exp"].padding <= 0.6 * found["exp"].padding
    assert found["fit as pad"].graphs <= found["pad"].graphs
    assert found["fit as pad"].padding <= 0.75 * found["pad"].padding


def test_a_fit_to_the_past_saves_where_the_longest_prompt_is_known() -> None:
    conv = compared("conv")
    assert conv["fit as exp"].padding <= 0.6 * conv["exp"].padding
    assert conv["fit as pad"].padding <= 0.75 * conv["pad"].padding


def test_on_evenly_distributed_lengths_no_range_saves_as_much() -> None:
    # With the longest prompt known beforehand, the best range of all for the second half itself
    # pads 0.71 times as much as exp and 0.82 times as much as pad: a fit comes close to that.
    code = compared("code")
    _, later = halves("code")
    for rule, bound in (("exp", 0.71), ("pad", 0.82)):
        hindsight = fitted_range(later[:, 1], 128, 7552, code[rule].graphs)
        values = np.array(hindsight)
        least = values[np.searchsorted(values, later[:, 1])].sum() / later[:, 1].sum() - 1
        assert least > bound * code[rule].padding
        assert code[f"fit as {rule}"].padding < 1.06 * least


def test_padding_of_every_strategy_on_a_complete_trace() -> None:
    # What the plugin's own functions gave for the complete trace, step 128, up to 7,552 tokens.
    seen, later = halves("code")
    complete = np.concatenate([seen, later])
    rows = compare_strategies(complete, complete, step=128, maxima=(1, 7552), budget=59)
    shown = [(row.strategy, row.graphs, round(100 * row.padding, 1)) for row in rows]
    assert shown == [
        ("lin", 59, 3.2),
        ("exp", 12, 16.0),
        ("pad", 15, 11.6),
        ("fit as exp", 12, 11.7),
        ("fit as pad", 15, 9.5),
        ("fit to 59", 59, 3.2),
    ]
    assert (rows[0].p99_padding, rows[0].worst_padding) == (126, 127)
    tokens = np.sort(-complete[:, 1] % 128)
    assert rows[0].p99_padding == tokens[math.ceil(0.99 * len(tokens)) - 1]


def test_counts_equal_repetition() -> None:
    rows = np.array([[1, 100], [2, 300], [4, 50]])
    counts = np.array([3, 1, 2])
    repeated = np.repeat(rows, counts, axis=0)
    counted = compare_strategies(rows, rows, step=16, maxima=(4, 512), counts=counts)
    for found, expected in zip(
        counted, compare_strategies(repeated, repeated, step=16, maxima=(4, 512)), strict=True
    ):
        assert found.padding == pytest.approx(expected.padding)
        assert attrs.evolve(found, padding=0.0) == attrs.evolve(expected, padding=0.0)


def test_the_counts_of_the_judged_batches_are_their_own() -> None:
    rows, judged = np.array([[1, 100], [2, 300]]), np.array([[1, 120], [2, 260]])
    options = {"step": 16, "maxima": (2, 512), "counts": [5, 1]}
    repeated = np.repeat(judged, [1, 4], axis=0)
    for own, expected in zip(
        compare_strategies(rows, judged, judged_counts=[1, 4], **options),  # type: ignore[arg-type]
        compare_strategies(rows, repeated, **options),  # type: ignore[arg-type]
        strict=True,
    ):
        assert own.padding == pytest.approx(expected.padding)
        assert attrs.evolve(own, padding=0.0) == attrs.evolve(expected, padding=0.0)


def test_without_a_tail_the_mean_padding_counts_alone() -> None:
    rows = np.array([[1, 100]] * 500 + [[1, 200]] * 300 + [[1, 300]] * 300 + [[1, 1000]])
    arguments = {"step": 100, "maxima": (1, 4000), "budget": 4}
    plain, least, tail = (
        compare_strategies(rows, rows, **arguments, **options)[-1]  # type: ignore[arg-type]
        for options in ({}, {"tail": 0.0}, {"tail": 10.0})
    )
    assert plain == least
    assert plain.worst_padding > tail.worst_padding
    assert plain.graphs == 4


def test_traffic_above_the_maxima_is_an_error() -> None:
    rows = np.array([[1, 100]])
    for judged, maxima in ((rows, (1, 99)), (rows[:0], (1, 100)), (rows * [[0, 1]], (1, 100))):
        with pytest.raises(BucketingError, match="raise the maxima"):
            compare_strategies(rows, judged, step=16, maxima=maxima)


def test_a_tail_keeps_the_worst_batch_of_later_traffic_below_that_of_exp() -> None:
    # Prompts in the order of their arrival, in batches of 1 to 16.
    lengths = LENGTHS["conv_lengths"].astype(np.int64)
    lengths = lengths[: len(lengths) // 16 * 16].reshape(-1, 16)
    sizes = np.minimum(np.random.default_rng(1).geometric(0.25, len(lengths)), 16)
    longest = [row[:size].max() for row, size in zip(lengths, sizes, strict=True)]
    seen, later = np.array_split(np.column_stack([sizes, longest]), 2)
    exp, mean, tail = (
        next(row for row in rows if row.strategy == name)
        for rows, name in (
            (compare_strategies(seen, later, step=128, maxima=(16, 16_384), tail=weight), name)
            for name, weight in (("exp", 0.0), ("fit as exp", 0.0), ("fit as exp", 3.0))
        )
    )
    assert tail.worst_padding < exp.worst_padding < mean.worst_padding / 3
    assert tail.p99_padding < exp.p99_padding < mean.p99_padding / 2
    assert tail.padding < 0.6 * min(exp.padding, mean.padding)


def test_rows_of_another_form_are_an_error() -> None:
    rows = np.array([[1, 100]])
    good = {"step": 16, "maxima": (1, 128)}
    for wrong in ([1, 2], [[1, 2, 3]], "rows", [[1, math.nan]], None):
        with pytest.raises(BucketingError, match="batches"):
            compare_strategies(wrong, rows, **good)  # type: ignore[arg-type]
        with pytest.raises(BucketingError, match="batches"):
            compare_strategies(rows, wrong, **good)  # type: ignore[arg-type]
    for changed in ({"maxima": 3}, {"maxima": (1, "x")}, {"step": 0}, {"budget": 0}, {"tail": -1}):
        with pytest.raises(BucketingError):
            compare_strategies(rows, rows, **{**good, **changed})  # type: ignore[arg-type]


def test_the_p99_counts_how_often_a_batch_came() -> None:
    rows = np.array([[1, 100], [1, 301]])
    for counts, expected in (([990, 10], 28), ([989, 11], 83)):
        lin = compare_strategies(rows, rows, step=128, maxima=(1, 384), counts=np.array(counts))[0]
        assert (lin.p99_padding, lin.worst_padding) == (expected, 83)
