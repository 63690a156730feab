"""Pages of the documentation: their Python blocks run, and the site has each page once."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from documentation import navigation

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/**/*.md"))
BLOCK = re.compile(r"(-->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""A block after a comment, such as ``<!-- not run: needs a server -->``, is not run."""


def run_blocks(text: str) -> None:
    """Run the blocks of a page in one namespace; compare what they print with what is shown."""
    names: dict[str, object] = {}
    for comment, code, shown in BLOCK.findall(text):
        if comment:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), names)  # noqa: S102 - our own
        assert printed.getvalue() == shown


STARTS = ROOT / "packages/engine/README.md"
"""The README of the engine starts one with a real model. Those of the libraries below run in the
tests of each; the server's needs a server and its client."""


@pytest.mark.parametrize(
    "page",
    [*PAGES, pytest.param(STARTS, marks=pytest.mark.slow)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_python_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page.read_text(encoding="utf-8"))


def test_a_block_uses_names_of_earlier_ones_and_prints_what_is_shown() -> None:
    run_blocks(
        "```python\nx = 1\n```\n<!-- not run: needs a server -->\n```python\nx = fail\n```\n"
        "```python\nprint(x)\n```\n\n```text\n1\n```\n"
    )
    with pytest.raises(AssertionError):
        run_blocks("```python\nprint(2)\n```\n\n```text\n1\n```\n")
    with pytest.raises(NameError):
        run_blocks("```python\nprint(missing)\n```\n")


def test_the_site_has_every_page_once_and_pages_of_a_package_together() -> None:
    pages = ["README.md", "docs/models.md", "docs/engine/settings.md", "packages/engine/README.md"]
    sections = {title: found for section in navigation(pages) for title, found in section.items()}
    assert sections["Start"] == ["README.md", "docs/models.md"]
    assert sections["engine"] == ["packages/engine/README.md", "docs/engine/settings.md"]
    shown = [page for section in sections.values() for page in section]
    assert sorted(shown) == sorted(pages)
    assert [page for section in navigation(["new/page.md"]) for page in section.get("Inside", [])]
