"""Files and batches on disk: one directory, which one server at a time uses.

Each has a record, which is replaced whole, and a file its content besides. Names on disk are ids
that the server has made; what clients send is looked up among them and never becomes a path.
Each belongs to the owner of an API key (see `key_owner`), "" without keys.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
from openai.types import Batch, FileObject

from trencadis.engine import ConfigError
from trencadis.server.errors import ApiError

logger = logging.getLogger("trencadis.server")

MAX_FILE_BYTES = 200_000_000
"""Most bytes of an uploaded file, as in the OpenAI API."""

MAX_FILES = 1000
"""Most files of an API key."""

MAX_KEY_BYTES = 4 << 30
"""Bytes of the files of an API key from which on it uploads no more and begins no batch."""

MAX_UPLOADS = 8
"""Most files that arrive at once; half of it for one API key."""

MAX_UNFINISHED = 64
"""Most batches that have not ended; a quarter of it for one API key."""

MAX_ENDED = 1000
"""Most batches of an API key that have ended; the oldest is forgotten."""

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that has not ended."""

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


@attrs.frozen
class StoredFile:
    """A file of the API key of ``owner``."""

    owner: str
    file: FileObject


@attrs.frozen
class StoredBatch:
    """A batch of ``owner``. ``output_id`` and ``error_id`` are the files that it writes.

    The batch names them once they are complete. ``deaths``: how often the engine core ended while
    it answered the line with this custom id.
    """

    owner: str
    batch: Batch
    output_id: str
    error_id: str
    deaths: dict[str, int] = attrs.field(factory=dict)

    @property
    def is_unfinished(self) -> bool:
        """Whether it has not ended."""
        return self.batch.status in UNFINISHED


class BatchStore:
    """The files and batches below ``directory``. ``clock`` returns seconds since the Unix epoch.

    Raises `ConfigError` for a directory that cannot be written or that another server uses.
    Methods that write raise `OSError`, as where the disk is full; records stay as they were.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._directory = directory
        self._writing = asyncio.Lock()
        self._uploads: Counter[str] = Counter()
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, StoredBatch] = {}
        self._has_unreadable = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(directory, error.strerror or str(error)) from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forks do not hold it
            self._load()
            self._remove_leftovers()
        except (BlockingIOError, PermissionError):
            os.close(self._lock)
            raise _unusable(directory, "another server uses it") from None
        except OSError as error:
            os.close(self._lock)
            raise _unusable(directory, error.strerror or str(error)) from None

    def close(self) -> None:
        """Leave the directory to another server. A further call has no effect."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def path(self, file_id: str) -> Path:
        """The content of a file whose id this server has made."""
        if not _ID.fullmatch(file_id):
            raise ValueError(f"{file_id!r} is not an id of this server")
        return self._directory / f"{file_id}.jsonl"

    def file_of(self, owner: str, file_id: str) -> FileObject:
        """A file of this owner. Raises 404, also for one of another owner."""
        stored = self.files.get(file_id)
        if stored is None or stored.owner != owner:
            message = f"No such File object: {file_id[:100]}"
            raise ApiError(404, message, param="id", code="file_not_found")
        return stored.file

    def batch_of(self, owner: str, batch_id: str) -> StoredBatch:
        """A batch of this owner. Raises 404, also for one of another owner."""
        stored = self.batches.get(batch_id)
        if stored is None or stored.owner != owner:
            message = f"No batch found with id '{batch_id[:100]}'."
            raise ApiError(404, message, param="id", code="batch_not_found")
        return stored

    @property
    def unfinished(self) -> list[StoredBatch]:
        """The batches that have not ended, oldest first."""
        return [stored for stored in self.batches.values() if stored.is_unfinished]

    @contextmanager
    def upload(self, owner: str) -> Iterator[str]:
        """The id of a file that arrives; what is not kept at the end is removed.

        Raises 429 beyond what a key may have, 503 where too many files arrive.
        """
        self._check_space(owner)
        arriving = self._uploads[owner]
        limit = MAX_UPLOADS // 2 if owner else MAX_UPLOADS
        if self._uploads.total() >= MAX_UPLOADS or arriving >= limit:
            message = "too many files are being sent: try again later"
            raise ApiError(503, message, code="too_many_bodies", headers={"Retry-After": "1"})
        self._uploads[owner] += 1
        file_id = f"file-{uuid.uuid4().hex}"
        try:
            yield file_id
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]
            if file_id not in self.files:
                self.path(file_id).unlink(missing_ok=True)

    def _check_space(self, owner: str) -> None:
        """Raise 429 where no further file of this owner may be kept."""
        owned = [stored.file for stored in self.files.values() if stored.owner == owner]
        num_bytes = sum(file.bytes for file in owned)
        arriving = self._uploads[owner]
        if len(owned) + arriving >= MAX_FILES:
            raise _too_many(
                f"there are {len(owned)} files, the most that there may be: delete some"
            )
        if num_bytes + arriving * MAX_FILE_BYTES >= MAX_KEY_BYTES:
            raise _too_many(
                f"the files have {num_bytes} bytes, and at most {MAX_KEY_BYTES} are kept: delete "
                "some"
            )

    async def keep_file(self, owner: str, file: FileObject) -> None:
        """Store the record of a file whose content is on disk."""
        record = {"owner": owner, "file": file.model_dump(mode="json")}
        await self._write(file.id, record)
        self.files[file.id] = StoredFile(owner, file)

    async def remove_file(self, owner: str, file_id: str) -> None:
        """Forget a file. Raises 404, and 409 for the input of a batch that has not ended."""
        self.file_of(owner, file_id)
        for stored in self.unfinished:
            if file_id in (stored.batch.input_file_id, stored.output_id, stored.error_id):
                raise ApiError(
                    409,
                    f"the batch {stored.batch.id!r} uses the file: cancel the batch, or wait for "
                    "its end",
                    param="id",
                    code="file_in_use",
                )
        del self.files[file_id]
        await asyncio.to_thread(self._unlink, file_id)

    async def add_batch(self, owner: str, batch: Batch) -> StoredBatch:
        """Store a new batch. Raises 429 where too many have not ended, or for too many files."""
        unfinished = self.unfinished
        of_owner = sum(stored.owner == owner for stored in unfinished)
        limit = MAX_UNFINISHED // 4 if owner else MAX_UNFINISHED
        if len(unfinished) >= MAX_UNFINISHED or of_owner >= limit:
            raise _too_many(f"{of_owner} batches have not ended: wait until one has")
        self._check_space(owner)
        output_id, error_id = (f"file-{uuid.uuid4().hex}" for _ in range(2))
        stored = StoredBatch(owner, batch, output_id, error_id)
        self.batches[batch.id] = stored
        try:
            await self.save_batch(batch.id)
        except OSError:
            del self.batches[batch.id]
            raise
        await self._forget_ended(owner)
        return stored

    def set_batch(self, batch_id: str, **fields: Any) -> StoredBatch:
        """Change fields of a batch in memory; `save_batch` writes them."""
        stored = self.batches[batch_id]
        changed = attrs.evolve(stored, batch=stored.batch.model_copy(update=fields))
        self.batches[batch_id] = changed
        return changed

    def count_death(self, batch_id: str, custom_id: str) -> None:
        """Note in memory that the engine core ended with a line; `save_batch` writes it."""
        stored = self.batches[batch_id]
        deaths = stored.deaths | {custom_id: stored.deaths.get(custom_id, 0) + 1}
        self.batches[batch_id] = attrs.evolve(stored, deaths=deaths)

    async def save_batch(self, batch_id: str) -> None:
        """Write the record of a batch."""
        stored = self.batches[batch_id]
        record = {
            "owner": stored.owner,
            "batch": stored.batch.model_dump(mode="json"),
            "output_id": stored.output_id,
            "error_id": stored.error_id,
            "deaths": stored.deaths,
        }
        await self._write(batch_id, record, lambda: self.batches[batch_id] is stored)

    async def _write(
        self,
        name: str,
        record: dict[str, Any],
        is_present: Callable[[], bool] = lambda: True,
    ) -> None:
        """Replace a record as a whole, unless a later one follows."""
        async with self._writing:
            if is_present():
                await asyncio.to_thread(self._replace, name, json.dumps(record).encode())

    def _replace(self, name: str, content: bytes) -> None:
        target = self._directory / f"{name}.json"
        temporary = target.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the new name is on disk, too
        finally:
            os.close(descriptor)

    async def _forget_ended(self, owner: str) -> None:
        ended = [
            stored.batch.id
            for stored in self.batches.values()
            if stored.owner == owner and not stored.is_unfinished
        ]
        for batch_id in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self.batches[batch_id]
            await asyncio.to_thread(self._unlink, batch_id)

    def _unlink(self, name: str) -> None:
        for suffix in (".json", ".jsonl"):
            (self._directory / f"{name}{suffix}").unlink(missing_ok=True)

    def _load(self) -> None:
        batches: list[StoredBatch] = []
        files: list[StoredFile] = []
        for path in self._directory.glob("*.json"):
            if not _ID.fullmatch(path.stem):
                continue
            try:
                record = json.loads(path.read_bytes())
                if not isinstance(record, dict):
                    raise TypeError("it is not a JSON object")
                if path.stem.startswith("file-"):
                    file = FileObject.model_validate(record["file"])
                    files.append(StoredFile(record["owner"], file))
                else:
                    batch = Batch.model_validate(record.pop("batch"))
                    batches.append(StoredBatch(batch=batch, **record))
            except (ValueError, KeyError, TypeError) as error:
                self._has_unreadable |= path.stem.startswith("batch_")
                logger.warning("The record %s cannot be read, and is left alone: %s", path, error)
        for stored in sorted(files, key=lambda each: (each.file.created_at, each.file.id)):
            if self.path(stored.file.id).exists():
                self.files[stored.file.id] = stored
        for each in sorted(batches, key=lambda each: (each.batch.created_at, each.batch.id)):
            self.batches[each.batch.id] = each

    def _remove_leftovers(self) -> None:
        """Remove what a server has begun to write that was killed."""
        kept = {stored.output_id for stored in self.unfinished}
        kept |= {stored.error_id for stored in self.unfinished}
        for path in self._directory.glob("*.tmp"):
            if _ID.fullmatch(path.stem):
                path.unlink()
        if self._has_unreadable:
            return  # which files a batch writes is in its record alone
        for path in self._directory.glob("*.jsonl"):
            has_record = path.with_suffix(".json").exists() or path.stem in kept
            if _ID.fullmatch(path.stem) and not has_record:
                path.unlink()


class AnswerFiles:
    """The output and the error file of a batch while they are written.

    A line is on disk before the next is begun, so that a server that is killed loses none.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.output, self.errors = output, errors
        self._turn = threading.Lock()

    def recover(self) -> dict[str, bool]:
        """The custom ids of the lines that are written, and whether each is in the output.

        What follows the last whole line is cut off.
        """
        with self._turn:
            found = _recovered(self.errors)
            return dict.fromkeys(found, False) | dict.fromkeys(_recovered(self.output), True)

    def append(self, lines: Iterable[dict[str, Any]], *, is_output: bool) -> None:
        """Write whole lines. Raises `OSError`, and the file is as before then."""
        path = self.output if is_output else self.errors
        with self._turn:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    for line in lines:
                        _write_all(descriptor, json.dumps(line).encode() + b"\n")
                    os.fdatasync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)


def _recovered(path: Path) -> list[str]:
    found: list[str] = []
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return found
    with file:
        end = 0
        for line in file:
            try:
                custom_id = json.loads(line)["custom_id"]
            except (ValueError, TypeError, KeyError):
                break
            if not line.endswith(b"\n"):
                break
            found.append(custom_id)
            end += len(line)
        file.truncate(end)
    return found


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded")


def _unusable(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"batch_directory {directory} cannot be used: {why}: give another", "batch_directory"
    )
