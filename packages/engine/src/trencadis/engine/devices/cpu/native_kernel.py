"""Compiles C++ source once for this machine, and loads it.

A library is compiled for the processor that runs it, so its file is named after source, compiler
flags and processor. It is loaded only from a directory in which no other user can write.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

logger = logging.getLogger("trencadis.engine")

_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno"),
    *("-fopenmp", "-shared", "-fPIC"),
)
_DIGEST = ".sha256"
_COMPILERS = ("g++", "clang++")
_LIMIT_SECONDS = 60.0
"""Time limit of the compiler. A kernel takes about a second."""


class NoKernel(Exception):
    """A kernel cannot be compiled or loaded on this machine; the message says why."""


def load_kernel(
    source: Path, definitions: Sequence[str], directory: Path | None = None
) -> ctypes.CDLL:
    """The library of ``source``, compiled with ``definitions`` (``D=64``) unless it was before.

    ``directory`` holds compiled libraries; by default it is in the user's cache directory. Raises
    `NoKernel`.
    """
    parent = directory or Path(platformdirs.user_cache_dir("trencadis")) / "kernels"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(parent)
        compiler = _find_compiler()
        flags = (*_FLAGS, *(f"-D{definition}" for definition in definitions))
        named = "\n".join((source.read_text(), compiler, *flags, _processor()))
        library = parent / f"{source.stem}-{hashlib.sha256(named.encode()).hexdigest()[:32]}.so"
        if not _is_whole(library):
            _compile(compiler, flags, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoKernel(str(error)) from error


def _compile(compiler: str, flags: Sequence[str], source: Path, library: Path) -> None:
    """Compile to ``library``, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *flags, str(source), "-o", str(made)]
        try:
            done = subprocess.run(  # noqa: S603 - the compiler that the user named
                command, check=False, capture_output=True, text=True, timeout=_LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise NoKernel(f"{compiler} took more than {_LIMIT_SECONDS:.0f} s") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise NoKernel(f"{compiler} failed: {lines[0]}")
        digest = made.with_suffix(_DIGEST)
        digest.write_text(_digest(made))
        made.replace(library)
        digest.replace(library.with_suffix(_DIGEST))


def _is_whole(library: Path) -> bool:
    """Whether a library is as it was written: a truncated one ends the process that loads it."""
    try:
        return library.with_suffix(_DIGEST).read_text() == _digest(library)
    except (OSError, ValueError):
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        if (found := shutil.which(name)) is not None:
            return found
    raise NoKernel(
        f"there is no C++ compiler {named!r} (CXX)" if named else "there is no C++ compiler"
    )


def _check_owner(directory: Path) -> None:
    """Raise `NoKernel` where another user could have put a library."""
    state = directory.stat()
    writable = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if state.st_uid != os.getuid() or writable:
        raise NoKernel(f"other users can write in {directory}: make it yours alone (chmod 700)")


def _processor() -> str:
    """What ``-march=native`` depends on."""
    flags = ("flags", "features", "model name")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = sorted({line for line in lines if line.lower().startswith(flags)})
    return "\n".join((platform.machine(), *found))
