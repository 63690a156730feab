"""An offline batch as vendors measure it: equal prompts, equal outputs, no scheduler.

All prompts are computed in one forward pass, then all sequences decode together to the end.
"""

from __future__ import annotations

from trencadis.bucketing import Bucket
from trencadis.engine.simulated.cost_model import CostModel
from trencadis.kvcache import ceil_div
from trencadis.warmup import Phase


def static_batch_s(costs: CostModel, batch: int, prompt: int, output: int) -> float:
    """Seconds for ``batch`` prompts of ``prompt`` tokens and ``output`` tokens for each.

    The prefill is launched, decode steps replay graphs, sampling is on the device. The cache is
    read up to the blocks that a sequence has begun (in optimum-habana's text generation:
    ``--bucket_internal --bucket_size``). Without the host's time for a scheduler, and without
    regard to the size of the device's memory.
    """
    bucket = Bucket(("batch", "query", "context_blocks"), (batch, prompt, 0))
    seconds = _step_s(costs, Phase.PROMPT, bucket, batch)
    for length in range(prompt + 1, prompt + output):
        blocks = batch * ceil_div(length, costs.block_size)
        bucket = Bucket(("batch", "blocks"), (batch, blocks))
        seconds += _step_s(costs, Phase.DECODE, bucket, batch)
    return seconds


def _step_s(costs: CostModel, phase: Phase, bucket: Bucket, batch: int) -> float:
    device_s = costs.device_s(phase, bucket)
    return (
        device_s
        + costs.launch_s(device_s, captured=phase is Phase.DECODE)
        + costs.upload_s(phase, bucket)
        + costs.sample_s(batch)
        + costs.fetch_s(batch)
    )
