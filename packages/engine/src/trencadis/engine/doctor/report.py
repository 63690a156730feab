"""The findings as a page of text, and as JSON to send to the developers.

Neither names the machine, its user or a path: what errors say of these is left out.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.engine.doctor.finding import Finding, Status

SCHEMA = 1
"""Grows with every change of the JSON that a reader of the old one would notice."""

_PATH = re.compile(r"(?<![\w/:.])(?:~|\.{0,2})/[^\s'\",;:()\]]+")
_WORST = (Status.FAILED, Status.DIFFERS)


@attrs.frozen
class DoctorReport:
    """``model`` without its directory, and the findings by the names of their checks."""

    model: str
    device: str
    findings: Mapping[str, Finding]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether nothing has failed or differs."""
        return not any(finding.status in _WORST for finding in self.findings.values())

    def page(self) -> str:
        """One line for each check, then how many there are of each status."""
        lines = [f"engine-serve doctor: {self.model} on {self.device}, {self.seconds:.0f} s", ""]
        width = max(map(len, self.findings), default=0)
        lines += [_line(name, finding, width) for name, finding in self.findings.items()]
        counts = {
            status: sum(finding.status is status for finding in self.findings.values())
            for status in Status
        }
        said = ", ".join(f"{count} {status.value}" for status, count in counts.items())
        return "\n".join([*lines, "", said, ""])

    def as_json(self) -> dict[str, Any]:
        """Plain values with the keys that ``test_doctor.py`` lists."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "device": self.device,
            "good": self.is_good,
            "seconds": round(self.seconds, 1),
            "checks": [
                {
                    "name": name,
                    "status": finding.status.value,
                    "detail": finding.detail,
                    "remedy": finding.remedy,
                    "seconds": round(finding.seconds, 2),
                    "values": dict(finding.values),
                }
                for name, finding in self.findings.items()
            ],
        }


def _line(name: str, finding: Finding, width: int) -> str:
    said = "; ".join(filter(None, (finding.detail, finding.remedy)))
    line = f"{finding.status.value:18}  {name:{width}}  {finding.seconds:6.1f} s  {said}"
    return line.rstrip()


def model_name(model: str) -> str:
    """The last part of a path, or a hub id."""
    path = Path(model).expanduser()
    is_path = path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1
    return path.absolute().name if is_path else model


def without_places(text: str, private: Iterable[str] | None = None) -> str:
    """``text`` in one line, without paths, the name of the machine and that of its user."""
    text = _PATH.sub("<path>", " ".join(text.split()))
    for word in _names_of_machine() if private is None else private:
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", "<name>", text)
    return text


def _names_of_machine() -> list[str]:
    names = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with contextlib.suppress(OSError, KeyError):  # a user without an entry, as in some containers
        names.append(getpass.getuser())
    return [name for name in names if len(name) > 2 and name != "localhost"]
