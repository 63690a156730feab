"""What SGLang's loader of plug-ins calls: puts `ThermalScheduler` into the place of its own."""

from __future__ import annotations

import logging
import os

from trencadis.scheduler.runtime_settings import OF_SGLANG

logger = logging.getLogger(__name__)


def install() -> None:
    """Replace SGLang's ``Scheduler`` in this process, where `OF_SGLANG` is set.

    SGLang calls this in each of its processes before a scheduler is made (``sglang.srt.plugins``).
    """
    if OF_SGLANG not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from trencadis.scheduler.sglang import ThermalScheduler  # noqa: PLC0415

    target = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(target, ThermalScheduler, HookType.REPLACE)
    logger.info("The batch of SGLang's scheduler is limited by trencadis-scheduler")
