"""Grids fitted to what was served: ``--bucketing fitted:FILE`` and ``--bucketing learn``."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import platformdirs

from trencadis.bucketing import (
    Bucket,
    BucketGrid,
    BucketingConfig,
    BucketingError,
    TrafficRecorder,
)
from trencadis.engine.config import FITTED, EngineConfig
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.grids import Grids, made_grids
from trencadis.engine.runner.limits import ServingLimits
from trencadis.engine.runner.recorded_traffic import decode_file, load_traffic, read_traffic
from trencadis.warmup import Phase, WarmupConfig, expected_replays

logger = logging.getLogger("trencadis.engine")

LEARN_FROM = 100
"""Batches of each phase from which on a grid is learned. Fewer say little of the next day."""


def fitted_config(config: BucketingConfig, path: Path) -> BucketingConfig:
    """These settings with a fit: to recorded traffic, or the buckets of a bucket file.

    ``path``: a ``.json`` file of recorded traffic, else a bucket file. A phase without a file uses
    its own strategy.
    """
    if path.suffix != ".json":
        return attrs.evolve(config, bucket_file=str(path))
    decode = decode_file(path)
    return attrs.evolve(
        config,
        prompt_strategy="fit",
        prompt_traffic=str(path),
        decode_strategy="fit" if decode.exists() else config.decode_strategy,
        decode_traffic=str(decode) if decode.exists() else None,
    )


def learned_config(
    config: BucketingConfig,
    path: Path,
    traffic: Mapping[Phase, TrafficRecorder],
    limits: ServingLimits,
) -> BucketingConfig | None:
    """These settings with a fit to what was served, or None as long as that is too little.

    Logs what the fit saves beside the grids of ``config``: graphs and padding of the traffic.
    """
    counts = {phase: traffic[phase].total if phase in traffic else 0 for phase in Phase}
    if min(counts.values()) < LEARN_FROM:
        logger.info(
            "Nothing learned yet: %d prompt and %d decode batches are recorded in %s, and a grid "
            "is learned from %d of each",
            *counts.values(),
            path,
            LEARN_FROM,
        )
        return None
    fitted = fitted_config(config, path)
    try:
        learned = made_grids(fitted, limits)
    except BucketingError as error:
        logger.warning("Nothing is learned from %s: %s", path, error)
        return None
    before = made_grids(config, limits)
    logger.info(
        "Buckets are learned from %d prompt and %d decode batches: %s, in place of %s with %s",
        *counts.values(),
        _summary(learned, traffic),
        _summary(before, traffic),
        config.strategy,
    )
    return fitted


def traffic_file(config: EngineConfig) -> Path | None:
    """Where the shapes of batches are recorded; None if they are not.

    ``learn`` without a file of the user's has one in the user's cache directory, for each model and
    block size.
    """
    if config.record_traffic is not None:
        return Path(config.record_traffic)
    if config.bucket_grid != "learn":
        return None
    name = re.sub(r"[^\w.-]+", "-", Path(config.model).name)[:64]
    digest = hashlib.sha256(f"{config.model}\n{config.block_size}".encode()).hexdigest()[:12]
    directory = Path(platformdirs.user_cache_dir("trencadis")) / "traffic"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}): name a file with --record-traffic"
        ) from error
    return directory / f"{name}-{digest}.json"


def served_traffic(config: EngineConfig) -> dict[Phase, TrafficRecorder]:
    """What earlier servers recorded, in the file of this one or in those that its settings name.

    Raises `ConfigError` for a file that cannot be read.
    """
    path = traffic_file(config)
    if path is None and config.bucket_grid.startswith(FITTED):
        path = Path(config.bucket_grid.removeprefix(FITTED))
        path = path if path.suffix == ".json" else None
    if path is not None:
        return read_traffic(path)
    buckets = config.bucketing or BucketingConfig()
    files = {Phase.PROMPT: buckets.prompt_traffic, Phase.DECODE: buckets.decode_traffic}
    return {phase: load_traffic(Path(file)) for phase, file in files.items() if file is not None}


def served_replays(
    grids: Grids, config: WarmupConfig, served: Mapping[Phase, TrafficRecorder]
) -> dict[Phase, dict[Bucket, float]]:
    """How often each bucket ran in the recorded traffic, where a strategy ``traffic`` needs it.

    Warns of a phase without recorded traffic. Raises `BucketingError` for traffic of other axes.
    """
    phases = (
        (Phase.PROMPT, grids.prompt, config.prompt_strategy),
        (Phase.DECODE, grids.decode, config.decode_strategy),
    )
    replays: dict[Phase, dict[Bucket, float]] = {}
    for phase, grid, strategy in phases:
        if strategy == "traffic" and phase in served:
            replays[phase] = expected_replays(grid, served[phase])
        elif strategy == "traffic":
            logger.warning(
                "VLLM_GRAPH_%s_STRATEGY=traffic has no recorded traffic to order graphs by, and "
                "captures small ones first: --record-traffic FILE records it for the next start",
                phase.value.upper(),
            )
    return replays


def _summary(grids: Grids, traffic: Mapping[Phase, TrafficRecorder]) -> str:
    prompt, decode = traffic[Phase.PROMPT], traffic[Phase.DECODE]
    return (
        f"{grids.num_buckets} buckets that pad {padding(grids.prompt, prompt):.1%} of prompts and "
        f"{padding(grids.decode, decode):.1%} of decodes"
    )


def padding(grid: BucketGrid, traffic: TrafficRecorder) -> float:
    """Padding of the traffic relative to its size, in the product of its first two axes."""
    padded = real = 0
    shapes, counts = traffic.shapes()
    for shape, count in zip(shapes.tolist(), counts.tolist(), strict=True):
        bucket = grid.find(shape) or grid.fallback(shape)
        padded += count * math.prod(bucket.shape[:2])
        real += count * math.prod(shape[:2])
    return padded / real - 1 if real else 0.0
