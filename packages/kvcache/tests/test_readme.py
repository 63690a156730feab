"""What a stranger pastes from the README runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_screen_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SNIPPETS[0], {})  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    comments = [line.split("#", 1)[1] for line in SNIPPETS[0].splitlines() if "print" in line]
    assert len(printed) == len(comments)
    assert all(line in comment for line, comment in zip(printed, comments, strict=True))


@pytest.mark.parametrize("snippet", SNIPPETS[1:])
def test_the_other_snippets_run(snippet: str) -> None:
    if "torch" in snippet:
        pytest.importorskip("torch")
    exec(snippet, {})  # noqa: S102
