"""The tiers below the device that ``kv_tiers`` names, as ``host:4,disk:/var/cache/kv:100``.

The last one may be a class of another package, ``module:Class:GIB``.
"""

from __future__ import annotations

import math

import attrs

from trencadis.engine.errors import ConfigError, shown

_GIB = 1 << 30
_MAX_GIB = 1 << 20


@attrs.frozen
class TierSetting:
    """A tier of at most ``num_bytes``.

    ``path``: the directory of a disk tier. ``class_name``: ``module:Class`` of a tier of another
    package. A host tier has neither.
    """

    num_bytes: int
    path: str | None = None
    class_name: str | None = None

    @property
    def rank(self) -> int:
        """Its place among the others."""
        return 2 if self.class_name is not None else self.path is not None


def parse_tiers(value: object) -> tuple[TierSetting, ...]:
    """The tiers, the fastest first; none for an empty text. Raises `ConfigError`."""
    if not isinstance(value, str):
        raise _wrong(value, "it is not a text")
    if not value:
        return ()
    tiers = tuple(_parse_tier(value, part) for part in value.split(","))
    ranks = [tier.rank for tier in tiers]
    if ranks != sorted(set(ranks)):
        raise _wrong(value, "there may be one of each kind, the host first and a class last")
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
    if kind not in ("host", "disk") and all(
        name.isidentifier() for name in (*kind.split("."), *path.split("."))
    ):
        return TierSetting(int(gib * _GIB), class_name=f"{kind}:{path}")
    raise _wrong(value, f"{shown(part)} names no tier")


def _wrong(value: object, reason: str) -> ConfigError:
    return ConfigError(
        f"kv_tiers {shown(value)} cannot be used ({reason}): give host:GIB, disk:PATH:GIB, "
        "module:Class:GIB, or several with commas between them",
        "kv_tiers",
    )
