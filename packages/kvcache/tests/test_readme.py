"""The README: its snippets run, and its table of environment variables matches the settings."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from trencadis.kvcache import CacheConfig, DefragConfig
from trencadis.kvcache.config import IGNORED_VARIABLES

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FIELDS = [field for settings in (CacheConfig, DefragConfig) for field in attrs.fields(settings)]


def test_the_first_snippet_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_table_of_variables_matches_the_metadata_of_the_settings() -> None:
    rows = [
        [cell.strip().strip("`") for cell in row.split("|")]
        for row in re.findall(r"^\| (`VLLM_.*) \|$", README, re.MULTILINE)
    ]
    settings = [
        [field.metadata["env"], field.name, repr(field.default), field.metadata["help"]]
        for field in FIELDS
        if "env" in field.metadata
    ]
    assert [row for row in rows if row[0] not in IGNORED_VARIABLES] == settings
    assert {row[0] for row in rows} == {*IGNORED_VARIABLES, *(row[0] for row in settings)}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_setting_says_what_it_means(field: attrs.Attribute[object]) -> None:
    assert field.metadata["help"].endswith(".")
    assert set(field.metadata) <= {"help", "env"}
