"""The pages' lists of settings are those of the settings classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_lists_of_the_pages_are_up_to_date() -> None:
    command = [sys.executable, "tools/flag_lists.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_settings_of_every_command_have_a_list() -> None:
    pages = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*/*.md")))
    for path in ("EngineConfig", "simulated.SimulationConfig"):
        assert f"<!-- flags:begin trencadis.engine.{path} -->" in pages
    assert "<!-- flags:begin trencadis.server.ServerSettings -->" in pages
