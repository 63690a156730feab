"""What is raised for a checkpoint's files that are damaged or hold something else."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

BROKEN_FILE_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(ImportError, RuntimeError, StrictDataclassError, SafetensorError),
)
"""transformers reads files without checking their form, so a wrong one raises nearly anything."""

_MAX_REASON = 300


def reason_of(error: BaseException) -> str:
    """The message of an error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 1]}\u2026"
