"""Replaces the model of a running core, in the eight steps of seed 004.

Nothing of the old model is read by the new one: what depends on a model is either a `Worker`, which
is replaced, or built again by `EngineCore.rebuild`. A failure in any step puts the previous model
back. Models that were served before may sleep in host memory (`ModelStash`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import attrs
import psutil

from trencadis.engine.core.config_payload import (
    OF_THE_DEVICE,
    config_of_payload,
    config_payload,
)
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.errors import ConfigError, SwitchFailedError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.runner.worker import Worker
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.warmup import format_bytes

logger = logging.getLogger("trencadis.engine")

_READ_BYTES_PER_SECOND = 20e6
"""Slowest reading of a large checkpoint that does not count as a hang."""

_STEP_SECONDS = 600.0
"""Longest silence of a step that neither reads a checkpoint nor compiles, such as moving the
weights to a host that swaps."""

_WEIGHT_FILES = (".safetensors", ".bin")


@attrs.frozen(kw_only=True)
class SwitchResult:
    """Seconds and memory of a switch. See `SwitchReport`."""

    unload_s: float
    load_s: float
    warmup_s: float
    memory_before_bytes: int
    memory_after_bytes: int
    from_stash: bool


class ModelStash:
    """Sleeping workers by their configuration, the least recently used first.

    Their weights take at most ``limit_bytes`` of host memory together.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._workers: OrderedDict[bytes, Worker] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all of them."""
        return sum(worker.weight_bytes for worker in self._workers.values())

    def put(self, worker: Worker) -> bool:
        """Keep a sleeping worker; others are dropped for it. False: it is larger than the limit."""
        needed = worker.weight_bytes
        if worker.is_discarded or needed > self.limit_bytes:
            return False
        self.make_space(needed)
        self._workers[_key(worker.config)] = worker
        return True

    def make_space(self, num_bytes: int) -> None:
        """Drop workers until so many bytes are free, or none are left."""
        while self._workers and self.num_bytes + num_bytes > self.limit_bytes:
            _, oldest = self._workers.popitem(last=False)
            logger.info("The weights of model %s are dropped from host memory", oldest.config.model)
            oldest.discard()

    def take(self, config: EngineConfig) -> Worker | None:
        """The worker with this configuration, which leaves the stash."""
        return self._workers.pop(_key(config), None)


def _key(config: EngineConfig) -> bytes:
    """Equal for equal configurations."""
    return config_payload(config)


@attrs.define(eq=False)
class _Switch:
    """A switch in progress. ``worker`` is that of the new model, once there is one."""

    core: EngineCore
    stash: ModelStash
    payload: bytes
    stop: Callable[[], bool]
    previous: Worker
    config: EngineConfig | None = None
    worker: Worker | None = None
    from_stash: bool = False
    warmup_s: float = 0.0


class ModelSwitcher:
    """Switches the model of ``core``, and lets it sleep.

    ``stop`` is polled during warm-up; True ends it.
    """

    def __init__(self, core: EngineCore, stop: Callable[[], bool] = lambda: False) -> None:
        self.stash = ModelStash()
        self._core = core
        self._stop = stop

    def reconfigure_engine(self, payload: bytes, stash_bytes: int) -> SwitchResult:
        """Serve the model of the configuration in ``payload``. Requests end without a message.

        ``stash_bytes``: the limit of the stash. Raises `SwitchFailedError` once the previous model
        serves again, or, with the step ``wake``, sleeps because it cannot be started again. Any
        other error: the core cannot go on.
        """
        self.stash.limit_bytes = stash_bytes
        core = self._core
        switch = _Switch(core, self.stash, payload, self._stop, core.worker)
        memory_before = memory_in_use(core)
        seconds: dict[str, float] = {}
        failed: tuple[str, str] | None = None
        for name, step in STEPS:
            began = time.monotonic()
            try:
                core.on_busy(f"the engine core switches models: {name}", _longest_s(name, switch))
                step(switch)
            except Exception as error:
                logger.warning("The switch of models failed in step %s", name, exc_info=error)
                failed = (name, f"{type(error).__name__}: {error}")
                break
            seconds[name] = time.monotonic() - began
        # Past the except clause, so that the frames of its traceback hold no tensors any more.
        if failed is not None:
            step_name, reason = failed
            # A payload that cannot be read has changed nothing; a core that slept wakes up.
            if step_name == "deserialise":
                pause_scheduling(switch)  # the front has parked or ended the requests
            sleeps_on = ""
            if step_name != "deserialise" or core.is_asleep:
                sleeps_on = self._put_back(switch)
            if sleeps_on:
                step_name, reason = "wake", f"{reason}. Now the engine sleeps: {sleeps_on}"
            raise SwitchFailedError(reason, step_name, switch.previous.config.name)
        unload_s = sum(seconds[name] for name in ("pause", "sleep", "unload"))
        result = SwitchResult(
            unload_s=unload_s,
            load_s=sum(seconds.values()) - unload_s - switch.warmup_s,
            warmup_s=switch.warmup_s,
            memory_before_bytes=memory_before,
            memory_after_bytes=memory_in_use(core),
            from_stash=switch.from_stash,
        )
        logger.info("The engine serves %s now: %s", core.config.name, result)
        return result

    def sleep(self, level: int) -> int:
        """Release device memory; requests end without a message. Returns the bytes that are free.

        Level 1 keeps the weights in host memory, level 2 drops them, as in vLLM. A core that sleeps
        at level 1 may go on to level 2.
        """
        core = self._core
        core.on_busy("the engine core releases its device memory", _longest_sleep_s(core.worker))
        before = memory_in_use(core)
        core.abort_all()
        core.scheduler.abort_admitted()
        if level == 1:
            core.worker.sleep()
        else:
            core.worker.discard()
        return max(0, before - memory_in_use(core))

    def wake_up(self) -> None:
        """Serve again after `sleep`, from empty caches. Does nothing in a core that is awake.

        Raises `SwitchFailedError` of the step ``wake`` where the core stays asleep, for example
        because other processes have taken the device memory.
        """
        core = self._core
        if not core.is_asleep:
            return
        core.on_busy("the engine core wakes up", _longest_start_s(core.worker))
        reason = self._start_again(core.worker)
        if reason:
            raise SwitchFailedError(f"the engine stays asleep: {reason}", "wake", core.config.name)

    def _start_again(self, worker: Worker) -> str:
        """Serve the model of a worker that sleeps; returns why it stays asleep, if it does."""
        core = self._core
        try:
            self._serve_again(worker)
        except Exception as error:
            if core.worker.config is not worker.config:
                raise  # a wake-up would start the wrong model: only a new core can serve
            logger.warning("The engine core cannot wake up", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        else:
            return ""
        # Past the except clause, as above: what has come to the device leaves it again.
        if not core.worker.is_discarded:
            core.worker.sleep()
        gc.collect()
        core.device.synchronize()  # a lazy device holds what it has collected
        return reason

    def _serve_again(self, worker: Worker) -> None:
        worker = _awake(self._core, worker)
        _warm_up(self._core, worker, self._stop)
        self._core.rebuild(worker)

    def _put_back(self, switch: _Switch) -> str:
        """Serve the previous model again, from wherever its weights are. As `_start_again`."""
        core = switch.core
        core.on_busy(
            "the engine core returns to the previous model", _longest_start_s(switch.previous)
        )
        if core.worker is not switch.previous:  # its device memory is needed
            core.worker.discard()
        if switch.worker is not None:
            switch.worker = None
            gc.collect()  # what a half-built worker holds
            core.device.synchronize()  # and what a lazy device has collected for it
        config = switch.previous.config
        return self._start_again(switch.stash.take(config) or switch.previous)


# The eight steps, in the order of seed 004.


def deserialise(switch: _Switch) -> None:
    """Read the configuration of the new model. Raises `ConfigError`."""
    config = config_of_payload(switch.payload)
    _check_same_device(switch.previous.config, config)
    switch.config = config.for_device(switch.core.device.defaults)


def pause_scheduling(switch: _Switch) -> None:
    """End every request and empty the prefix cache, so that nothing refers to KV blocks."""
    switch.core.abort_all()
    switch.core.scheduler.abort_admitted()


def sleep_device(switch: _Switch) -> None:
    """Release the device memory of the previous model: its weights go to host memory.

    The new model leaves the stash before that, and others for which there is no space then.
    """
    switch.worker = switch.stash.take(_configuration(switch))
    switch.from_stash = switch.worker is not None
    if switch.previous.weight_bytes > switch.stash.limit_bytes:
        switch.previous.discard()
    else:
        switch.stash.make_space(switch.previous.weight_bytes)
        switch.previous.sleep()


def unload_model(switch: _Switch) -> None:
    """Put the previous model into the stash. Without space for it, its weights are dropped."""
    if not switch.stash.put(switch.previous):
        switch.previous.discard()


def load_model(switch: _Switch) -> None:
    """Load the new model's weights from the checkpoint, unless they were in the stash."""
    if switch.worker is None:
        switch.worker = Worker(_configuration(switch), switch.core.device)
        switch.worker.load()


def initialise_cache(switch: _Switch) -> None:
    """Size and allocate the KV cache; then warm up, unless the programs were kept."""
    worker = _new_worker(switch)
    if switch.from_stash:
        worker.wake()
    else:
        worker.initialise_cache()
    began = time.monotonic()
    _warm_up(switch.core, worker, switch.stop)
    switch.warmup_s = time.monotonic() - began


def rebuild_scheduling(switch: _Switch) -> None:
    """Make a new block pool, prefix cache, scheduler, request table and grammar compiler."""
    switch.core.rebuild(_new_worker(switch))


def resume(switch: _Switch) -> None:
    """Check weights that come back from the stash by a forward pass; then requests are served."""
    if switch.from_stash:
        switch.core.worker.runner.probe()


Step = Callable[[_Switch], None]

STEPS: tuple[tuple[str, Step], ...] = (
    ("deserialise", deserialise),
    ("pause", pause_scheduling),
    ("sleep", sleep_device),
    ("unload", unload_model),
    ("load", load_model),
    ("cache", initialise_cache),
    ("rebuild", rebuild_scheduling),
    ("resume", resume),
)
"""The steps by the names that `SwitchFailedError` has."""


def _check_same_device(previous: EngineConfig, config: EngineConfig) -> None:
    for name in OF_THE_DEVICE:
        ours, theirs = getattr(previous, name), getattr(config, name)
        if ours != theirs:
            raise ConfigError(
                f"{name} is {theirs!r} for {config.name} and {ours!r} for {previous.name}: it is a "
                "setting of the device, give all models the same",
                name,
            )


def memory_in_use(core: EngineCore) -> int:
    """Bytes in use of the device's memory; on the CPU those of this process."""
    device = core.device
    if device.shares_host_memory:
        return int(psutil.Process().memory_info().rss)
    device.synchronize()
    used = device.total_memory() - device.free_memory()
    logger.debug("%s of device memory are in use", format_bytes(used))
    return used


def _awake(core: EngineCore, worker: Worker) -> Worker:
    """``worker`` with its device memory, or, where its weights were dropped, another like it."""
    if worker.is_discarded:
        worker = Worker(worker.config, core.device)
        worker.load()
        worker.initialise_cache()
    elif worker.is_asleep:
        worker.wake()
    return worker


def _warm_up(core: EngineCore, worker: Worker, stop: Callable[[], bool]) -> None:
    def before_bucket() -> bool:
        core.on_busy("the engine core warms up", BUSY_SECONDS)
        return stop()

    if not worker.is_warm:
        worker.warm_up(before_bucket)


# How long a core may be silent. Each limit is generous: a core that is slow serves in the end, and
# one that is killed loses all requests.


def _longest_s(step: str, switch: _Switch) -> float:
    """Longest silence of a step."""
    if step == "load" and switch.worker is None:
        return _longest_load_s(_configuration(switch))
    if step == "cache":
        return BUSY_SECONDS
    if step == "sleep":
        return _longest_sleep_s(switch.previous)
    return _STEP_SECONDS


def _longest_sleep_s(worker: Worker) -> float:
    """Longest silence while a worker releases its memory, after a compilation that has begun."""
    return _STEP_SECONDS if worker.background is None else _STEP_SECONDS + BUSY_SECONDS


def _longest_start_s(worker: Worker) -> float:
    """Longest silence until a worker is back, before its warm-up: weights, then the cache."""
    loads_s = _longest_load_s(worker.config) if worker.is_discarded else 0.0
    return loads_s + BUSY_SECONDS


def _longest_load_s(config: EngineConfig) -> float:
    """Longest reading of a checkpoint. What is not a directory may be downloaded or converted."""
    source = Path(config.model).expanduser()
    if not source.is_dir():
        return BUSY_SECONDS
    files = [path for path in source.iterdir() if path.suffix in _WEIGHT_FILES]
    num_bytes = sum(path.stat().st_size for path in files)
    return max(BUSY_SECONDS, num_bytes / _READ_BYTES_PER_SECOND)


def _configuration(switch: _Switch) -> EngineConfig:
    if switch.config is None:
        raise RuntimeError("the configuration was not read")
    return switch.config


def _new_worker(switch: _Switch) -> Worker:
    if switch.worker is None:
        raise RuntimeError("the new model was not loaded")
    return switch.worker
