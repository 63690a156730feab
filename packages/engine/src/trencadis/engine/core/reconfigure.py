"""Replaces the model of a running core, in the eight steps of seed 004.

Nothing of the old model is read by the new one: what depends on a model is either the executor's,
which replaces it, or built again by `EngineCore.rebuild`. A failure in any step puts the previous
model back. Models that were served before may wait in the executor's host memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from trencadis.engine.core.config_payload import OF_THE_DEVICE, config_of_payload
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.errors import ConfigError, SwitchFailedError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.runner.executor import ModelFacts
from trencadis.engine.runner.executor_choice import with_rank_per_node
from trencadis.engine.settings.engine_config import EngineConfig

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


@attrs.define(eq=False)
class _Switch:
    """A switch in progress. ``config`` and ``facts`` are those of the new model, once it is read
    and once it has a cache. ``was_put_aside``: the executor no longer has the previous model."""

    core: EngineCore
    payload: bytes
    stash_bytes: int
    stop: Callable[[], bool]
    previous: EngineConfig
    config: EngineConfig
    facts: ModelFacts | None = None
    was_put_aside: bool = False
    from_stash: bool = False
    warmup_s: float = 0.0


class ModelSwitcher:
    """Switches the model of ``core``, and lets it sleep.

    ``stop`` is polled during warm-up; True ends it.
    """

    def __init__(self, core: EngineCore, stop: Callable[[], bool] = lambda: False) -> None:
        self._core = core
        self._stop = stop

    def check(self, payload: bytes) -> None:
        """Raise `ConfigError` or `ModelError` where the model of a payload cannot be served.

        As far as that is known before anything is loaded. Changes nothing, and may be called in
        another thread while steps run.
        """
        core = self._core
        core.executor.check(_config_of(payload, core))

    def reconfigure_engine(self, payload: bytes, stash_bytes: int) -> SwitchResult:
        """Serve the model of the configuration in ``payload``. Requests end without a message.

        ``stash_bytes``: the limit of the stash. Raises `SwitchFailedError` once the previous model
        serves again, or, with the step ``wake``, sleeps because it cannot be started again. Any
        other error: the core cannot go on.
        """
        core = self._core
        switch = _Switch(core, payload, stash_bytes, self._stop, core.config, core.config)
        memory_before = core.executor.memory_in_use()
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
            raise SwitchFailedError(reason, step_name, switch.previous.name)
        unload_s = sum(seconds[name] for name in ("pause", "sleep", "unload"))
        result = SwitchResult(
            unload_s=unload_s,
            load_s=sum(seconds.values()) - unload_s - switch.warmup_s,
            warmup_s=switch.warmup_s,
            memory_before_bytes=memory_before,
            memory_after_bytes=core.executor.memory_in_use(),
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
        core.on_busy("the engine core releases its device memory", _longest_sleep_s(core.config))
        before = core.executor.memory_in_use()
        core.abort_all()
        core.release_tiers()
        core.executor.sleep(level)
        return max(0, before - core.executor.memory_in_use())

    def wake_up(self) -> None:
        """Serve again after `sleep`, from empty caches. Does nothing in a core that is awake.

        Raises `SwitchFailedError` of the step ``wake`` where the core stays asleep, for example
        because other processes have taken the device memory.
        """
        core = self._core
        if not core.is_asleep:
            return
        core.on_busy("the engine core wakes up", _longest_start_s(core, core.config))
        reason = self._start_again()
        if reason:
            raise SwitchFailedError(f"the engine stays asleep: {reason}", "wake", core.config.name)

    def _start_again(self) -> str:
        """Serve the executor's model, which may sleep; returns why it stays asleep, if it does."""
        core = self._core
        try:
            core.rebuild(core.executor.wake(_polled(core, self._stop)))
        except Exception as error:
            logger.warning("The engine core cannot wake up", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        else:
            return ""
        # Past the except clause, as above: what has come to the device leaves it again.
        core.executor.sleep(1)
        return reason

    def _put_back(self, switch: _Switch) -> str:
        """Serve the previous model again, from wherever its weights are. As `_start_again`."""
        core = switch.core
        core.on_busy(
            "the engine core returns to the previous model", _longest_start_s(core, switch.previous)
        )
        core.config = switch.previous  # also where it sleeps on
        if switch.was_put_aside:
            core.executor.put_back()
        return self._start_again()


# The eight steps, in the order of seed 004.


def deserialise(switch: _Switch) -> None:
    """Read the configuration of the new model. Raises `ConfigError`."""
    switch.config = _config_of(switch.payload, switch.core)


def pause_scheduling(switch: _Switch) -> None:
    """End every request and empty the prefix cache, so that nothing refers to KV blocks."""
    switch.core.abort_all()


def sleep_device(switch: _Switch) -> None:
    """Release the device memory of the previous model: its weights go to host memory."""
    switch.was_put_aside = True
    switch.core.release_tiers()
    switch.core.executor.put_aside(switch.config, switch.stash_bytes)


def unload_model(switch: _Switch) -> None:
    """Put the previous model into the stash. Without space for it, its weights are dropped."""
    switch.core.executor.unload()


def load_model(switch: _Switch) -> None:
    """Load the new model's weights from the checkpoint, unless they were in the stash."""
    switch.from_stash = switch.core.executor.load(switch.config)


def initialise_cache(switch: _Switch) -> None:
    """Size and allocate the KV cache; then warm up, unless the programs were kept."""
    core = switch.core
    switch.facts = core.executor.plan_memory()
    began = time.monotonic()
    core.executor.warm_up(_polled(core, switch.stop))
    switch.warmup_s = time.monotonic() - began


def rebuild_scheduling(switch: _Switch) -> None:
    """Make a new block pool, prefix cache, scheduler, request table and grammar compiler."""
    if switch.facts is None:
        raise RuntimeError("the new model has no cache")
    switch.core.rebuild(switch.facts)


def resume(switch: _Switch) -> None:
    """Check weights that come back from the stash by a forward pass; then requests are served."""
    if switch.from_stash:
        switch.core.executor.probe()


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


def _config_of(payload: bytes, core: EngineCore) -> EngineConfig:
    """The configuration of another model for the device of ``core``. Raises `ConfigError`."""
    config = with_rank_per_node(config_of_payload(payload))
    _check_same_device(core.config, config)
    return config.for_device(core.executor.device_facts.defaults)


def _check_same_device(previous: EngineConfig, config: EngineConfig) -> None:
    for name in OF_THE_DEVICE:
        ours, theirs = getattr(previous, name), getattr(config, name)
        if ours != theirs:
            raise ConfigError(
                f"{name} is {theirs!r} for {config.name} and {ours!r} for {previous.name}: it is a "
                "setting of the device, give all models the same",
                name,
            )


def _polled(core: EngineCore, stop: Callable[[], bool]) -> Callable[[], bool]:
    """``stop``, for a warm-up that says before each bucket that the core is busy."""

    def before_bucket() -> bool:
        core.on_busy("the engine core warms up", BUSY_SECONDS)
        return stop()

    return before_bucket


# How long a core may be silent. Each limit is generous: a core that is slow serves in the end, and
# one that is killed loses all requests.


def _longest_s(step: str, switch: _Switch) -> float:
    """Longest silence of a step."""
    if step == "load" and not switch.core.executor.has_weights(switch.config):
        return _longest_load_s(switch.config)
    if step == "cache":
        return BUSY_SECONDS
    if step == "sleep":
        return _longest_sleep_s(switch.previous)
    return _STEP_SECONDS


def _longest_sleep_s(config: EngineConfig) -> float:
    """Longest silence while a model's memory is released, after a compilation that has begun."""
    return _STEP_SECONDS + (BUSY_SECONDS if config.warmup == "background" else 0.0)


def _longest_start_s(core: EngineCore, config: EngineConfig) -> float:
    """Longest silence until a model is back, before its warm-up: weights, then the cache."""
    loads_s = 0.0 if core.executor.has_weights(config) else _longest_load_s(config)
    return loads_s + BUSY_SECONDS


def _longest_load_s(config: EngineConfig) -> float:
    """Longest reading of a checkpoint. What is not a directory may be downloaded or converted."""
    source = Path(config.model).expanduser()
    if not source.is_dir():
        return BUSY_SECONDS
    files = [path for path in source.iterdir() if path.suffix in _WEIGHT_FILES]
    num_bytes = sum(path.stat().st_size for path in files)
    return max(BUSY_SECONDS, num_bytes / _READ_BYTES_PER_SECOND)
