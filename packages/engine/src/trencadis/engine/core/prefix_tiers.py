"""The tiers below the device's prefix cache, from their setting, and what their keys are bound to.

The tiers are the engine's, and stay when its model changes. The bytes of a block depend on the
weights and on how they are computed, so the keys of each model are its own: `model_identity`.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import attrs

from trencadis.engine.api.outputs import TierStats
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.executor import Executor, ModelFacts
from trencadis.engine.settings.kv_tiers import TierSetting, parse_tiers
from trencadis.kvcache import (
    BlockManager,
    BlockTier,
    CacheRecorder,
    DiskTier,
    HostTier,
    KVCacheError,
    TierTransfers,
)

_FORMAT = 5
"""Raised with each change of what the bytes of a block mean."""

_SETTINGS = (
    "block_size",
    "quantization",
    "quant_config",
    "kv_cache_dtype",
    "fp32_softmax",
    "tensor_parallel_size",
    "runner",
)
"""Settings that change the bytes of a block, or where they lie in it."""


class PrefixTiers:
    """The tiers of an engine. Raises `ConfigError` for one that cannot be used."""

    def __init__(self, setting: str) -> None:
        self._tiers: list[BlockTier] = []
        try:
            for each in parse_tiers(setting):
                self._tiers.append(_make_tier(each))
        except (KVCacheError, ConfigError) as error:
            for tier in self._tiers:
                tier.close()
            raise ConfigError(f"kv_tiers {setting}: {error}", "kv_tiers") from error
        self._transfers: TierTransfers | None = None

    def serve(
        self, executor: Executor, facts: ModelFacts, blocks: BlockManager, recorder: CacheRecorder
    ) -> TierTransfers | None:
        """The transfers of a model that is served from now on, in place of the one before."""
        self.pause()
        staging = executor.staging_blocks()
        if not self._tiers or not staging:
            return None
        self._transfers = TierTransfers(
            blocks,
            self._tiers,
            recorder,
            staging=staging,
            first_host_block=facts.num_host_blocks,
            identity=model_identity(facts, executor.device_facts.name),
        )
        return self._transfers

    def pause(self) -> bool:
        """End the transfers of the model. False where a tier is still at work."""
        transfers, self._transfers = self._transfers, None
        return transfers is None or transfers.close()

    def close(self) -> None:
        """End the tiers, unless one hangs: it is left to the end of the process."""
        if self.pause():
            for tier in self._tiers:
                tier.close()

    def stats(self, name: str) -> TierStats | None:
        """The counters of the tier of this name, if there is one."""
        for tier in self._tiers:
            if tier.name == name:
                return TierStats(**attrs.asdict(tier.counters))
        return None


def _make_tier(setting: TierSetting) -> BlockTier:
    if setting.class_name is not None:
        return _import_tier(setting.class_name, setting.num_bytes)
    if setting.path is not None:
        return DiskTier(str(Path(setting.path).expanduser()), setting.num_bytes)
    return HostTier(setting.num_bytes)


def _import_tier(path: str, limit_bytes: int) -> BlockTier:
    """The tier of the class at ``module:Class``, which is called with the bytes it may keep."""
    try:
        tier = pkgutil.resolve_name(path)(limit_bytes)
    except Exception as error:  # importing a module runs it, so any error may leave it
        raise ConfigError(
            f"the tier {path} cannot be made ({type(error).__name__}: {error}): name a class whose "
            "argument is its bytes, in a module that Python finds (PYTHONPATH)"
        ) from error
    missing = [name for name in _OF_A_TIER if not hasattr(tier, name)]
    if missing:
        raise ConfigError(
            f"the tier {path} has no {', '.join(missing)}: see trencadis.kvcache.BlockTier"
        )
    return cast("BlockTier", tier)


_OF_A_TIER = ("name", "counters", "wants", "store", "num_leading", "load", "close")
"""What `BlockTier` declares."""


def model_identity(facts: ModelFacts, device: str) -> bytes:
    """What decides the bytes of a block besides its tokens and extra keys.

    The model is known by its files: path, size and time of change of each. To read the content of
    hundreds of gigabytes at each start would take longer than what tiers save, and a checkpoint
    that is replaced gets new times. Of a model of the hub, whose directory is not known here, the
    id and its configuration, which names the commit. ``max_model_len`` is among them because it
    decides the rotary frequencies of some models.
    """
    config = facts.config
    return json.dumps(
        [
            _FORMAT,
            device,
            facts.dtype,
            facts.block_bytes,
            facts.limits.max_model_len,
            [str(layer) for layer in facts.spec.layers],
            [str(getattr(config, name)) for name in _SETTINGS],
            _files(facts.spec.source),
            facts.spec.packing is not None,
            facts.spec.config.to_json_string(use_diff=False),
            str(getattr(facts.spec.config, "_commit_hash", None)),
        ]
    ).encode()


def _files(source: str) -> Sequence[tuple[str, int, int]]:
    """Path, bytes and time of change of each file of a checkpoint's directory."""
    directory = Path(source)
    if not directory.is_dir():
        return [(source, 0, 0)]
    found = []
    for path in sorted(directory.resolve().iterdir()):
        if path.is_file():
            status = path.stat()
            found.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return found
