"""Intel's ``block_softmax_adjustment`` is used for shapes at which it was tried, on a Gaudi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trencadis.engine.devices.hpu import kernels
from trencadis.engine.devices.hpu.kernels import ADJUSTMENT_TRIALS, BlocksTried, FusedAdjustment

HEADS = [(24, 8, 64, 64), (12, 6, 64, 64)]
"""Three query heads for each of 8 KV heads, and two for each of 6: layers of two kinds."""

Wrong = Callable[[torch.Tensor, int], bool]


def usable(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> Any:
    """What is used where the kernel is wrong for some shapes of ``peak`` and sizes of a batch."""
    right = kernels._fused_adjustment

    def kernel(peak: torch.Tensor, sums: Any, owners: Any, mapping: torch.Tensor) -> torch.Tensor:
        factor = right(peak, sums, owners, mapping)
        return factor * 1.5 if wrong(peak, mapping.shape[1]) else factor

    monkeypatch.setattr(kernels, "_fused_adjustment", kernel)
    return kernels._usable_adjustment(HEADS, torch.bfloat16, torch.device("hpu"))


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [
        (lambda peak, batch: False, ADJUSTMENT_TRIALS[-1]),
        (lambda peak, batch: peak.shape[0] > 2048, BlocksTried(2048, 128)),
        (lambda peak, batch: batch > 100, BlocksTried(128, 32)),
        (lambda peak, batch: peak.shape[1:3] == (6, 2), None),
        (lambda peak, batch: peak.shape[1:3] == (8, 3), None),
    ],
    ids=["right", "many blocks", "many sequences", "two query heads", "three query heads"],
)
def test_it_is_tried_with_the_heads_of_the_model_and_from_few_to_many_blocks(
    stand_in: Any, wrong: Wrong, limit: BlocksTried | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in("lazy"):
        found = usable(monkeypatch, wrong)
    assert (None if found is None else found.limit) == limit


@pytest.mark.parametrize(
    ("blocks", "batch", "is_used"), [(128, 32, True), (129, 32, False), (128, 33, False)]
)
def test_more_blocks_or_sequences_than_were_tried_are_computed_by_pytorch(
    blocks: int, batch: int, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_fused_adjustment", lambda *given: None)
    owners = torch.arange(blocks) % batch
    mapping = (owners[:, None] == torch.arange(batch)).float()
    peak, sums = torch.randn(blocks, 2, 3, 1), torch.ones(blocks, 2, 3, 1)
    found = FusedAdjustment(BlocksTried(128, 32))(peak, sums, owners, mapping)
    assert (found is None) == is_used
    if found is not None:
        assert torch.equal(found, kernels.block_adjustment(peak, sums, owners, mapping))
