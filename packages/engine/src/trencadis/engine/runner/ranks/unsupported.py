"""Which settings cannot be served by several ranks yet, each with what to do instead."""

from __future__ import annotations

from trencadis.engine.errors import ConfigError
from trencadis.engine.settings.engine_config import EngineConfig

_REMEDIES: dict[str, tuple[object, str]] = {
    "runner": ("generate", "choose the runner generate"),
    "quantization": ("none", "leave it out"),
}
"""Settings with the one value that ranks can have, and the remedy for others."""


def check_device(config: EngineConfig, device: str) -> None:
    """Raise `ConfigError` where the device called ``device`` cannot be that of ranks."""
    if device != "cpu":
        raise _conflict(config, "device", device, "choose device cpu")


def check_settings(config: EngineConfig) -> None:
    """Raise `ConfigError`, naming the setting, for one that ranks cannot have.

    ``config`` has the device's defaults.
    """
    for field, (value, remedy) in _REMEDIES.items():
        if (found := getattr(config, field)) != value:
            raise _conflict(config, field, found, remedy)
    if config.compile:
        raise _conflict(config, "compile", True, "leave it out")
    if config.warmup == "background":
        raise _conflict(config, "warmup", "background", "choose full or none")


def switch_error(config: EngineConfig) -> ConfigError:
    """The error of a switch of models."""
    return _conflict(config, None, "a switch of models", "start a server for each model")


def _conflict(config: EngineConfig, field: str | None, value: object, remedy: str) -> ConfigError:
    what = value if field is None else f"{field} {value}"
    return ConfigError(
        f"tensor_parallel_size {config.tensor_parallel_size} does not work with {what} yet: "
        f"{remedy}, or leave tensor_parallel_size out",
        field or "tensor_parallel_size",
    )
