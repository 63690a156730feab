"""``/v1/models``: the served model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from openai.types import Model

from trencadis.server.api.error_responses import error_responses
from trencadis.server.routes.context import ServingContext


def models_router(context: ServingContext) -> APIRouter:
    """The routes for the served model."""
    router = APIRouter(tags=["models"])

    def served_model() -> Model:
        vllm_fields: dict[str, Any] = {"max_model_len": context.engine.max_model_len}
        return Model(
            id=context.engine.model_name,
            created=context.created,
            object="model",
            owned_by="trencadis",
            **vllm_fields,
        )

    @router.get("/v1/models", responses=error_responses(401))
    async def list_models() -> dict[str, Any]:
        """The list of served models, which has one entry."""
        return {"object": "list", "data": [served_model().model_dump(exclude_unset=True)]}

    @router.get(
        "/v1/models/{name:path}", responses={200: {"model": Model}, **error_responses(401, 404)}
    )
    async def retrieve_model(name: str) -> Response:
        """A model by its name, which may contain slashes."""
        context.check_model(name)
        content = served_model().model_dump_json(exclude_unset=True)
        return Response(content, media_type="application/json")

    return router
