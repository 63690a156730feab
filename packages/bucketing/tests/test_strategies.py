"""Strategies: one row of the table is enough to add one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trencadis.bucketing import (
    BucketingConfig,
    BucketingError,
    compare_strategies,
    decode_grid,
    prompt_grid,
    sequence_grid,
)
from trencadis.bucketing.cli import main
from trencadis.bucketing.config import describe_axis_settings
from trencadis.bucketing.strategies import STRATEGIES, AxisSettings, Strategy

LIMITS = {"max_num_seqs": 5, "max_model_len": 1000, "block_size": 128}


def halving_range(min: int, max: int) -> tuple[int, ...]:
    """`max`, half of it, a quarter, down to `min`."""
    values = {max}
    while max and max // 2 >= min:
        max //= 2
        values.add(max)
    return tuple(sorted(values))


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> BucketingConfig:
    monkeypatch.setitem(STRATEGIES, "half", Strategy(halving_range, ("min", "max")))
    return BucketingConfig.from_env({"VLLM_BUCKETING_STRATEGY": "half"})


def test_a_new_row_gives_every_grid(half: BucketingConfig) -> None:
    prompt = prompt_grid(half, max_num_batched_tokens=1000, **LIMITS)
    assert prompt.values("query") == (250, 500, 1000)
    assert prompt.describe()[0] == (
        "Prompt bucket config (min, max_warmup) bs:[1, 5], query:[128, 1000], blocks:[0, 8]"
    )
    decode = decode_grid(half, num_blocks=40, **LIMITS)
    assert decode.values("blocks") == (1, 2, 5, 10, 20, 40)
    assert sequence_grid("decode", half, **LIMITS).values("batch") == (1, 2, 5)


def test_a_new_row_is_a_choice_of_the_command_and_compared(
    half: BucketingConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", "--strategy", "half"]) == 0
    assert "Prompt bucket config (min, max_warmup)" in capsys.readouterr().out
    rows = np.array([[1, 100], [2, 300]])
    results = compare_strategies(rows, rows, step=128, maxima=(2, 512))
    assert {"half", "fit as half"} <= {result.strategy for result in results}
    assert describe_axis_settings()["MIN"] == "smallest bucket, in units of the axis"
    with pytest.raises(BucketingError, match=f"one of {', '.join(STRATEGIES)}"):
        BucketingConfig(strategy="x")


@pytest.mark.parametrize("name", STRATEGIES)
def test_values_end_at_max(name: str) -> None:
    axis = AxisSettings(
        name="seq", label="seq", min=7, step=5, max=33, limit=4, pad_max=9, pad_percent=25
    )
    values = STRATEGIES[name].values([axis])["seq"]
    assert values[-1] == 33
    assert list(values) == sorted(set(values))
