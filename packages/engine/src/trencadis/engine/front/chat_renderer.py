"""Renders conversations with chat templates, so that a slow one delays only other slow ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from trencadis.engine.errors import SlowConversation
from trencadis.engine.line_process import LineProcess

QUICK_SECONDS = 0.1
"""Processor time of a quick attempt. Usual conversations take milliseconds."""

PATIENT_SECONDS = 2.0
"""Processor time in which any conversation must be rendered. Megabytes take a tenth of it."""

ANSWER_SECONDS = 10.0
"""Longest wait for a conversation, of which a fork may also compile the template: several times its
processor time, on a busy machine. A process that takes longer is stopped or broken."""


class ChatRenderer:
    """Two processes: what the first does not render within `QUICK_SECONDS`, the second does.

    The second one starts when it is first needed. Thread-safe: each process has one conversation at
    a time, in the order in which threads get its lock.
    """

    def __init__(self) -> None:
        module = "trencadis.engine.front.template_process"
        self._quick = LineProcess(module, answer_s=ANSWER_SECONDS)
        self._patient = LineProcess(module, answer_s=2 * ANSWER_SECONDS)
        self._quick_lock, self._patient_lock = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Start the first process, so that no conversation waits for it.

        Raises `RequestFailed` where it cannot be started, or the processes were ended for good.
        """
        with self._quick_lock:
            self._quick.start()

    def render(self, arguments: Mapping[str, Any], quick: bool | None) -> dict[str, str]:
        """``{"text": ...}`` or ``{"error": ...}``, for the arguments of ``render_jinja_template``.

        ``quick``: True for the first process alone, False for the second alone, None for one after
        the other. Raises `SlowConversation` where the first has not sufficed, `ProcessUnresponsive`
        where a process does not answer, `RequestFailed` where it was ended, and as ``json.dumps``.
        """
        if quick is not False:
            with self._quick_lock:
                answer: dict[str, str] = self._quick.ask([QUICK_SECONDS, arguments])
            if "timed_out" not in answer:
                return answer
            if quick:
                raise SlowConversation(
                    f"rendering the messages takes more than {QUICK_SECONDS} s of processor time"
                )
        with self._patient_lock:
            patient_answer: dict[str, str] = self._patient.ask([PATIENT_SECONDS, arguments])
            return patient_answer

    def close(self) -> None:
        """End the processes for good, at once: conversations fail, also those that wait."""
        self._quick.close_for_good()
        self._patient.close_for_good()

    def release(self) -> None:
        """End the processes after the conversations of now. A later one starts them again."""
        for lock, process in (
            (self._quick_lock, self._quick),
            (self._patient_lock, self._patient),
        ):
            with lock:
                process.close()
