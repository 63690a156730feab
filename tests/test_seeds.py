"""``docs/seeds.md`` names a test for each requirement of the seeds, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]]
    for row in (ROOT / "docs" / "seeds.md").read_text().splitlines()
    if re.match(r"\| \d", row)
]


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1][:40]}")
def test_the_test_of_a_requirement_exists(row: list[str]) -> None:
    _, requirement, works, test = row
    assert requirement
    assert re.match(r"(yes|partly|no)\b", works)
    file, _, name = test.strip("`").partition("::")
    source = (ROOT / "packages" / file).read_text()
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), test
