"""Embeddings as callers get them."""

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
    def of(cls, delta: CompletionDelta) -> Embedding:
        """The embedding in the delta of a request. Raises `RequestFailed` if it was aborted."""
        if delta.embedding is None:
            raise RequestFailed(f"request {delta.request_id} was aborted: send it again")
        vector = np.frombuffer(delta.embedding, "<f4")
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
