"""``import habana_frameworks.torch`` brings the device into PyTorch."""

import habana_frameworks.torch.core
import habana_frameworks.torch.distributed.hccl
import habana_frameworks.torch.hpu  # noqa: F401
