"""Which executor the settings ask for."""

from __future__ import annotations

from trencadis.engine.runner.executor import Executor
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks.rank_executor import RankExecutor
from trencadis.engine.settings.engine_config import EngineConfig


def make_executor(config: EngineConfig) -> Executor:
    """The executor of an engine core. Raises `ConfigError`, naming the setting."""
    if config.tensor_parallel_size > 1:
        return RankExecutor(config)
    return InProcessExecutor(config)
