"""Finds a checkpoint by name. Imports neither PyTorch nor transformers, for a fast start."""

from __future__ import annotations

from pathlib import Path

from trencadis.engine.errors import ModelError
from trencadis.engine.models.gguf import convert_gguf
from trencadis.engine.models.hub import check_hub


def locate(name: str) -> str:
    """A directory or hub id that transformers can load for ``name``.

    A ``.gguf`` file is converted on the first call. Raises `ModelError` for a path that is not a
    checkpoint, and for a hub id where neither the cache has it nor the hub answers.
    """
    check_checkpoint(name)
    path = Path(name).expanduser()
    if path.is_file():
        return str(convert_gguf(path))
    if path.is_dir():
        return str(path)
    check_hub(name)
    return name


def check_checkpoint(name: str) -> None:
    """Raise `ModelError` for a path that is not a checkpoint. A hub id is not looked up."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"{name} is a file: name the checkpoint's directory, or a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{name} holds no config.json: name a transformers checkpoint")
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not path.exists():
        raise ModelError(f"there is no directory {name}")
