"""What every route of one app shares: the engine, the settings, and what was built from them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import attrs

from trencadis.engine import InvalidRequest, SamplingParams
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.errors import ApiError
from trencadis.server.generation.choice_stream import Deltas, Job
from trencadis.server.generation.prompts import PromptEncoder
from trencadis.server.metrics import ServingMetrics
from trencadis.server.settings import ServerSettings


@attrs.frozen
class ServingContext:
    """One app's engine and its surroundings. ``created`` is in seconds of the Unix epoch."""

    engine: ServingEngine
    settings: ServerSettings
    metrics: ServingMetrics
    encoder: PromptEncoder
    created: int

    def check_model(self, name: str | None) -> None:
        """Raise 404 unless ``name`` is the served model; None means that one."""
        if name is not None and name != self.engine.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {self.engine.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_token_ids(self, params: SamplingParams) -> None:
        """Raise `InvalidRequest` where a parameter names a token that the model lacks."""
        vocab_size = self.engine.tokenizer.vocab_size
        fields = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for field, token_ids in fields.items():
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{field} names token {token}, outside this model's vocabulary "
                        f"(0 to {vocab_size - 1})",
                        field,
                    )

    def start(self, jobs: Sequence[Job], request_id: str) -> Deltas:
        """The deltas of a request's jobs; nothing runs until they are iterated."""
        return Deltas(self.engine, self.metrics, jobs, request_id)


def new_id(prefix: str) -> str:
    """An id for a response: unique, and the engine's id of its request."""
    return f"{prefix}-{uuid.uuid4().hex}"
