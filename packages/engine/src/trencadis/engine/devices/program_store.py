"""Compiled programs on disk: one file each, complete or absent.

A compiler that is killed leaves half a library behind, and loading that ends the process. So this
process compiles in a directory of its own, and what a program consists of is put into the common
one afterwards, as one archive with checksums that appears under its name in one step.
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
"""No process compiles for so long: what is older was left by one that was killed."""

_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)


class ProgramStore:
    """The programs in ``directory``, which several processes may share.

    ``workplace`` is where this process compiles; it goes when the process does.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        self._temporary = tempfile.TemporaryDirectory(
            prefix=_PREFIX, dir=directory, ignore_cleanup_errors=True
        )
        self.workplace = Path(self._temporary.name)
        self._warned = False

    def fetch(self, key: str) -> None:
        """Put the files of a program into the workplace, if it is there and whole."""
        archive = self._archive(key)
        try:
            with zipfile.ZipFile(archive) as packed:
                if packed.testzip() is not None:
                    raise zipfile.BadZipFile("a checksum differs")
                packed.extractall(self.workplace)
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
        """Keep these files of the workplace as a program; a full disk is only a warning."""
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
