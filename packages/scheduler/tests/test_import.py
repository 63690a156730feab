"""Policies and what only tiers use are imported on first use: a tenth of the time of an import."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

import trencadis.scheduler
from trencadis.scheduler import thermal

late = {f"trencadis.scheduler.thermal.{name}" for name in ("heat_model", "phase_power")}
late |= {path.partition(":")[0] for path in thermal.POLICIES.values()}
late -= {"trencadis.scheduler.thermal.proportional"}  # with which an order sets a target
late |= {"trencadis.kvcache.tier", "trencadis.kvcache.tier_transfers"}
print(sorted(late & sys.modules.keys()))
assert all(hasattr(thermal, name) for name in thermal.__all__)
print(sorted(late - sys.modules.keys()))
"""


def test_policies_and_tiers_are_imported_on_first_use() -> None:
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    tiers = "['trencadis.kvcache.tier', 'trencadis.kvcache.tier_transfers']"
    assert run.stdout.split("\n") == ["[]", tiers, ""]
