"""Work on many items, a bounded number of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def work_at_once(items: Iterator[T], work: Callable[[T], Awaitable[None]], most: int) -> None:
    """Await ``work`` for each item, at most ``most`` at once.

    A thread reads the items, one by one as there is place. The first error ends all work and is
    raised, as is a cancellation.
    """
    free = asyncio.Semaphore(most)
    tasks: set[asyncio.Task[None]] = set()

    async def worked(item: T) -> None:
        try:
            await work(item)
        finally:
            free.release()

    try:
        while (item := await asyncio.to_thread(next, items, None)) is not None:
            await free.acquire()
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                task.result()
            tasks.add(asyncio.create_task(worked(item)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
