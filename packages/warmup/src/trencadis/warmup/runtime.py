"""What warm-up needs of its host: a `Runtime` that can run one bucket with dummy data."""

from __future__ import annotations

import enum
from typing import Protocol

from trencadis.bucketing import Bucket


class Phase(enum.Enum):
    """The two kinds of forward pass. The values are the words of the log lines (seed 000)."""

    PROMPT = "Prompt"
    DECODE = "Decode"


class Runtime(Protocol):
    """The host that is warmed up. The library imports none; implement this for yours."""

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run one forward of exactly this shape on dummy data, leaving no visible state."""

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""

    def free_memory(self) -> int:
        """Free device memory, bytes."""
