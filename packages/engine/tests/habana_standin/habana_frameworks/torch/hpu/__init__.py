"""``torch.hpu``. Graphs are there in lazy mode only.

Source: ``habana_frameworks/torch/hpu/__init__.py``, whose ``if is_lazy(): from .graphs import *``
this keeps.
"""

import os

from gaudi_standin.bridge import BRIDGE
from habana_frameworks.torch.hpu.memory import *  # noqa: F403
from habana_frameworks.torch.hpu.streams import *  # noqa: F403
from habana_frameworks.torch.utils.internal import is_lazy

if is_lazy():
    from habana_frameworks.torch.hpu.graphs import *  # noqa: F403


def init() -> None:
    """The device is acquired. Real ones raise here where the driver does not answer."""


_lazy_init = init


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    """Never throws: «returns 0 if driver is missing or can't be initialized»."""
    return device_count() > 0


def device_count() -> int:
    return int(os.environ.get("GAUDI_STANDIN_DEVICES", "1"))


def current_device() -> int:
    return 0


def get_device_name(device: object = None) -> str:
    return os.environ.get("GAUDI_STANDIN_NAME", "GAUDI-STANDIN")


def synchronize() -> None:
    """Wait for everything that was submitted; what is only collected was not."""
    BRIDGE.synchronize()


def is_bf16_supported() -> bool:
    return True
