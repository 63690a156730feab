"""A core that signals one of its ranks before a step of a switch or before its warm-up.

`run_core` takes the place of the core's entry point. The file that `SIGNAL_FILE` names holds the
step (or ``warm-up``), the number of the signal and the rank; the core that follows it deletes it. A
rank fails in the next call that it gets after SIGUSR1, by ``sitecustomize.py`` (`plant`); after
SIGUSR2 it goes on, with other tokens, another plan or other step numbers than the core has sent, as
the file says. Import this in a core alone: it replaces the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trencadis.engine.core import core_process, reconfigure
from trencadis.engine.runner.ranks.rank_executor import RankExecutor

SIGNAL_FILE = "TRENCADIS_TEST_SIGNAL_FILE"

_SITE = """
import signal

def fail(*given, **named):
    raise RuntimeError("planted")

def arm(*_):
    from trencadis.engine.runner.in_process import InProcessExecutor
    calls = "execute load plan_memory warm_up put_aside unload probe sleep memory_in_use"
    for name in calls.split():
        setattr(InProcessExecutor, name, fail)

signal.signal(signal.SIGUSR1, arm)

def disagree(*_):
    import os
    import attrs
    from trencadis.engine.runner.model_runner import ModelStep
    from trencadis.engine.runner.ranks.packed_steps import StepUnpacker
    own_step, own_wait = StepUnpacker.step, ModelStep.wait

    def other_number(self, packed):
        step = own_step(self, packed)
        return attrs.evolve(step, number=step.number + 1)

    def other_plan(self, packed):
        step = own_step(self, packed)
        moved = tuple(each._replace(start=each.start - 1) for each in step.decodes)
        return attrs.evolve(step, decodes=moved)

    def other_token(self):
        result = own_wait(self)
        others = {seq_id: token ^ 1 for seq_id, token in result.token_ids.items()}
        return attrs.evolve(result, token_ids=others)

    path = os.environ["TRENCADIS_TEST_SIGNAL_FILE"]
    with open(path) as file:
        what = file.read()
    os.unlink(path)
    if what == "token":
        ModelStep.wait = other_token
    else:
        StepUnpacker.step = {"number": other_number, "plan": other_plan}[what]

signal.signal(signal.SIGUSR2, disagree)
"""


def plant(directory: Path) -> None:
    """Write the ``sitecustomize.py`` that ranks are to import from ``directory``."""
    (directory / "sitecustomize.py").write_text(_SITE)


def _signal(executor: RankExecutor, step: str) -> None:
    file = Path(os.environ[SIGNAL_FILE])
    if file.exists():
        wanted, number, rank = file.read_text().split()
        if wanted == step:
            file.unlink()
            os.kill(executor.processes.pids[int(rank)], int(number))


def _signalled(name: str, step: reconfigure.Step) -> reconfigure.Step:
    def run(switch: reconfigure._Switch) -> None:
        _signal(switch.core.executor, name)
        step(switch)

    return run


def _signalled_warm_up(own: Callable[..., Any]) -> Callable[..., Any]:
    def warm_up(executor: RankExecutor, *given: Any) -> Any:
        _signal(executor, "warm-up")
        return own(executor, *given)

    return warm_up


def run_core(*given: Any) -> None:
    reconfigure.STEPS = tuple((name, _signalled(name, step)) for name, step in reconfigure.STEPS)
    RankExecutor.warm_up = _signalled_warm_up(RankExecutor.warm_up)
    core_process.run_core(*given)
