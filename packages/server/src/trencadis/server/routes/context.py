"""Objects that all routes of one app share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import attrs

from trencadis.engine import AdapterInfo, EngineUnresponsive, InvalidRequest, SamplingParams
from trencadis.server.batches.batch_runner import BatchRunner
from trencadis.server.engine_protocol import (
    ServingEngine,
    SleepingEngine,
    SwitchingEngine,
    adapters,
)
from trencadis.server.errors import ApiError
from trencadis.server.generation.prompts import PromptEncoder
from trencadis.server.generation.response_store import ResponseStore
from trencadis.server.generation.served_model import ServedModel, ServedModels
from trencadis.server.http.json_body import JsonBodies
from trencadis.server.metrics.serving_metrics import ServingMetrics
from trencadis.server.settings import ServerSettings
from trencadis.server.switching.switch_control import SwitchControl


@attrs.define
class Drain:
    """Whether new requests are rejected, because an administrator has asked for it."""

    is_draining: bool = False


@attrs.frozen
class ServingContext:
    """The engine, the settings and the objects built from them.

    ``switching``: the engine, if it has several models, and ``switcher`` its only user; None for an
    engine of one model. ``responses``: those that are stored, None where none are. ``batches``:
    None without a directory. ``created`` is the start time of the app, in seconds since the Unix
    epoch.
    """

    engine: ServingEngine
    switching: SwitchingEngine | None
    settings: ServerSettings
    metrics: ServingMetrics
    bodies: JsonBodies
    encoder: PromptEncoder
    models: ServedModels
    switcher: SwitchControl | None
    responses: ResponseStore | None
    batches: BatchRunner | None
    created: int
    drain: Drain

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of all models that this server may serve."""
        switching = self.switching
        return (self.engine.model_name,) if switching is None else switching.aliases

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters of the active model, which requests may name as a model."""
        return adapters(self.engine)

    def alias_of(self, name: str | None) -> str | None:
        """The model that a request needs: that of an adapter, or the one that it names."""
        if name is None or name in self.aliases or name not in self.adapters:
            return name
        return self.engine.model_name

    async def check_health(self) -> str:
        """Raise an error of `ServingEngine.check_health` where no request can be served.

        Returns what may keep the engine silent for minutes, "" for nothing.
        """
        limit = self.settings.health_timeout
        try:
            return await asyncio.wait_for(self.engine.check_health(), limit) or ""
        except asyncio.TimeoutError:
            raise EngineUnresponsive(
                f"the engine did not answer within {limit:g} seconds"
            ) from None

    async def check_serving(self) -> None:
        """Raise the error that a new request would get now."""
        self.check_ready()
        await self.check_health()

    def check_accepting(self) -> None:
        """Raise 503 while an administrator drains this server."""
        if self.drain.is_draining:
            raise self._unavailable(
                "an administrator drains this server, it accepts no requests: send it to another",
                "draining",
            )

    def check_ready(self) -> None:
        """Raise 503 where new requests would be rejected.

        With ``auto_switch`` requests wait for the end of a switch and wake up an engine that sleeps
        because it was idle, so the server stays ready.
        """
        self.check_accepting()
        is_asleep = isinstance(self.engine, SleepingEngine) and self.engine.is_sleeping
        if is_asleep and not (self.switcher is not None and self.switcher.idle.is_asleep):
            raise self._unavailable("the engine sleeps: POST /wake_up", "engine_sleeping")
        is_switching = self.switching is not None and self.switching.is_switching
        if is_switching and not self.settings.auto_switch:
            raise self._unavailable("the model is being switched", "model_switching")

    def check_name(self, name: str | None) -> None:
        """Raise 404 unless ``name`` is that of a configured model or of an adapter, or None."""
        if name is not None and name not in self.aliases and name not in self.adapters:
            listed = ", ".join(map(repr, (*self.aliases, *self.adapters)))
            raise ApiError(
                404,
                f"the model {name!r} does not exist: this server has {listed}",
                param="model",
                code="model_not_found",
            )

    def model_for(self, name: str | None) -> ServedModel:
        """The model that a request names, by an adapter's name with that adapter.

        None names the active one. Raises 404 for another.
        """
        self.check_name(name)
        active = self.engine.model_name
        if name is not None and name not in self.aliases and name in self.adapters:
            return attrs.evolve(self.models.current, lora=name)
        if name not in (None, active):
            raise ApiError(
                404,
                f"the model {name!r} is not active: this server serves {active!r} now. Send "
                f"{active!r}, or have an administrator switch with POST /v1/models/switch or start "
                "the server with --auto-switch",
                param="model",
                code="model_not_found",
            )
        return self.models.current

    def check_runner(self, name: str | None, *, wants_embeddings: bool) -> None:
        """Raise 400 where the model of this name has the runner for other requests.

        Before a switch to it. None names the active one.
        """
        computes, name = self.computes_embeddings(name), self.alias_of(name)
        check_runner(name or self.engine.model_name, computes, wants_embeddings=wants_embeddings)

    def computes_embeddings(self, name: str | None) -> bool:
        """Whether the model of this name generates nothing; None names the active one."""
        switching, name = self.switching, self.alias_of(name)
        if switching is None:
            return self.models.current.is_pooling
        return switching.entry_of(name or switching.active).config.runner == "pooling"

    async def model_to_count(self, name: str | None) -> ServedModel:
        """The model whose tokenizer counts tokens for a request that names it.

        As `model_for`; with ``auto_switch`` also a model that is not active, without a switch.
        """
        switching = self.switching
        if switching is None or not self.settings.auto_switch:
            return self.model_for(name)
        self.check_name(name)
        if name is None or self.alias_of(name) == self.engine.model_name:
            return self.models.current
        return self.models.inactive(name, await switching.tokenizer_of(name))

    def _unavailable(self, message: str, code: str) -> ApiError:
        headers = {"Retry-After": str(self.settings.retry_after)}
        return ApiError(503, message, code=code, headers=headers)


def check_runner(name: str, computes_embeddings: bool, *, wants_embeddings: bool) -> None:
    """Raise 400 for a request for embeddings or scores to a model that generates, and the other way
    round."""
    if computes_embeddings == wants_embeddings:
        return
    if wants_embeddings:
        reason = (
            "generates and computes no embeddings or scores: start it with --runner pooling for "
            "them"
        )
    else:
        reason = (
            "computes embeddings or scores and generates nothing: send the request to "
            "/v1/embeddings, /v1/score or /v1/rerank, or start it with --runner generate"
        )
    raise ApiError(400, f"the model {name!r} {reason}", param="model", code="invalid_value")


def check_token_ids(params: SamplingParams, model: ServedModel) -> None:
    """Raise `InvalidRequest` if a parameter names a token id outside the vocabulary."""
    vocab_size = model.tokenizer.vocab_size
    fields = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids,
    }
    for field, token_ids in fields.items():
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{field} names token {token}, outside this model's vocabulary "
                    f"(0 to {vocab_size - 1})",
                    field,
                )
