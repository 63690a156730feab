"""The plugin's logger, which is called first."""

from __future__ import annotations

import logging


def logger() -> logging.Logger:
    return logging.getLogger("vllm")
