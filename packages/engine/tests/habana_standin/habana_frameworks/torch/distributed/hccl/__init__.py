"""Importing it makes ``hccl`` a backend of ``torch.distributed``; the stand-in has one process.

Source: ``habana_frameworks/torch/distributed/hccl/__init__.py``.
"""


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """``(world_size, rank, local_rank)``."""
    return world_size or 1, -1 if rank is None else rank, -1 if local_rank is None else local_rank
