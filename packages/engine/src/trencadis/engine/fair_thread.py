"""A thread for work that takes too long for an event loop, shared by clients in rotation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class FairThread:
    """Does one piece of work at a time: of the clients that wait, the next of each in rotation."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """What each client waits for; the client that is next comes first."""
        self._lock = threading.Lock()

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """The result of ``work``, once it is done. Raises `RuntimeError` after `close`."""
        future: Future[T] = Future()
        with self._lock:
            self._thread.submit(self._do_next)
            self._waiting.setdefault(client, deque()).append((future, work))
        return future

    def close(self) -> None:
        """End the thread after the present work, and cancel all other."""
        with self._lock:
            self._thread.shutdown(wait=False, cancel_futures=True)
            for client in self._waiting.values():
                for future, _ in client:
                    future.cancel()
            self._waiting.clear()

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:  # closed
                return
            client = next(iter(self._waiting))
            works = self._waiting.pop(client)
            future, work = works.popleft()
            if works:
                self._waiting[client] = works
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # as in an executor, the caller that waits gets it
            future.set_exception(error)
        else:
            future.set_result(result)
