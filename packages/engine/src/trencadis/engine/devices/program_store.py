"""Stores compiled programs on disk, one archive per program, written atomically.

A killed compiler leaves a partial library, and loading one crashes the process. So each process
compiles in its own directory. The files of a complete program are then stored in the shared
directory as one archive with checksums, renamed into place.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

logger = logging.getLogger("trencadis.engine")

_PREFIX = "compiling-"
_LEFT_AFTER_SECONDS = 24 * 3600.0
"""Age after which a process's directory is removed: its process was killed."""

_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)


class ProgramStore:
    """The programs in ``directory``, which several processes may share.

    ``workplace`` is the directory in which this process compiles. It is removed at exit.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(directory)
        self._temporary = tempfile.TemporaryDirectory(
            prefix=_PREFIX, dir=directory, ignore_cleanup_errors=True
        )
        self.workplace = Path(self._temporary.name)
        self._warned = False

    def fetch(self, key: str) -> None:
        """Unpack a stored program into the workplace, if it exists and its checksums match."""
        archive = self._archive(key)
        try:
            with zipfile.ZipFile(archive) as packed:
                if packed.testzip() is not None:
                    raise zipfile.BadZipFile("a checksum differs")
                # A library that this process has loaded must not be overwritten.
                missing = [
                    name for name in packed.namelist() if not (self.workplace / name).exists()
                ]
                packed.extractall(self.workplace, missing)
        except FileNotFoundError:
            return
        except _UNREADABLE as error:
            if not self._warned:
                logger.warning("%s cannot be read and is compiled anew: %s", archive, error)
            self._warned = True

    def present(self) -> frozenset[Path]:
        """The files in the workplace."""
        return frozenset(path for path in self.workplace.rglob("*") if path.is_file())

    def keep(self, key: str, files: frozenset[Path]) -> None:
        """Store files of the workplace as a program. A full disk gives only a warning."""
        try:
            partial = self.workplace / "partial.zip"
            with zipfile.ZipFile(partial, "w") as packed:
                for path in sorted(files):
                    packed.write(path, path.relative_to(self.workplace))
            partial.replace(self._archive(key))
        except OSError as error:
            logger.warning("What was compiled cannot be kept in %s: %s", self.directory, error)

    def _archive(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.zip"


def _remove_leftovers(directory: Path) -> None:
    for path in directory.glob(f"{_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _LEFT_AFTER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
