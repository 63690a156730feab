"""README: its examples print what it shows, its table of variables matches the settings."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import attrs
import pytest

from trencadis.kvcache import CacheConfig, DefragConfig
from trencadis.kvcache.config import IGNORED_VARIABLES

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)
FIELDS = [field for settings in (CacheConfig, DefragConfig) for field in attrs.fields(settings)]


def test_the_examples_print_what_the_readme_shows() -> None:
    names: dict[str, object] = {}
    for code, shown in EXAMPLES:
        if "torch" in code:
            pytest.importorskip("torch")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own
        assert printed.getvalue() == shown
    assert len(EXAMPLES) == 3


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
