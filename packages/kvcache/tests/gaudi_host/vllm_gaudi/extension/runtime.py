"""The settings of the plugin, by its names. A test sets them."""

from __future__ import annotations

import types

CONFIG = types.SimpleNamespace()


def get_config() -> types.SimpleNamespace:
    return CONFIG
