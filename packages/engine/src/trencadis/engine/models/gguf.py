"""Converts a GGUF file to safetensors in the user's cache directory, once.

In bf16, for every device, and below it packed, as far as `packed_gguf` reads the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

import platformdirs
from safetensors import SafetensorError

from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import reason_of
from trencadis.engine.models.weight_files import has_all_tensors

logger = logging.getLogger("trencadis.engine")

_FORMAT = 3
"""Version of the conversion. Increase it to invalidate older conversions."""

_MAGIC = b"GGUF"

_SCRATCH_NAME = re.compile(r"\..+-[0-9a-f]{16}-[a-z0-9_]{8}")
"""A dot, the name of the conversion with its fingerprint, and what `tempfile.mkdtemp` adds."""


def cache_directory() -> Path:
    """Directory of converted models, in the user's cache directory of this platform."""
    return Path(platformdirs.user_cache_dir("trencadis")) / "models"


def convert_gguf(gguf: Path, name: str | None = None, cache: Path | None = None) -> Path:
    """Directory with the safetensors conversion of ``gguf``, converted on the first call.

    The conversion is written to a temporary directory and renamed when complete, so a killed
    process leaves no partial result; the next conversion removes what it has left. If two
    processes convert at once, the first to finish wins and the other uses its result. A conversion
    that was damaged later is made again. Raises `ModelError` when transformers cannot read the
    file, or the conversion cannot be written.
    """
    parent = cache if cache is not None else cache_directory()
    _check_magic(gguf)
    try:
        target = parent / f"{name or gguf.stem}-{_fingerprint(gguf)}"
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror}") from error
    try:
        if target.is_dir():
            if _is_whole(target):
                return target
            logger.warning("%s is damaged and is converted again", target)
            shutil.rmtree(target)
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        logger.info("Converting %s to bf16 safetensors in %s (once)", gguf.name, target)
        _convert_to(target, gguf)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the conversion of {gguf.name} cannot be kept in {parent}: {reason_of(error)}. Make "
            "free space there, or name another cache directory with XDG_CACHE_HOME"
        ) from error
    return target


def _check_magic(gguf: Path) -> None:
    """Raise `ModelError` for a file of another form, which transformers takes for a config file."""
    try:
        with gguf.open("rb") as file:
            beginning = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror}") from error
    if beginning != _MAGIC:
        raise ModelError(
            f"{gguf} is not a GGUF file, which begins with GGUF: download it again, or name a "
            "checkpoint's directory"
        )


def _convert_to(target: Path, gguf: Path) -> None:
    _remove_abandoned(target.parent)
    with _scratch_for(target) as scratch:
        _convert(gguf, scratch)
        _publish(scratch, target)


@contextlib.contextmanager
def _scratch_for(target: Path) -> Generator[Path, None, None]:
    """A directory beside ``target``, locked as long as its process lives."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        with _locked(scratch, waits=True):
            if not scratch.exists():  # removed as abandoned, before it was locked
                continue
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed processes have left of their conversions: each is as large as a model."""
    for scratch in parent.glob(".*"):
        if _SCRATCH_NAME.fullmatch(scratch.name) and scratch.is_dir():
            with _locked(scratch, waits=False) as is_locked:
                if is_locked:
                    logger.info("Removing %s of a conversion that was killed", scratch)
                    shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path, *, waits: bool) -> Generator[bool, None, None]:
    """Lock a directory until the end of the context or of the process; gives whether that worked.

    It does not where another process has the lock, unless this one waits for it, nor where a file
    system has no locks of directories: what is left behind there stays.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # another process has removed it
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _is_whole(target: Path) -> bool:
    """Whether no file is empty, and those of the weights have the sizes that their headers say."""
    return all(
        file.stat().st_size > 0 and (file.suffix != ".safetensors" or has_all_tensors(file))
        for file in target.rglob("*")
        if file.is_file()
    )


def _convert(gguf: Path, target: Path) -> None:
    # Imported here, because a start that finds a conversion must not wait for these imports.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    from trencadis.engine.models.packed_gguf import write_packed  # noqa: PLC0415

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
            trust_remote_code=False,
        )
        model, report = loaded
        _check_complete(gguf, report["missing_keys"])
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False
        )
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(
            f"reading GGUF files needs pip install 'trencadis-engine[gguf]': {error}"
        ) from error
    except Exception as error:  # a broken file makes the reader raise errors of any type
        raise ModelError(
            f"{gguf} cannot be read as a GGUF model: {reason_of(error)}. Where it is damaged, "
            "download it again"
        ) from error
    write_packed(gguf, model, target)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _check_complete(gguf: Path, missing: Collection[str]) -> None:
    """Raise `ModelError` for missing weights, which transformers draws at random."""
    if missing:
        raise ModelError(
            f"{gguf} lacks {len(missing)} weights of its model, such as {min(missing)}: download "
            "it again"
        )


def _publish(scratch: Path, target: Path) -> None:
    """Rename to ``target``. ``OSError`` with an existing target: another process was faster."""
    try:
        os.replace(scratch, target)  # noqa: PTH105  (Path.replace hides that this is one rename)
    except OSError:
        if not target.is_dir():
            raise


def _fingerprint(gguf: Path) -> str:
    """A digest of the whole file and of the version of the conversion.

    A file that is replaced in place may keep its size and its first MiB, which is metadata.
    """
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    digest.update(f":{_FORMAT}".encode())
    return digest.hexdigest()[:16]
