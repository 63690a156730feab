"""Checks grammars before their requests are sent to the core, in a process that may fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from trencadis.engine.api.structured_output import FIELD, StructuredOutput
from trencadis.engine.errors import InvalidRequest, shown
from trencadis.engine.grammars.grammar import require_llguidance
from trencadis.engine.line_process import LineProcess

_NUM_VERDICTS = 256
"""Grammars whose verdict is kept."""

_ANSWER_SECONDS = 20.0
"""Longest wait for a check: several times its processor time, on a busy machine."""


class GrammarChecker:
    """Starts the process of `check_process` with the first grammar. Thread-safe.

    ``tokenizer`` gives the text of the model's ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._process = LineProcess(
            "trencadis.engine.grammars.check_process", tokenizer, answer_s=_ANSWER_SECONDS
        )
        self._verdicts: dict[StructuredOutput, str] = {}
        self._lock = threading.Lock()

    def recall(self, structured_output: StructuredOutput) -> bool:
        """Whether a grammar was checked already; then raises as `check` did. Does not wait."""
        verdict = self._verdicts.get(structured_output)
        if verdict is not None:
            _raise_if_bad(verdict)
        return verdict is not None

    def check(self, structured_output: StructuredOutput) -> None:
        """Raise `InvalidRequest` for a grammar that is not valid or too hard to serve.

        Takes up to seconds for a new grammar; do not call it in an event loop. Raises
        `ProcessUnresponsive` where the process does not answer, and `RequestFailed` where it cannot
        be started.
        """
        require_llguidance()
        with self._lock:
            verdict = self._verdicts.get(structured_output)
            if verdict is None:
                verdict = str(self._process.ask(attrs.asdict(structured_output)))
                self._verdicts[structured_output] = verdict
            if len(self._verdicts) > _NUM_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
        _raise_if_bad(verdict)

    def close(self, *, for_good: bool = False) -> None:
        """End the process. A later check starts it again, or fails with ``for_good``."""
        if for_good:
            self._process.close_for_good()
        else:
            self._process.close()


def _raise_if_bad(verdict: str) -> None:
    if verdict:
        raise InvalidRequest(f"structured_output cannot be served: {_short(verdict)}", FIELD)


def _short(message: str) -> str:
    """A message of llguidance, which may quote the whole grammar."""
    message = " ".join(message.split())
    return message if len(message) <= 300 else shown(message)[1:]
