"""The weight files of a local checkpoint: which transformers loads, and whether they are whole."""

from __future__ import annotations

import json
from pathlib import Path

from trencadis.engine.errors import ModelError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; each may be divided, with an index."""


def check_directory(directory: Path) -> None:
    """Raise `ModelError` where weights are missing, or a safetensors file was cut off.

    Reads an index and the headers of safetensors files, no weights.
    """
    for path in weight_files(directory):
        if not path.is_file():
            raise ModelError(
                f"{directory} lacks the weight file {path.name}: copy or download it again"
            )
        if path.suffix == ".safetensors" and not has_all_tensors(path):
            raise ModelError(
                f"{path} cannot be loaded: it was cut off, or is not a safetensors file. Copy or "
                "download it again"
            )


def checkpoint_directory(source: str) -> Path:
    """Where the files of a checkpoint are, also of one of the Hugging Face Hub."""
    directory = Path(source)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow)

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))


def weight_files(directory: Path) -> list[Path]:
    """The files of the weights that transformers loads. Raises `ModelError` without any."""
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [directory / shard for shard in _shards(index)]
    raise ModelError(
        f"{directory} has no weights: neither {' nor '.join(WEIGHT_FILES)}, nor an index of "
        "several such files"
    )


def _shards(index: Path) -> list[str]:
    """The names of the files of an index: ``{"weight_map": {tensor: file}}``."""
    try:
        return sorted(set(map(str, json.loads(index.read_bytes())["weight_map"].values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be used: {type(error).__name__}: {error}") from error


def has_all_tensors(file: Path) -> bool:
    """A safetensors file is the length of its header in 8 bytes, the header, and the tensors."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        size = file.stat().st_size
        if length > size:
            return False
        try:
            tensors = json.loads(content.read(length))
            tensors.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
    return bool(size == 8 + length + max(ends, default=0))
