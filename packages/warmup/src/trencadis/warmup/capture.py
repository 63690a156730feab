"""Captures graphs within a budget. The graphs that stay captured never exceed the budget.

Two passes (seed 002). In the first pass each phase may fill its share, prompts first. In the second
pass both phases may use what is left. A graph is captured only if the lower bound of its predicted
size fits; then its size is measured:

- It fits: it is kept.
- It exceeds its phase's share, but not the budget: it is provisional. It counts in no share until
  the second pass keeps or releases it.
- It does not fit: it is released at once and never captured again.

So the decisions are mostly those of a packing in the same order that knows every size. If the
predictions were inaccurate and much of the budget is unused, a last pass retries the graphs that
were skipped.

A host that serves while it warms up captures bucket by bucket, with `GraphCapture.capture_bucket`.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import ConfigError, InvalidAnswer
from trencadis.warmup.execution import RUNTIME_METHODS, read_clock, read_free_memory
from trencadis.warmup.graph_cost import GraphCostModel
from trencadis.warmup.log_lines import bucket_line, format_bytes, format_shape
from trencadis.warmup.memory_plan import GraphBudget
from trencadis.warmup.report import CaptureReport, GraphOutcome, GraphStatus
from trencadis.warmup.runtime import GraphRuntime, Phase
from trencadis.warmup.strategies import Order
from trencadis.warmup.validators import (
    as_buckets,
    function,
    instance_of,
    require_methods,
)

logger = logging.getLogger("trencadis.warmup")

_MIN_UNUSED_FOR_RETRY = 0.05
"""Inaccurate predictions are retried only if more than this share of the budget is unused."""


class _Pass(enum.Enum):
    """How much memory a graph may take."""

    SHARE = enum.auto()
    """What is left of its phase's share."""
    BUDGET = enum.auto()
    """What is left of the budget."""
    RETRY = enum.auto()
    """What is left of the budget, with a cautious prediction."""


class GraphCapture:
    """Captures the graphs of both phases: iterate over `steps`, then read `report`.

    The iterator may be closed early: the graphs captured until then stay within the budget.
    ``clock`` returns seconds. Raises `ConfigError` for wrong arguments, and `InvalidAnswer` if an
    order returns other buckets than it was given, here or in `steps`.
    """

    def __init__(
        self,
        runtime: GraphRuntime,
        buckets: Mapping[Phase, Iterable[Bucket]],
        orders: Mapping[Phase, Order],
        budget: GraphBudget,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_methods("runtime", runtime, (*RUNTIME_METHODS, "capture", "release"))
        instance_of(GraphBudget).checked("budget", budget)
        function.checked("clock", clock)
        for name, of_phase in (("buckets", buckets), ("orders", orders)):
            instance_of(Mapping).checked(name, of_phase)
            if not all(phase in of_phase for phase in Phase):
                raise ConfigError(f"{name} has the keys {list(of_phase)}: pass both phases")
        self._runtime = runtime
        self._budget = budget
        self._clock = clock
        self._queues = {phase: _CaptureQueue(buckets[phase], orders[phase]) for phase in Phase}
        self._used = dict.fromkeys(Phase, 0)
        self._not_returned = 0
        self._provisional: dict[tuple[Phase, Bucket], GraphOutcome] = {}
        self._outcomes: list[GraphOutcome] = []

    @property
    def num_buckets(self) -> int:
        """Buckets of both phases."""
        return sum(queue.total for queue in self._queues.values())

    @property
    def report(self) -> CaptureReport:
        """The outcomes so far. A graph whose release failed counts as captured."""
        return CaptureReport(self._budget.total, tuple(self._outcomes))

    def steps(self) -> Generator[GraphOutcome, None, None]:
        """Capture graph by graph. Yields the outcome of each bucket once, when it is final.

        An error of the runtime is passed on; `report` then has every graph that stays captured. A
        graph whose size cannot be measured is released.
        """
        logger.info(self._budget.describe())
        num_yielded = len(self._outcomes)
        try:
            for _ in self._passes():
                yield from self._outcomes[num_yielded:]
                num_yielded = len(self._outcomes)
        finally:
            self._release_provisional()
        for phase in Phase:
            logger.info(self.report.summary(phase, self._queues[phase].total))

    def capture_bucket(self, phase: Phase, bucket: Bucket) -> GraphOutcome | None:
        """Capture the graph of this bucket now, within its phase's share; returns the outcome.

        None if the graph was decided before, or is not expected to fit: `steps` may capture it
        later, with what is left of the budget. An error of the runtime is passed on. Raises
        `ConfigError` for a bucket of neither phase.
        """
        instance_of(Phase).checked("phase", phase)
        queue = self._queues[phase]
        if not queue.has(bucket):
            raise ConfigError(f"{bucket!r} is not a {phase.value} bucket of this capture")
        if bucket in queue.decided:
            return None
        queue.position = len(queue.decided) + 1
        num_outcomes = len(self._outcomes)
        self._try(phase, bucket, self._left_of_share(phase), _Pass.BUDGET)
        return next(iter(self._outcomes[num_outcomes:]), None)

    def _passes(self) -> Iterator[None]:
        for phase in Phase:
            for bucket in self._queues[phase].undecided():
                self._try(phase, bucket, self._left_of_share(phase), _Pass.SHARE)
                yield
        for phase in Phase:
            for bucket in self._queues[phase].undecided():
                provisional = self._provisional.pop((phase, bucket), None)
                if provisional is not None:
                    self._keep_or_release(provisional, fits=provisional.used <= self._unused)
                else:
                    self._try(phase, bucket, self._unused, _Pass.BUDGET)
                yield
        for phase in Phase:
            for bucket in self._queues[phase].undecided():
                self._try(phase, bucket, self._unused, _Pass.RETRY)
                yield

    def _left_of_share(self, phase: Phase) -> int:
        return min(self._budget.share(phase) - self._used[phase], self._unused)

    @property
    def _unused(self) -> int:
        """Bytes of the budget that no kept graph takes. Provisional graphs do not count."""
        return self._budget.total - self._not_returned - sum(self._used.values())

    @property
    def _provisional_bytes(self) -> int:
        return sum(outcome.used for outcome in self._provisional.values())

    def _try(self, phase: Phase, bucket: Bucket, limit: int, during: _Pass) -> None:
        """Capture the graph if it should fit into ``limit`` bytes. Only `_Pass.RETRY` skips it."""
        queue = self._queues[phase]
        predicted = int(queue.costs.lower_bound(bucket))
        if during is _Pass.RETRY and limit > _MIN_UNUSED_FOR_RETRY * self._budget.total:
            predicted = int(queue.costs.cautious_lower_bound(bucket))
        if predicted > limit or limit <= 0:
            if during is _Pass.RETRY:
                self._record(GraphOutcome(phase, bucket, GraphStatus.SKIPPED, predicted))
            return
        has_fit = queue.costs.has_fit_for(bucket)
        if during is _Pass.SHARE and not has_fit and self._is_crowded(phase):
            # A second provisional graph would displace the first, and a released graph is never
            # captured again.
            return
        if queue.costs.is_accurate_for(bucket):
            # Provisional graphs make space before the capture only if the prediction is accurate.
            # Otherwise they are released after the measurement, never without need.
            self._shrink_provisional(max_bytes=self._unused - predicted)
        outcome = self._capture(phase, bucket, predicted)
        if outcome.used <= limit:
            try:
                self._shrink_provisional(max_bytes=self._unused - outcome.used)
            except BaseException:
                self._release(outcome)
                raise
            self._keep_or_release(outcome, fits=outcome.used <= self._unused)
        elif during is _Pass.SHARE and outcome.used <= self._unused - self._provisional_bytes:
            self._provisional[phase, bucket] = outcome
        else:
            self._keep_or_release(outcome, fits=False)
        # Last, because an order that raises must leave no captured graph without its outcome.
        queue.observe(bucket, outcome.used)

    def _capture(self, phase: Phase, bucket: Bucket, predicted: int) -> GraphOutcome:
        queue = self._queues[phase]
        free, started = read_free_memory(self._runtime), read_clock(self._clock)
        stage = f"Graph/{phase.value}"
        logger.info(bucket_line(stage, queue.position, queue.total, bucket, free))
        self._runtime.capture(phase, bucket)
        try:
            self._runtime.synchronize()
            # Memory that something else gives back meanwhile does not enlarge the budget.
            used = max(0, free - read_free_memory(self._runtime))
            seconds = read_clock(self._clock) - started
        except BaseException:
            self._release(GraphOutcome(phase, bucket, GraphStatus.CAPTURED, predicted))
            raise
        return GraphOutcome(phase, bucket, GraphStatus.CAPTURED, predicted, used, seconds)

    def _keep_or_release(self, outcome: GraphOutcome, *, fits: bool) -> None:
        """Keep a measured graph, or release it. Memory that release does not return is spent."""
        if fits:
            self._keep(outcome)
            return
        free = self._release(outcome)
        self._runtime.synchronize()
        self._not_returned -= min(outcome.used, read_free_memory(self._runtime) - free)
        logger.info(
            "[Warmup][Graph/%s] %s took %s, predicted at least %s: released",
            outcome.phase.value,
            format_shape(outcome.bucket),
            format_bytes(outcome.used),
            format_bytes(outcome.predicted),
        )

    def _keep(self, outcome: GraphOutcome) -> None:
        self._used[outcome.phase] += outcome.used
        self._record(outcome)

    def _release(self, outcome: GraphOutcome) -> int:
        """Release a graph; returns the free memory before. Its memory counts as not returned yet.

        If that fails, the host may still replay the graph, so it counts as captured.
        """
        try:
            free = read_free_memory(self._runtime)
            self._runtime.release(outcome.phase, outcome.bucket)
        except BaseException:
            self._keep(outcome)
            raise
        self._not_returned += outcome.used
        self._record(attrs.evolve(outcome, status=GraphStatus.RELEASED))
        return free

    def _is_crowded(self, phase: Phase) -> bool:
        """Whether another graph as large as a provisional one of this phase would not fit."""
        sizes = [outcome.used for outcome in self._provisional.values() if outcome.phase is phase]
        return bool(sizes) and self._unused - self._provisional_bytes < max(sizes)

    def _shrink_provisional(self, max_bytes: int) -> None:
        """Release provisional graphs, last first, until they take at most ``max_bytes``."""
        while self._provisional and self._provisional_bytes > max_bytes:
            self._keep_or_release(self._provisional.popitem()[1], fits=False)

    def _release_provisional(self) -> None:
        """Release all provisional graphs, last first. An error does not keep the others."""
        with ExitStack() as stack:
            for outcome in self._provisional.values():
                stack.callback(self._keep_or_release, outcome, fits=False)
            self._provisional.clear()

    def _record(self, outcome: GraphOutcome) -> None:
        self._queues[outcome.phase].decided.add(outcome.bucket)
        self._outcomes.append(outcome)


class _CaptureQueue:
    """The buckets of one phase in the order of their capture, with their predicted sizes.

    ``position`` is that of the bucket that `undecided` yielded last, counted from 1.
    """

    def __init__(self, buckets: Iterable[Bucket], order: Order) -> None:
        candidates = list(dict.fromkeys(as_buckets("buckets", buckets)))
        self.total = len(candidates)
        self.costs = GraphCostModel(candidates)
        self.decided: set[Bucket] = set()
        self.position = 0
        self._order = order
        self._candidates = frozenset(candidates)
        self._queue = self._sorted(candidates)

    def has(self, bucket: object) -> bool:
        """Whether this is a bucket of the phase."""
        return isinstance(bucket, Bucket) and bucket in self._candidates

    def undecided(self) -> Iterator[Bucket]:
        """Iterate once over the queue, without the decided buckets."""
        self.position = 0
        while self.position < self.total:
            self.position += 1
            bucket = self._queue[self.position - 1]
            if bucket not in self.decided:
                yield bucket

    def observe(self, bucket: Bucket, cost: int) -> None:
        """Add a measured graph, and sort the rest of the queue by the better predictions.

        Sorts only when the number of measurements is a power of two, to limit the total time.
        """
        self.costs.observe(bucket, cost)
        measured = self.costs.num_measured
        if measured & (measured - 1) == 0:
            self._queue[self.position :] = self._sorted(self._queue[self.position :])

    def _sorted(self, buckets: list[Bucket]) -> list[Bucket]:
        ordered = self._order(list(buckets), self.costs.expected)
        is_list = isinstance(ordered, list) and len(ordered) == len(buckets)
        of_buckets = is_list and all(isinstance(bucket, Bucket) for bucket in ordered)
        if not of_buckets or set(ordered) != set(buckets):
            raise InvalidAnswer(
                f"the capture order returned {ordered!r}: return the given buckets as a list"
            )
        return ordered
