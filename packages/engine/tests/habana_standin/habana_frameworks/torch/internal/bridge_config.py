"""The bridge's variables that may change while it runs, one function each to read and to set.

``scripts/generate_env.py`` makes the real module of ``scripts/env_flags.yaml``: those with
``settable: true`` can be set.
"""

from gaudi_standin.bridge import BRIDGE


def get_pt_compile_only_mode() -> bool:
    return BRIDGE.compile_only


def set_pt_compile_only_mode(value: bool) -> None:
    BRIDGE.compile_only = value
