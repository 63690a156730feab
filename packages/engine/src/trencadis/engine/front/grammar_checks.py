"""Checks the grammars of requests beside the event loop, before the requests are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.errors import EngineOverloaded
from trencadis.engine.grammars.checker import GrammarChecker

_MAX_GRAMMAR_CHECKS = 64
"""Requests that may wait until their grammar is checked. A check takes up to seconds."""


class GrammarChecks:
    """A thread that checks one grammar at a time. ``tokenizer``: as `GrammarChecker` takes it."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        self._grammars = GrammarChecker(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-checks")
        self._num_waiting = 0

    async def check(self, structured_output: StructuredOutput) -> None:
        """Raise the errors of `GrammarChecker.check`, or `EngineOverloaded`."""
        if self._grammars.recall(structured_output):
            return
        if self._num_waiting >= _MAX_GRAMMAR_CHECKS:
            raise EngineOverloaded(
                f"{self._num_waiting} requests wait until their grammars are checked: "
                "try again later"
            )
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            check = self._grammars.check
            await loop.run_in_executor(self._thread, check, structured_output)
        finally:
            self._num_waiting -= 1

    def use_tokenizer(self, tokenizer: Callable[[], str]) -> None:
        """Check for another model from now on."""
        self._grammars.close()
        self._grammars = GrammarChecker(tokenizer)

    def close(self) -> None:
        """End the thread and its process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._grammars.close(for_good=True)
