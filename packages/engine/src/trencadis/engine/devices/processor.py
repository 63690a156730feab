"""What compiled code depends on beside its source: the processor that it is compiled for."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def processor() -> str:
    """What ``-march=native`` depends on."""
    flags = ("flags", "features", "model name")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = sorted({line for line in lines if line.lower().startswith(flags)})
    return "\n".join((platform.machine(), *found))
