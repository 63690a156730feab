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

UNFINISHED = ("queued", "in_progress")
"""The states of a response that is still made."""


@attrs.frozen(eq=False)
class StoredResponse:
    """A response of the API key ``owner``, "" without keys.

    ``content``: the response as JSON. ``conversation``: a JSON list of the items that a later
    request continues, the response's own among them. ``run``: what makes a response in the
    background.
    """

    owner: str
    response_id: str
    status: str
    content: bytes
    conversation: bytes = b"[]"
    run: asyncio.Task[None] | None = None
    expires_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """What it counts."""
        return max(LEAST_BYTES, len(self.content) + len(self.conversation))

    @property
    def is_unfinished(self) -> bool:
        """Whether it is still made; as long it stays in the store."""
        return self.status in UNFINISHED


class ResponseStore:
    """Responses of at most ``max_bytes``, each for ``ttl_s`` seconds after it has ended.

    Without a place, the owner of the most bytes loses the oldest ones. ``clock`` counts seconds.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._by_owner: dict[str, dict[str, StoredResponse]] = {}
        """The responses of each owner, those first that expire first."""
        self._num_bytes: Counter[str] = Counter()
        self._unfinished: dict[tuple[str, str], StoredResponse] = {}

    @property
    def num_bytes(self) -> int:
        """What all responses count together."""
        return self._num_bytes.total()

    @property
    def unfinished(self) -> tuple[StoredResponse, ...]:
        """The responses that are still made."""
        return tuple(self._unfinished.values())

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of an owner; None for one that is not there, or is another's."""
        self._drop_expired()
        return self._by_owner.get(owner, {}).get(response_id)

    def put(self, response: StoredResponse) -> None:
        """Add a response, or replace that of the same id. One that is too large is not kept."""
        self._drop_expired()
        self.remove(response.owner, response.response_id)
        if response.num_bytes > self._max_bytes:
            return
        kept = attrs.evolve(response, expires_s=self._clock() + self._ttl_s)
        self._by_owner.setdefault(kept.owner, {})[kept.response_id] = kept
        self._num_bytes[kept.owner] += kept.num_bytes
        if kept.is_unfinished:
            self._unfinished[kept.owner, kept.response_id] = kept
        while self.num_bytes > self._max_bytes and (oldest := self._oldest()) is not None:
            self.remove(oldest.owner, oldest.response_id)

    def remove(self, owner: str, response_id: str) -> None:
        """Remove a response, if it is there."""
        removed = self._by_owner.get(owner, {}).pop(response_id, None)
        if removed is None:
            return
        self._unfinished.pop((owner, response_id), None)
        self._num_bytes[owner] -= removed.num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._num_bytes[owner]

    def _oldest(self) -> StoredResponse | None:
        """The oldest finished response of the owner with the most bytes that has one."""
        for owner, _ in self._num_bytes.most_common():
            for response in self._by_owner[owner].values():
                if not response.is_unfinished:
                    return response
        return None

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for owner, responses in tuple(self._by_owner.items()):
            ended = (each for each in responses.values() if not each.is_unfinished)
            expired = []
            for response in ended:
                if response.expires_s > now_s:
                    break
                expired.append(response.response_id)
            for response_id in expired:
                self.remove(owner, response_id)
