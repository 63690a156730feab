"""A step as a value that an executor gets, and its result as a value that the core gets back.

Both can be encoded, so that ranks in other processes execute the same step. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.engine.api.outputs import PositionLogprobs
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.kvcache import CopyPlan
from trencadis.scheduler import Candidate, ScheduledSequence, StepTiming

IntArray = npt.NDArray[np.int32]


class TokenMask(Protocol):
    """The tokens that a row may sample. Encoded, it is a mask that is computed."""

    def words(self) -> IntArray:
        """One bit for each token, from the lowest: int32 ``[vocabulary / 32, rounded up]``.

        Waits until it is computed.
        """


@attrs.frozen(eq=False)
class SampleSettings:
    """How the tokens of a sequence are sampled; one value for all of its steps.

    ``history``: the tokens of the sequence, prompt and output, where penalties or ``bad_words``
    need them; else empty. It is not a copy: the tokens of later steps follow in it.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    history: Sequence[int] = ()
    is_random: bool = attrs.field(init=False)
    """Whether a token is drawn, and not the most probable one taken."""
    changes_logits: bool = attrs.field(init=False)
    """Whether the parameters may change single logits, in this or another step: `logit_edits` looks
    at no other row."""

    @is_random.default
    def _is_random(self) -> bool:
        return not self.params.greedy

    @changes_logits.default
    def _changes_logits(self) -> bool:
        return bool(self.params.logit_bias or self.params.min_tokens or self.history)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> SampleSettings:
        """The settings of a sequence with these tokens, its history where it is needed."""
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        needs_history = penalties != (1.0, 0.0, 0.0) or bool(params.bad_words)
        history = token_ids if needs_history else ()
        return cls(params, seed, num_prompt_tokens, eos_token_ids, history)


class RowRequest(NamedTuple):
    """What is asked of the logits after the last of ``num_tokens`` tokens, prompt and output.

    A token for each of ``samples``, which differ in their seeds alone: several where a prompt ends
    that several sequences share. With ``num_candidates``, that many most probable next tokens of
    the beam that is the only sample. ``mask``: the tokens that a structured output or
    ``allowed_token_ids`` allows, None for all tokens. It also says which tokens ``min_tokens``
    forbids.
    """

    num_tokens: int
    samples: tuple[SampleSettings, ...]
    mask: TokenMask | None = None
    num_candidates: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.num_tokens - self.samples[0].num_prompt_tokens

    @property
    def forbidden_token_ids(self) -> frozenset[int]:
        """The tokens that would end the answer before ``min_tokens``."""
        sample = self.samples[0]
        if self.num_output_tokens >= sample.params.min_tokens:
            return frozenset()
        return sample.eos_token_ids.union(sample.params.stop_token_ids)

    @property
    def bad_next_ids(self) -> frozenset[int]:
        """The last tokens of the ``bad_words`` that the output ends with the others of."""
        sample = self.samples[0]
        if not sample.params.bad_words:
            return frozenset()
        output = tuple(sample.history[sample.num_prompt_tokens : self.num_tokens])
        words = (word for word in sample.params.bad_words if isinstance(word, tuple))
        return frozenset(
            word[-1] for word in words if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]
        )


class PromptTargets(NamedTuple):
    """The prompt tokens that are scored by the tokens of a chunk, each by the token before it.

    ``position``: that of the first one in the prompt. ``offset``: of the token that scores it, in
    the chunk. ``num_logprobs``: most probable tokens to report for each.
    """

    position: int
    offset: int
    token_ids: tuple[int, ...]
    num_logprobs: int


class ChunkScores(NamedTuple):
    """Scores of prompt tokens from ``position`` on: fp32 ``[tokens, 2 + 2 * n]``.

    Of each token its log-probability and its rank, then the log-probabilities of the n most
    probable tokens, then their ids; n is ``num_logprobs``, or the vocabulary where that is smaller.
    """

    position: int
    values: npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class StepInput:
    """What an executor computes in a step. The fields but ``rows`` and ``targets`` are those of
    `SchedulerOutput`.

    ``rows``: what is sampled, by sequence id; a sequence without an entry samples nothing.
    ``targets``: the prompt tokens to score, by sequence id. Block tables and histories are the
    core's own, and valid until the core applies the step's result. ``adapter_slots``: the slot of
    each adapter that a scheduled sequence has, by digest; the executor copies it there first.
    ``state_moves``: copies between slots of states, before the forward passes; None without states.
    """

    number: int
    prompts: tuple[ScheduledSequence, ...]
    decodes: tuple[ScheduledSequence, ...]
    moves: CopyPlan
    rows: Mapping[int, RowRequest]
    targets: Mapping[int, PromptTargets] = attrs.field(factory=dict)
    adapter_slots: Mapping[str, int] = attrs.field(factory=dict)
    state_moves: CopyPlan | None = None


@attrs.frozen(eq=False, kw_only=True)
class StepResult:
    """What a step has computed, by the ids of the sequences that sampled, forks included.

    - ``token_ids``: the sampled tokens; 0 where an embedding or a score stands in the place.
    - ``logprobs``: log-probabilities, where the request asked for them.
    - ``embeddings``: what a pooling model computed, see `CompletionDelta`.
    - ``candidates``: of each beam, the best first.
    - ``prompt_logprobs``: the scores of prompt tokens, by the ids of the sequences that computed
      them, whether they sampled or not.
    - ``failed``: the error of each scheduled sequence whose forward pass or sampling failed. It has
      no other result.
    - ``timing``: what is known of the durations, None for nothing.
    """

    token_ids: Mapping[int, int]
    logprobs: Mapping[int, PositionLogprobs] = attrs.field(factory=dict)
    embeddings: Mapping[int, bytes] = attrs.field(factory=dict)
    candidates: Mapping[int, Sequence[Candidate]] = attrs.field(factory=dict)
    prompt_logprobs: Mapping[int, ChunkScores] = attrs.field(factory=dict)
    failed: Mapping[int, Exception] = attrs.field(factory=dict)
    timing: StepTiming | None = None


class PendingStep(Protocol):
    """A step that the executor may still be working on."""

    def wait(self) -> StepResult:
        """The result. Blocks until it has arrived; call it once, in the order of the steps."""
