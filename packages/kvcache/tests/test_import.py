"""What few hosts use is imported on first use: tiers took a third of the time of an import."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

import trencadis.kvcache as library

names = ["decode_layout", "disk_tier", "host_tier", "layer_groups", "remapper", "tier"]
names.append("tier_transfers")
late = {f"trencadis.kvcache.{name}" for name in names}
print(sorted(late & sys.modules.keys()))
assert all(hasattr(library, name) for name in library.__all__)
print(sorted(late - sys.modules.keys()))
"""


def test_what_few_hosts_use_is_imported_on_first_use() -> None:
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n") == ["[]", "[]", ""]
