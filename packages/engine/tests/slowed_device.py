"""A CPU whose steps are slow while a file exists, so that requests run until a test has seen them.

`SLOW_FILE` names the file. For processes that a test starts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from trencadis.engine.devices import CPUDevice

SLOW_FILE = "TRENCADIS_TEST_SLOW_FILE"
STEP_SECONDS = 0.1


class SlowedCPU(CPUDevice):
    """As `CPUDevice`."""

    def begin_step(self) -> None:
        super().begin_step()
        if Path(os.environ[SLOW_FILE]).exists():
            time.sleep(STEP_SECONDS)
