"""On SGLang's module path: lets torchvision be imported, whose wheels are for CUDA.

SGLang imports it for images, and it describes operators to PyTorch that a CPU build has not.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
