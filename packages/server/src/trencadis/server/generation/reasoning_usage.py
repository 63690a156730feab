"""Token counts of a request, with those of the reasoning of its answers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails

from trencadis.engine import CompletionDelta
from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.generation.choice_stream import ChoiceDelta, Usage
from trencadis.server.generation.prompts import Prompt
from trencadis.server.parsers.events import Reasoning
from trencadis.server.parsers.reasoning_parsers import ReasoningParser


@attrs.define
class _ReasoningCount:
    """The tokens of the reasoning of one answer. ``parser``: None once the reasoning has ended."""

    parser: ReasoningParser | None
    tokens: int = 0
    _undecided: int = 0

    def add(self, delta: CompletionDelta) -> None:
        if self.parser is None:
            return
        self._undecided += len(delta.token_ids)
        for event in self.parser.push(delta.text):
            if not isinstance(event, Reasoning):
                self.parser = None  # the rest of the answer is none
                return
            self.tokens += self._undecided
            self._undecided = 0


@attrs.define
class ReasoningUsage(Usage):
    """Token counts, and how many generated tokens are reasoning. Its markers count too.

    ``plans``: how the answers to each prompt are read.
    """

    plans: Sequence[AnswerPlan] = ()
    _counts: dict[int, _ReasoningCount] = attrs.field(factory=dict)
    """For each choice that has begun, where its model may reason."""

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> ReasoningUsage:
        """The counts before the answers to conversations begin."""
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return cls(num_tokens, plans=[prompt.answer or AnswerPlan() for prompt in prompts])

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all choices."""
        return sum(count.tokens for count in self._counts.values())

    def add(self, item: ChoiceDelta) -> None:
        super().add(item)
        plan = self.plans[item.prompt]
        if plan.reasoning is None:
            return
        if item.choice not in self._counts:
            self._counts[item.choice] = _ReasoningCount(plan.reasoning(plan.is_open))
        self._counts[item.choice].add(item.delta)

    def so_far(self) -> CompletionUsage:
        usage = super().so_far()
        if any(plan.reasoning is not None for plan in self.plans):
            usage.completion_tokens_details = CompletionTokensDetails(
                reasoning_tokens=self.reasoning_tokens
            )
        return usage
