"""Host memory for swapped sequences, without a setting."""

from __future__ import annotations

from trencadis.engine import EngineConfig
from trencadis.engine.devices import CPUDevice
from trencadis.engine.runner.host_swap import num_host_blocks

MIB = 1 << 20


class OtherMemory(CPUDevice):
    """A device with memory of its own."""

    shares_host_memory = False
    default_kv_cache_memory = None


def test_ranks_together_have_the_swap_space_of_one_process() -> None:
    alone, pair = (EngineConfig(model="a", tensor_parallel_size=size) for size in (1, 2))
    device = OtherMemory()
    assert num_host_blocks(alone, device, 2 * MIB, 100) == 2048, "4 GiB"
    assert num_host_blocks(pair, device, MIB, 100) == 2048, "blocks of half the heads"
    assert num_host_blocks(alone, CPUDevice(), 2 * MIB, 100) == 0
