"""What vLLM's loader of plug-ins calls: puts `OnlineDefragmenter` into the plugin for Gaudi."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

SWITCH = "TRENCADIS_VLLM_GAUDI"
"""Environment: what takes the plugin's place, separated by commas; nothing does by default."""

NAMES = ("buckets", "defragmentation")
"""What it may have; each is of a library."""

NAME = "defragmentation"
"""In `SWITCH`: the defragmentation of this library."""


def install() -> None:
    """Replace the plugin's ``OnlineDefragmenter`` in this process, where `SWITCH` has `NAME`.

    vLLM calls this in each process before a model runner is made (``vllm.general_plugins``). Raises
    `ImportError` where the plugin for Gaudi is not installed.
    """
    names = {name.strip() for name in os.environ.get(SWITCH, "").split(",")}
    if unknown := names - {"", *NAMES}:
        logger.warning("%s has %s: it may have %s", SWITCH, sorted(unknown), ", ".join(NAMES))
    if NAME not in names:
        return
    from vllm_gaudi.extension import defragmentation  # noqa: PLC0415 - not without the switch

    from trencadis.kvcache.vllm_gaudi import OnlineDefragmenter  # noqa: PLC0415

    defragmentation.OnlineDefragmenter = OnlineDefragmenter
    for name in ("hpu_model_runner", "hpu_worker"):
        module = sys.modules.get(f"vllm_gaudi.v1.worker.{name}")
        if module is not None:
            module.OnlineDefragmenter = OnlineDefragmenter  # type: ignore[attr-defined]
    logger.info("Defragmentation of trencadis-kvcache takes the place of the plugin's")
