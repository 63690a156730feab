"""What the project's simulator predicts for a decode step on the device that is there."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.errors import ModelError
from trencadis.engine.models.loader import ModelSpec
from trencadis.engine.simulated import HARDWARE, CostModel, read_model_shape
from trencadis.warmup import Phase


@attrs.frozen
class PredictedStep:
    milliseconds: float
    launches: int


def predicted_step(
    spec: ModelSpec,
    dtype: str,
    product: str,
    block_size: int,
    shape: tuple[int, int],
    *,
    captured: bool,
    compiled: bool,
    in_fp8: bool = False,
    cache_in_8_bits: bool = False,
) -> PredictedStep | str:
    """The time and launches of a step, or why there is no prediction.

    ``product`` is the device's own name, ``shape`` the sequences and the KV blocks that are read.
    ``captured``: graphs are replayed. ``compiled``: forward passes are programs. ``in_fp8``: the
    products of layers are.
    """
    words = re.sub(r"[^a-z0-9]", "", product.lower())
    hardware = next((HARDWARE[name] for name in HARDWARE if name in words), None)
    if hardware is None:
        return f"the simulator knows no {product}"
    try:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "config.json"
            spec.config.get_text_config(decoder=True).to_json_file(file, use_diff=False)
            model = read_model_shape(file)
    except ModelError:
        return "the simulator does not model this architecture"
    width = 4 if dtype == "float32" else 2
    model = attrs.evolve(model, dtype_bytes=width, matrix_dtype_bytes=width, kv_dtype_bytes=width)
    model = model.quantized(matrices=in_fp8, kv_cache=cache_in_8_bits)
    costs = CostModel(model, hardware, block_size, compiled=compiled)
    bucket, rows = Bucket(("batch", "blocks"), shape), shape[0]
    device_s = costs.device_s(Phase.DECODE, bucket)
    seconds = (
        device_s
        + costs.upload_s(Phase.DECODE, bucket)
        + costs.launch_s(device_s, captured=captured)
        + costs.sample_s(rows)
        + costs.fetch_s(rows)
        + costs.host_s(rows)
    )
    launches = 1 if captured else costs.num_programs
    return PredictedStep(1000 * seconds, launches + costs.num_sampler_launches)
