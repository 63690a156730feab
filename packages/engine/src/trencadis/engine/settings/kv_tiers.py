"""The tiers below the device that ``kv_tiers`` names, as ``host:4,disk:/var/cache/kv:100``."""

from __future__ import annotations

import math

import attrs

from trencadis.engine.errors import ConfigError, shown

_GIB = 1 << 30
_MAX_GIB = 1 << 20


@attrs.frozen
class TierSetting:
    """A tier of at most ``num_bytes``. ``path``: the directory of a disk tier, else None."""

    num_bytes: int
    path: str | None = None


def parse_tiers(value: object) -> tuple[TierSetting, ...]:
    """The tiers, the fastest first; none for an empty text. Raises `ConfigError`."""
    if not isinstance(value, str):
        raise _wrong(value, "it is not a text")
    if not value:
        return ()
    tiers = tuple(_parse_tier(value, part) for part in value.split(","))
    kinds = [tier.path is not None for tier in tiers]
    if kinds not in ([True], [False], [False, True]):
        raise _wrong(value, "there may be one of each kind, the host first")
    return tiers


def _parse_tier(value: str, part: str) -> TierSetting:
    kind, _, rest = part.partition(":")
    path, _, size = rest.rpartition(":")
    try:
        gib = float(size)
    except ValueError:
        gib = math.nan
    if not 0 < gib <= _MAX_GIB:
        raise _wrong(value, f"{shown(size)} is not a number of GiB above 0")
    if kind == "host" and not path:
        return TierSetting(int(gib * _GIB))
    if kind == "disk" and path and "\0" not in path:
        return TierSetting(int(gib * _GIB), path)
    raise _wrong(value, f"{shown(part)} names neither")


def _wrong(value: object, reason: str) -> ConfigError:
    return ConfigError(
        f"kv_tiers {shown(value)} cannot be used ({reason}): give host:GIB, disk:PATH:GIB, or both "
        "with a comma between them",
        "kv_tiers",
    )
