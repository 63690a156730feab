"""Which request waits for which model, and when a switch may begin. No engine and no clock.

The rules of ``--auto-switch``:

- A request for the active model is served at once, unless a switch is under way.
- The request that has waited longest chooses the next model. So each model is reached after at most
  as many switches as there are other models. A model that is still prepared is left out: its
  download may take hours.
- A model stays active for ``min_stay_s``, counted from the end of its switch, and also after one
  that failed, once it had begun to load. So clients that alternate between models cannot make the
  server spend its time on loading them. An order that loads nothing does not prolong it.
- A model that fails to load is tried again after twice that time, then after four times, up to an
  hour; after an hour at once where its load ended the core, because the restarts of a core are
  counted. Until then requests for it are rejected; parked ones wait. An engine that cannot switch
  now, such as one that sleeps, is not a failure of the model.
- At most ``max_waiting`` requests wait, and of a client with a name at most half as many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from typing import TypeAlias

import attrs


class QueueFull(Exception):
    """As many requests wait already as may, or as may of one client."""


@attrs.define(eq=False)
class WaitingRequest:
    """A request for ``alias``; None for the model that is active, whichever it is.

    ``number`` is its place in the order of arrival, which it keeps where it waits again.
    ``client``: with whose requests it shares a part of the queue; "" for none.
    """

    alias: str | None
    number: int | None = None
    client: str = ""


@attrs.frozen
class _Parked:
    """Requests of ``alias`` that the engine keeps until their model is active again."""

    alias: str
    number: int


@attrs.frozen
class Failure:
    """The last switches to a model failed. ``reason``: empty where the model was not at fault."""

    num_failures: int
    not_before_s: float
    reason: str = ""


_MAX_RETRY_S = 3600.0

_MAX_DOUBLINGS = 12
"""With these, any wait is longer than the longest; many more would overflow."""

_Waiting: TypeAlias = "WaitingRequest | _Parked"


class SwitchQueue:
    """The requests that wait for a model. Times are seconds of the caller's clock."""

    def __init__(self, active: str, *, min_stay_s: float, max_waiting: int) -> None:
        self.active = active
        self.is_switching = False
        self._min_stay_s = min_stay_s
        self._max_waiting = max_waiting
        self._stays_until_s = -math.inf
        self._waiting: list[WaitingRequest] = []
        self._parked: list[_Parked] = []
        self._failures: dict[str, Failure] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def count_by_model(self) -> Mapping[str, int]:
        """How many requests wait for each model; those for any wait for the active one."""
        return Counter(request.alias or self.active for request in self._waiting)

    def arrive(self, request: WaitingRequest) -> bool:
        """Whether a request is served now; otherwise it waits. Raises `QueueFull`."""
        if request.number is None:
            request.number = self._next_number()
        if not self.is_switching and request.alias in (None, self.active):
            return True
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull
        num_own = sum(other.client == request.client for other in self._waiting)
        if request.client and num_own >= max(1, self._max_waiting // 2):
            raise QueueFull
        self._waiting.append(request)
        return False

    def leave(self, request: WaitingRequest) -> None:
        """A request waits no longer; one that does not wait is ignored."""
        if request in self._waiting:
            self._waiting.remove(request)

    def wanted(self, now_s: float) -> list[str]:
        """The models that a switch may load now, if it may begin; longest wait first."""
        others = [each for each in self._others() if self._not_before_s(each) <= now_s]
        return list(dict.fromkeys(each.alias or "" for each in sorted(others, key=_number)))

    def next_switch_s(self, now_s: float, preparing: Container[str] = ()) -> float | None:
        """Seconds until a switch may begin; None while none is needed or one is under way.

        ``preparing``: models to which none may begin yet.
        """
        others = [each for each in self._others() if each.alias not in preparing]
        if self.is_switching or not others:
            return None
        begins_s = max(self._stays_until_s, min(map(self._not_before_s, others)))
        return max(0.0, begins_s - now_s)

    def next_model(self, now_s: float, preparing: Container[str] = ()) -> str | None:
        """The model of the request that has waited longest for another one; None if none may."""
        wanted = [alias for alias in self.wanted(now_s) if alias not in preparing]
        return wanted[0] if wanted else None

    def begin(self, alias: str | None = None, now_s: float = math.inf) -> str:
        """Begin a switch to ``alias``, or to the model that is needed: now every request waits.

        Returns its alias. Raises `ValueError` where none is needed now.
        """
        target = self.next_model(now_s) if alias is None else alias
        if target is None:
            raise ValueError("no request waits for another model")
        self.is_switching = True
        return target

    def end(
        self, active: str, now_s: float, *, parked: str | None = None, has_loaded: bool = True
    ) -> list[WaitingRequest]:
        """A switch has ended with the model ``active``; returns the requests that it serves.

        ``parked``: the model of which requests were parked, None where there are none.
        ``has_loaded``: whether it has begun to load a model, after which the active one stays.
        """
        self.is_switching = False
        self.active = active
        if has_loaded:
            self._stays_until_s = now_s + self._min_stay_s
        self._failures.pop(active, None)
        self._parked = [group for group in self._parked if group.alias != active]
        if parked is not None and parked not in (group.alias for group in self._parked):
            self._parked.append(_Parked(parked, self._next_number()))
        return self._take(active, None)

    def refuse(
        self, alias: str, now_s: float, reason: str = "", *, ended_core: bool = False
    ) -> list[WaitingRequest]:
        """Take out the requests for a model that could not be loaded.

        Parked ones stay, last in the order: the engine still has them. ``reason``: what is wrong
        with the model; empty where the fault is another. ``ended_core``: its load ended the core.
        """
        known = self._failures.get(alias)
        num_failures = 1 if known is None else known.num_failures + 1
        doubled = 2.0 ** min(num_failures, _MAX_DOUBLINGS)
        wait_s = min(max(1.0, self._min_stay_s) * doubled, _MAX_RETRY_S)
        if ended_core:
            wait_s = _MAX_RETRY_S
        self._failures[alias] = Failure(num_failures, now_s + wait_s, reason)
        return self._take_refused(alias)

    def _take_refused(self, alias: str) -> list[WaitingRequest]:
        if any(group.alias == alias for group in self._parked):
            self._parked = [group for group in self._parked if group.alias != alias]
            self._parked.append(_Parked(alias, self._next_number()))
        return self._take(alias)

    def delay(self, alias: str, now_s: float) -> list[WaitingRequest]:
        """As `refuse`, where the engine could not switch now: no fault of the model.

        Parked ones wait for the minimum stay, and other requests may wait, too.
        """
        known = self._failures.get(alias)
        num_failures = 0 if known is None else known.num_failures
        self._failures[alias] = Failure(num_failures, now_s + max(1.0, self._min_stay_s))
        return self._take_refused(alias)

    def failure_of(self, alias: str | None, now_s: float) -> Failure | None:
        """Why requests for a model are rejected now, if they are."""
        failure = None if alias is None else self._failures.get(alias)
        if failure is None or not failure.reason or failure.not_before_s <= now_s:
            return None
        return failure

    @property
    def is_waited_for(self) -> bool:
        """Whether requests wait or are parked."""
        return bool(self._waiting or self._parked)

    def retry_after_s(self, now_s: float) -> int:
        """Seconds that a rejected client is told to wait: until the next switch may begin."""
        return math.ceil(max(1.0, self._stays_until_s - now_s))

    def _others(self) -> list[_Waiting]:
        """What waits for another model than the active one."""
        waiting: list[_Waiting] = [*self._waiting, *self._parked]
        return [each for each in waiting if each.alias not in (None, self.active)]

    def _take(self, *aliases: str | None) -> list[WaitingRequest]:
        taken = [request for request in self._waiting if request.alias in aliases]
        self._waiting = [request for request in self._waiting if request.alias not in aliases]
        return taken

    def _not_before_s(self, waiting: _Waiting) -> float:
        """When a switch for it may begin. Requests that may not wait for a model are rejected."""
        if not isinstance(waiting, _Parked) or waiting.alias not in self._failures:
            return -math.inf
        return self._failures[waiting.alias].not_before_s

    def _next_number(self) -> int:
        self._num_arrived += 1
        return self._num_arrived


def _number(waiting: _Waiting) -> int:
    return waiting.number or 0
