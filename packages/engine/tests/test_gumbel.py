"""The random numbers of draws: fixed for a seed, uniform, independent of each other."""

from __future__ import annotations

import math

import numpy as np
import torch

from trencadis.engine.runner.gumbel import NUM_KEYS, draw_keys, log_times

VOCABULARY = 200_000
KEYS_OF_0 = [11282, 39997, 34514, 18572, 8365, 28999]
TIMES_OF_0 = [0.019949, -2.231003, -0.73026, -0.192444, -1.327415]


def keys(count: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([draw_keys(7, position) for position in range(count)]))


def uniforms(token_ids: list[int], count: int) -> torch.Tensor:
    """The tokens' times as uniform numbers, under the keys of ``count`` positions."""
    ids = torch.tensor([token_ids], dtype=torch.int32)
    return 1.0 - torch.exp(-torch.exp(log_times(ids, keys(count)).double()))


def test_a_seed_keeps_its_numbers_in_every_release() -> None:
    assert draw_keys(0, 0).tolist() == KEYS_OF_0
    assert draw_keys(2**63 - 1, 5).tolist() != draw_keys(-(2**63), 5).tolist()
    ids = torch.tensor([[0, 1, 65_535, 65_536, 128_255]], dtype=torch.int32)
    found = log_times(ids, torch.tensor([KEYS_OF_0], dtype=torch.int32))[0].tolist()
    assert np.allclose(found, TIMES_OF_0, atol=1e-5)


def test_no_intermediate_number_needs_more_than_31_bits() -> None:
    """Run with 64 bits, the same operations give the same numbers: nothing overflows."""
    ids = torch.arange(0, VOCABULARY, 7, dtype=torch.int32)[None]
    largest = torch.full((1, NUM_KEYS), 65_535, dtype=torch.int32)
    for some in (keys(3), largest, torch.zeros_like(largest)):
        assert torch.equal(log_times(ids, some), log_times(ids.long(), some.long()))


def test_times_are_finite_and_exponential() -> None:
    """The least of n times follows an exponential distribution of rate n (200 positions)."""
    ids = torch.arange(VOCABULARY, dtype=torch.int32)[None]
    least = []
    for some in keys(200).split(1):
        times = log_times(ids, some)
        assert torch.isfinite(times).all()
        least.append(math.exp(float(times.min())) * VOCABULARY)
    # The mean of 200 exponential numbers has a standard error of 0.07.
    assert abs(np.mean(least) - 1.0) < 0.3
    assert min(least) < 0.05


def test_each_token_is_uniform_over_positions() -> None:
    found = uniforms([0, 1, 255, 256, 65_535, 65_536, 131_071, 199_999], 20_000)
    for token in found.T:
        counts = np.histogram(token.numpy(), bins=64, range=(0, 1))[0]
        # Chi-squared with 63 degrees of freedom exceeds 120 once in 50,000 times.
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 120


def test_two_tokens_are_independent_of_each_other() -> None:
    """Ids that differ by one bit, by one, or in their upper half alone (fails with 4 rounds)."""
    ids = [0, 1, 2, 3, 4, 8, 64, 256, 1024, 4096, 32_768, 65_536, 65_537, 131_072]
    cells = (uniforms(ids, 40_000) * 8).long()
    worst = 0.0
    for i in range(len(ids)):
        for j in range(i):
            counts = torch.bincount(cells[:, i] * 8 + cells[:, j], minlength=64)
            worst = max(worst, float(((counts - 625.0) ** 2 / 625.0).sum()))
    # The largest of 91 chi-squared numbers with 63 degrees of freedom.
    assert worst < 125
