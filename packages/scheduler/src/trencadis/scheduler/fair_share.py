"""Fair shares: clients that wait get equal service, whatever one of them sends.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv 2401.00588, algorithm 2): a counter for each client grows with the service that it gets, and
of the clients that wait, the one with the lowest counter is served next. A client that was idle
begins with the lowest counter of those that wait, so it cannot save service up. It begins no lower
than the counter of any client that was served in turn: with priorities, a client that waits behind
all others keeps its low counter, and new clients of a high priority must not begin there.

`GroupStates` owns the shares. `AdmissionControl` and `StepResultProcessor` charge for service.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import attrs

OUTPUT_WEIGHT = 2
"""Service of an output token. That of a computed prompt token is 1: the weights of the paper."""

RESERVE = 8
"""The last of so many parts of the running limit is for clients that run less than their share."""

RECENT_S = 60.0
"""How long a client without requests counts as one that may return, in seconds."""

MAX_IDLE_CLIENTS = 1024
"""Most clients without requests whose service is remembered."""


@attrs.define(eq=False)
class Client:
    """A client that has sent requests.

    ``service``: its counter. ``num_waiting``: its groups that have not been admitted.
    ``num_groups``: its groups that have not finished. ``seen_s``: when its last request came.
    ``first_arrival``: the number of its first request, counting those of all clients;
    ``last_start``: how many had come when a group of it was last admitted; None before that.
    """

    name: str = ""
    service: int = 0
    num_waiting: int = 0
    num_groups: int = 0
    seen_s: float = -math.inf
    first_arrival: int = 0
    last_start: int | None = None


class ClientShares:
    """The clients that have requests, and those whose counter is still above that of others.

    While two clients wait, the service that each gets differs by at most twice that of the largest
    batch: ``2 * max(longest prompt, OUTPUT_WEIGHT * output tokens of all running sequences)`` (the
    paper's theorem 4.8, without preemption and priorities).

    Of the clients without a request at most `MAX_IDLE_CLIENTS` are remembered, those that came
    last, however many names there are. One that is forgotten begins anew.
    """

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._floor = 0
        """The highest counter with which a client was served in turn."""
        self._last_waiting = Client()
        """The client whose last waiting group left the queue most recently."""

    def enter_queue(self, name: str, now_s: float, arrival: int) -> Client:
        """A group of the client ``name`` begins to wait: request number ``arrival`` of all."""
        client = self._clients.get(name)
        if client is None or not client.num_waiting:
            level = self._level()
            if client is None:
                self._forget_idle(level, now_s)
                client = self._clients[name] = Client(name, first_arrival=arrival)
            client.service = max(client.service, level)
        client.num_waiting += 1
        client.num_groups += 1
        client.seen_s = now_s
        return client

    def leave_queue(self, client: Client) -> None:
        """A group of a client waits no longer: it was admitted or aborted."""
        client.num_waiting -= 1
        if not client.num_waiting:
            self._last_waiting = client

    def serve_in_turn(self, client: Client) -> None:
        """A group is admitted that was first in the queue. Its client is charged afterwards."""
        self._floor = max(self._floor, client.service)

    def remove(self, client: Client) -> None:
        """A group of a client has ended. It does not wait."""
        client.num_groups -= 1

    def may_wait(self, name: str, num_places: int, others: Sequence[str] = ()) -> bool:
        """Whether the client ``name`` has less than its share of a full queue of ``num_places``.

        Each of n clients that wait has the n-th part of it, so a queue that one of them has filled
        is not closed to the others. Never true for a client that waits alone. ``others``: the
        clients of requests that wait elsewhere, one for each request.
        """
        num_waiting = Counter(others)
        for client in self._clients.values():
            if client.num_waiting:
                num_waiting[client.name] += client.num_waiting
        num_own = num_waiting[name]
        num_clients = len(num_waiting)
        return num_own < num_places // (num_clients + (num_own == 0)) and num_clients > 0

    def num_active(self, now_s: float) -> int:
        """Clients that have requests, or sent some in the last `RECENT_S` seconds."""
        return sum(_is_active(client, now_s) for client in self._clients.values())

    def _level(self) -> int:
        """The counter from which a client goes on that was idle. It never falls."""
        waiting = [client.service for client in self._clients.values() if client.num_waiting]
        lowest = min(waiting) if waiting else self._last_waiting.service
        return max(self._floor, lowest)

    def _forget_idle(self, level: int, now_s: float) -> None:
        """Forget clients that are not active and whose counter would be ``level`` on return.

        Of the others without requests those that came first, once there are `MAX_IDLE_CLIENTS`:
        half as many are left, because the requests of thousands may have ended since.
        """
        idle = [
            name
            for name, client in self._clients.items()
            if client.service <= level and not _is_active(client, now_s)
        ]
        for name in idle:
            del self._clients[name]
        rest = [client for client in self._clients.values() if not client.num_groups]
        if len(rest) >= MAX_IDLE_CLIENTS:  # half of them, so that the next names cost no sorting
            rest.sort(key=attrgetter("seen_s"))
            for client in rest[: -(MAX_IDLE_CLIENTS // 2)]:
                del self._clients[client.name]


def _is_active(client: Client, now_s: float) -> bool:
    return client.num_groups > 0 or now_s - client.seen_s < RECENT_S
