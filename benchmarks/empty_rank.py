"""A rank whose steps are empty: it takes part in everything but the computing (`rank_steps`)."""

from __future__ import annotations

import os

import attrs

from trencadis.engine import EngineConfig
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.ranks import rank_process
from trencadis.engine.runner.step import StepInput, StepResult

TOKEN = 7


@attrs.frozen
class EmptyStep:
    """A step that was computed before it began."""

    step: StepInput

    def wait(self) -> StepResult:
        return StepResult(token_ids=dict.fromkeys(self.step.rows, TOKEN))


class EmptyExecutor(InProcessExecutor):
    """An executor that has the whole model, and samples the same token for each row."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(attrs.evolve(config, tensor_parallel_size=1), records=False)

    def execute(self, step: StepInput) -> EmptyStep:
        return EmptyStep(step)


def main() -> None:
    """The entry point of the process, in place of the one of `rank_process`."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    rank_process._joined = lambda start, _: EmptyExecutor(start.config)
    rank_process.main()
