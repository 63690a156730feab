"""Wrong calls, which a type checker must refuse: an ignore comment without an error is an error.

Never executed.
"""

from __future__ import annotations

import trencadis.engine
import trencadis.server
from trencadis.bucketing import BucketGrid, BucketingConfig, linear_range
from trencadis.engine import EngineConfig, SamplingParams
from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import Request, SchedulerConfig
from trencadis.server import ServerSettings, create_app
from trencadis.warmup import warm_up


def refused(grid: BucketGrid, manager: BlockManager) -> None:
    BucketGrid({"batch": "12"})  # type: ignore[dict-item]
    BucketingConfig("lin", step=128)  # type: ignore[call-arg]
    linear_range(1, 32, "64")  # type: ignore[arg-type]
    grid.find((3, 412)).shape  # type: ignore[union-attr]  # noqa: B018
    CacheConfig(16, 8)  # type: ignore[call-arg]
    manager.allocate(1, "a prompt")  # type: ignore[arg-type]
    Request(request_id="a", prompt_token_ids="a prompt", max_tokens=1)  # type: ignore[arg-type]
    SchedulerConfig(policy="shortest")  # type: ignore[arg-type]
    warm_up(object(), (), ())  # type: ignore[arg-type]
    SamplingParams(stop=[2])  # type: ignore[list-item]
    SamplingParams(stop=2)  # type: ignore[arg-type]
    SamplingParams(logit_bias={"7": 1})  # type: ignore[dict-item]
    SamplingParams(stop_token_ids=["</s>"])  # type: ignore[list-item]
    EngineConfig(model="m", dtype="int8")  # type: ignore[arg-type]
    EngineConfig(model="m", device=5)  # type: ignore[arg-type]
    ServerSettings(port="8000")  # type: ignore[arg-type]
    create_app(EngineConfig(model="m"))  # type: ignore[arg-type]
    trencadis.engine.no_such_name()  # type: ignore[attr-defined]
    trencadis.server.no_such_name()  # type: ignore[attr-defined]
