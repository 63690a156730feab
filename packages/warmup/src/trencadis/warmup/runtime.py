"""What warm-up needs of its host: a `Runtime`, and a `GraphRuntime` where there are graphs.

The library imports no runtime; implement the protocol for yours. Where several devices run the
same model, ``free_memory`` is the least over all of them, so that all of them decide alike.
"""

from __future__ import annotations

import enum
from typing import Protocol, runtime_checkable

from trencadis.bucketing import Bucket


class Phase(enum.Enum):
    """The two kinds of forward pass. The values are the words of the log lines (seed 000)."""

    PROMPT = "Prompt"
    DECODE = "Decode"


class Runtime(Protocol):
    """A host whose shapes are compiled when they run for the first time."""

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run one forward of exactly this shape on dummy data, leaving no visible state."""

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""

    def free_memory(self) -> int:
        """Free device memory, bytes."""


@runtime_checkable
class GraphRuntime(Runtime, Protocol):
    """A host that can also record a bucket as a graph and replay it."""

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Record the forward of this bucket; from now on the bucket is replayed."""

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Forget the graph and return its memory; from now on the bucket is executed."""
