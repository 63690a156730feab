"""Compiles grammars in the core, beside the thread that runs the steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.fair_thread import FairThread
from trencadis.engine.grammars.grammar import load_tokenizer, new_matcher, require_llguidance
from trencadis.engine.grammars.matcher import CompiledGrammar, FixedMask, MaskThreads, StepMasks

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NUM_COMPILED = 16
"""Compiled grammars that are kept. A check before limits the memory of each."""


class GrammarCompiler:
    """Compiles structured outputs, one after the other, and keeps those that were used last.

    It serves clients in rotation.

    ``tokenizer`` gives the text of the model's ``tokenizer.json``; ``vocab_size`` is the width of
    the logits. Nothing is loaded before the first grammar.
    """

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._text = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._thread = FairThread("grammar-compiler")
        self._threads: MaskThreads | None = None
        self._compiled: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()

    def compile(
        self, structured_output: StructuredOutput, client: str = ""
    ) -> Future[CompiledGrammar]:
        """The grammar, once it is compiled. The result raises ``ValueError`` for a bad one.

        Raises `InvalidRequest` where llguidance is not installed.
        """
        require_llguidance()
        compiled = self._compiled.get(structured_output)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = self._thread.submit(client, partial(self._compile, structured_output))
            self._compiled[structured_output] = compiled
        self._compiled.move_to_end(structured_output)
        if len(self._compiled) > _NUM_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def masks(self) -> StepMasks:
        """The masks of a new step."""
        if self._threads is None:
            self._threads = MaskThreads()
        return StepMasks(self._threads, self._vocab_size)

    def listed(self, token_ids: tuple[int, ...], forbidden: Collection[int]) -> FixedMask:
        """The mask of a row that lists its tokens, see `FixedMask.of`. Needs no grammar."""
        return FixedMask.of(token_ids, forbidden, self._vocab_size)

    def close(self) -> None:
        """End the threads."""
        self._thread.close()
        if self._threads is not None:
            self._threads.close()

    def _compile(self, structured_output: StructuredOutput) -> CompiledGrammar:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._text(), self._vocab_size, self._eos_token_ids)
        beginning = new_matcher(self._tokenizer, structured_output)
        return CompiledGrammar(beginning, self._tokenizer, self._vocab_size)
