"""A server chooses its buckets from recorded traffic and pads batches to them."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

from trencadis.bucketing import (
    AxisConfig,
    Bucket,
    BucketGrid,
    BucketingConfig,
    BucketingError,
    TrafficRecorder,
    fitted_range,
    linear_range,
    prompt_grid,
    sequence_grid,
)


def is_small_enough(bucket: Bucket) -> bool:
    return bucket["batch"] * bucket["seq"] <= 32_768


def fitted_grid(lengths: list[int]) -> BucketGrid:
    sizes = fitted_range(lengths, step=128, max=4096, limit=6)
    assert_type(sizes, tuple[int, ...])
    assert sizes == fitted_range(np.array(lengths), step=128, max=4096, limit=6)
    return BucketGrid(
        {"batch": linear_range(1, 32, 64), "seq": sizes},
        filters=[is_small_enough, lambda bucket: bucket["seq"] > 0],
        cost=lambda bucket: bucket["batch"] * bucket["seq"],
    )


def grids_from_environment(environ: dict[str, str]) -> tuple[BucketGrid, BucketGrid]:
    config = BucketingConfig.from_env(environ)
    config = attrs.evolve(config, prompt_query=AxisConfig(min=128, step=128, max=1024))
    prompts = prompt_grid(
        config, max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=8, block_size=128
    )
    decodes = sequence_grid("decode", config, max_num_seqs=8, max_model_len=2048, block_size=128)
    return prompts, decodes


def main() -> None:
    grid = fitted_grid([130, 400, 412, 90, 1800])
    assert_type(grid.find((3, 412)), Bucket | None)
    bucket = grid.find([3, 412]) or grid.fallback([3, 412])
    assert_type(bucket, Bucket)
    assert_type(bucket.shape, tuple[int, ...])
    assert_type(bucket["seq"], int)
    assert_type(grid.padding((3, 412)), float)
    assert_type(sorted(grid), list[Bucket])
    graphs: dict[Bucket, str] = {Bucket(["batch", "seq"], [4, 512]): "graph"}
    assert bucket in graphs

    recorder = TrafficRecorder(("batch", "seq"))
    recorder.record((3, 412), count=2)
    shapes, counts = recorder.shapes()
    assert_type(shapes, npt.NDArray[np.int64])
    assert_type(counts, npt.NDArray[np.int64])

    for served in grids_from_environment({"VLLM_BUCKETING_STRATEGY": "lin"}):
        assert_type(served.describe(), tuple[str, ...])
    try:
        Bucket(("batch", "seq"), (4,))
    except BucketingError as error:
        assert_type(error, BucketingError)
