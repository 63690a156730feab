"""The limits of a batch for a scheduler that is not ours: running limit, victims, orders, heat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic

import attrs

from trencadis.scheduler.clock import SteadyClock
from trencadis.scheduler.config import SchedulerConfig, SettingsInForce
from trencadis.scheduler.control import BatchControl, BatchControlResult, ControlHandler
from trencadis.scheduler.errors import ConfigError, HostError, StepOrderError
from trencadis.scheduler.running_limit import BatchHost, RunningLimit
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.victims import Victim, VictimT
from trencadis.scheduler.validators import instance_of, integer, number

_VICTIM = tuple(name for name in vars(Victim) if not name.startswith("_"))
_NUM_TOKENS, _SECONDS = integer(0), number(0)


@attrs.frozen
class BatchLimits:
    """The limits of a step: running sequences, and tokens of all prefill chunks together.

    The running sequences are within ``max_num_seqs``; admit no more than up to it.
    """

    max_num_seqs: int
    max_prefill_tokens: int


class BatchLimiter(Generic[VictimT]):
    """Limits the batch of a host: by orders of an administrator, by temperature and power.

    `Scheduler` limits its own batch by the same parts. Call `begin_step` before each step of the
    host. A batch above a limit that has fallen is cut at once, in the policy's order of victims.

    Args:
        host: its running requests, and how it preempts one.
        max_num_seqs: the most sequences that the host can run at once. An order above is rejected.
        max_num_batched_tokens: the token budget of a step of the host.
        thermal: limits by temperature or power; None for orders alone.
        clock: returns seconds. A step back counts as no time.

    Raises `ConfigError` for a wrong argument. Not thread-safe, except for `control`.
    """

    def __init__(
        self,
        host: BatchHost[VictimT],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        thermal: ThermalGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(host, type) or not callable(getattr(host, "preempt", None)):
            raise ConfigError(
                f"host {host!r} has no running requests and no preempt(victim): pass an object "
                "with both",
                "host",
            )
        if thermal is not None:
            instance_of(ThermalGuard).checked("thermal", thermal)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._settings = settings = SettingsInForce(config)
        self._clock = SteadyClock(clock)
        self._host = checked = _CheckedHost(host)
        self._limit = RunningLimit(settings, checked, thermal)
        self._control = ControlHandler(
            settings, checked, self._limit, thermal, num_slots=config.max_num_seqs
        )
        self._num_prefill_tokens = 0
        self._is_deciding = False

    @property
    def has_orders(self) -> bool:
        """Whether the next step carries out an order: begin one, though there is nothing to run."""
        return self._control.has_orders

    def begin_step(
        self, *, num_prefill_tokens: int = 0, longest_wait_s: float = 0.0
    ) -> BatchLimits:
        """The limits of the next step, after victims were preempted so that they hold.

        A step that carries out an order starts nothing: ``max_num_seqs`` is what runs. The policy
        ``two_phase`` reads the arguments: the tokens of the prefill chunks of the step before, and
        the seconds since the oldest request came that has no token yet.

        Raises `ConfigError` for a wrong argument, `HostError` for a host that does not do what
        `BatchHost` says, `StepOrderError` for a call from inside another. An error of the host is
        passed on.
        """
        num_tokens = _NUM_TOKENS.checked("num_prefill_tokens", num_prefill_tokens)
        wait_s = _SECONDS.checked("longest_wait_s", longest_wait_s)
        if self._is_deciding:
            raise StepOrderError(
                "begin_step() was called from a policy or from preempt(): call it once before each "
                "step"
            )
        self._is_deciding = True
        try:
            return self._decide(num_tokens, wait_s)
        finally:
            self._is_deciding = False

    def control(self, control: BatchControl) -> Future[BatchControlResult]:
        """Queue an order, from any thread; the next step carries it out.

        Or the one after that, if the last step carried out another. The future raises
        `ControlError`, naming the field, for one that cannot be applied.
        """
        return self._control.put(control)

    def abort_and_swap(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests in the next step; returns the ids of those that run.

        See `Scheduler.abort_and_swap`.
        """
        return self._control.request_preemption(request_ids)

    def _decide(self, num_prefill_tokens: int, longest_wait_s: float) -> BatchLimits:
        now_s, _ = self._clock.read()
        self._num_prefill_tokens += num_prefill_tokens
        view = _View(self._settings, self._limit, self._num_prefill_tokens, longest_wait_s, now_s)
        self._limit.ask_policy(view)
        is_ordered = self._control.apply(now_s, view)
        limit, num_running = self._limit.value(now_s), self._limit.num_running_seqs
        if num_running > limit:
            for victim in self._limit.victims_of_policy(num_running - limit):
                self._host.preempt(victim)
        if is_ordered:
            limit = min(limit, self._limit.num_running_seqs)
        return BatchLimits(limit, self._limit.prefill_tokens())


@attrs.frozen
class _View(Generic[VictimT]):
    """What a thermal policy reads of the host."""

    _settings: SettingsInForce
    _limit: RunningLimit[VictimT]
    num_prefill_tokens: int
    longest_wait_s: float
    now_s: float

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self._settings.config

    @property
    def num_running_seqs(self) -> int:
        return self._limit.num_running_seqs


class _CheckedHost(Generic[VictimT]):
    """A host whose answers are checked, because others have written it."""

    def __init__(self, host: BatchHost[VictimT]) -> None:
        self._host = host
        self._known: set[type] = set()

    @property
    def running(self) -> list[VictimT]:
        """A copy: the host changes its own while it preempts."""
        running = list(self._host.running)
        for victim in running:
            if type(victim) not in self._known:
                self._check(victim)
        return running

    def preempt(self, victim: VictimT) -> None:
        self._host.preempt(victim)
        if any(running is victim for running in self._host.running):
            raise HostError(
                f"preempt() of {type(self._host).__name__} left request {victim.request_id!r} "
                "running: take it out of running before it returns"
            )

    def _check(self, victim: VictimT) -> None:
        missing = [name for name in _VICTIM if not hasattr(victim, name)]
        if missing:
            raise HostError(
                f"a running request of {type(self._host).__name__} is of type "
                f"{type(victim).__name__}, which has no {', '.join(missing)}: give it the "
                "attributes of Victim"
            )
        self._known.add(type(victim))
