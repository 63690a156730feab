"""Finds a checkpoint by name. Imports neither PyTorch nor transformers, for a fast start."""

from __future__ import annotations

from pathlib import Path

from trencadis.engine.errors import ModelError
from trencadis.engine.models.gguf import convert_gguf


def locate(name: str) -> str:
    """A directory or hub id that transformers can load for ``name``.

    A ``.gguf`` file is converted on the first call. Raises `ModelError` for a path that is not a
    checkpoint.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return str(convert_gguf(path))
        raise ModelError(f"{name} is a file: name the checkpoint's directory, or a .gguf file")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name} holds no config.json: name a transformers checkpoint")
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no directory {name}")
    return name
