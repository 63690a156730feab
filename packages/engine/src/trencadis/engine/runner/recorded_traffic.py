"""What was served, as counts of batch shapes: kept in two files, never a token of it.

The files are those of `trencadis.bucketing.TrafficRecorder`: prefill batches in the file that the
user names, which ``trencadis-buckets fit`` reads, and decode batches beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from trencadis.bucketing import BucketingError, TrafficRecorder
from trencadis.engine.errors import ConfigError
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")

CAPACITY = 4096
"""Most different shapes of a phase. Beyond it sizes are rounded up; so a file stays below 100 kB
and is written in a few milliseconds."""

SAVE_SECONDS = 60.0
"""Period in which the files are written while requests are served."""

_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.01
"""How long another server may take to write before this one goes on and writes a minute later."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of file systems without locks."""


def decode_file(path: Path) -> Path:
    """The file of the decode batches: ``traffic.decode.json`` beside ``traffic.json``."""
    return path.with_name(f"{path.stem}.decode{path.suffix}")


def read_traffic(path: Path) -> dict[Phase, TrafficRecorder]:
    """The recorded traffic of the phases whose file exists. Raises `ConfigError`."""
    files = {Phase.PROMPT: path, Phase.DECODE: decode_file(path)}
    return {phase: load_traffic(file) for phase, file in files.items() if file.exists()}


def load_traffic(file: Path) -> TrafficRecorder:
    """The traffic in a file. Raises `ConfigError` where it cannot be read or is something else."""
    try:
        return TrafficRecorder.load(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): name another") from error
    except BucketingError as error:
        raise ConfigError(f"{error}: name another file, or remove this one") from error


class TrafficLog:
    """Counts the shapes of live batches, and adds them to what the files have.

    Several servers may record in the same files: each adds what it has counted since it wrote them
    last, under the lock of ``FILE.lock``. ``axes`` are those of each phase's grid. ``clock``
    returns seconds. Raises `ConfigError` for a file that is not recorded traffic of these axes, and
    where its directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        axes: Mapping[Phase, Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = {Phase.PROMPT: path, Phase.DECODE: decode_file(path)}
        self._lock_file = path.with_name(f"{path.name}.lock")
        self._axes = {phase: tuple(axes[phase]) for phase in Phase}
        self._clock = clock
        self._new: dict[tuple[Phase, tuple[int, ...]], int] = {}  # checked when they are counted
        self._counted = {phase: self._recorder(phase) for phase in Phase}
        self._written: dict[Phase, tuple[_Version, TrafficRecorder]] = {}
        self._saved_s = clock()
        self._can_save = True
        for phase in Phase:
            self._read(phase)  # rejects a file of something else, also while the lock is held
        try:
            self._write(tuple(Phase))
        except TimeoutError as error:
            self._warn(error)
        except OSError as error:
            raise ConfigError(
                f"record_traffic {path} cannot be written ({error.strerror}): name another file",
                "record_traffic",
            ) from error

    def record(self, phase: Phase, shape: Sequence[int]) -> None:
        """Count a batch by its shape before padding."""
        key = phase, tuple(shape)
        self._new[key] = self._new.get(key, 0) + 1
        if len(self._new) > CAPACITY:
            self._count()
        if self._clock() - self._saved_s > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Add what was counted to the files. An error is logged once, and requests are served on.

        What could not be added is added by a later call.
        """
        self._saved_s = self._clock()
        self._count()
        phases = [phase for phase, counted in self._counted.items() if counted.total]
        try:
            if phases:
                self._write(phases)
            self._can_save = True
        except (OSError, ConfigError, BucketingError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if self._can_save:
            path = self._files[Phase.PROMPT]
            reason = error.strerror if isinstance(error, OSError) else error
            logger.warning("Traffic cannot be written to %s: %s", path, reason)
        self._can_save = False

    def _count(self) -> None:
        new, self._new = self._new, {}
        try:
            for (phase, shape), count in new.items():
                self._counted[phase].record(shape, count)
        except BucketingError as error:  # a recorder is full after 10**12 batches
            logger.warning("Some batches are not recorded: %s", error)

    def _write(self, phases: Sequence[Phase]) -> None:
        with _locked(self._lock_file):
            for phase in phases:
                self._add(phase)

    def _add(self, phase: Phase) -> None:
        """Add what was counted to the file of a phase, which another server may have written."""
        file = self._files[phase]
        version, recorded = self._written.pop(phase, (None, None))
        if recorded is None or version != _version(file):
            recorded = self._read(phase)
        recorded.merge(self._counted[phase])
        recorded.save(file)
        self._counted[phase] = self._recorder(phase)
        self._written[phase] = _version(file), recorded

    def _read(self, phase: Phase) -> TrafficRecorder:
        file, recorder = self._files[phase], self._recorder(phase)
        if not file.exists():
            return recorder
        recorded = load_traffic(file)
        if recorded.axes != self._axes[phase]:
            raise ConfigError(
                f"{file} has traffic of {', '.join(recorded.axes)}, and this server's buckets have "
                f"{', '.join(self._axes[phase])}: name another file",
                "record_traffic",
            )
        recorder.merge(recorded)
        return recorder

    def _recorder(self, phase: Phase) -> TrafficRecorder:
        return TrafficRecorder(self._axes[phase], capacity=CAPACITY)


_Version: TypeAlias = tuple[int, int, int] | None
"""What tells whether a file was replaced: inode, size and time. None where there is no file."""


def _version(file: Path) -> _Version:
    try:
        state = file.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


@contextlib.contextmanager
def _locked(file: Path) -> Generator[None, None, None]:
    """Hold the lock of a file, which is made. Where the file system has none, it does without.

    Raises `OSError`, also where another process holds it for half a second.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    for _ in range(_LOCK_TRIES):
        if _try_lock(descriptor):
            return
        time.sleep(_LOCK_PAUSE_S)
    raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock")


def _try_lock(descriptor: int) -> bool:
    """Whether the file is locked now, or cannot be locked by anyone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
