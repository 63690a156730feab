"""Snapshots of the engine for all who watch the dashboard: one a second, the same for everyone.

A page reads those of a `Viewer` as server-sent events: ``history`` first, then a ``snapshot``
a second, and ``end`` when the server stops. The core is asked for its blocks and buckets only while
someone watches. Without viewers the feed notes one `HistoryPoint` a second of the statistics that
the engine sends anyway, so that a page that is opened after an incident shows what led to it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import attrs

from trencadis.engine import EngineError, EngineInspection
from trencadis.server.engine_protocol import (
    InspectableEngine,
    ServingEngine,
    as_switching,
    totals_by_model,
)
from trencadis.server.errors import ApiError, as_api_error, server_stopping
from trencadis.server.metrics.percentiles import RecentPercentiles
from trencadis.server.metrics.serving_metrics import ServingMetrics

INTERVAL_S = 1.0
"""Seconds between two snapshots."""

MAX_VIEWERS = 16
"""Most streams at once. Each costs a connection and, a second, the bytes of a snapshot."""

MAX_HISTORY_POINTS = 600
"""Seconds of history: ten minutes."""

MAX_EVENTS = 300
"""Events of a stream; then it ends, and the page opens another. A server without an end of its own
for streams, such as uvicorn without ``timeout_graceful_shutdown``, could not stop before."""

SLOW_S = 10.0
"""Seconds for a viewer to receive an event. One that takes longer is dropped."""

SERVING = "serving"
"""The state of a server that accepts requests. Others are the codes of the error responses."""

_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
}


@attrs.frozen
class HistoryPoint:
    """What the charts over time show of a second. Names are those of `EngineStats`.

    ``time_s``: seconds since the Unix epoch. ``num_waiting_reqs``: all requests that do not run.
    ``num_prefill_tokens``, ``num_generation_tokens``: totals of all models.
    """

    time_s: float
    hottest_c: float | None
    target_temp_c: float | None
    power_w: float | None
    num_running_seqs: int
    max_running_seqs: int
    num_waiting_reqs: int
    cache_usage: float
    num_prefill_tokens: int
    num_generation_tokens: int


@attrs.frozen(eq=False)
class Viewer:
    """A page that is open. One that reads slowly gets the latest snapshot, not all."""

    events: AsyncGenerator[str, None]
    _leave: Callable[[Viewer], None]

    async def aclose(self) -> None:
        """End the events, also before the first was read. May be called again."""
        self._leave(self)
        await self.events.aclose()


class DashboardFeed:
    """The state of ``engine`` and of the requests in ``metrics``, second by second.

    ``check_serving`` raises the error that a request would get now. `start` begins the history;
    `close` ends all streams. ``interval_s``: seconds between two snapshots.
    """

    def __init__(
        self,
        engine: ServingEngine,
        metrics: ServingMetrics,
        check_serving: Callable[[], Awaitable[None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._check_serving = check_serving
        self.interval_s = interval_s
        self._history: deque[HistoryPoint] = deque(maxlen=MAX_HISTORY_POINTS)
        self._latencies = {
            name: RecentPercentiles(metrics, histogram) for name, histogram in _LATENCIES.items()
        }
        self._viewers: set[Viewer] = set()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._published: asyncio.Future[str] | None = None
        self._asked: asyncio.Task[None] | None = None
        self._inspection: EngineInspection | None = None
        self._inspected_model = ""
        self._inspected_s = 0.0

    def start(self) -> None:
        """Note the history from now on. Does nothing where that is done already."""
        if self._is_closed or (self._task is not None and not self._task.done()):
            return
        self._published = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="dashboard")
        self._task.add_done_callback(self._fail)

    def close(self) -> None:
        """End every stream, and accept no further one. May be called again."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        if self._asked is not None:
            self._asked.cancel()
        if self._published is not None and not self._published.done():
            self._published.set_result(event("end", {"reason": "the server stops"}))

    @property
    def num_viewers(self) -> int:
        """Viewers that are not closed."""
        return len(self._viewers)

    def admit(self) -> Viewer:
        """A further viewer, which counts until it is closed. Raises 503 where none is accepted."""
        if self._is_closed:
            raise server_stopping()
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(
                503,
                f"the dashboard has its maximum of {MAX_VIEWERS} viewers: close another page, or "
                "read /metrics",
                code="too_many_viewers",
                headers={"Retry-After": "10"},
            )
        viewer = Viewer(self._events(), self._viewers.discard)
        self._viewers.add(viewer)
        return viewer

    async def _events(self) -> AsyncGenerator[str, None]:
        self.start()
        yield event("history", self._columns())
        for _ in range(MAX_EVENTS):
            published = self._published
            if published is None:
                return
            # Shielded: the end of one viewer must not cancel what the others wait for.
            yield await asyncio.shield(published)
            if self._is_closed and published is self._published:
                return  # that was the last event

    async def _run(self) -> None:
        while True:
            point = self._point()
            self._history.append(point)
            if self._viewers:
                self._publish(event("snapshot", await self._snapshot(point)))
            else:
                for latency in self._latencies.values():
                    latency.forget()
            await asyncio.sleep(self.interval_s)

    def _publish(self, text: str) -> None:
        published = self._published
        self._published = asyncio.get_running_loop().create_future()
        if published is not None and not published.done():
            published.set_result(text)

    def _fail(self, task: asyncio.Task[None]) -> None:
        """Give the error that has ended the task to all viewers; the next viewer restarts it."""
        if self._is_closed or self._published is None or self._published.done():
            return
        cancelled = RuntimeError("the task of the dashboard was cancelled")
        error = cancelled if task.cancelled() else task.exception()
        if error is not None:
            self._published.set_exception(error)

    def _point(self) -> HistoryPoint:
        stats = self._engine.stats
        thermal = stats.thermal
        totals = totals_by_model(self._engine).values()
        return HistoryPoint(
            time_s=round(time.time(), 3),
            hottest_c=None if thermal is None else thermal.hottest_c,
            target_temp_c=None if thermal is None else thermal.target_temp_c,
            power_w=None if thermal is None else thermal.power_w,
            num_running_seqs=stats.num_running_seqs,
            max_running_seqs=stats.max_running_seqs,
            num_waiting_reqs=stats.num_waiting_reqs
            + stats.num_swapped_reqs
            + stats.num_preempted_reqs,
            cache_usage=round(stats.cache_usage, 4),
            num_prefill_tokens=sum(each.num_prefill_tokens for each in totals),
            num_generation_tokens=sum(each.num_generation_tokens for each in totals),
        )

    def _columns(self) -> dict[str, Any]:
        """The history, column by column, which is a third of the bytes of its points."""
        names = [field.name for field in attrs.fields(HistoryPoint)]
        return {name: [getattr(point, name) for point in self._history] for name in names}

    async def _snapshot(self, point: HistoryPoint) -> dict[str, Any]:
        state, reason = await self._state()
        inspection = await self._inspect()
        switching = as_switching(self._engine)
        return {
            "interval_s": self.interval_s,
            "model": self._engine.model_name,
            "models": [] if switching is None else list(switching.aliases),
            "state": state,
            "reason": reason,
            "num_active_requests": self._metrics.num_active,
            "point": attrs.asdict(point),
            "stats": attrs.asdict(self._engine.stats),
            "latency": {
                name: attrs.asdict(latency.observe()) for name, latency in self._latencies.items()
            },
            "inspection": None if inspection is None else attrs.asdict(inspection),
            "inspection_age_s": None
            if inspection is None
            else round(time.monotonic() - self._inspected_s, 1),
        }

    async def _state(self) -> tuple[str, str]:
        """What a request would get now: `SERVING`, or the code of the error and its message."""
        try:
            await self._check_serving()
        except (ApiError, EngineError) as error:
            api_error = as_api_error(error)
            return api_error.code or str(api_error.status), api_error.message
        return SERVING, ""

    async def _inspect(self) -> EngineInspection | None:
        """The core's latest answer, which is older than a second while it compiles.

        It is asked again once it has answered. None where its last answer was an error, or of a
        model that is no longer active.
        """
        if not isinstance(self._engine, InspectableEngine):
            return None
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask(self._engine))
        await asyncio.wait((self._asked,), timeout=self.interval_s / 2)
        if self._asked.done():
            asked, self._asked = self._asked, None
            if not asked.cancelled():
                asked.result()
        return self._inspection if self._inspected_model == self._engine.model_name else None

    async def _ask(self, engine: InspectableEngine) -> None:
        """Note the answer of the core when it comes; none where it cannot answer."""
        model = self._engine.model_name
        try:
            inspection = await engine.inspect()
        except EngineError:
            self._inspection = None
        else:
            self._inspection, self._inspected_model = inspection, model
            self._inspected_s = time.monotonic()


def event(name: str, content: dict[str, Any]) -> str:
    """A server-sent event with ``content`` as JSON, which has no NaN: null stands for it."""
    text = json.dumps(_finite(content), separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value
