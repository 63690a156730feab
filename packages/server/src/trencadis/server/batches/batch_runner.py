"""Runs batches: each line of an input file is a request to the app of the server.

A few lines are sent at once, so that requests of clients that wait are delayed little, and with the
lowest priority where the scheduling policy has priorities.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from openai.types import BatchError, BatchRequestCounts, FileObject
from openai.types.batch import Errors
from starlette.types import ASGIApp, Scope

from trencadis.server.batches.at_once import work_at_once
from trencadis.server.batches.batch_line import (
    BatchLine,
    BatchLineError,
    answer_of,
    error_code,
    failure_of,
    lines_of,
    parsed,
    post,
)
from trencadis.server.batches.file_store import AnswerFiles, BatchStore, StoredBatch
from trencadis.server.errors import as_api_error
from trencadis.server.http.api_keys import accept_name
from trencadis.server.http.error_handlers import was_lost

logger = logging.getLogger("trencadis.server")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

MAX_LINES = 50_000
"""Most lines of a file, as in the OpenAI API."""

MAX_CUSTOM_ID = 512
"""Most characters of a custom id."""

MAX_ERRORS = 100
"""Most errors that are listed of one file."""

MAX_DEATHS = 3
"""So often the engine core may end while it answers a line, until the line is not sent again."""

LOWEST_PRIORITY = 2**63 - 1

_CHECK_S = 10.0
"""Longest time between two looks at the clock, in seconds: it may be set."""


def check_input(
    path: Path, endpoint: str, max_line: int, stop: threading.Event
) -> tuple[int, list[BatchError]]:
    """The number of lines of an input file, and what is wrong with them, until ``stop`` is set."""
    errors: list[BatchError] = []
    seen: set[str] = set()
    total = 0

    def report(line: int | None, code: str, message: str, param: str | None = None) -> None:
        errors.append(BatchError(code=code, line=line, message=message, param=param))

    with path.open("rb") as file:
        for number, line in lines_of(file, max_line, stop):
            total += 1
            if total > MAX_LINES:
                report(None, "too_many_requests", f"the file has more than {MAX_LINES} requests")
            if len(errors) >= MAX_ERRORS or total > MAX_LINES:
                break
            try:
                request = parsed(line, (endpoint,), max_line)
            except BatchLineError as error:
                report(number, error.code, str(error), error.param)
                continue
            name = request.custom_id
            if len(name) > MAX_CUSTOM_ID:
                why = f"a custom_id has at most {MAX_CUSTOM_ID} characters"
                report(number, "invalid_request", why, "custom_id")
            elif name in seen:
                why = f"the custom_id {name!r} is that of an earlier line, too"
                report(number, "duplicate_custom_id", why, "custom_id")
            seen.add(name)
    if not total:
        report(None, "empty_file", "the file has no requests")
    return total, errors


class _Stop:
    """The end of a batch: the event loop waits for it, and threads look at ``of_threads``.

    A process waits for its threads before it exits.
    """

    def __init__(self) -> None:
        self.of_loop = asyncio.Event()
        self.of_threads = threading.Event()

    def set(self) -> None:
        self.of_loop.set()
        self.of_threads.set()


class BatchRunner:
    """Runs the batches of a store, from `start` to `close`.

    ``most_lines`` gets how many requests of batches are in the app, and returns how many there may
    be. ``is_held``: whether the model that a body names is not active, so that its line waits.
    ``name_of`` returns the name of the API key of an owner, "" for none.
    ``count_line`` gets whether a line is completed or failed. ``retry_after`` is in seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        *,
        most_lines: Callable[[int], int],
        is_held: Callable[[dict[str, Any]], bool],
        name_of: Callable[[str], str],
        count_line: Callable[[str], None],
        max_line: int,
        retry_after: float,
    ) -> None:
        self.store = store
        self._most_lines = most_lines
        self._is_held = is_held
        self._name_of = name_of
        self._count_line = count_line
        self._max_line = max_line
        self._retry_after = retry_after
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, _Stop] = {}
        self._num_sent = 0
        self._num_suspects = 0
        self._freed = asyncio.Event()
        self._has_priorities = True

    def start(self, app: ASGIApp) -> None:
        """Go on with the batches that have not ended; ``app`` answers their lines."""
        self._app = app
        for stored in self.store.unfinished:
            self.add(stored.batch.id)

    def add(self, batch_id: str) -> None:
        """Run a batch of the store."""
        self._stops[batch_id] = _Stop()
        task = asyncio.create_task(self._run(batch_id))
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._forget(batch_id))

    def stop(self, batch_id: str) -> None:
        """Send no further lines of a batch, and end those that are being answered."""
        if batch_id in self._stops:
            self._stops[batch_id].set()

    async def close(self) -> None:
        """End all, without a change of what is stored: the next server goes on."""
        for stop in self._stops.values():
            stop.of_threads.set()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stored in self.store.unfinished:
            if stored.deaths:  # the last of them may not be on disk
                await _failure(partial(self.store.save_batch, stored.batch.id))
        self.store.close()

    def _forget(self, batch_id: str) -> None:
        del self._tasks[batch_id], self._stops[batch_id]

    async def _run(self, batch_id: str) -> None:
        try:
            await self._validate(batch_id)
            if self.store.batches[batch_id].is_unfinished:
                await self._answer(batch_id)
        except Exception as error:
            logger.exception("The batch %s failed", batch_id)
            message = as_api_error(error).message
            failure = [BatchError(code="internal_error", message=message)]
            await self._finish(batch_id, "failed", errors=Errors(data=failure, object="list"))

    async def _validate(self, batch_id: str) -> None:
        stored = self.store.batches[batch_id]
        if stored.batch.status != "validating":
            return
        path = self.store.path(stored.batch.input_file_id)
        stop = self._stops[batch_id].of_threads
        work = partial(check_input, path, stored.batch.endpoint, self._max_line, stop)
        total, errors = await asyncio.to_thread(work)
        if self.store.batches[batch_id].batch.status != "validating":
            return  # it is cancelled, and the check may have stopped
        if errors:
            listed = Errors(data=errors, object="list")
            await self._change(batch_id, "failed", failed_at=self._now(), errors=listed)
        else:
            counts = BatchRequestCounts(completed=0, failed=0, total=total)
            await self._change(
                batch_id, "in_progress", in_progress_at=self._now(), request_counts=counts
            )

    async def _answer(self, batch_id: str) -> None:
        stored = self.store.batches[batch_id]
        files = self._files(stored)
        done = await self._recovered(batch_id, files)
        if stored.batch.status == "in_progress":
            work = asyncio.create_task(self._answer_lines(batch_id, files, done))
            try:
                await self._until_stopped(batch_id, work)
            finally:
                work.cancel()
                await asyncio.wait((work,))
            if not work.cancelled():
                work.result()
            done = await self._recovered(batch_id, files)  # a last line may have been written
        batch = self.store.batches[batch_id].batch
        counts = batch.request_counts
        if batch.status == "cancelling":
            await self._finish(batch_id, "cancelled")
            return
        if batch.status == "in_progress":
            is_complete = counts is not None and len(done) >= counts.total
            now = self._now()
            expired_at = None if is_complete else now
            await self._change(batch_id, "finalizing", finalizing_at=now, expired_at=expired_at)
        if self.store.batches[batch_id].batch.expired_at is None:
            await self._finish(batch_id, "completed")
            return
        await self._persist(lambda: self._write_expired(stored, files, done))
        await self._recovered(batch_id, files)
        await self._finish(batch_id, "expired")

    def _files(self, stored: StoredBatch) -> AnswerFiles:
        return AnswerFiles(self.store.path(stored.output_id), self.store.path(stored.error_id))

    async def _recovered(self, batch_id: str, files: AnswerFiles) -> dict[str, bool]:
        """The lines that are answered, which are counted; on disk the files alone tell it."""
        done = await asyncio.to_thread(files.recover)
        counts = self.store.batches[batch_id].batch.request_counts
        if counts is not None:
            counts.completed = sum(done.values())
            counts.failed = len(done) - counts.completed
        return done

    async def _until_stopped(self, batch_id: str, work: asyncio.Task[None]) -> None:
        """Wait until all lines have been answered, the batch is cancelled or has expired."""
        expires_at = self.store.batches[batch_id].batch.expires_at or 0
        stop = asyncio.create_task(self._stops[batch_id].of_loop.wait())
        try:
            while not work.done() and not stop.done():
                left = expires_at - self.store.clock()
                if left <= 0:
                    return
                await asyncio.wait(
                    (work, stop),
                    timeout=min(left, _CHECK_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            stop.cancel()

    async def _answer_lines(self, batch_id: str, files: AnswerFiles, done: dict[str, bool]) -> None:
        stored = self.store.batches[batch_id]

        async def answer(line: BatchLine) -> None:
            result = await self._answered(batch_id, line)
            response = result["response"]
            is_output = response is not None and response["status_code"] == 200
            append = partial(files.append, [result], is_output=is_output)
            await self._persist(lambda: _to_its_end(append))
            done[line.custom_id] = is_output
            self._count_line("completed" if is_output else "failed")
            counts = self.store.batches[batch_id].batch.request_counts
            if counts is not None:
                counts.completed += is_output
                counts.failed += not is_output

        most = max(1, 2 * self._most_lines(0))
        await work_at_once(self._left(stored, dict(done)), answer, most)

    def _left(self, stored: StoredBatch, done: dict[str, bool]) -> Iterator[BatchLine]:
        """The lines without an answer. They have been checked, but the file may have changed."""
        batch = stored.batch
        stop = self._stops[batch.id].of_threads
        with self.store.path(batch.input_file_id).open("rb") as file:
            for _, line in lines_of(file, self._max_line, stop):
                with suppress(BatchLineError):
                    request = parsed(line, (batch.endpoint,), self._max_line)
                    if request.custom_id not in done:
                        yield request

    async def _answered(self, batch_id: str, line: BatchLine) -> dict[str, Any]:
        while True:
            if self._num_deaths(batch_id, line) >= MAX_DEATHS:
                message = f"the engine core ended {MAX_DEATHS} times while it answered the request"
                return failure_of(line.custom_id, "engine_error", message)
            if not self._is_held(line.body):
                status, body, is_lost = await self._sent(batch_id, line)
                if is_lost:
                    self.store.count_death(batch_id, line.custom_id)
                    await self._persist(partial(self.store.save_batch, batch_id))
                is_late = status == 503 and error_code(body) != "bucket_miss"
                if not is_late and not (status == 404 and self._is_held(line.body)):
                    return answer_of(line, status, body)
            await asyncio.sleep(self._retry_after)

    def _num_deaths(self, batch_id: str, line: BatchLine) -> int:
        return self.store.batches[batch_id].deaths.get(line.custom_id, 0)

    async def _sent(self, batch_id: str, line: BatchLine) -> tuple[int, dict[str, Any], bool]:
        """As `_post`. A line with which the core has ended is sent while no other line is.

        If it is the cause, the others do not end with it again.
        """
        is_suspect = self._num_deaths(batch_id, line) > 0
        self._num_suspects += is_suspect
        try:
            await self._place(is_suspect=is_suspect)
            try:
                return await self._post(self.store.batches[batch_id].owner, line)
            finally:
                self._num_sent -= 1
        finally:
            self._num_suspects -= is_suspect
            self._freed.set()

    def _has_place(self, *, is_suspect: bool) -> bool:
        if is_suspect:
            return self._num_sent == 0
        return self._num_suspects == 0 and self._num_sent < self._most_lines(self._num_sent)

    async def _place(self, *, is_suspect: bool) -> None:
        """Wait until one more request may be sent."""
        while not self._has_place(is_suspect=is_suspect):
            self._freed.clear()
            with suppress(asyncio.TimeoutError):  # requests of clients may have ended
                await asyncio.wait_for(self._freed.wait(), 1.0)
        self._num_sent += 1

    async def _post(self, owner: str, line: BatchLine) -> tuple[int, dict[str, Any], bool]:
        """The status and body of the answer, and whether the engine core ended meanwhile."""
        if self._app is None:
            raise RuntimeError("the runner has not started")

        sent: Scope = {}

        def of_client(scope: Scope) -> None:
            nonlocal sent
            sent = scope
            if name := self._name_of(owner):
                accept_name(scope, name)
            # The salt of cached prefixes follows from the key, which is not stored.
            salt = f"Bearer batches of {owner}".encode()
            scope["headers"].append((b"authorization", salt))

        body = line.body
        if self._has_priorities:
            lowest = BatchLine(line.custom_id, line.url, {**body, "priority": LOWEST_PRIORITY})
            status, answer = await post(self._app, lowest, of_client)
            error = answer.get("error")
            if status != 400 or not isinstance(error, dict) or error.get("param") != "priority":
                return status, answer, was_lost(sent)
            self._has_priorities = False
        body = {name: value for name, value in body.items() if name != "priority"}
        status, answer = await post(self._app, BatchLine(line.custom_id, line.url, body), of_client)
        return status, answer, was_lost(sent)

    async def _write_expired(
        self, stored: StoredBatch, files: AnswerFiles, done: dict[str, bool]
    ) -> None:
        message = "the request was not answered before the completion window of the batch ended"
        left = (
            failure_of(line.custom_id, "batch_expired", message)
            for line in self._left(stored, done)
        )
        await asyncio.to_thread(partial(files.append, left, is_output=False))

    async def _finish(self, batch_id: str, end: str, **fields: Any) -> None:
        stored = self.store.batches[batch_id]
        files = self._files(stored)
        ids: dict[str, str] = {}
        written = (
            ("output_file_id", stored.output_id, files.output),
            ("error_file_id", stored.error_id, files.errors),
        )
        for field, file_id, path in written:
            if not path.exists() or not path.stat().st_size:
                continue
            file = FileObject(
                id=file_id,
                bytes=path.stat().st_size,
                created_at=self._now(),
                filename=f"{batch_id}_{field.removesuffix('_file_id')}.jsonl",
                object="file",
                purpose="batch_output",
                status="processed",
            )
            await self._persist(partial(self.store.keep_file, stored.owner, file))
            ids[field] = file_id
        await self._change(batch_id, end, **{f"{end}_at": self._now()}, **ids, **fields)

    async def _change(self, batch_id: str, status: str, **fields: Any) -> None:
        self.store.set_batch(batch_id, status=status, **fields)
        await self._persist(lambda: self.store.save_batch(batch_id))

    async def _persist(self, write: Callable[[], Awaitable[Any]]) -> None:
        """Write, again and again while the disk does not take it."""
        is_logged = False
        while (error := await _failure(write)) is not None:
            if not is_logged:
                logger.warning("Batches wait, what they write cannot be stored: %s", error)
            is_logged = True
            await asyncio.sleep(self._retry_after)

    def _now(self) -> int:
        return int(self.store.clock())


async def _to_its_end(write: Callable[[], None]) -> None:
    """Write in a thread, to its end also where the task is cancelled meanwhile, even repeatedly.

    A line that is written after the answers of a batch have been counted would not count.
    """
    task = asyncio.create_task(asyncio.to_thread(write))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        task.exception()  # it is looked at: an end that is not would be logged
        raise


async def _failure(write: Callable[[], Awaitable[Any]]) -> OSError | None:
    try:
        await write()
    except OSError as error:
        return error
    return None
