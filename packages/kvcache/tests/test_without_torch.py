"""Without PyTorch the bookkeeping works, and the module that needs it names the extra."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["torch"] = None  # as if it were not installed

from trencadis.kvcache import BlockManager, CacheConfig, KVCacheError

BlockManager(CacheConfig(num_blocks=4, block_size=4)).allocate(1, [1])
try:
    import trencadis.kvcache.tensors
except ImportError as error:
    assert isinstance(error, KVCacheError)
    print(error)
"""


def test_the_tensors_name_the_extra_that_they_need() -> None:
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "install trencadis-kvcache[torch]" in run.stdout
