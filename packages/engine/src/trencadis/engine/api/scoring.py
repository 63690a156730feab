"""How a model scores a query and a document: what its prompt is made of, and what its score means.

The core finds it in the checkpoint and sends it to the front, which makes the prompts.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs

PairForm = Literal["template", "qwen3-reranker", "conversation", "joined"]
"""How a query and a document become a prompt.

``template``: the chat template, which has places for messages of the roles ``query`` and
``document``. ``qwen3-reranker``: the prompt of that family. ``conversation``: the chat template, of
a question of the user and the answer to it, for reward models. ``joined``: one text after the
other, unchanged.
"""

Activation = Literal["sigmoid", "identity"]


@attrs.frozen
class PairPrompt:
    """The prompt of a query and a document.

    ``instruction``: that of requests without one; "" for that of the template. ``arguments``:
    further arguments of the chat template, which a request may replace. ``pad_token_id``: a token
    that is left out at the end of a prompt, because the model is scored at the last other one.
    """

    form: PairForm
    instruction: str = ""
    arguments: dict[str, Any] = attrs.field(factory=dict)
    pad_token_id: int | None = None


@attrs.frozen
class Scoring:
    """How a model scores pairs.

    ``token_ids``: the tokens of which it was trained to give one as its answer. The logit of a
    prompt is that of the first of them, less that of the second if there are two, so that its
    sigmoid is the softmax of both. Without any the logit is that of a score head. ``activation``
    turns the logit into the score.
    """

    prompt: PairPrompt
    token_ids: tuple[int, ...] = ()
    activation: Activation = "sigmoid"

    def score(self, logit: float, use_activation: bool = True) -> float:
        """The score of a logit, or the logit itself."""
        if not use_activation or self.activation == "identity":
            return logit
        # Of the two forms, the one whose exponential cannot overflow.
        if logit >= 0:
            return 1.0 / (1.0 + math.exp(-logit))
        return math.exp(logit) / (1.0 + math.exp(logit))
