"""The process that makes the checks: it has the device and, later, the engine.

A question names a check of `check_list`; its answer is a finding as JSON. A check that raises is a
finding, too. After one that leaves the engine in an unknown state the process is to be ended.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trencadis.engine.core.config_payload import config_of_payload
from trencadis.engine.doctor import software
from trencadis.engine.doctor.check_list import (
    DEVICE,
    ENGINE,
    KERNEL,
    MEMORY,
    PROGRAM,
    REFERENCE,
    REPLAY,
    SOFTWARE,
    STEP,
    TOKENS,
    WARM_UP,
)
from trencadis.engine.doctor.finding import Finding, Status
from trencadis.engine.errors import EngineError
from trencadis.engine.line_process import announce_ready
from trencadis.engine.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from trencadis.engine.doctor.served_engine import ServedEngine


class CheckProcess:
    """Answers questions. The device is opened by the first check that needs it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: ServedEngine | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The finding of the check that a question names."""
        name, given = question["check"], question["given"]
        is_broken = False
        try:
            if name in SOFTWARE:
                finding = software.examine(name, wants_gaudi=self._config.device == "hpu")
            else:
                finding = self._with_device(name, given)
        except Exception as error:  # of any type: the device's software raises its own
            logging.getLogger("trencadis.engine").exception("The check %s raised", name)
            finding = Finding(Status.FAILED, _in_words(error))
            is_broken = self._engine is not None and self._engine.is_broken
        return {
            "status": finding.status.value,
            "detail": finding.detail,
            "remedy": finding.remedy,
            "values": dict(finding.values),
            "is_broken": is_broken,
        }

    def _with_device(self, name: str, given: Mapping[str, Any]) -> Finding:
        # Imported here, since a package that they need may be the one that is missing.
        from trencadis.engine.doctor import device_findings as of_device  # noqa: PLC0415
        from trencadis.engine.doctor import step_findings as of_steps  # noqa: PLC0415
        from trencadis.engine.doctor.full_warm_up import check_full_warm_up  # noqa: PLC0415
        from trencadis.engine.doctor.program_runs import run_program, start_engine  # noqa: PLC0415
        from trencadis.engine.doctor.served_engine import ServedEngine  # noqa: PLC0415
        from trencadis.engine.doctor.token_comparison import (  # noqa: PLC0415
            compare_tokens,
            reference_tokens,
        )

        if self._engine is None:
            self._engine = ServedEngine(self._config)
        engine = self._engine
        kind, _, rest = name.partition(" ")
        if kind == KERNEL:
            return of_device.try_kernel(engine, rest)
        if kind == PROGRAM:
            return run_program(engine, rest)
        if name == REFERENCE:
            return reference_tokens(engine, given)
        if name in TOKENS:
            return compare_tokens(engine, rest, given)
        others = {
            DEVICE: of_device.describe_device,
            ENGINE: start_engine,
            REPLAY: of_steps.check_replay,
            STEP: of_steps.measure_step,
            MEMORY: of_device.describe_memory,
            WARM_UP: check_full_warm_up,
        }
        return others[name](engine)


def _in_words(error: Exception) -> str:
    """The first line of an error, with the type of those that are not the engine's own."""
    line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, EngineError) and line:
        return line
    name = type(error).__name__
    return f"raised {name}: {line}" if line else f"raised {name}"


def main() -> None:
    """Answer questions until the input ends."""
    first = json.loads(sys.stdin.readline())
    announce_ready()
    # The libraries of devices print: their lines must not be taken for answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        logging.basicConfig(level=first["level"], stream=sys.stderr)
        process = CheckProcess(config_of_payload(bytes.fromhex(first["config"])))
        for line in sys.stdin:
            number, question = json.loads(line)
            answers.write(json.dumps([number, process.answer(question)]) + "\n")
            answers.flush()
