"""What warm-up needs of its host: a `Runtime`, or a `GraphRuntime` if it has graphs.

This package imports no runtime: implement the protocol for yours. If several devices run one
model, ``free_memory`` must return the minimum over the devices, so that all take the same
decisions.
"""

from __future__ import annotations

import enum
from typing import Protocol, runtime_checkable

from trencadis.bucketing import Bucket


class Phase(enum.Enum):
    """The two kinds of forward pass. The values are the words in the log lines (seed 000)."""

    PROMPT = "Prompt"
    DECODE = "Decode"


class Runtime(Protocol):
    """A host that compiles a bucket when it first executes it."""

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run one forward pass of exactly this shape on dummy data. Leave no visible state.

        A host may leave it out where an earlier one has made this shape ready.
        """

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""

    def free_memory(self) -> int:
        """Free device memory, bytes."""


@runtime_checkable
class GraphRuntime(Runtime, Protocol):
    """A host that can also capture a bucket as a graph and replay it."""

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Capture the forward pass of this bucket. From now on the host replays the graph."""

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Drop the graph and free its memory. From now on the host executes the bucket."""
