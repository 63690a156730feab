"""The bridge: registers the device, and the compiler where the mode is not lazy.

Source: ``habana_frameworks/torch/core/__init__.py``, ``core/step_closure.py`` and
https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html
"""

from gaudi_standin import torch_patches
from gaudi_standin.bridge import BRIDGE
from habana_frameworks.torch import hpu
from habana_frameworks.torch.utils.internal import is_lazy

BRIDGE.lazy = is_lazy()
torch_patches.apply(hpu)
if not BRIDGE.lazy:
    import habana_frameworks.torch.dynamo.compile_backend  # noqa: F401


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """Compile and start what is collected; nothing outside lazy mode (``lazy_only``)."""
    if BRIDGE.lazy:
        BRIDGE.mark_step()


def hpu_initialize(*_: object, **__: object) -> None:
    """Prepare a model for inference; the stand-in has nothing to prepare."""


hpu_inference_initialize = hpu_initialize
