"""Compiles C++ source once for this machine, loads it, and finds its fastest way to compute.

A library is compiled for the processor that runs it, so its file is named after source, compiler
flags and processor. It is loaded only from a place where no other user can write.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import platformdirs
import torch

from trencadis.engine.devices.own_files import other_writer, why_foreign
from trencadis.engine.devices.processor import processor

logger = logging.getLogger("trencadis.engine")

_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno"),
    *("-fopenmp", "-shared", "-fPIC"),
)
_DIGEST = ".sha256"
_COMPILERS = ("g++", "clang++")
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_LIMIT_SECONDS = 60.0
"""Time limit of the compiler. A kernel takes about a second."""


WAYS = {True: "fp32", False: "pairs of bf16"}
"""Names of the ways to multiply bf16, by whether it is widened to fp32."""

_TIMED_ROUNDS = 20

_Way = TypeVar("_Way")


class NoKernel(Exception):
    """A kernel cannot be compiled or loaded on this machine; the message says why."""


def load_kernel(
    source: Path,
    definitions: Sequence[str],
    directory: Path | None = None,
    *,
    trusted: bool = False,
) -> ctypes.CDLL:
    """The library of ``source``, compiled with ``definitions`` (``D=64``) unless it was before.

    Compiled libraries are in ``directory``, or where that cannot be used, and by default, in the
    user's cache directory, from which a directory that lacks one takes a copy. ``trusted``: those
    of other users are loaded, too. Raises `NoKernel`.
    """
    try:
        compiler = _find_compiler()
        flags = (*_FLAGS, *(f"-D{definition}" for definition in definitions))
        named = "\n".join((*_texts(source), compiler, *flags, processor()))
        name = f"{source.stem}-{hashlib.sha256(named.encode()).hexdigest()[:32]}.so"
    except OSError as error:
        raise NoKernel(str(error)) from error

    of_user = Path(platformdirs.user_cache_dir("trencadis")) / "kernels"

    def load(parent: Path, trusted: bool) -> ctypes.CDLL:
        library = _own_directory(parent, trusted) / name
        if not _is_whole(library, trusted) and not _copied(of_user / name, library):
            _compile(compiler, flags, source, library)
        return ctypes.CDLL(str(library))

    try:
        if directory is not None:
            try:
                return load(directory, trusted)
            except (OSError, NoKernel) as error:
                logger.warning("The %s kernel of %s is not used: %s", source.stem, directory, error)
        return load(of_user, False)
    except OSError as error:
        raise NoKernel(str(error)) from error


def _texts(source: Path) -> list[str]:
    """The text of a source, and those of the headers beside it that it includes."""
    text = source.read_text()
    return [text, *(source.with_name(name).read_text() for name in _INCLUDED.findall(text))]


def fastest(what: str, ways: Mapping[str, _Way], compute: Callable[[_Way], object]) -> _Way:
    """The way in which ``compute`` takes the least time; each is called in turns, on one thread.

    Several threads would wait for each other, and on a busy machine longer than they compute.
    ``what`` is computed, in ways by name: for the log.
    """
    if len(ways) == 1:
        return next(iter(ways.values()))

    def seconds(way: _Way) -> float:
        started = time.perf_counter()
        compute(way)
        return time.perf_counter() - started

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [[seconds(way) for way in ways.values()] for _ in range(_TIMED_ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    least = [min(times) for times in zip(*rounds, strict=True)]
    chosen = least.index(min(least))
    trial = ", ".join(
        f"{name} {taken * 1e6:.0f} µs" for name, taken in zip(ways, least, strict=True)
    )
    logger.info("%s multiplies %s (trial: %s)", what, list(ways)[chosen], trial)
    return list(ways.values())[chosen]


def _own_directory(directory: Path, trusted: bool) -> Path:
    """The directory without links, made if need be. Raises `OSError` if it is not the user's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    resolved = directory.resolve()
    if not trusted and (reason := other_writer(resolved)) is not None:
        raise PermissionError(
            f"another user may have made what is in {directory}: {reason}. Make it yours alone "
            "(chown, chmod go-w)"
        )
    return resolved


def _copied(made: Path, library: Path) -> bool:
    """Whether ``library`` is now a copy of ``made``, which only this user can have written."""
    try:
        if not made.exists():
            return False
        _own_directory(made.parent, False)
        if not _is_whole(made, False):
            return False
        with tempfile.TemporaryDirectory(prefix=".copying-", dir=library.parent) as scratch:
            copy = Path(scratch) / library.name
            shutil.copyfile(made, copy)
            _place(copy, library)
    except OSError:
        return False
    return True


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
            telling = next((line for line in lines if "error:" in line), lines[0])
            raise NoKernel(f"{compiler} failed: {telling}")
        _place(made, library)


def _place(made: Path, library: Path) -> None:
    """Move a library, and a checksum of it, into their place."""
    digest = made.with_suffix(_DIGEST)
    digest.write_text(_digest(made))
    made.replace(library)
    digest.replace(library.with_suffix(_DIGEST))


def _is_whole(library: Path, trusted: bool) -> bool:
    """Whether a library is as it was written, by this user: a truncated one ends the process."""
    try:
        if not trusted and why_foreign(library.stat()) is not None:
            return False
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


def no_memory() -> MemoryError:
    """The error of a kernel that found no memory: its status is not 0. It has changed nothing."""
    return MemoryError(
        "a kernel of the CPU found no memory: lower --max-num-seqs or --kv-cache-memory"
    )
