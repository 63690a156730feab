"""Objects that all routes of one app share."""

from __future__ import annotations

import attrs

from trencadis.engine import InvalidRequest, SamplingParams
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.errors import ApiError
from trencadis.server.generation.answer_plan import AnswerPlanner
from trencadis.server.generation.prompts import PromptEncoder
from trencadis.server.metrics.serving_metrics import ServingMetrics
from trencadis.server.settings import ServerSettings


@attrs.define
class Drain:
    """Whether new requests are refused, because an operator has asked for it."""

    is_draining: bool = False


@attrs.frozen
class ServingContext:
    """The engine, the settings and the objects built from them.

    ``created`` is the start time of the app, in seconds since the Unix epoch.
    """

    engine: ServingEngine
    settings: ServerSettings
    metrics: ServingMetrics
    encoder: PromptEncoder
    answers: AnswerPlanner
    created: int
    drain: Drain

    def check_accepting(self) -> None:
        """Raise 503 while an operator drains this server."""
        if self.drain.is_draining:
            raise ApiError(
                503,
                "an operator drains this server, so it accepts no requests: send it to another",
                code="draining",
                headers={"Retry-After": str(self.settings.retry_after)},
            )

    def check_model(self, name: str | None) -> None:
        """Raise 404 unless ``name`` is the served model or None."""
        if name is not None and name != self.engine.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {self.engine.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_token_ids(self, params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a parameter names a token id outside the vocabulary."""
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
