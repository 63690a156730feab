"""An engine configuration as msgpack, which a core reads when it switches models.

Nothing is pickled, so a payload can make nothing but an `EngineConfig`, whose validators run. What
msgpack cannot say is rejected where it is written.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from trencadis.engine.errors import ConfigError, shown
from trencadis.engine.settings.capacity_settings import DeviceDefault
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.settings.library_settings import library_settings

MAX_PAYLOAD_BYTES = 1 << 20
"""Largest payload that is read: a configuration takes two kilobytes, a chat template some more."""

OF_THE_DEVICE = (
    "compile_cache",
    "trust_compile_cache",
    "device",
    "cpu_threads",
    "cpu_numa",
    "tensor_parallel_size",
    "fp32_softmax",
    "temperature_source",
    "thermal_devices",
    "thermal_policy",
    "thermal_policy_config",
    "kv_events_config",
    "kv_tiers",
)
"""Settings that all models of an engine share: they are of the device, which stays."""

_LIBRARY_SETTINGS = ("bucketing", "graphs", "defrag")
"""Fields whose values are settings classes of the libraries, as `library_settings` orders them."""


def config_payload(config: EngineConfig) -> bytes:
    """``config`` as msgpack. Defaults that the device replaces are left out, so that it still does.

    Raises `ConfigError`, naming the setting, for a value that would arrive changed.
    """
    if type(config) is not EngineConfig:
        raise ConfigError(f"a model's config must be an EngineConfig, got {shown(config)}")
    if not isinstance(config.device, str):
        raise ConfigError(
            f"device {shown(config.device)} is an object and cannot be sent to the engine core: "
            "name it as module:Class",
            "device",
        )
    values = {
        field.name: _plain(getattr(config, field.name))
        for field in attrs.fields(EngineConfig)
        if type(getattr(config, field.name)) is not DeviceDefault
    }
    try:
        payload = msgspec.msgpack.encode(values)
        arrives = config_of_payload(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(_unsayable(f"{error}")) from error
    for field in attrs.fields(EngineConfig):
        sent, received = getattr(config, field.name), getattr(arrives, field.name)
        if sent != received:
            reason = f"{field.name} {shown(sent)} would arrive as {shown(received)}"
            raise ConfigError(_unsayable(reason), field.name)
    return payload


def config_of_payload(payload: bytes) -> EngineConfig:
    """The configuration in a payload. Raises `ConfigError` for one that cannot be read."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a configuration of {len(payload)} bytes is above {MAX_PAYLOAD_BYTES}: name the chat "
            "template as a file"
        )
    try:
        values = msgspec.msgpack.decode(payload, type=dict[str, Any])
        kinds = map(type, library_settings({}))
        for name, kind in zip(_LIBRARY_SETTINGS, kinds, strict=True):
            if values.get(name) is not None:
                values[name] = msgspec.convert(values[name], kind)
        return EngineConfig(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"this is not a configuration of an engine: {error}") from error


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else value


def _unsayable(reason: str) -> str:
    return (
        f"the configuration cannot be sent to the engine core ({reason}): use numbers, texts, "
        "lists, and mappings with texts as keys"
    )
