"""README and page of settings: their examples run, and their tables and lists match the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from trencadis.bucketing.config import describe_axis_settings, describe_variables
from trencadis.bucketing.strategies import STRATEGIES

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PAGES = Path(__file__).parents[3] / "docs" / "bucketing"
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)


def test_the_examples_print_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code, shown in EXAMPLES:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own
        assert printed.getvalue() == shown
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(
    "meanings",
    [describe_variables(), describe_axis_settings()],
    ids=["variables", "axis settings"],
)
def test_lists_of_variables_are_those_of_the_settings(meanings: dict[str, str]) -> None:
    items = "".join(f"- `{name}`: {meaning}\n" for name, meaning in meanings.items())
    page = (PAGES / "settings.md").read_text(encoding="utf-8")
    assert f"\n\n{items}\n" in page


def test_every_strategy_has_its_range_in_the_table() -> None:
    named = re.findall(r"^\| `\w+\(.*?\)` \| `(\w+)`", README, re.MULTILINE)
    assert list(dict.fromkeys(named)) == list(STRATEGIES)
