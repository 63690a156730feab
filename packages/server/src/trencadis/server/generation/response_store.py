"""Responses that clients ask for again: in memory, each for its API key, bounded in bytes and time.

vLLM keeps them for ever, and for every client (``VLLM_ENABLE_RESPONSES_API_STORE``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import attrs

LEAST_BYTES = 1024
"""What a response counts at least, so that there is a bound of their number, too."""

END_BYTES = 512
"""What an unfinished response counts besides, so that an error, as its end, has a place."""

UNFINISHED = ("queued", "in_progress")
"""The states of a response that is still made."""


@attrs.define(eq=False)
class Run:
    """What makes a response in the background. Each is equal to itself alone."""

    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """End it, if it has begun."""
        if self.task is not None:
            self.task.cancel()


@attrs.frozen(eq=False)
class StoredResponse:
    """A response of the API key with the name ``owner``, "" without keys.

    ``content``: the response as JSON. ``conversation``: a JSON list of the items that a later
    request continues, the response's own among them. ``run``: what makes a response in the
    background.
    """

    owner: str
    response_id: str
    status: str
    content: bytes
    conversation: bytes = b"[]"
    run: Run | None = None
    expires_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """What it counts."""
        num_bytes = len(self.content) + len(self.conversation)
        return max(LEAST_BYTES, num_bytes + END_BYTES * self.is_unfinished)

    @property
    def is_unfinished(self) -> bool:
        """Whether it is still made; as long it stays in the store."""
        return self.status in UNFINISHED


class ResponseStore:
    """Responses of at most ``max_bytes``, each for ``ttl_s`` seconds after it has ended.

    Those that are still made have at most half of the bytes, those of one API key a quarter, and
    stay. Without a place for another, the owner of the most bytes of finished ones loses the
    oldest of them. ``clock`` counts seconds.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._finished: dict[str, dict[str, StoredResponse]] = {}
        """The finished responses of each owner, those first that expire first."""
        self._num_bytes: Counter[str] = Counter()
        """Of the finished ones of each owner."""
        self._unfinished: dict[tuple[str, str], StoredResponse] = {}
        self._num_unfinished_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """What all responses count together."""
        return self._num_bytes.total() + self._num_unfinished_bytes.total()

    @property
    def unfinished(self) -> tuple[StoredResponse, ...]:
        """The responses that are still made."""
        return tuple(self._unfinished.values())

    def num_unfinished(self, owner: str) -> int:
        """How many responses of an owner are still made."""
        return sum(each == owner for each, _ in self._unfinished)

    def unfinished_share(self, owner: str) -> int:
        """Bytes that unfinished responses of an owner may have."""
        return self._max_bytes // (4 if owner else 2)

    def unfinished_room(self, owner: str) -> int:
        """Bytes that an owner's next unfinished response may have."""
        own = self.unfinished_share(owner) - self._num_unfinished_bytes[owner]
        return min(own, self._max_bytes // 2 - self._num_unfinished_bytes.total())

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of an owner; None for one that is not there, or is another's."""
        self._drop_expired()
        unfinished = self._unfinished.get((owner, response_id))
        return unfinished or self._finished.get(owner, {}).get(response_id)

    def put(self, response: StoredResponse) -> bool:
        """Add a response, or replace a finished one of the same id. Returns whether it is kept.

        It is not where its id is that of an unfinished one, or where it is too large.
        """
        owner, response_id = response.owner, response.response_id
        if (owner, response_id) in self._unfinished:
            return False
        if response.is_unfinished and response.num_bytes > self.unfinished_room(owner):
            return False
        return self._replace(self.get(owner, response_id), response)

    def update(self, response: StoredResponse) -> bool:
        """Replace an unfinished response by what its own run has made. Returns whether it is kept.

        It is not where the other has ended or was removed, or where it is too large. An end with
        no more than `END_BYTES` besides what was there always has a place.
        """
        present = self._unfinished.get((response.owner, response.response_id))
        if present is None or present.run is not response.run:
            return False
        return self._replace(present, response)

    def remove(self, owner: str, response_id: str) -> None:
        """Remove a response, if it is there."""
        removed = self._unfinished.pop((owner, response_id), None)
        if removed is not None:
            self._num_unfinished_bytes[owner] -= removed.num_bytes
            return
        removed = self._finished.get(owner, {}).pop(response_id, None)
        if removed is None:
            return
        self._num_bytes[owner] -= removed.num_bytes
        if not self._finished[owner]:
            del self._finished[owner], self._num_bytes[owner]

    def _replace(self, present: StoredResponse | None, response: StoredResponse) -> bool:
        self._drop_expired()
        evicted = self._evicted_for(present, response)
        if evicted is None:
            return False
        for each in evicted if present is None else (*evicted, present):
            self.remove(each.owner, each.response_id)
        owner, response_id = response.owner, response.response_id
        run = response.run if response.is_unfinished else None
        kept = attrs.evolve(response, run=run, expires_s=self._clock() + self._ttl_s)
        if kept.is_unfinished:
            self._unfinished[owner, response_id] = kept
            self._num_unfinished_bytes[owner] += kept.num_bytes
        else:
            self._finished.setdefault(owner, {})[response_id] = kept
            self._num_bytes[owner] += kept.num_bytes
        return True

    def _evicted_for(
        self, present: StoredResponse | None, response: StoredResponse
    ) -> list[StoredResponse] | None:
        """What goes for a response that replaces ``present``; None where it has no place itself."""
        sizes = self._num_bytes.copy()
        if present is not None and not present.is_unfinished:
            sizes[present.owner] -= present.num_bytes
        if not response.is_unfinished:
            sizes[response.owner] += response.num_bytes
        excess = self.num_bytes + response.num_bytes - self._max_bytes
        excess -= 0 if present is None else present.num_bytes
        oldest = {
            owner: (each for each in responses.values() if each is not present)
            for owner, responses in self._finished.items()
        }
        evicted: list[StoredResponse] = []
        while excess > 0:
            owner = max(sizes, key=lambda each: sizes[each], default="")
            victim = next(oldest.get(owner, iter(())), None)
            if victim is None:
                return None
            evicted.append(victim)
            sizes[owner] -= victim.num_bytes
            excess -= victim.num_bytes
        return evicted

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for owner, responses in tuple(self._finished.items()):
            expired = []
            for response in responses.values():
                if response.expires_s > now_s:
                    break
                expired.append(response.response_id)
            for response_id in expired:
                self.remove(owner, response_id)
