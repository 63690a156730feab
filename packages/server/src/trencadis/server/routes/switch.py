"""Administrators' routes of development mode: the switch between models (seed 004), sleep, wake up.

Without ``VLLM_SERVER_DEV_MODE=1`` they do not exist, as in vLLM. `BearerAuth` checks the key.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import attrs
from fastapi import APIRouter, Depends, Query
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from trencadis.engine import SwitchInProgressError
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.engine_protocol import SleepingEngine
from trencadis.server.errors import ApiError
from trencadis.server.http.auth import SLEEP_PATHS, SWITCH_PATH
from trencadis.server.http.json_body import require_json
from trencadis.server.routes.context import ServingContext

_SLEEP, _WAKE_UP, _IS_SLEEPING = SLEEP_PATHS


class SwitchRequest(BaseModel):
    """Which model to serve, and what happens to the requests that run."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = Field(description="Alias of the model to serve.")
    running: Literal["wait", "abort", "park"] = Field(
        "wait",
        description="What happens to requests that still run after drain_timeout_s: with wait they "
        "go on and the switch fails, abort ends them, park keeps them until their model is active "
        "again.",
    )
    drain_timeout_s: float = Field(
        60.0,
        ge=0,
        le=86_400,
        validation_alias=AliasChoices("drain_timeout_s", "drain_timeout"),
        description="Seconds for running requests to finish. Also drain_timeout, as in Gaudi's "
        "vLLM plugin.",
    )
    wait: bool = Field(
        True, description="Wait for the end of a switch under way; false: answer 409."
    )


def switch_router(context: ServingContext) -> APIRouter:
    """The routes of development mode, or answers that they are off."""
    if not context.settings.server_dev_mode:
        return _absent_router()
    router = APIRouter(tags=["development"])
    if context.switcher is not None:
        _add_switch(router, context)
    if isinstance(context.engine, SleepingEngine):
        _add_sleep(router, context, context.engine)
    return router


def _add_switch(router: APIRouter, context: ServingContext) -> None:
    switcher = context.switcher
    if switcher is None:
        return

    @router.post(
        SWITCH_PATH,
        dependencies=[Depends(require_json)],
        responses=error_responses(*BODY_ERRORS, 403, 404, 409, 415, 429, 500, 503),
    )
    async def switch_model(order: SwitchRequest) -> dict[str, Any]:
        """Serve another model; the answer comes when it serves, with the seconds of each part.

        After a failed switch the previous model serves again, and the error names the step.
        """
        try:
            report = await switcher.switch(
                order.model,
                running=order.running,
                drain_timeout_s=order.drain_timeout_s,
                waits=order.wait,
            )
        except SwitchInProgressError as error:
            raise ApiError(
                409,
                str(error),
                code="switch_in_progress",
                headers={"Retry-After": str(context.settings.retry_after)},
            ) from error
        return attrs.asdict(report)


def _add_sleep(router: APIRouter, context: ServingContext, engine: SleepingEngine) -> None:
    errors = error_responses(400, 401, 403, 429, 500, 503)

    @router.post(_SLEEP, responses=errors)
    async def sleep(level: int = Query(1, ge=1, le=2)) -> dict[str, Any]:
        """Release the device's memory. Level 1 keeps the weights on the host, level 2 does not."""
        idle = None if context.switcher is None else context.switcher.idle
        # Before it sleeps, so that no request wakes it up meanwhile.
        could_wake = idle is not None and idle.leave_to_operator()
        try:
            released = await engine.sleep(level)
        except Exception:
            if idle is not None and could_wake:
                idle.leave_to_requests()
            raise
        return {"is_sleeping": engine.is_sleeping, "released_bytes": released}

    @router.post(_WAKE_UP, responses=errors)
    async def wake_up() -> dict[str, bool]:
        """Serve again after ``/sleep``."""
        await engine.wake_up()
        if context.switcher is not None:
            context.switcher.idle.note_request()
        return {"is_sleeping": engine.is_sleeping}

    @router.get(_IS_SLEEPING, responses=errors)
    async def is_sleeping() -> dict[str, bool]:
        """Whether the engine sleeps."""
        return {"is_sleeping": engine.is_sleeping}


def _absent_router() -> APIRouter:
    """404 where ``/v1/models/{name}`` would make it 405, with what opens the route."""
    router = APIRouter(include_in_schema=False)

    async def refuse() -> NoReturn:
        raise ApiError(
            404,
            f"there is no POST {SWITCH_PATH}: start the server with VLLM_SERVER_DEV_MODE=1",
        )

    router.add_api_route(SWITCH_PATH, refuse, methods=["POST"], response_model=None)
    return router
