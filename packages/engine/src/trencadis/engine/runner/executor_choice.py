"""Which executor the settings ask for."""

from __future__ import annotations

import attrs

from trencadis.engine.devices import class_of_device
from trencadis.engine.errors import ConfigError, EngineError
from trencadis.engine.runner.executor import Executor
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor
from trencadis.engine.runner.ranks.unsupported import check_ranks
from trencadis.engine.runner.worker import inspected
from trencadis.engine.settings.engine_config import EngineConfig


def with_rank_per_node(config: EngineConfig) -> EngineConfig:
    """The settings with a rank for each NUMA node, where they ask for that and there are several.

    A number of ranks that was set stays. Raises `ConfigError` where the model cannot have this one,
    and as `inspected`.
    """
    device = class_of_device(config.device)
    if config.cpu_numa == "off" or config.tensor_parallel_size > 1 or device is None:
        return config
    if (size := device.num_nodes()) == 1:
        return config
    divided, spec = attrs.evolve(config, tensor_parallel_size=size), inspected(config)
    try:
        check_ranks(divided, spec)
    except EngineError as error:
        raise ConfigError(
            f"cpu_numa auto sets tensor_parallel_size to {size}, the number of NUMA nodes: {error}."
            " cpu_numa off serves without ranks",
            "cpu_numa",
        ) from error
    return divided


def make_executor(config: EngineConfig) -> Executor:
    """The executor of an engine core. Raises `ConfigError`, naming the setting."""
    if config.tensor_parallel_size > 1:
        return RankExecutor(config)
    return InProcessExecutor(config)
