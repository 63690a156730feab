"""Compiled programs made before a server needs them: a cache is filled, or checked for gaps.

A server that is started with the same settings and this cache compiles nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")


@attrs.frozen
class CompileCacheReport:
    """What a compile cache has for a server with some settings.

    ``missing``: the buckets with a program that it lacks; None where the device cannot tell.
    ``num_compiled``: programs that were compiled to fill it, in ``seconds``.
    """

    directory: Path
    num_buckets: int
    missing: tuple[tuple[Phase, Bucket], ...] | None
    num_compiled: int = 0
    seconds: float = 0.0


def fill_compile_cache(config: EngineConfig) -> CompileCacheReport:
    """Warm up as a server with these settings does, so that its programs are in ``compile_cache``.

    Compilation is on where neither settings nor device say so. Raises `ConfigError` where nothing
    could be compiled or kept, and the errors of `EngineCore`.
    """
    directory = _directory(config)
    device = _device(config, directory)
    core = _core(config, device)
    try:
        report = core.warm_up()
        missing = tuple(core.executor.missing_buckets()) if device.lists_programs else None
        return CompileCacheReport(
            directory,
            core.facts.num_buckets,
            missing,
            device.num_compilations(),
            report.seconds if report is not None else 0.0,
        )
    finally:
        core.close()


def check_compile_cache(config: EngineConfig) -> CompileCacheReport:
    """Which buckets of a server with these settings have no program in ``compile_cache``.

    The model is loaded, since the buckets depend on the memory that it leaves. Nothing is added to
    the cache. A device that cannot list its programs runs each bucket, and compiles what is missing
    elsewhere. Raises `ConfigError` for a directory that does not exist, or a device that neither
    lists nor counts.
    """
    directory = _directory(config)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: make it with engine-serve warmup MODEL")
    device = _device(config, directory, read_only=True)
    if not (device.lists_programs or device.counts_missing):
        raise ConfigError(
            f"device {device.name} cannot list the programs in {directory}, which it names itself: "
            "start a server with it and see the compilations in its log"
        )
    core = _core(config, device)
    try:
        missing = tuple(core.executor.missing_buckets())
        return CompileCacheReport(directory, core.facts.num_buckets, missing)
    finally:
        core.close()


def _directory(config: EngineConfig) -> Path:
    if config.compile_cache is None:
        raise ConfigError("compile_cache names no directory: set it", "compile_cache")
    return Path(config.compile_cache)


def _device(config: EngineConfig, directory: Path, *, read_only: bool = False) -> Device:
    return select_device(
        config.device,
        directory,
        trust_compile_cache=config.trust_compile_cache,
        read_only=read_only,
        fp32_softmax=config.fp32_softmax,
        cpu_threads=config.cpu_threads,
    )


def _core(config: EngineConfig, device: Device) -> EngineCore:
    """A core with a full warm-up, and with compilation unless the device decides it."""
    if config.compile is None and "compile" not in device.defaults:
        config = attrs.evolve(config, compile=True)
    if config.compile is False and "compile" not in device.defaults:
        raise ConfigError(
            f"on {device.name} nothing is compiled with --no-compile: leave it out", "compile"
        )
    if config.compile and (missing := device.compiler_missing()) is not None:
        raise ConfigError(f"compiling needs {missing}", "compile")
    # Events and tiers are those of a server, which may run beside this.
    config = attrs.evolve(config, warmup="full", device=device, kv_events_config={}, kv_tiers="")
    return EngineCore(config, InProcessExecutor(config, records=False))
