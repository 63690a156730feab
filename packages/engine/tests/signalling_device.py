"""A CPU whose core signals itself, or fails, before a step of a switch.

The file that `SIGNAL_FILE` names holds the step and the number of the signal, 0 for an error. The
core that follows it deletes it. Before a signal it waits for a file ``begun`` beside it, which the
test creates once the front has read that the core has begun: what is not yet sent would be lost.
Import this in a core alone: it replaces the steps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from trencadis.engine.core import reconfigure
from trencadis.engine.devices import CPUDevice

SIGNAL_FILE = "TRENCADIS_TEST_SIGNAL_FILE"


class SignallingCPU(CPUDevice):
    """Slow, so that on a busy machine too a request of 200 tokens outlives the order to switch."""

    def mark_step(self) -> None:
        time.sleep(0.003)


def _signalled(name: str, step: reconfigure.Step) -> reconfigure.Step:
    def run(switch: reconfigure._Switch) -> None:
        file = Path(os.environ[SIGNAL_FILE])
        if file.exists():
            wanted, number = file.read_text().split()
            if wanted == name:
                file.unlink()
                if number == "0":
                    raise RuntimeError("a fault")
                begun = file.with_name("begun")
                while not begun.exists():
                    time.sleep(0.001)
                begun.unlink()
                os.kill(os.getpid(), int(number))
        step(switch)

    return run


reconfigure.STEPS = tuple((name, _signalled(name, step)) for name, step in reconfigure.STEPS)
