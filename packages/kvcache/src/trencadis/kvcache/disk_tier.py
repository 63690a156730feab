"""A tier of files, one for each block, which a later process finds again.

Files are in a subdirectory of their own, with mode 0700, which one process at a time uses. A file
is written under a temporary name and renamed, so that a killed process leaves no half of one. It is
read only if it is a plain file of this user whose checksum, over its key and its content, is right;
what is not is removed. Names are relative to a descriptor of the directory and never followed
through a symbolic link, so nothing outside is read, written or removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.lru_bytes import LruBytes
from trencadis.kvcache.tier import KEY_BYTES, Content, TierCounters

logger = logging.getLogger("trencadis.kvcache")

DIRECTORY = "trencadis-kv-blocks"
"""The subdirectory, all of whose files are the tier's: others are removed."""

PAUSE_SECONDS = 10.0
"""After an error of the disk nothing is stored for so long."""

MAX_FILES = 1 << 20
"""Files that a start looks at; the rest of a larger directory is removed."""

_MAGIC = b"TRKVBLK1"
"""Names the format; another version has another one."""

_HEADER = struct.Struct("<8s32sQ16s")  # format, key, bytes of the content, checksum
_CHECKSUM_BYTES = 16
_SUFFIX = ".kv"
_LOCK = "lock"
_TEMPORARY = "tmp-"
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class DiskTier:
    """A `BlockTier` of files below the directory ``path``, of at most ``limit_bytes`` together.

    The least recently used are removed first. Raises `InvalidSetting` for a directory that cannot
    be made or written, that another user owns, or that another process uses as a tier.
    """

    name = "disk"

    def __init__(self, path: str, limit_bytes: int) -> None:
        self.counters = TierCounters()
        self._path = Path(path) / DIRECTORY
        self._lock = threading.Lock()
        self._lru = LruBytes(limit_bytes)
        self._paused_until_s = 0.0
        self._has_failed = False
        self._descriptors: list[int] = []
        try:
            self._open()
            self._scan()
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise InvalidSetting(
                    f"the directory {self._path} of a disk tier is in use by another process: give "
                    "each server its own"
                ) from error
            if isinstance(error, OSError):
                raise InvalidSetting(
                    f"the directory {self._path} of a disk tier cannot be used ({error}): give a "
                    "directory that this user may write"
                ) from error
            raise

    def wants(self, key: bytes) -> bool:
        with self._lock:
            return key not in self._lru and time.monotonic() >= self._paused_until_s

    def store(self, key: bytes, content: Content) -> None:
        size = _HEADER.size + sum(piece.nbytes for piece in content)
        with self._lock:
            if not self._descriptors or size > self._lru.limit_bytes or key in self._lru:
                return
        temporary = f"{_TEMPORARY}{key.hex()}-{threading.get_ident()}"
        try:
            self._write(temporary, key, content)
            with self._lock:
                dropped = self._lru.add(key, size) or ()
                os.rename(temporary, _file_name(key), src_dir_fd=self._dir, dst_dir_fd=self._dir)
                self.counters.num_stored_blocks += 1
                self.counters.num_stored_bytes += size - _HEADER.size
                self.counters.num_bytes = self._lru.num_bytes
                for oldest in dropped:
                    self._unlink(_file_name(oldest))
        except OSError as error:
            with self._lock:
                self._lru.remove(key)
                self.counters.num_bytes = self._lru.num_bytes
                self._paused_until_s = time.monotonic() + PAUSE_SECONDS
            self._unlink(temporary)
            self._report(f"a block cannot be stored ({error})")
        else:
            self._has_failed = False

    def num_leading(self, keys: Iterable[bytes]) -> int:
        with self._lock:
            return self._lru.num_leading(keys)

    def load(self, key: bytes, content: Content) -> bool:
        with self._lock:
            if not self._descriptors or not self._lru.touch(key):
                return False
        name = _file_name(key)
        try:
            reason = self._read(name, key, content)
        except OSError as error:
            reason = f"{error}"
        if not reason:
            with self._lock:
                self.counters.num_loaded_blocks += 1
                self.counters.num_loaded_bytes += sum(piece.nbytes for piece in content)
            return True
        with self._lock:
            is_ours = self._lru.remove(key)  # else it has left for another one meanwhile
            if is_ours:
                self._unlink(name)
            self.counters.num_bytes = self._lru.num_bytes
        if is_ours:
            self._report(f"the file {name} is rejected and removed ({reason})")
        return False

    def close(self) -> None:
        with self._lock:
            descriptors, self._descriptors = self._descriptors, []
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def _dir(self) -> int:
        return self._descriptors[0]

    def _open(self) -> None:
        """Make the directory, open it and take its lock."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._path.mkdir(0o700)
        self._descriptors = [os.open(self._path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)]
        owner = os.fstat(self._dir).st_uid
        if owner != os.geteuid():
            raise PermissionError(f"user {owner} owns it")
        os.fchmod(self._dir, 0o700)
        if _mode_of(self._dir, _LOCK) not in (None, stat.S_IFREG):
            self._remove_stranger(_LOCK)
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._dir)
        self._descriptors.append(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _scan(self) -> None:
        """Find the blocks of an earlier process, and remove everything else. Reads no content."""
        found: list[tuple[int, bytes, int]] = []
        with os.scandir(self._dir) as entries:
            for entry in entries:
                if entry.name == _LOCK:
                    continue
                key = _key_of(entry.name)
                status = entry.stat(follow_symlinks=False)
                is_block = key and _why_rejected(status) == "" and status.st_size > _HEADER.size
                if not is_block or len(found) >= MAX_FILES:
                    self._remove_stranger(entry.name)
                elif key is not None:
                    found.append((status.st_mtime_ns, key, status.st_size))
        for _, key, size in sorted(found):
            dropped = self._lru.add(key, size)
            for name in (key,) if dropped is None else dropped:
                self._unlink(_file_name(name))
        self.counters.num_bytes = self._lru.num_bytes
        if self._lru:
            logger.info("The disk tier %s has %d blocks", self._path, len(self._lru))

    def _remove_stranger(self, name: str) -> None:
        """Remove an entry that is none of the tier's. A directory stays, and is not entered."""
        self.counters.num_errors += not name.startswith(_TEMPORARY)
        self._unlink(name)

    def _write(self, name: str, key: bytes, content: Content) -> None:
        self._unlink(name)
        header = _HEADER.pack(
            _MAGIC, key, sum(piece.nbytes for piece in content), _checksum(key, content)
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
        file = os.open(name, flags, 0o600, dir_fd=self._dir)
        try:
            for piece in (memoryview(header), *content):
                left = piece
                while left.nbytes:
                    left = left[os.write(file, left) :]
            _note_use(file)
        finally:
            os.close(file)

    def _read(self, name: str, key: bytes, content: Content) -> str:
        """Read a file into ``content``; returns why it is rejected, if it is."""
        num_bytes = sum(piece.nbytes for piece in content)
        file = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._dir)
        try:
            status = os.fstat(file)
            reason = _why_rejected(status)
            header = b"" if reason else os.read(file, _HEADER.size)
            if reason or status.st_size != _HEADER.size + num_bytes or len(header) < _HEADER.size:
                return reason or f"it has not {_HEADER.size + num_bytes} bytes"
            magic, stored_key, stored_bytes, checksum = _HEADER.unpack(header)
            if (magic, stored_key, stored_bytes) != (_MAGIC, key, num_bytes):
                return "its header is of another block or format"
            for piece in content:
                left = piece
                while left.nbytes:
                    count = os.readv(file, [left])
                    if not count:
                        return "it ends early"
                    left = left[count:]
            if _checksum(key, content) != checksum:
                return "its checksum is wrong"
            with suppress(OSError):
                _note_use(file)
            return ""
        finally:
            os.close(file)

    def _unlink(self, name: str) -> None:
        with suppress(OSError, IndexError):
            os.unlink(name, dir_fd=self._dir)

    def _report(self, reason: str) -> None:
        """Count an error; only the first of several in a row is logged."""
        with self._lock:
            self.counters.num_errors += 1
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            logger.warning("Disk tier %s: %s. Serving goes on without it", self._path, reason)


def _file_name(key: bytes) -> str:
    return key.hex() + _SUFFIX


def _key_of(name: str) -> bytes | None:
    """The key that a file name stands for, None for another name."""
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and name == _file_name(key) else None


def _why_rejected(status: os.stat_result) -> str:
    """Why a file may not be read, whatever it holds."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a plain file"
    if status.st_uid != os.geteuid():
        return f"user {status.st_uid} owns it"
    if status.st_nlink != 1:
        return "it has several names"
    return ""


def _mode_of(directory: int, name: str) -> int | None:
    """The kind of an entry (``stat.S_IFMT``), None where there is none."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _note_use(file: int) -> None:
    """Tell a later start which files were used last. The kernel's own times are too coarse."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _checksum(key: bytes, content: Content) -> bytes:
    checksum = blake2b(key=key, digest_size=_CHECKSUM_BYTES)
    for piece in content:
        checksum.update(piece)
    return checksum.digest()
