"""Embeddings and scores of pairs as callers get them."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.engine.api.outputs import CompletionDelta
from trencadis.engine.api.scoring import Scoring
from trencadis.engine.errors import InvalidRequest, RequestFailed


@attrs.frozen(eq=False)
class Embedding:
    """The embedding of a prompt: ``vector`` is fp32 ``[embedding size]`` and has length 1.

    The product of two vectors is the cosine of their angle. ``num_cached_tokens``: prompt tokens
    that were prefix hits.
    """

    vector: npt.NDArray[np.float32]
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, delta: CompletionDelta, use_activation: bool = True) -> Embedding:
        """The embedding in the delta of a request. Raises `RequestFailed` if it was aborted.

        Without ``use_activation`` the vector is the hidden state, of any length.
        """
        if delta.embedding is None:
            raise RequestFailed(f"request {delta.request_id} was aborted: send it again")
        vector = np.frombuffer(delta.embedding, "<f4")
        if use_activation:
            length = np.linalg.norm(vector.astype(np.float64))  # squares could overflow in fp32
            vector = (vector / (length or 1.0)).astype(np.float32)
        return cls(vector, delta.num_prompt_tokens, delta.num_cached_tokens)


def check_pooling(embedding_size: int, scoring: Scoring | None = None) -> None:
    """Raise `InvalidRequest` for an engine without embeddings, whose ``embedding_size`` is 0."""
    if scoring is not None:
        raise InvalidRequest(
            "this engine serves a model that scores pairs and computes no embeddings: call score, "
            "or serve an embedding model"
        )
    if not embedding_size:
        raise InvalidRequest(
            "this engine has the runner generate and computes no embeddings: start it with the "
            "runner pooling"
        )


@attrs.frozen
class Score:
    """How relevant a document is to a query.

    ``score``: from 0 to 1 where the model's scores are sigmoids of its logits, the default.
    ``num_cached_tokens``: prompt tokens that were prefix hits.
    """

    score: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, delta: CompletionDelta, scoring: Scoring, use_activation: bool = True) -> Score:
        """The score in the delta of a request. Raises `RequestFailed` if it was aborted."""
        if delta.embedding is None:
            raise RequestFailed(f"request {delta.request_id} was aborted: send it again")
        logit = float(np.frombuffer(delta.embedding, "<f4")[0])
        score = scoring.score(logit, use_activation)
        return cls(score, delta.num_prompt_tokens, delta.num_cached_tokens)


def check_scoring(scoring: Scoring | None) -> Scoring:
    """The way in which an engine scores. Raises `InvalidRequest` for an engine without scores."""
    if scoring is None:
        raise InvalidRequest(
            "this engine serves no model that scores pairs: start it with the runner pooling and a "
            "reranker, or compare the results of embed"
        )
    return scoring
