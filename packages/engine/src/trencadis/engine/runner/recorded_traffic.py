"""What was served, as counts of batch shapes: kept in two files, never a token of it.

The files are those of `trencadis.bucketing.TrafficRecorder`, which ``trencadis-buckets fit`` reads:
prefill batches in the file that the user names, decode batches beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trencadis.bucketing import BucketingError, TrafficRecorder
from trencadis.engine.errors import ConfigError
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")

CAPACITY = 4096
"""Most different shapes of a phase. Beyond it sizes are rounded up; so a file stays below 100 kB
and is written in a few milliseconds."""

SAVE_SECONDS = 60.0
"""Period in which the files are written while requests are served."""


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

    ``axes`` are those of each phase's grid. ``clock`` returns seconds. Raises `ConfigError` for a
    file that is no recorded traffic of these axes, and where its directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        axes: Mapping[Phase, Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = {Phase.PROMPT: path, Phase.DECODE: decode_file(path)}
        self._clock = clock
        self._recorders = {
            phase: TrafficRecorder(axes[phase], capacity=CAPACITY) for phase in Phase
        }
        for phase, recorded in read_traffic(path).items():
            if recorded.axes != tuple(axes[phase]):
                raise ConfigError(
                    f"{self._files[phase]} has traffic of {', '.join(recorded.axes)}, and this "
                    f"server's buckets have {', '.join(axes[phase])}: name another file",
                    "record_traffic",
                )
            self._recorders[phase].merge(recorded)
        self._new: dict[tuple[Phase, tuple[int, ...]], int] = {}  # checked when they are counted
        self._saved_s = clock()
        self._can_save = True
        try:
            self._write()
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
        """Write the files. An error is logged once, and requests are served on."""
        self._saved_s = self._clock()
        try:
            self._write()
            self._can_save = True
        except OSError as error:
            if self._can_save:
                path = self._files[Phase.PROMPT]
                logger.warning("Traffic cannot be written to %s: %s", path, error.strerror)
            self._can_save = False

    def _count(self) -> None:
        counted, self._new = self._new, {}
        try:
            for (phase, shape), count in counted.items():
                self._recorders[phase].record(shape, count)
        except BucketingError as error:  # a recorder is full after 10**12 batches
            logger.warning("Some batches are not recorded: %s", error)

    def _write(self) -> None:
        self._count()
        for phase, recorder in self._recorders.items():
            recorder.save(self._files[phase])
