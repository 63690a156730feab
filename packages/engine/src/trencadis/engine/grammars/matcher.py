"""The state of one answer in its grammar, and the masks of the tokens that may come next.

The masks of a step are computed in a thread while the device runs the forward pass: llguidance
releases Python's lock.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.engine.grammars.grammar import matcher_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

IntArray = npt.NDArray[np.int32]

_SLOWEST_MASK_SECONDS = 0.25
"""Processor time of a mask with which a request ends: the masks of a step delay all its rows. A
usual mask takes a thousandth of it."""

_SLOWEST_FORCED_SECONDS = 0.02
"""Processor time of forced tokens after which a matcher is asked for no more of them: the step
waits. Usual ones take a thousandth of it."""

_MAX_THREADS = 4
"""Threads that compute the masks of a step. The forward pass needs the other cores."""


@attrs.frozen(eq=False)
class CompiledGrammar:
    """A matcher at the beginning, which is copied for each answer, and its tokenizer.

    ``vocab_size``: the width of the logits. The tokenizer may name tokens beyond it.
    """

    beginning: LLMatcher
    tokenizer: LLTokenizer
    vocab_size: int


@attrs.define(eq=False)
class GrammarMatcher:
    """Follows the tokens of one answer. It depends on them alone, so preemption does not change it.

    ``error``: why it cannot go on, "" while it can. The copy of the grammar is made when the first
    token is due, so a request that waits takes no memory for it.
    """

    grammar: CompiledGrammar
    error: str = ""
    _matcher: LLMatcher | None = None
    _is_slow: bool = False

    @property
    def state(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self.grammar.beginning.deep_copy()
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._matcher is not None and not self.error and self._matcher.is_stopped()

    def consume(self, token_id: int) -> None:
        """Follow a sampled token; sets ``error`` where the grammar does not allow it."""
        if not self.error and not self.state.consume_token(token_id):
            self.error = matcher_error(self.state)

    def forced_tokens(self) -> list[int]:
        """The tokens that the grammar forces next: at each of them, its mask has no other.

        They are those that the tokenizer makes of the forced text, without the last ones where the
        grammar also allows a longer token. The matcher keeps what it has found for the next mask. A
        matcher that takes long is asked once: a step waits for it, while a mask has a limit.
        """
        if self.error or self._is_slow or self.is_complete:
            return []
        began = time.thread_time()
        tokens: list[int] = self.state.compute_ff_tokens()
        self._is_slow = time.thread_time() - began > _SLOWEST_FORCED_SECONDS
        return list(itertools.takewhile(lambda token: token < self.grammar.vocab_size, tokens))

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Whether the grammar allows no further token after these."""
        if self.error or not token_ids:
            return False
        after = self.state.deep_copy()
        return bool(after.consume_tokens(list(token_ids)) and after.is_stopped())

    def consume_all(self, token_ids: Sequence[int]) -> None:
        """Follow forced tokens; sets ``error`` where the grammar does not allow them."""
        if token_ids and not self.error and not self.state.consume_tokens(list(token_ids)):
            self.error = matcher_error(self.state)


_Row = tuple[GrammarMatcher, tuple[int, ...]]
"""A matcher, and the tokens that are forbidden beside it."""


class StepMasks:
    """The masks of the rows of one step: `add` each row, then `start`.

    ``vocab_size`` is the width of the logits.
    """

    def __init__(self, threads: MaskThreads, vocab_size: int) -> None:
        self._threads = threads
        self._vocab_size = vocab_size
        self._rows: list[_Row] = []
        self._masks: Future[IntArray] | None = None

    def add(self, matcher: GrammarMatcher, forbidden: Iterable[int] = ()) -> RowMask:
        """The mask of a row, without the ``forbidden`` tokens unless nothing else is allowed."""
        self._rows.append((matcher, tuple(forbidden)))
        return RowMask(self, len(self._rows) - 1)

    def start(self) -> None:
        """Start to compute the masks."""
        if self._rows:
            self._masks = self._threads.run(self._rows, self._vocab_size)

    def row(self, number: int) -> IntArray:
        """Waits for the masks."""
        assert self._masks is not None, "start() was not called"  # noqa: S101
        words: IntArray = self._masks.result()[number]
        return words


@attrs.frozen(eq=False)
class FixedMask:
    """A ``TokenMask`` that is computed."""

    _words: IntArray

    @classmethod
    def of(
        cls, token_ids: tuple[int, ...], forbidden: Collection[int], vocab_size: int
    ) -> FixedMask:
        """Of these tokens, without the ``forbidden`` ones unless nothing else is allowed."""
        mask = _mask_of(token_ids, vocab_size)
        if forbidden:
            mask = mask.copy()
            _forbid(mask, forbidden)
        return cls(mask)

    def words(self) -> IntArray:
        return self._words


@attrs.frozen(eq=False)
class RowMask:
    """The sampler's ``TokenMask`` of a row."""

    _step: StepMasks
    _number: int

    def words(self) -> IntArray:
        """Waits. All bits are set where the matcher has failed: its request ends after the step."""
        return self._step.row(self._number)

    def __reduce__(self) -> tuple[type[FixedMask], tuple[IntArray]]:
        """Other processes get the bits."""
        return FixedMask, (self.words(),)


class MaskThreads:
    """Computes masks beside the thread that runs the steps."""

    def __init__(self) -> None:
        from llguidance import LLExecutor  # noqa: PLC0415

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._executor = LLExecutor(max(1, min(_MAX_THREADS, (cores or 1) // 2)))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._was_slow = False

    def run(self, rows: Sequence[_Row], vocab_size: int) -> Future[IntArray]:
        """The bits of each row, int32 ``[rows, vocabulary / 32]``.

        Sets ``error`` of matchers that fail.
        """
        return self._thread.submit(self._compute, rows, vocab_size)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compute(self, rows: Sequence[_Row], vocab_size: int) -> IntArray:
        size = rows[0][0].grammar.tokenizer.vocab_size
        masks = np.zeros((len(rows), (size + 31) // 32), np.int32)
        began = time.perf_counter()
        if self._was_slow:
            self._fill_each(rows, masks)
        else:
            states = [(matcher.state, i) for i, (matcher, _) in enumerate(rows)]
            self._executor.unsafe_compute_mask_ptr(
                states, masks.ctypes.data, masks.strides[0], len(masks)
            )
        self._was_slow = time.perf_counter() - began > _SLOWEST_MASK_SECONDS
        # The tokenizer may name tokens that the model does not have.
        masks = np.ascontiguousarray(masks[:, : (vocab_size + 31) // 32])
        if vocab_size % 32:
            masks[:, -1] &= (1 << vocab_size % 32) - 1
        for mask, (matcher, forbidden) in zip(masks, rows, strict=True):
            _forbid(mask, forbidden)
            if matcher.state.is_error():
                matcher.error = matcher_error(matcher.state)
            elif not mask.any():
                matcher.error = "none of the model's tokens continues it"
            if matcher.error:
                mask[:] = -1
        return masks

    def _fill_each(self, rows: Sequence[_Row], masks: IntArray) -> None:
        """Compute the masks one by one, to find the matchers that are slow."""
        for mask, (matcher, _) in zip(masks, rows, strict=True):
            began = time.thread_time()
            matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            seconds = time.thread_time() - began
            if seconds > _SLOWEST_MASK_SECONDS:
                matcher.error = f"it is too hard: a token takes {seconds * 1000:.0f} ms"


@functools.lru_cache(maxsize=256)
def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> IntArray:
    """Read only: each step of a request asks for the same."""
    words = np.zeros((vocab_size + 31) // 32, np.uint32)
    ids = np.asarray(token_ids, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << ids % 32)
    words.flags.writeable = False
    return words.view(np.int32)


def _forbid(mask: IntArray, tokens: Iterable[int]) -> None:
    """Remove tokens from a mask, unless it has no other."""
    removed = np.zeros_like(mask)
    for token in tokens:
        if token // 32 < len(mask):
            removed.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    if (mask & ~removed).any():
        mask &= ~removed


def allowed_tokens(words: IntArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """The bits of masks as bool ``[..., vocab_size]``."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocab_size].view(np.bool_)
