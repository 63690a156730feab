"""``import habana_frameworks.torch`` brings the device into PyTorch."""

import os

import habana_frameworks.torch.core
import habana_frameworks.torch.distributed.hccl
import habana_frameworks.torch.hpu  # noqa: F401

if os.environ.get("GAUDI_STANDIN_ENGINE_TESTS"):
    import gaudi_standin.engine_tests  # noqa: F401
