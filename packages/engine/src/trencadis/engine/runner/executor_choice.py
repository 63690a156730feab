"""Which executor the settings ask for."""

from __future__ import annotations

import attrs

from trencadis.engine.devices import class_of_device
from trencadis.engine.runner.executor import Executor
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor
from trencadis.engine.settings.engine_config import EngineConfig


def with_rank_per_node(config: EngineConfig) -> EngineConfig:
    """The settings with a rank for each NUMA node, where they ask for that and there are several.

    A number of ranks that was set stays.
    """
    device = class_of_device(config.device)
    if config.cpu_numa == "off" or config.tensor_parallel_size > 1 or device is None:
        return config
    return attrs.evolve(config, tensor_parallel_size=device.num_nodes())


def make_executor(config: EngineConfig) -> Executor:
    """The executor of an engine core. Raises `ConfigError`, naming the setting."""
    if config.tensor_parallel_size > 1:
        return RankExecutor(config)
    return InProcessExecutor(config)
