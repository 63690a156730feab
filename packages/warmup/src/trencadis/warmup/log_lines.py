"""The words of the log lines, which are those of seed 000: people search their logs for them."""

from __future__ import annotations

from trencadis.bucketing import Bucket

_LOGGED_AXES = {
    "batch": "batch_size",
    "seq": "seq_len",
    "query": "query_len",
    "context_blocks": "num_blocks",
    "blocks": "num_blocks",
}
"""Names of the axes in the lines of Gaudi's plugin."""


def format_bytes(size: float, digits: int = 4) -> str:
    """Bytes as people read them: ``14.97 GiB``, ``-252 KiB``, ``0 B``.

    ``digits`` are the significant ones, four as in the seeds' lines.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.{digits}g} {unit}"
        size /= 1024
    return f"{size:.{digits}g} TiB"


def bucket_line(stage: str, position: int, total: int, bucket: Bucket, free_memory: int) -> str:
    """``[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB``."""
    return (
        f"[Warmup][{stage}][{position}/{total}] {shape_words(bucket)} "
        f"free_mem:{format_bytes(free_memory)}"
    )


def shape_words(bucket: Bucket) -> str:
    """``batch_size:4 seq_len:1024``."""
    sizes = zip(bucket.axes, bucket.shape, strict=True)
    return " ".join(f"{_LOGGED_AXES.get(axis, axis)}:{size}" for axis, size in sizes)
