"""A runtime asks the scheduler for steps, under a thermal policy and a sensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter, Direction
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    BeamSearch,
    Candidate,
    FinishReason,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceUpdate,
    StepTiming,
    ThermalGuard,
    Victim,
)
from trencadis.scheduler.telemetry import (
    ReaderConfig,
    Reading,
    TemperatureReader,
    TemperatureSource,
    TemperatureState,
)
from trencadis.scheduler.thermal import SchedulerThermalPolicy, SchedulerView, load_thermal_policy


class HalfWhenHot(SchedulerThermalPolicy):
    """Runs half of the sequences above 80 degrees C."""

    def __init__(self) -> None:
        self.temp_c = 0.0

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self.temp_c = temp_c

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        most = scheduler.scheduler_config.max_num_seqs
        return most // 2 if self.temp_c > 80 else most

    def select_victims(self, running: Sequence[Victim], num_to_evict: int) -> list[Victim]:
        return sorted(running, key=lambda group: group.priority)[:num_to_evict]


class Thermometer(TemperatureSource):
    @property
    def name(self) -> str:
        return "thermometer"

    def read(self) -> list[Reading]:
        return [Reading(device=0, temperature_c=60.5)]


def compute(output: SchedulerOutput) -> dict[int, int]:
    for direction, copies in output.moves:
        assert_type(direction, Direction)
        assert len(copies) > 0
    for row in (*output.prompts, *output.decodes):
        assert_type(row.token_ids, Sequence[int])
        assert_type(row.block_table, npt.NDArray[np.int32])
    rows = (*output.prompts, *output.decodes)
    return {seq_id: 7 for row in rows for seq_id in row.sample_ids}


def main() -> None:
    reader = TemperatureReader(Thermometer(), ReaderConfig(period_s=0.5, devices=[0]))
    reader.poll()
    assert_type(reader.state(), TemperatureState)
    blocks = BlockManager(CacheConfig(num_blocks=64, block_size=4))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, policy="priority"),
        blocks,
        thermal=ThermalGuard(HalfWhenHot(), reader.state),
        defragmenter=Defragmenter(blocks),
    )
    sample = scheduler.add(Request(request_id="a", prompt_token_ids=[1, 2, 3], max_tokens=4))
    answer = scheduler.control(BatchControl(max_num_seqs=4, policy="largest_kv"))
    assert_type(answer, Future[BatchControlResult])
    while scheduler.has_work:
        output = scheduler.schedule()
        updates = scheduler.update(output, compute(output), timing=StepTiming(prompts_s=0.01))
        assert_type(updates, tuple[SequenceUpdate, ...])
    assert_type(answer.result().evicted_request_ids, tuple[str, ...])
    assert_type(sample.finish_reason, FinishReason | None)
    assert_type(load_thermal_policy("proportional", target_temp_c=80.0), SchedulerThermalPolicy)

    beams = BeamSearch(width=2, early_stopping="never")
    scheduler.add(Request(request_id="b", prompt_token_ids=(1, 2), max_tokens=2, beam_search=beams))
    output = scheduler.schedule()
    best = [Candidate(token_id=5, logprob=-0.5), Candidate(token_id=6, logprob=-1.5)] * 2
    scheduler.update(output, {}, candidates={output.prompts[0].seq_id: best}, forced={})
    assert_type(scheduler.abort("b"), bool)
