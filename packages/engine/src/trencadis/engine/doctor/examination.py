"""Asks the checks one after the other, in a process that each of them may end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.doctor.check_list import (
    ALL_LIMITS,
    CHECKS,
    DEVICE,
    ENGINE,
    LIMIT_S,
    REFERENCE,
    REFERENCE_LIMITS,
    TOKENS,
    Check,
    Need,
)
from trencadis.engine.doctor.finding import Finding, Status, absent
from trencadis.engine.doctor.report import DoctorReport, model_name, without_places
from trencadis.engine.errors import ConfigError, ProcessUnresponsive, RequestFailed
from trencadis.engine.line_process import LineProcess
from trencadis.engine.settings.engine_config import EngineConfig

_PROCESS = "trencadis.engine.doctor.check_process"
_SHOWN_LEVEL = logging.INFO
"""Up to this level of logging, the output of the checks' process is shown."""

_NEEDED = {Need.DEVICE: DEVICE, Need.ENGINE: ENGINE}


def examine(
    config: EngineConfig,
    *,
    limit_s: float = LIMIT_S,
    only: Sequence[str] = (),
    on_finding: Callable[[str, Finding], None] = lambda name, finding: None,
) -> DoctorReport:
    """Run the checks on the device and the model of ``config``.

    ``limit_s``: seconds that a check may take; some may take several times as many, and all
    together ten times. ``only``: beginnings of names of checks; what these need is checked, too.
    ``on_finding`` is called after each. Raises `ConfigError` for a model that generates nothing,
    for a device that is an object, and for a name that no check begins with.
    """
    if config.runner != "generate":
        raise ConfigError("the doctor checks models that generate: leave --runner out", "runner")
    chosen = _chosen(only)
    examination = _Examination(config, limit_s)
    try:
        for check in chosen:
            on_finding(check.name, examination.run(check))
        return examination.report()
    finally:
        examination.close()


def _chosen(only: Sequence[str]) -> list[Check]:
    """The checks whose names begin so, and what they need; all for none."""
    for text in only:
        if not any(check.name.startswith(text) for check in CHECKS):
            names = ", ".join(check.name for check in CHECKS)
            raise ConfigError(f"no check is named {text!r}: take the beginning of one of {names}")
    named = [check for check in CHECKS if not only or check.name.startswith(tuple(only))]
    needed = {_NEEDED[need] for need in _NEEDED for check in named if check.need >= need}
    return [check for check in CHECKS if check in named or check.name in needed]


class _Examination:
    """The findings so far, and the processes that find them."""

    def __init__(self, config: EngineConfig, limit_s: float) -> None:
        self._config = config
        self._limit_s = limit_s
        self._began_s = time.monotonic()
        self._findings: dict[str, Finding] = {}
        self._process = self._started(config)
        self._made = Need.NOTHING
        """What the present process has: after its end the next one has nothing."""
        self._reference: dict[str, Any] | Finding | None = None

    def close(self) -> None:
        self._process.close_for_good()

    def report(self) -> DoctorReport:
        found = self._findings.get(DEVICE)
        device = found.values if found is not None else {}
        return DoctorReport(
            model_name(self._config.model),
            str(device.get("product") or device.get("name") or self._config.device),
            self._findings,
            time.monotonic() - self._began_s,
        )

    def run(self, check: Check) -> Finding:
        """The finding of a check, which is kept."""
        began_s = time.monotonic()
        finding = self._missing(check) or self._find(check)
        if finding.status in (Status.FAILED, Status.DIFFERS) and not finding.remedy:
            finding = attrs.evolve(finding, remedy=check.remedy)
        finding = attrs.evolve(
            finding,
            detail=without_places(finding.detail),
            remedy=without_places(finding.remedy),
            seconds=time.monotonic() - began_s,
        )
        self._findings[check.name] = finding
        return finding

    def _missing(self, check: Check) -> Finding | None:
        """The finding of a check that cannot be made, because one before it has failed."""
        for need in (Need.DEVICE, Need.ENGINE):
            name = _NEEDED[need]
            if check.need >= need and self._findings[name].status is Status.FAILED:
                return Finding(Status.FAILED, f"not run, because «{name}» has failed", "see there")
        if self._left_s() <= 0:
            return Finding(
                Status.FAILED,
                f"not run: all checks together may take {ALL_LIMITS * self._limit_s:g} s",
                "raise --check-limit",
            )
        return None

    def _find(self, check: Check) -> Finding:
        given: Mapping[str, Any] = {}
        if check.name in TOKENS:
            reference = self._tokens_of_cpu()
            if isinstance(reference, Finding):
                return reference
            given = reference
        for need, name in _NEEDED.items():
            # An earlier check has ended the process that had it.
            if check.need >= need > self._made:
                again = self._ask(next(each for each in CHECKS if each.name == name), {})
                if again.status is not Status.OK:
                    said = f"«{name}» failed in a new process: {again.detail}"
                    return Finding(Status.FAILED, said, again.remedy)
        return self._ask(check, given)

    def _ask(self, check: Check, given: Mapping[str, Any]) -> Finding:
        limit_s = max(1.0, min(check.limits * self._limit_s, self._left_s()))
        made, self._made = self._made, Need.NOTHING
        try:
            answer = self._process.ask({"check": check.name, "given": given}, limit_s)
        except ProcessUnresponsive:
            said = f"no result within {limit_s:g} s: its process was ended"
            return Finding(Status.FAILED, said, f"{check.remedy}, or raise --check-limit")
        except RequestFailed:
            return Finding(Status.FAILED, "it ended its process (--log-level debug shows how)")
        if answer["is_broken"]:
            self._process.close()
            return _finding(answer)
        gained = next((need for need, name in _NEEDED.items() if name == check.name), made)
        self._made = max(made, gained) if answer["status"] == Status.OK.value else made
        return _finding(answer)

    def _tokens_of_cpu(self) -> dict[str, Any] | Finding:
        """The prompts, and the tokens that the CPU generates; the finding where it cannot."""
        if self._reference is None:
            self._reference = self._ask_cpu()
        return self._reference

    def _ask_cpu(self) -> dict[str, Any] | Finding:
        served = self._findings[ENGINE].values
        if self._findings[DEVICE].values["name"] == "cpu":
            return absent("this is the CPU")
        config = EngineConfig(
            model=self._config.model,
            chat_template=self._config.chat_template,
            device="cpu",
            dtype=served["dtype"],
            mamba_ssm_cache_dtype=self._config.mamba_ssm_cache_dtype,
            max_model_len=served["max_model_len"],
            max_num_seqs=8,
            enable_prefix_caching=False,
            warmup="none",
        )
        limit_s = max(1.0, min(REFERENCE_LIMITS * self._limit_s, self._left_s()))
        process = self._started(config)
        try:
            answer = process.ask({"check": REFERENCE, "given": dict(served)}, limit_s)
        except ProcessUnresponsive:
            return absent(f"the CPU has computed no tokens to compare with within {limit_s:g} s")
        except RequestFailed:
            return absent("the CPU has computed no tokens to compare with: its process ended")
        finally:
            process.close_for_good()
        if answer["status"] == Status.OK.value:
            return dict(answer["values"])
        return absent(f"the CPU has computed no tokens to compare with: {answer['detail']}")

    def _left_s(self) -> float:
        return self._began_s + ALL_LIMITS * self._limit_s - time.monotonic()

    def _started(self, config: EngineConfig) -> LineProcess:
        level = logging.getLogger().getEffectiveLevel()
        first = {"config": config_payload(config).hex(), "level": level}
        shows = level <= _SHOWN_LEVEL
        return LineProcess(_PROCESS, lambda: first, answer_s=self._limit_s, shows_errors=shows)


def _finding(answer: Mapping[str, Any]) -> Finding:
    return Finding(
        Status(answer["status"]), answer["detail"], answer["remedy"], values=answer["values"]
    )
