"""The first example of the README prints what the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_first_example_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    match = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert match is not None
    exec(compile(match[1], "README.md", "exec"), {})  # noqa: S102 - the example is our own
    assert capsys.readouterr().out == match[2]
