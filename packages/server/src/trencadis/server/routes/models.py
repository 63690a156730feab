"""``/v1/models``: the models of this server. One of them is active."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from openai.types import Model

from trencadis.server.api.error_responses import error_responses
from trencadis.server.routes.context import ServingContext


def models_router(context: ServingContext) -> APIRouter:
    """The routes for the models."""
    router = APIRouter(tags=["models"])

    def described(alias: str) -> Model:
        """A model. Only that of an engine with several models says whether it is active, and only
        an active one knows its longest sequence."""
        active = context.engine.model_name
        vllm_fields: dict[str, Any] = {"root": alias, "parent": None}
        if alias == active:
            vllm_fields["max_model_len"] = context.engine.max_model_len
        if context.switcher is not None:
            vllm_fields["active"] = alias == active
        return Model(
            id=alias,
            created=context.created,
            object="model",
            owned_by="trencadis",
            **vllm_fields,
        )

    def adapter(name: str) -> Model:
        """An adapter as a model, as vLLM describes it: its root is its directory."""
        fields: dict[str, Any] = {
            "root": context.adapters[name].path,
            "parent": context.engine.model_name,
            "max_model_len": context.engine.max_model_len,
        }
        return Model(
            id=name, created=context.created, object="model", owned_by="trencadis", **fields
        )

    @router.get("/v1/models", responses=error_responses(401))
    async def list_models() -> dict[str, Any]:
        """The list of models, then the adapters of the one that is served.

        Where there are several models, ``active`` marks that one.
        """
        models = [*map(described, context.aliases), *map(adapter, context.adapters)]
        listed = [model.model_dump(exclude_unset=True) for model in models]
        return {"object": "list", "data": listed}

    @router.get(
        "/v1/models/{name:path}", responses={200: {"model": Model}, **error_responses(401, 404)}
    )
    async def retrieve_model(name: str) -> Response:
        """A model by its name, which may contain slashes."""
        context.check_name(name)
        describe = described if name in context.aliases else adapter
        content = describe(name).model_dump_json(exclude_unset=True)
        return Response(content, media_type="application/json")

    return router
