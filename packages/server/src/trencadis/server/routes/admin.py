"""``POST /v1/admin/batch``: what an operator orders, under a key of its own (seed 003)."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trencadis.engine import BatchControl
from trencadis.server.routes.context import ServingContext


class BatchControlRequest(BaseModel):
    """One order; all its parts take effect together. A field that is not known is an error here,
    since what an operator mistypes must not pass for done."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_num_seqs: int | None = Field(default=None, ge=1)
    force_evict: int | None = Field(default=None, ge=0)
    target_temp_c: float | None = Field(default=None, gt=0, le=95)
    policy: Literal["lru", "largest_kv", "lowest_priority", "cheapest"] = "lru"
    dry_run: bool = False


def admin_router(context: ServingContext) -> APIRouter:
    """Routes for operators. `BearerAuth` keeps others out."""
    router = APIRouter(tags=["admin"])
    body = {"application/json": {"schema": BatchControlRequest.model_json_schema()}}

    @router.post("/v1/admin/batch", openapi_extra={"requestBody": {"content": body}})
    async def control_batch(request: Request) -> dict[str, Any]:
        """Change how many sequences may run, evict some, or set the target temperature.

        Answers once it is done, at the top of the engine's next step.
        """
        # Read by hand: seed 003's call declares no JSON. The key keeps web pages out as well.
        order = _order(await request.body())
        return attrs.asdict(await context.engine.control(order))

    return router


def _order(body: bytes) -> BatchControl:
    try:
        wanted = BatchControlRequest.model_validate_json(body)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error
    return BatchControl(**wanted.model_dump())
