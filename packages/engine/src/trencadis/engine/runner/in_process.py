"""The executor whose worker is in the core's process, and the models that wait in host memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from trencadis.bucketing import Bucket
from trencadis.engine.api.inspection import GridUsage
from trencadis.engine.devices import select_device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.adapter_files import Adapter
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.runner.adapter_store import AdapterReader, AdapterStore, LoadedAdapter
from trencadis.engine.runner.executor import DeviceFacts, ExecutorCounters, ModelFacts
from trencadis.engine.runner.kept_programs import ProgramStore
from trencadis.engine.runner.prompt_scorer import SCORED_TOKEN_COST
from trencadis.engine.runner.shared_blocks import StagingFiles
from trencadis.engine.runner.step import PendingStep, StepInput
from trencadis.engine.runner.worker import Worker
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache import Content
from trencadis.warmup import Phase, WarmupReport, format_bytes

logger = logging.getLogger("trencadis.engine")


class ModelStash:
    """Sleeping workers, the least recently used first.

    Their weights take at most ``limit_bytes`` of host memory together.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._workers: list[Worker] = []

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all of them."""
        return sum(worker.weight_bytes for worker in self._workers)

    def put(self, worker: Worker) -> bool:
        """Keep a sleeping worker; others are dropped for it. False: it is larger than the limit."""
        needed = worker.weight_bytes
        if worker.is_discarded or needed > self.limit_bytes:
            return False
        self.make_space(needed)
        self._workers.append(worker)
        return True

    def make_space(self, num_bytes: int) -> None:
        """Drop workers until so many bytes are free, or none are left."""
        while self._workers and self.num_bytes + num_bytes > self.limit_bytes:
            oldest = self._workers.pop(0)
            logger.info("The weights of model %s are dropped from host memory", oldest.config.model)
            oldest.discard()

    def take(self, config: EngineConfig) -> Worker | None:
        """The worker with this configuration, which leaves the stash."""
        for number, worker in enumerate(self._workers):
            if worker.config == config:
                return self._workers.pop(number)
        return None


class InProcessExecutor:
    """An `Executor` with one `Worker` on the device that ``config`` names.

    Without ``records`` no traffic is recorded: for a core that only warms up. ``worker`` holds the
    model that is served or sleeps. ``part``: that of this process, where it is one of several ranks
    (`ranks`). Raises `ConfigError` where ``config`` asks for several and this is none of them.
    """

    worker: Worker
    _previous: Worker
    """The worker that was put aside last."""

    def __init__(
        self, config: EngineConfig, *, records: bool = True, part: RankPart | None = None
    ) -> None:
        size = config.tensor_parallel_size
        if size > 1 and part is None:
            raise ConfigError(
                f"tensor_parallel_size {size} is only for serving requests: leave it out here",
                "tensor_parallel_size",
            )
        self._part = part
        self.device = device = select_device(
            config.device,
            Path(config.compile_cache) if config.compile_cache else None,
            trust_compile_cache=config.trust_compile_cache,
            fp32_softmax=config.fp32_softmax,
            cpu_threads=config.cpu_threads,
            num_ranks=size,
        )
        self.device_facts = DeviceFacts(
            device.name, device.defaults, device.temperature_source, device.sensor_indices
        )
        self.on_cold: Callable[[object], None] = lambda shape: None
        self.stash = ModelStash()
        self.programs = ProgramStore()
        self._records = records
        self._following: Worker | None = None
        """The worker of the model that is loaded next, where its weights were in the stash."""

    @property
    def is_asleep(self) -> bool:
        return self.worker.is_asleep

    @property
    def is_warming_up(self) -> bool:
        background = self.worker.background
        return background is not None and background.is_running and not self.worker.is_asleep

    # A model, from its checkpoint to its first step.

    def check(self, config: EngineConfig) -> None:
        if not self.has_weights(config):
            Worker(config, self.device, records=False, part=self._part)

    def load(self, config: EngineConfig) -> bool:
        worker, self._following = self._following, None
        if worker is not None:
            self.worker = worker
            return True
        self.worker = self._loaded(config)
        return False

    def plan_memory(self) -> ModelFacts:
        if self.worker.is_asleep:
            self.worker.wake()
        else:
            self.worker.initialise_cache()
        return self._facts()

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        return None if self.worker.is_warm else self.worker.warm_up(stop)

    def advance_warm_up(self, *, idle: bool) -> None:
        if self.worker.background is not None and not self.worker.is_asleep:
            self.worker.background.advance(idle=idle)

    # Adapters of the model.

    def adapter_reader(self) -> AdapterReader:
        return self.worker.adapters.reader()

    def hold_adapter(self, adapter: Adapter) -> LoadedAdapter:
        return self.worker.adapters.hold(adapter)

    def holds_adapter(self, digest: str) -> bool:
        return digest in self.worker.adapters

    def drop_adapter(self, digest: str) -> None:
        self.worker.adapters.drop(digest)

    # Steps.

    def execute(self, step: StepInput) -> PendingStep:
        return self.worker.runner.run(step)

    def staging_blocks(self) -> Sequence[Content]:
        cache = self.worker.cache
        return [
            cache.host_content(block)
            for block in range(self._facts().num_host_blocks, cache.num_host_blocks)
        ]

    @property
    def staging_files(self) -> StagingFiles:
        """Where the memory of `staging_blocks` is, for the core of ranks."""
        return self.worker.staging_files

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        return self.worker.runner.pays_to_jump(start, num_forced, num_seqs)

    def probe(self) -> None:
        self.worker.runner.probe()

    def counters(self) -> ExecutorCounters:
        runner = self.worker.runner
        return ExecutorCounters(
            num_ready_buckets=runner.buckets.num_ready,
            num_graphs=runner.forward_runner.num_graphs,
            num_padded_tokens=runner.batches.padded_tokens,
            num_bucket_misses=runner.buckets.num_misses,
            num_cold_forwards=runner.forward_runner.cold_forwards,
            num_compilations=runner.forward_runner.compilations,
        )

    def grid_usage(self) -> tuple[GridUsage, ...]:
        runner = self.worker.runner
        return runner.buckets.grid_usage(is_padded=runner.batches.pads_to_buckets)

    def missing_buckets(self) -> Sequence[tuple[Phase, Bucket]]:
        return self.worker.missing_buckets()

    # Another model, and sleep.

    def memory_in_use(self) -> int:
        device = self.device
        if device.shares_host_memory:
            return int(psutil.Process().memory_info().rss)
        device.synchronize()
        used = device.total_memory() - device.free_memory()
        logger.debug("%s of device memory are in use", format_bytes(used))
        return used

    @property
    def models_in_memory(self) -> tuple[EngineConfig, ...]:
        """The settings of the models whose weights are held, wherever they are."""
        held = [self.worker, *self.stash]
        if self._following is not None:
            held.append(self._following)
        return tuple(worker.config for worker in held if not worker.is_discarded)

    def has_weights(self, config: EngineConfig) -> bool:
        return config in self.models_in_memory

    def put_aside(self, following: EngineConfig, stash_bytes: int) -> None:
        stash, worker = self.stash, self.worker
        stash.limit_bytes, self._previous = stash_bytes, worker
        # It leaves the stash first, so that its space is that of others.
        self._following = stash.take(following)
        if worker.weight_bytes > stash_bytes:
            worker.discard()
        else:
            stash.make_space(worker.weight_bytes)
            worker.sleep()

    def unload(self) -> None:
        if not self.stash.put(self.worker):
            self.worker.discard()

    def put_back(self) -> None:
        if self.worker is not self._previous and self.worker.is_warm:
            self.worker.discard()  # its device memory is needed; what is half built is collected
        self.worker, self._following = self._previous, None
        self.stash.take(self.worker.config)
        self._collect()

    def sleep(self, level: int) -> None:
        if level != 1:
            self.worker.discard()
        elif not self.worker.is_discarded:
            self.worker.sleep()
        self._collect()

    def wake(self, stop: Callable[[], bool] = lambda: False) -> ModelFacts:
        worker = self.worker
        if worker.is_discarded:
            worker = self._loaded(worker.config, worker.adapters)
            worker.initialise_cache()
        elif worker.is_asleep:
            worker.wake()
        if not worker.is_warm:
            worker.warm_up(stop)
        self.worker = worker
        return self._facts()

    def close(self) -> None:
        self.worker.close()

    def _loaded(self, config: EngineConfig, adapters: AdapterStore | None = None) -> Worker:
        worker = Worker(
            config,
            self.device,
            self.on_cold,
            programs=self.programs,
            records=self._records,
            part=self._part,
            adapters=adapters,
        )
        worker.load()
        return worker

    def _facts(self) -> ModelFacts:
        worker, grids, states = self.worker, self.worker.grids, self.worker.cache.states
        return ModelFacts(
            config=worker.config,
            spec=worker.spec,
            limits=worker.limits,
            num_host_blocks=worker.cache.num_host_blocks - worker.num_staging_blocks,
            block_bytes=worker.block_bytes,
            max_chunk_tokens=grids.max_chunk_tokens if grids else None,
            read=worker.read,
            num_shared_blocks=worker.num_shared_blocks,
            dtype=str(worker.dtype).removeprefix("torch."),
            num_buckets=grids.num_buckets if grids else 0,
            embedding_size=worker.embedding_size,
            # A shorter chunk would be padded to the same bucket.
            scored_token_cost=1.0 if grids and not grids.ragged else SCORED_TOKEN_COST,
            num_state_slots=0 if states is None else states.num_slots,
            num_host_state_slots=0 if states is None else states.num_host_slots,
            num_state_snapshots=0 if states is None else states.num_snapshots,
            state_bytes=worker.state_bytes,
            windows=worker.windows,
        )

    def _collect(self) -> None:
        """Free what nothing refers to, as a half-built worker, on a lazy device, too."""
        gc.collect()
        self.device.synchronize()
