"""Importing it makes ``hccl`` a backend of ``torch.distributed``, and chooses the device of a rank.

Source: ``habana_frameworks/torch/distributed/hccl/__init__.py`` of the bridge 1.19.0, lines 25-104.
"""

import os
from typing import Any

import torch
import torch.distributed


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """``(world_size, rank, local_rank)``, by the variables that launchers set."""
    if world_size is not None and rank is not None and local_rank is not None:
        os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(local_rank))
    size, local = int(os.getenv("WORLD_SIZE", "1")), int(os.getenv("LOCAL_RANK", "-1"))
    if "HLS_MODULE_ID" not in os.environ and local != -1 and size != 1:
        visible = os.environ.get("HABANA_VISIBLE_MODULES", "").split(",")
        if visible != [""]:
            assert local < len(visible), "There is not enough devices available"
        os.environ["HLS_MODULE_ID"] = str(local) if visible == [""] else visible[local]
    return size, int(os.getenv("RANK", "-1")), local


initialize_distributed_hpu()


def _create(options: Any, _: Any) -> Any:
    return torch.distributed.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


torch.distributed.Backend.register_backend("hccl", _create, extended_api=True, devices=["hpu"])
