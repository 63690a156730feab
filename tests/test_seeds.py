"""``docs/seeds.md`` names a test for each requirement of the seeds, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
