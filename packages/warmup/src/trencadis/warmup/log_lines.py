"""The log lines of a warm-up. Their wording is that of seed 000, which users search for."""

from __future__ import annotations

from trencadis.bucketing import Bucket

_LOGGED_AXES = {
    "batch": "batch_size",
    "seq": "seq_len",
    "query": "query_len",
    "context_blocks": "num_blocks",
    "blocks": "num_blocks",
}
"""The names that Gaudi's plugin logs for the axes of a bucket."""


def format_bytes(size: float, digits: int = 4) -> str:
    """A size with a binary unit: ``14.97 GiB``, ``-252 KiB``, ``0 B``.

    ``digits``: significant digits; seed 000 has four.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.{digits}g} {unit}"
        size /= 1024
    return f"{size:.{digits}g} TiB"


def bucket_line(stage: str, position: int, total: int, bucket: Bucket, free_memory: int) -> str:
    """``[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB``."""
    return (
        f"[Warmup][{stage}][{position}/{total}] {format_shape(bucket)} "
        f"free_mem:{format_bytes(free_memory)}"
    )


def format_shape(bucket: Bucket) -> str:
    """``batch_size:4 seq_len:1024``."""
    sizes = zip(bucket.axes, bucket.shape, strict=True)
    return " ".join(f"{_LOGGED_AXES.get(axis, axis)}:{size}" for axis, size in sizes)
