"""The process that downloads or converts a checkpoint while another model is served.

Both take minutes, memory and processor time, and a thread could not be ended with the server. The
result is in the cache of the hub or of conversions, where the engine core finds it.

Reads questions of `LineProcess`, names of checkpoints; answers each with ``{"source": ...,
"has_weights": ...}``, what `locate` returns and whether weights are there, or ``{"error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from pathlib import Path

from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.models.checkpoint import locate
from trencadis.engine.models.hub import why_unreachable
from trencadis.engine.models.weight_files import WEIGHT_FILES


def main() -> None:
    """Serve until the end of the input, such as where the server was killed."""
    answers = sys.stdout
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not an answer
        while True:
            number, name = json.loads(questions.get())
            answers.write(json.dumps([number, _answer(name)]) + "\n")
            answers.flush()


def _read(questions: queue.SimpleQueue[str]) -> None:
    """In a thread: the end of the input ends the process, and not what it downloads."""
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)


def _answer(name: str) -> dict[str, object]:
    try:
        source = locate(name)
        has_weights = Path(source).is_dir() or _download(source)
    except ModelError as error:
        return {"error": str(error)}
    except BROKEN_FILE_ERRORS as error:
        return {"error": f"{name} cannot be downloaded: {reason_of(error)}"}
    return {"source": source, "has_weights": has_weights}


def _download(name: str) -> bool:
    """Bring the weights of a hub id into the hub's cache; returns whether it has any.

    Without weights, loading the tokenizer or the model says what is missing. Raises ``OSError``
    where the hub cannot be asked or rejects, unless the weights are in the cache.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415  (slow)

    unreachable = why_unreachable(name)
    if unreachable:  # which each file would find out again, with retries
        if _has_weights(name, is_online=False):
            return True
        raise OSError(unreachable)
    try:
        return _has_weights(name, is_online=True)
    except LocalEntryNotFoundError as error:  # no connection, or the hub is down
        if _has_weights(name, is_online=False):
            return True
        raise OSError(f"{error}: {error.__cause__}") from error


def _has_weights(name: str, *, is_online: bool) -> bool:
    from transformers.utils.hub import get_checkpoint_shard_files  # noqa: PLC0415  (slow)

    for file in WEIGHT_FILES:
        if _cached(name, file, is_online=is_online) is not None:
            return True
        index = _cached(name, f"{file}.index.json", is_online=is_online)
        if index is not None:
            get_checkpoint_shard_files(name, index, local_files_only=not is_online)  # type: ignore[no-untyped-call]
            return True
    return False


def _cached(name: str, file: str, *, is_online: bool) -> str | None:
    """The path of a file of a hub id, downloaded if need be; None where there is none.

    Not transformers' ``cached_file``, whose errors do not tell a file that does not exist from a
    hub that rejects or cannot be reached.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (slow)
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        LocalEntryNotFoundError,
    )

    try:
        return hf_hub_download(name, file, local_files_only=not is_online)
    except LocalEntryNotFoundError:  # an EntryNotFoundError, too
        if is_online:
            raise
        return None
    except EntryNotFoundError:
        return None
