"""Stores compiled programs on disk, one archive per program, written atomically.

A killed compiler leaves a partial library, and loading one crashes the process. So each process
compiles in a directory of its own. The files of a complete program are then stored in the shared
directory as one archive, renamed into place.

An archive begins with the hashes of its key and of its content, so that one that was damaged or
renamed is not taken for a program. Both can be computed by anyone. That this user has made an
archive is seen from its owner: one that another user could have written is not loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import time
import weakref
import zipfile
from pathlib import Path

from trencadis.engine.devices.own_files import other_writer, why_foreign

logger = logging.getLogger("trencadis.engine")

_PREFIX = "compiling-"
_LEFT_AFTER_SECONDS = 60.0
"""Age from which a process's directory without a lock is removed: its process was killed. A process
locks its directory right after it has made it."""

_LEFT_WITHOUT_LOCKS_SECONDS = 24 * 3600.0
"""The same where the file system has no locks, and it may be in use."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)

_ROOM_BYTES = 256 << 20
"""Free space below which a process compiles elsewhere: a start leaves some 10 MB of files."""

_HEAD = b"trencadis program 2 "
_TRUST = "--trust-compile-cache"


class _Refused(Exception):
    """An archive is not used; the message says why."""


class ProgramStore:
    """The programs in ``directory``, which several processes may share.

    ``trusted``: those of other users are loaded, too. ``workplace`` is the directory in which
    this process compiles; its part ``headers`` is never stored. It is removed at exit. It is in
    ``directory``, or among the system's temporary files where that cannot be written, is full, or
    is not this user's own. Then nothing is stored. Raises `OSError` where ``directory`` is missing
    and cannot be made.
    """

    def __init__(self, directory: Path, *, trusted: bool = False) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not resolved again: a link on the way may be changed after the check.
        self.directory = directory.resolve()
        self._trusted = trusted
        self._foreign = None if trusted else other_writer(self.directory)
        self._not_kept = self._foreign or _why_not_kept(self.directory)
        self._warned: set[str] = set()
        if self._foreign is not None:
            self._warn(
                "foreign",
                f"Programs in {self.directory} are not loaded, since another user may have made "
                f"them: {self._foreign}. They are compiled at each start: make it yours alone "
                f"(chown, chmod go-w), or pass {_TRUST}",
            )
        if self._not_kept is None:
            _remove_leftovers(self.directory)
        self._temporary = tempfile.TemporaryDirectory(
            prefix=_PREFIX,
            dir=None if self._not_kept else self.directory,
            ignore_cleanup_errors=True,
        )
        self.workplace = Path(self._temporary.name)
        # Waits for a server that looks at this moment whether it is a leftover.
        if (lock := _lock(self.workplace, fcntl.LOCK_EX)) is not None:
            weakref.finalize(self, os.close, lock)  # or the end of the process, however it ends
        self.headers = self.workplace / "headers"

    def has(self, key: str) -> bool:
        """Whether a program is stored that `fetch` would load.

        Warns of the first archive that is rejected for a reason.
        """
        try:
            self._read(key)
        except FileNotFoundError:
            return False
        except _Refused as error:
            # Otherwise an earlier warning says that nothing in the directory is loaded.
            if self._foreign is None:
                self._warn(str(error), f"{self._archive(key)} would not be loaded: {error}")
            return False
        return True

    def fetch(self, key: str) -> bool:
        """Unpack a stored program into the workplace. Returns whether there is one to be loaded."""
        if self._foreign is not None:
            return False
        try:
            content = self._read(key)
            with zipfile.ZipFile(io.BytesIO(content)) as packed:
                for name in packed.namelist():
                    _place(self.workplace, name, packed.read(name))
        except FileNotFoundError:
            return False
        except (_Refused, OSError, zipfile.BadZipFile) as error:
            self._warn(
                "refused",
                f"{self._archive(key)} is not loaded, and its program is compiled anew: {error}",
            )
            return False
        return True

    def present(self) -> frozenset[Path]:
        """The files in the workplace, without headers."""
        return frozenset(
            path
            for path in self.workplace.rglob("*")
            if path.is_file() and self.headers not in path.parents
        )

    def keep(self, key: str, files: frozenset[Path]) -> None:
        """Store files of the workplace as a program. Where it cannot, it warns, once."""
        if self._foreign is not None:
            return
        if self._not_kept is not None:
            self._warn_not_kept(self._not_kept)
            return
        partial = self.workplace / "partial.zip"
        try:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", strict_timestamps=False) as packed:
                for path in sorted(files):
                    packed.write(path, path.relative_to(self.workplace))
            content = buffer.getvalue()
            partial.write_bytes(_head(key, content) + content)
            partial.replace(self._archive(key))
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._warn_not_kept(str(error.strerror or error))

    def _warn_not_kept(self, reason: str) -> None:
        self._warn(
            "not kept",
            f"What is compiled cannot be kept in {self.directory} ({reason}), and the next start "
            "compiles it again: free space there, or name another directory with --compile-cache",
        )

    def _read(self, key: str) -> bytes:
        """The content of an archive. Raises `FileNotFoundError`, and `_Refused` with the reason."""
        if self._foreign is not None:
            raise _Refused(self._foreign)
        try:
            # Does not wait for a writer, where another user has put a pipe.
            descriptor = os.open(self._archive(key), os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                self._check_file(os.fstat(descriptor))
                content = file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _Refused(str(error.strerror or error)) from error
        length = len(_head(key, b""))
        head, content = content[:length], content[length:]
        if not head.startswith(_HEAD):
            raise _Refused("it is not an archive of a program, or of another release")
        if head != _head(key, content):
            raise _Refused("it has changed since it was written, or is of another program")
        return content

    def _check_file(self, state: os.stat_result) -> None:
        if not stat.S_ISREG(state.st_mode):
            raise _Refused("it is not a file")
        if not self._trusted and (reason := why_foreign(state)) is not None:
            raise _Refused(
                f"it {reason}, who may have put any code there: chown it, or pass {_TRUST}"
            )

    def _warn(self, kind: str, text: str) -> None:
        """Log a warning, but the first of its kind alone."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)

    def _archive(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.zip"


def _head(key: str, content: bytes) -> bytes:
    hashes = (hashlib.sha256(part).hexdigest() for part in (key.encode(), content))
    return _HEAD + " ".join(hashes).encode() + b"\n"


def _place(directory: Path, name: str, content: bytes) -> None:
    """Write a file that appears complete or not at all, and is never overwritten.

    A library that this process has loaded must not change.
    """
    path = directory / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _why_not_kept(directory: Path) -> str | None:
    """Why programs cannot be stored in a directory; None if they can."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return str(error.strerror or error)
    return None if free >= _ROOM_BYTES else f"{free >> 20} MiB are free there"


def _lock(directory: Path, how: int) -> int | None:
    """Lock a directory; None where the file system has no locks. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return descriptor


def _remove_leftovers(directory: Path) -> None:
    for path in directory.glob(f"{_PREFIX}*"):
        try:
            age = time.time() - path.stat().st_mtime
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, removed by another server at the same time, or no directory
            continue
        if age > (_LEFT_WITHOUT_LOCKS_SECONDS if lock is None else _LEFT_AFTER_SECONDS):
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
