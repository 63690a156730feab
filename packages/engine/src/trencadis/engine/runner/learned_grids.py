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
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.grids import Grids, made_grids, ragged_grids
from trencadis.engine.runner.limits import ServingLimits
from trencadis.engine.runner.recorded_traffic import decode_file, load_traffic, read_traffic
from trencadis.engine.settings.engine_config import FITTED, EngineConfig
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


def learn_grids(
    config: BucketingConfig | None,
    path: Path,
    traffic: Mapping[Phase, TrafficRecorder],
    limits: ServingLimits,
    *,
    exponential: bool,
) -> Grids | None:
    """Grids fitted to what was served, or None as long as that is too little.

    Logs what the fit saves beside the grids of ``config``, or, without it, those of the device
    (``exponential`` as for `build_grids`): graphs and padding of the traffic.
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
    try:
        learned = made_grids(fitted_config(config or BucketingConfig(), path), limits)
    except BucketingError as error:
        logger.warning("Nothing is learned from %s: %s", path, error)
        return None
    counts = {
        Phase.PROMPT: _num_within(learned.prompt, traffic[Phase.PROMPT]),
        Phase.DECODE: _num_within(learned.decode, traffic[Phase.DECODE]),
    }
    if min(counts.values()) < LEARN_FROM:
        logger.info(
            "Nothing learned yet: of the batches in %s, %d prompt and %d decode batches are within "
            "the limits of this server, and a grid is learned from %d of each",
            path,
            *counts.values(),
            LEARN_FROM,
        )
        return None
    before = made_grids(config, limits, exponential=exponential)
    logger.info(
        "Buckets are learned from %d prompt and %d decode batches: %s, in place of %s with %s",
        *counts.values(),
        _summary(learned, traffic),
        _summary(before, traffic),
        _strategies(config, exponential=exponential),
    )
    return learned


def learn_decodes(
    path: Path, traffic: Mapping[Phase, TrafficRecorder], limits: ServingLimits
) -> Grids | None:
    """Grids whose decodes are fitted to what was served, for a device with ragged prompts.

    One that compiles each shape: others pad no decodes. Such a device pads the tokens of a prefill
    batch together, by less than a fit of padded batches could save. So decodes alone are learned.
    None as long as that is too little. Logs what the fit saves beside the grid that the device has
    without it.
    """
    decodes = traffic.get(Phase.DECODE)
    if decodes is None or decodes.total < LEARN_FROM:
        logger.info(
            "Nothing learned yet: %d decode batches are recorded in %s, and their grid is learned "
            "from %d; prompts are ragged here and pad next to nothing",
            0 if decodes is None else decodes.total,
            decode_file(path),
            LEARN_FROM,
        )
        return None
    fitted = BucketingConfig(decode_strategy="fit", decode_traffic=str(decode_file(path)))
    try:
        grids = ragged_grids(limits, fitted)
    except BucketingError as error:
        logger.warning("Nothing is learned from %s: %s", decode_file(path), error)
        return None
    learned, before = grids.decode, ragged_grids(limits).decode
    count = _num_within(learned, decodes)
    if count < LEARN_FROM:
        logger.info(
            "Nothing learned yet: of the decode batches in %s, %d are within the limits of this "
            "server, and their grid is learned from %d",
            decode_file(path),
            count,
            LEARN_FROM,
        )
        return None
    logger.info(
        "Buckets are learned from %d decode batches: %d decode buckets that pad %s, in place of "
        "%d that pad %s. Prompts stay ragged, which pads less than buckets of prompts would",
        count,
        len(learned),
        f"{padding(learned, decodes):.1%}",
        len(before),
        f"{padding(before, decodes):.1%}",
    )
    return grids


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
    """What was served before, of the phases with any: what the buckets are fitted to.

    For a phase whose settings name no file, and for ``learn``, what is in the file of this server.
    Raises `ConfigError` for a file that cannot be read.
    """
    path = traffic_file(config)
    served = {} if path is None else read_traffic(path)
    if config.bucket_grid != "learn":
        served |= _named_traffic(config)
    return {phase: traffic for phase, traffic in served.items() if traffic.total}


def _named_traffic(config: EngineConfig) -> dict[Phase, TrafficRecorder]:
    """The traffic of the files that the settings of buckets name."""
    if config.bucket_grid.startswith(FITTED):
        path = Path(config.bucket_grid.removeprefix(FITTED))
        if not path.is_file():
            fault = f"bucket_grid {FITTED}{path} is not a file: name another"
            raise ConfigError(fault, "bucket_grid")
        return read_traffic(path) if path.suffix == ".json" else {}
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


def _num_within(grid: BucketGrid, traffic: TrafficRecorder) -> int:
    """The recorded batches that a server with this grid can have."""
    shapes, counts = traffic.shapes()
    within = [grid.find(shape) is not None for shape in shapes.tolist()]
    return int(counts[within].sum())


def _strategies(config: BucketingConfig | None, *, exponential: bool) -> str:
    """What chooses the buckets without learning."""
    if config is None and not exponential:
        return "the default of this device"
    config = config or BucketingConfig()
    prompt, decode = config.strategy_of("prompt"), config.strategy_of("decode")
    return prompt if prompt == decode else f"{prompt} for prompts and {decode} for decodes"


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
