"""The settings that an engine and a simulation of it share, with the groups of their flags."""

from __future__ import annotations

import attrs

from trencadis.engine.settings.flags import setting_field
from trencadis.engine.validators import Validator, integer, is_integer, number

DEFAULT_SWAP_SPACE = 4.0
"""GiB, as in ``vllm serve --swap-space``."""

INT32_MAX = 2**31 - 1
MAX_NUM_SEQS = 1 << 16
MAX_BATCHED_TOKENS = 1 << 24
"""Bounds beyond which a number is a typing error: no device holds a batch of that size."""

MAX_BYTES = 1 << 50

MAX_BLOCK_SIZE = 1 << 16
"""Tokens. The longest KV blocks in use have 256."""

MODEL, MEMORY, WARMUP, HEAT = "model", "batches and memory", "warm-up", "heat"
FAULTS = "faults"
LORA = "adapters"
"""Groups of flags in ``--help``."""

THERMAL_POLICIES = "none, proportional, power, two_phase"
"""Those of the scheduler, for the help: importing them here would load NumPy."""


class DeviceDefault(int):
    """A default that the device replaces by its own (``Device.defaults``), if it has one."""


def _is_power_of_two(value: object) -> bool:
    return is_integer(value) and value > 0 and not value & (value - 1)


@attrs.frozen(kw_only=True)
class CapacitySettings:
    """The settings that an engine and a simulation of it share."""

    max_model_len: int | None = setting_field(
        None,
        integer(2, INT32_MAX, optional=True),
        "--max-model-len",
        metavar="TOKENS",
        group=MODEL,
        help="longest sequence: the tokens of a prompt and its answer together",
        default="the model's context length",
    )
    seed: int = setting_field(
        0,
        integer(0, 2**63 - 1),
        "--seed",
        metavar="N",
        group=MODEL,
        help="seed of the random draws, except for requests with their own seed",
    )
    max_num_seqs: int = setting_field(
        DeviceDefault(32),
        integer(1, MAX_NUM_SEQS),
        "--max-num-seqs",
        metavar="N",
        group=MEMORY,
        help="most sequences decoded in one step",
        default="32; 128 on hpu",
    )
    max_num_batched_tokens: int = setting_field(
        DeviceDefault(1024),
        integer(1, MAX_BATCHED_TOKENS),
        "--max-num-batched-tokens",
        metavar="TOKENS",
        group=MEMORY,
        help="most prompt tokens computed in one step; a longer prompt is split",
        default="1024; 2048 on hpu",
    )
    max_mixed_prefill_tokens: int | None = setting_field(
        None,
        integer(1, MAX_BATCHED_TOKENS, optional=True),
        "--max-mixed-prefill-tokens",
        metavar="TOKENS",
        group=MEMORY,
        help="most prompt tokens in a step that also decodes",
        default="--max-num-batched-tokens; 256 on cpu where that is not set",
    )
    max_waiting: int = setting_field(
        2048,
        integer(1, INT32_MAX),
        "--max-waiting",
        metavar="N",
        group=MEMORY,
        help="most requests in the waiting queue; further requests are rejected",
    )
    block_size: int = setting_field(
        DeviceDefault(32),
        Validator("a power of two", _is_power_of_two, 1, MAX_BLOCK_SIZE),
        "--block-size",
        metavar="TOKENS",
        group=MEMORY,
        parse=int,
        help="tokens per KV block, a power of two",
        default="32; 128 on hpu",
    )
    num_blocks: int | None = setting_field(
        None,
        integer(2, INT32_MAX, optional=True),
        "--num-gpu-blocks-override",
        metavar="BLOCKS",
        group=MEMORY,
        help="number of KV blocks",
        default="as many as fit the memory",
    )
    gpu_memory_utilization: float = setting_field(
        0.9,
        number(0, 1, exclusive_low=True),
        "--gpu-memory-utilization",
        metavar="SHARE",
        group=MEMORY,
        help="share of the free device memory to use, above 0 and at most 1",
    )
