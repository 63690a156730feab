"""The examples of the README print what the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)


def test_every_example_shows_what_it_prints() -> None:
    assert README.count("```python") == len(EXAMPLES) == 2


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=["scheduler", "limiter"])
def test_an_example_prints_what_the_readme_shows(
    code: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - the example is our own
    assert capsys.readouterr().out == shown
