"""Which settings cannot be served by several ranks yet, each with what to do instead."""

from __future__ import annotations

from trencadis.engine.devices import Device, class_of_device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.loader import ModelSpec, check_weight_files
from trencadis.engine.models.rank_loading import divide
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.worker import inspected
from trencadis.engine.settings.engine_config import EngineConfig


def checked_device(config: EngineConfig) -> type[Device]:
    """The device of each rank, which is not loaded here: each rank takes one for itself.

    Raises `ConfigError`, naming the setting, for one that ranks cannot have.
    """
    device = class_of_device(config.device)
    if device is None or device.collectives is None:
        name = config.device if device is None else device.name
        raise _conflict(config, "device", name, "choose device cpu or hpu")
    if config.warmup == "background":
        raise _conflict(config, "warmup", "background", "choose full or none")
    return device


def check_config(config: EngineConfig) -> None:
    """Raise `ConfigError` or `ModelError` where ranks cannot serve a model under these settings.

    As far as its files and settings tell, without a device and without its weights.
    """
    spec = inspected(config)
    check_ranks(config, spec)
    check_weight_files(spec)


def check_ranks(config: EngineConfig, spec: ModelSpec) -> None:
    """As `check_config`, but for the model itself, which has these facts."""
    device = checked_device(config)
    if any(layer.states for layer in spec.layers):
        what = f"layers that keep a state on {device.name}, which {spec.source} has,"
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} does not work with {what} yet: "
            "leave it out",
            "tensor_parallel_size",
        )
    divide(spec.config, spec.layers, spec.source, RankPart(0, config.tensor_parallel_size))


def _conflict(config: EngineConfig, field: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size {config.tensor_parallel_size} does not work with {field} {value} "
        f"yet: {remedy}, or leave tensor_parallel_size out",
        field,
    )
