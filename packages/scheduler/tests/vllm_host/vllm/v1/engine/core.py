"""The core that clients of vLLM call by the name of a method."""

from __future__ import annotations

from typing import Any


class EngineCore:
    """vLLM's, as far as a call of ``call_utility`` reaches."""

    batch_control: Any

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
