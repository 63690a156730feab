"""``docs/seeds.md`` names a test for each requirement of the seeds, which fails without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutants import LISTS as MUTATIONS
from mutants import load

ROOT = Path(__file__).parents[1]
LISTS = {
    title: [
        re.fullmatch(r"- ([\d, -]+): (.+) \(`(.+)::(\w+)`\)", row).groups()
        for row in rows.splitlines()
        if row.startswith("- ")
    ]
    for title, rows in re.findall(
        r"^## Seeds? ([\d and]+):.*?\n(.*?)(?=^## |\Z)",
        (ROOT / "docs" / "seeds.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
ROWS = [row for rows in LISTS.values() for row in rows]


def test_every_seed_has_a_list() -> None:
    numbers = {title: len(rows) for title, rows in LISTS.items()}
    assert list(numbers) == ["000 and 001", "002", "003", "004"]
    assert numbers.pop("004") > 10
    assert sum(numbers.values()) == 104


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1][:40]}")
def test_the_test_of_a_requirement_exists(row: tuple[str, ...]) -> None:
    _, _, file, name = row
    source = (ROOT / "packages" / file).read_text()
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), name


NOT_BROKEN = {
    "engine/tests/test_real_groups.py::test_beams_are_those_of_transformers_with_and_without_evictions",
    "engine/tests/test_real_groups.py::test_evicted_in_the_middle_of_its_prompt_a_request_has_the_same_tokens",
    "engine/tests/test_real_switches.py::test_many_switches_under_load_change_no_token_and_leak_nothing",
    "engine/tests/test_switch_faults.py::test_a_core_that_dies_or_hangs_in_any_step_is_replaced_and_parked_requests_go_on",
    "server/tests/test_deploy.py::test_promtool_accepts",
    "server/tests/test_model_switch_real.py::test_the_flow_of_the_plugin_works_as_printed",
}
"""Tests of rows that no mutation breaks yet. Most take minutes.

None can break what promtool accepts: it reads `deploy/`, and a mutation changes a package.
"""


def test_the_mutations_break_what_the_rows_name() -> None:
    broken = {mutation.row for mutation in load(MUTATIONS / "seeds.toml")}
    named = {f"{file}::{name}" for _, _, file, name in ROWS}
    assert broken <= named, "a mutation of a row that is gone"
    assert named - broken == NOT_BROKEN
