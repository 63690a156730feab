"""Checks the grammars of requests beside the event loop, before the requests are sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.errors import EngineOverloaded
from trencadis.engine.fair_thread import FairThread
from trencadis.engine.grammars.checker import GrammarChecker

_MAX_GRAMMAR_CHECKS = 64
"""Requests that may wait until their grammar is checked. A check takes up to seconds."""


class GrammarChecks:
    """A thread that checks one grammar at a time. ``tokenizer``: as `GrammarChecker` takes it.

    It serves clients in rotation, and a client other than "" has at most half of the places.
    """

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._grammars = GrammarChecker(tokenizer)
        self._thread = FairThread("grammar-checks")
        self._num_waiting: Counter[str] = Counter()
        """Requests that wait, by client."""

    async def check(self, structured_output: StructuredOutput, client: str = "") -> None:
        """Raise the errors of `GrammarChecker.check`, or `EngineOverloaded`."""
        if self._grammars.recall(structured_output):
            return
        waiting = self._num_waiting
        if waiting.total() >= _MAX_GRAMMAR_CHECKS:
            raise EngineOverloaded(
                f"{waiting.total()} requests wait until their grammars are checked: try again later"
            )
        if client and waiting[client] >= _MAX_GRAMMAR_CHECKS // 2:
            raise EngineOverloaded(
                f"{waiting[client]} requests of this client wait until their grammars are checked: "
                "try again later"
            )
        check = partial(self._grammars.check, structured_output)
        waiting[client] += 1
        try:
            await asyncio.wrap_future(self._thread.submit(client, check))
        finally:
            waiting[client] -= 1
            if not waiting[client]:
                del waiting[client]

    def use_tokenizer(self, tokenizer: Callable[[], str]) -> None:
        """Check for another model from now on."""
        self._grammars.close()
        self._grammars = GrammarChecker(tokenizer)

    def close(self) -> None:
        """End the thread and its process."""
        self._thread.close()
        self._grammars.close(for_good=True)
