"""``/v1/models``: what is being served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from openai.types import Model

from trencadis.server.routes.context import ServingContext


def models_router(context: ServingContext) -> APIRouter:
    """Routes that list the served model."""
    router = APIRouter(tags=["models"])

    def served() -> Model:
        vllms_own: dict[str, Any] = {"max_model_len": context.engine.max_model_len}
        return Model(
            id=context.engine.model_name,
            created=context.created,
            object="model",
            owned_by="trencadis",
            **vllms_own,
        )

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """All models; one, today."""
        return {"object": "list", "data": [served().model_dump(exclude_unset=True)]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        """One model by its name, slashes included."""
        context.check_model(name)
        content = served().model_dump_json(exclude_unset=True)
        return Response(content, media_type="application/json")

    return router
