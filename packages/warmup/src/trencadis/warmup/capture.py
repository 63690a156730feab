"""Recording graphs within a budget that what stays captured never exceeds.

Two passes (seed 002): each phase within its share, prompts first; then what is left over, to
whichever phase still has graphs. A graph is tried only where the least it is expected to take
fits, and measured when it is there. One that turns out not to fit is released at once and never
captured again; one that is past its phase's share alone is set aside, counted in no share, until
the second pass shows whether it can stay. So decisions are mostly those of a packing in the same
order with perfect knowledge. Where much is left in the end and predictions were rough, those that
they have refused get one more look.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.graph_cost import GraphCostModel
from trencadis.warmup.log_lines import bucket_line, format_bytes, shape_words
from trencadis.warmup.memory_plan import GraphBudget
from trencadis.warmup.report import CaptureReport, GraphOutcome, GraphStatus
from trencadis.warmup.runtime import GraphRuntime, Phase
from trencadis.warmup.strategies import Order

logger = logging.getLogger("trencadis.warmup")

_WORTH_A_DOUBT = 0.05
"""Share of the budget that must be unused for predictions that were rough to be doubted."""


class _Pass(enum.Enum):
    """What a graph may take: the rest of its phase's share, or of the whole; then once more,
    where a prediction that has proved rough may have refused what fits."""

    SHARES = enum.auto()
    WHOLE = enum.auto()
    DOUBT = enum.auto()


class GraphCapture:
    """One capture of the graphs of both phases: iterate over `steps`, then take the `report`.

    Closing the iterator early is safe: what is captured by then stays within the budget.
    ``clock`` gives seconds.
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
        self._runtime = runtime
        self._budget = budget
        self._clock = clock
        self._queues = {phase: _Queue(buckets[phase], orders[phase]) for phase in Phase}
        self._used = dict.fromkeys(Phase, 0)
        self._unreturned = 0
        self._aside: dict[tuple[Phase, Bucket], GraphOutcome] = {}
        self._outcomes: list[GraphOutcome] = []

    @property
    def num_buckets(self) -> int:
        return sum(queue.total for queue in self._queues.values())

    @property
    def report(self) -> CaptureReport:
        """What has been decided so far."""
        return CaptureReport(self._budget.total, tuple(self._outcomes))

    def steps(self) -> Generator[GraphOutcome, None, None]:
        """Capture graph by graph; yields each bucket's outcome once, when it is final.

        An error that the runtime raises is passed on.
        """
        logger.info(self._budget.describe())
        told = 0
        try:
            for _ in self._passes():
                yield from self._outcomes[told:]
                told = len(self._outcomes)
        finally:
            self._release_aside(keep=0)
        for phase in Phase:
            logger.info(self.report.summary(phase, self._queues[phase].total))

    def _passes(self) -> Iterator[None]:
        shares = {Phase.PROMPT: self._budget.prompt, Phase.DECODE: self._budget.decode}
        for phase, share in shares.items():
            for bucket in self._queues[phase].undecided():
                self._try(phase, bucket, min(share - self._used[phase], self._left), _Pass.SHARES)
                yield
        for phase in Phase:
            for bucket in self._queues[phase].undecided():
                waiting = self._aside.pop((phase, bucket), None)
                if waiting is not None:
                    self._settle(waiting, fits=waiting.used <= self._left)
                else:
                    self._try(phase, bucket, self._left, _Pass.WHOLE)
                yield
        for phase in Phase:
            for bucket in self._queues[phase].undecided():
                self._try(phase, bucket, self._left, _Pass.DOUBT)
                yield

    @property
    def _left(self) -> int:
        """Bytes that no kept graph takes; graphs set aside give way."""
        return self._budget.total - self._unreturned - sum(self._used.values())

    def _try(self, phase: Phase, bucket: Bucket, left: int, during: _Pass) -> None:
        """Capture what should fit into ``left`` bytes; only the last refusal is final."""
        queue = self._queues[phase]
        predicted = int(queue.costs.at_least(bucket))
        if during is _Pass.DOUBT and left > _WORTH_A_DOUBT * self._budget.total:
            predicted = int(queue.costs.at_least_in_doubt(bucket))
        if predicted > left or left <= 0:
            if during is _Pass.DOUBT:
                self._decide(GraphOutcome(phase, bucket, GraphStatus.SKIPPED, predicted))
            return
        unknown = not queue.costs.knows(bucket)
        if during is _Pass.SHARES and unknown and self._is_crowded(phase):
            # A second guess past the share would have to give way to the first, and what has been
            # released is not captured again.
            return
        if queue.costs.is_sure_of(bucket):
            # What waits gives way beforehand to a cost that is sure, to any other only when it is
            # seen to fit: else it would have been released for nothing.
            self._release_aside(keep=self._left - predicted)
        outcome = self._capture(phase, bucket, predicted)
        queue.learn(bucket, outcome.used)
        if outcome.used <= left:
            self._release_aside(keep=self._left - outcome.used)
            self._settle(outcome, fits=outcome.used <= self._left)
        elif during is _Pass.SHARES and outcome.used <= self._left - self._set_aside:
            # Past the share, within the whole: it may have what the other phase leaves over.
            self._aside[phase, bucket] = outcome
        else:
            self._settle(outcome, fits=False)

    def _capture(self, phase: Phase, bucket: Bucket, predicted: int) -> GraphOutcome:
        queue = self._queues[phase]
        free, started = self._runtime.free_memory(), self._clock()
        stage = f"Graph/{phase.value}"
        logger.info(bucket_line(stage, queue.position, queue.total, bucket, free))
        self._runtime.capture(phase, bucket)
        self._runtime.synchronize()
        used = max(0, free - self._runtime.free_memory())
        seconds = self._clock() - started
        return GraphOutcome(phase, bucket, GraphStatus.CAPTURED, predicted, used, seconds)

    def _settle(self, outcome: GraphOutcome, *, fits: bool) -> None:
        """Keep a measured graph, or release it, counting what does not come back as spent."""
        if fits:
            self._used[outcome.phase] += outcome.used
            self._decide(outcome)
            return
        free = self._runtime.free_memory()
        self._runtime.release(outcome.phase, outcome.bucket)
        self._runtime.synchronize()
        self._unreturned += max(0, outcome.used - (self._runtime.free_memory() - free))
        logger.info(
            "[Warmup][Graph/%s] %s took %s, predicted at least %s: released",
            outcome.phase.value,
            shape_words(outcome.bucket),
            format_bytes(outcome.used),
            format_bytes(outcome.predicted),
        )
        self._decide(attrs.evolve(outcome, status=GraphStatus.RELEASED))

    def _is_crowded(self, phase: Phase) -> bool:
        """Whether a graph as large as one of this phase that waits would have no room beside it."""
        waiting = [outcome.used for outcome in self._aside.values() if outcome.phase is phase]
        return bool(waiting) and self._left - self._set_aside < max(waiting)

    @property
    def _set_aside(self) -> int:
        return sum(outcome.used for outcome in self._aside.values())

    def _release_aside(self, keep: int) -> None:
        """Release graphs set aside, the last first, until they take no more than ``keep`` bytes."""
        while self._aside and self._set_aside > keep:
            self._settle(self._aside.popitem()[1], fits=False)

    def _decide(self, outcome: GraphOutcome) -> None:
        self._queues[outcome.phase].decided.add(outcome.bucket)
        self._outcomes.append(outcome)


class _Queue:
    """The buckets of one phase in the order of their capture, and what their graphs cost."""

    def __init__(self, buckets: Iterable[Bucket], order: Order) -> None:
        candidates = list(dict.fromkeys(buckets))
        self.total = len(candidates)
        self.costs = GraphCostModel(candidates)
        self.decided: set[Bucket] = set()
        self._order = order
        self._queue = order(candidates, self.costs.expected)
        self.position = 0
        """Of the bucket that was last given out, from 1."""

    def undecided(self) -> Iterator[Bucket]:
        """Go through the queue once, past what has been decided."""
        self.position = 0
        while self.position < self.total:
            self.position += 1
            bucket = self._queue[self.position - 1]
            if bucket not in self.decided:
                yield bucket

    def learn(self, bucket: Bucket, cost: int) -> None:
        """Costs known better may change the order of what is still to come.

        It is renewed whenever twice as many are known, so that it costs little in the end.
        """
        self.costs.observe(bucket, cost)
        known = self.costs.num_measured
        if known & (known - 1) == 0:
            rest = self._queue[self.position :]
            self._queue[self.position :] = self._order(rest, self.costs.expected)
