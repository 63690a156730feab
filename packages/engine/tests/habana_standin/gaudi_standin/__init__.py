"""What stands behind the stand-in for ``habana_frameworks``: a device made of CPU memory.

Tensors on it say that they are on ``hpu``; their values are CPU tensors that nobody but this
package reads. ``../README.md`` says which rules of the real device are kept, with the source of
each, and which are not.
"""

from gaudi_standin.bridge import BRIDGE
from gaudi_standin.rules import (
    GraphViolation,
    PlacementViolation,
    ScriptViolation,
    StaleOutput,
    StorageMoved,
)

__all__ = [
    "BRIDGE",
    "GraphViolation",
    "PlacementViolation",
    "ScriptViolation",
    "StaleOutput",
    "StorageMoved",
]
