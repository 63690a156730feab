"""The cost model against throughput that Intel publishes for Gaudi 2 and Gaudi 3.

Sources of the rows: ``data/README.md``.
"""

from __future__ import annotations

import csv
from pathlib import Path

import attrs
import pytest

from trencadis.bucketing import Bucket
from trencadis.engine.simulated import (
    CostModel,
    find_hardware,
    read_model_shape,
    static_batch_s,
)
from trencadis.warmup import Phase

DATA = Path(__file__).parent / "data"
BLOCK = 128

with (DATA / "gaudi_published.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
CHECKED = [row for row in ROWS if row["use"] == "check"]

RATIOS = {
    ("gaudi3", "128", "128"): 1.03,
    ("gaudi3", "128", "2048"): 1.11,
    ("gaudi3", "2048", "128"): 1.11,
    ("gaudi3", "2048", "2048"): 1.22,
    ("gaudi2", "128", "128"): 0.89,
    ("gaudi2", "128", "2048"): 1.09,
    ("gaudi2", "2048", "128"): 0.95,
    ("gaudi2", "2048", "2048"): 0.99,
}
"""Simulated by published tokens per second of Llama 3.1 8B, by device, input and output length.

No row of this model was used to choose a figure of the cost model.
"""

RANK_RATIOS = {
    ("2", "128", "128"): 1.10,
    ("2", "128", "2048"): 0.89,
    ("2", "2048", "128"): 0.96,
    ("2", "2048", "2048"): 0.91,
    ("8", "128", "128"): 1.06,
    ("8", "2048", "2048"): 1.12,
}
"""The same of Llama 3.1 70B on Gaudi 3, by cards and lengths: rows that chose no figure either."""


def costs(row: dict[str, str]) -> CostModel:
    assert row["precision"] == "fp8"
    ranks = int(row["ranks"])
    model = read_model_shape(DATA / f"{row['model']}.json")
    of_rank = model.quantized(matrices=True, kv_cache=True, attention=True).divided(ranks)
    return CostModel(of_rank, find_hardware(row["device"]), BLOCK, num_ranks=ranks)


def ratio(row: dict[str, str]) -> float:
    batch, prompt, output = (int(row[name]) for name in ("batch", "prompt", "output"))
    seconds = static_batch_s(costs(row), batch, prompt, output)
    return batch * output / seconds / float(row["tokens_per_s"])


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: "-".join([*row.values()][2:6]))
def test_a_published_row_has_its_known_ratio(row: dict[str, str]) -> None:
    expected = RATIOS[row["device"], row["prompt"], row["output"]]
    assert ratio(row) == pytest.approx(expected, abs=0.01)


def test_every_published_row_of_several_cards_is_within_an_eighth() -> None:
    rows = [row for row in ROWS if row["use"] == "check_ranks"]
    found = {(row["ranks"], row["prompt"], row["output"]): ratio(row) for row in rows}
    assert found == {key: pytest.approx(value, abs=0.01) for key, value in RANK_RATIOS.items()}
    assert all(abs(value - 1) <= 0.125 for value in found.values())


def test_six_of_the_eight_published_rows_are_within_a_fifth() -> None:
    assert len(CHECKED) == len(RATIOS) == 8
    assert sum(abs(ratio(row) - 1) <= 0.2 for row in CHECKED) >= 6


def test_the_rows_that_the_two_shares_were_fitted_to_are_another_model() -> None:
    fitted = [row for row in ROWS if row["use"] == "fit"]
    assert {row["model"] for row in fitted} == {"llama-2-7b"}
    assert {row["model"] for row in CHECKED} == {"llama-3.1-8b"}
    assert all(ratio(row) == pytest.approx(1.0, abs=0.13) for row in fitted)


def test_gaudi_2_and_gaudi_3_share_both_shares() -> None:
    gaudi2, gaudi3 = find_hardware("gaudi2"), find_hardware("gaudi3")
    assert gaudi2.compute_efficiency == gaudi3.compute_efficiency
    assert gaudi2.hbm_efficiency == gaudi3.hbm_efficiency


def test_programs_of_the_default_mode_are_started_while_the_device_computes() -> None:
    """Llama 3.1 8B has 32 layers: 36 launches in all, as on the stand-in."""
    model = costs(CHECKED[0])
    compiled, replay_s = attrs.evolve(model, compiled=True), model.hardware.replay_s
    assert compiled.num_programs + compiled.num_sampler_launches == 36
    assert compiled.launch_s(1.0, captured=False) == replay_s
    assert compiled.launch_s(0.0, captured=False) == pytest.approx(34 * replay_s)
    assert compiled.launch_s(1.0, captured=False) < model.launch_s(1.0, captured=False)


def test_a_static_batch_is_one_prefill_and_a_decode_per_further_token() -> None:
    """By hand, with a host and a link that take no time."""
    row = CHECKED[0]
    model = costs(row)
    free = {"launch_s": 0.0, "replay_s": 0.0, "copy_s": 0.0, "link_bytes_per_s": 1e30}
    model = attrs.evolve(model, hardware=attrs.evolve(model.hardware, **free))
    prompt = Bucket(("batch", "query", "context_blocks"), (4, 255, 0))
    expected_s = model.device_s(Phase.PROMPT, prompt)
    for blocks_each in (2, 3, 3):  # 256 tokens fill two blocks, the next begins a third
        bucket = Bucket(("batch", "blocks"), (4, 4 * blocks_each))
        expected_s += model.device_s(Phase.DECODE, bucket)
    expected_s += 4 * model.sample_s(4)
    assert static_batch_s(model, 4, 255, 4) == pytest.approx(expected_s)
