"""``POST /invocations`` of SageMaker: a request of another route, which its fields tell."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from trencadis.engine import InvalidRequest
from trencadis.server.api.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from trencadis.server.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    RequestBody,
)

_BY_FIELD: dict[str, type[RequestBody]] = {
    "messages": ChatCompletionRequest,
    "prompt": CompletionRequest,
    "input": EmbeddingRequest,
    "query": RerankRequest,
    "text_1": ScoreRequest,
    "queries": ScoreRequest,
    "data_1": ScoreRequest,
}
"""The field that a request of each kind must have."""


def as_embedding(chat: ChatCompletionRequest) -> EmbeddingRequest:
    """A conversation as a request to embed it, for a model that generates nothing.

    Raises `ValidationError`.
    """
    return EmbeddingRequest.model_validate(chat.model_dump(exclude_unset=True))


class Invocation(BaseModel):
    """A request for chat, a completion, embeddings, scores or a ranking, as its route takes it."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Any:
        """The request as that of its route. Raises as that does, and `InvalidRequest`."""
        if not isinstance(obj, dict):
            return super().model_validate(obj, **options)
        for field, model in _BY_FIELD.items():
            if field in obj:
                return model.model_validate(obj, **options)
        listed = ", ".join(_BY_FIELD)
        raise InvalidRequest(f"the fields say no kind of request: give one of {listed}")
