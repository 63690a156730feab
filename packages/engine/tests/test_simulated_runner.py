"""The simulated device in the hands of the real warm-up, and of a scheduler's steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import pytest

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.step import StepInput, StepResult
from trencadis.engine.simulated import (
    CostModel,
    MemoryModel,
    SimulatedClock,
    SimulatedHeat,
    SimulatedRunner,
    SimulatedRuntime,
    find_hardware,
    read_model_shape,
)
from trencadis.kvcache import BlockCopy, CopyPlan, Direction
from trencadis.scheduler import ScheduledSequence, SchedulerOutput
from trencadis.warmup import GraphRuntime, MemoryPlan, Phase, warm_up

LLAMA = Path(__file__).parent / "data" / "llama-3.1-8b.json"
GIB = 1 << 30

GRIDS = Grids(
    BucketGrid({"batch": (1, 2), "query": (128, 256), "context_blocks": (0, 4)}),
    BucketGrid({"batch": (1, 4), "blocks": (8, 64)}),
)
DECODE = Bucket(("batch", "blocks"), (4, 64))


class Device:
    """A Gaudi 3, or another device, with Llama 3.1 8B, and its clock."""

    def __init__(
        self,
        free_bytes: int = 40 * GIB,
        seed: int = 0,
        *,
        samples_on_host: bool = False,
        name: str = "gaudi3",
    ) -> None:
        model, hardware = read_model_shape(LLAMA), find_hardware(name)
        self.clock = SimulatedClock()
        self.costs = CostModel(model, hardware, block_size=128)
        memory = MemoryModel(model, hardware)
        self.runtime = SimulatedRuntime(
            self.costs, memory, self.clock, free_bytes, samples_on_host=samples_on_host
        )
        self.runner = SimulatedRunner(self.runtime, GRIDS, seed)


def scheduled(
    seq_id: int, start: int, count: int, blocks: list[int], *, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, (7,) * count, np.array(blocks, np.int32), samples)


def run(device: Device, output: SchedulerOutput) -> StepResult:
    step = StepInput(output.step, output.prompts, output.decodes, output.moves, {})
    return device.runner.execute(step).wait()


def test_a_bucket_is_compiled_once() -> None:
    device = Device()
    device.runtime.execute(Phase.DECODE, DECODE)
    cold_s = device.clock()
    device.runtime.execute(Phase.DECODE, DECODE)
    warm_s = device.clock() - cold_s
    assert cold_s - warm_s == pytest.approx(device.costs.hardware.compile_s)
    assert device.runtime.compilations == 1


def test_a_captured_bucket_is_replayed_until_it_is_released() -> None:
    device = Device()
    runtime = device.runtime
    before = runtime.free_memory()
    launched_s = [runtime.forward(Phase.DECODE, DECODE) for _ in range(2)][1]
    runtime.capture(Phase.DECODE, DECODE)
    assert runtime.free_memory() < before
    replayed_s = runtime.forward(Phase.DECODE, DECODE)
    assert replayed_s < launched_s
    runtime.release(Phase.DECODE, DECODE)
    assert runtime.free_memory() == before
    assert runtime.forward(Phase.DECODE, DECODE) == pytest.approx(launched_s)
    assert (runtime.replays, runtime.launches) == (1, 3)


def test_what_the_host_does_while_the_device_computes_does_not_count() -> None:
    device = Device()
    runtime, host_s = device.runtime, device.costs.host_s(4)
    runtime.execute(Phase.DECODE, DECODE)
    for hidden in (0.0, 0.25, 1.0, 3.0):
        runtime.synchronize()
        runtime._occupy(hidden * host_s)
        counted_s, now_s = runtime.times.host_s, device.clock()
        runtime.schedule(4)
        assert device.clock() - now_s == pytest.approx(host_s)
        left = max(0.0, 1 - hidden)
        assert runtime.times.host_s - counted_s == pytest.approx(left * host_s, abs=1e-12)


def test_the_phases_of_equal_buckets_are_two() -> None:
    """A host's two grids may have the same axes."""
    device, bucket = Device(), Bucket(("batch", "blocks"), (1, 8))
    device.runtime.capture(Phase.DECODE, bucket)
    device.runtime.forward(Phase.DECODE, bucket)
    assert device.runtime.replays == 1
    with pytest.raises(TypeError):  # a prompt has a third axis
        device.runtime.forward(Phase.PROMPT, bucket)


def test_warm_up_compiles_everything_and_keeps_the_budget() -> None:
    device = Device(free_bytes=20 * GIB)
    plan = MemoryPlan.from_profile(
        20 * GIB, graph_reserved_mem=0.05, block_bytes=device.costs.block_bytes
    )
    device.runtime.allocate(plan.num_blocks * device.costs.block_bytes)
    budget = plan.graph_budget(device.runtime.free_memory()).total
    assert isinstance(device.runtime, GraphRuntime)
    report = warm_up(
        device.runtime,
        GRIDS.prompt.buckets,
        GRIDS.decode.buckets,
        memory=plan,
        clock=device.clock,
    )
    assert report.seconds == device.clock()
    assert device.runtime.compilations == len(GRIDS.prompt) + len(GRIDS.decode)
    assert report.capture is not None
    captured = sum(len(report.capture.captured(phase)) for phase in Phase)
    assert 0 < captured < device.runtime.compilations
    assert report.allocated <= budget


def test_a_step_pads_to_the_grids_and_passes_the_time_of_its_buckets() -> None:
    device = Device()
    output = SchedulerOutput(
        1,
        prompts=(scheduled(9, 0, 100, [5]),),
        decodes=(scheduled(1, 300, 1, [1, 2, 30]), scheduled(2, 5, 1, [4])),
    )
    run(device, output)  # compiles
    before_s = device.clock()
    result = run(device, output)
    prompt, decode = GRIDS.prompt.find((1, 100, 0)), GRIDS.decode.find((2, 31))
    assert prompt is not None
    assert decode is not None
    costs, expected_s = device.costs, 0.0
    for phase, bucket in ((Phase.PROMPT, prompt), (Phase.DECODE, decode)):
        device_s = costs.device_s(phase, bucket)
        expected_s += device_s + costs.launch_s(device_s, captured=False)
        expected_s += costs.upload_s(phase, bucket)
    expected_s += costs.sample_s(3) + costs.fetch_s(3) + costs.host_s(3)
    assert device.clock() - before_s == pytest.approx(expected_s)
    assert sorted(result.token_ids) == [1, 2, 9]
    assert device.runner.prompt_tokens.share == pytest.approx(128 / 100 - 1)
    assert device.runner.decode_rows.share == pytest.approx(4 / 2 - 1)
    assert device.runner.decode_blocks.share == pytest.approx(64 / 31 - 1)
    assert device.runner.bucket_misses == 0
    assert result.timing is not None
    assert result.timing.prompts_s is not None


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    device = Device()
    moves = CopyPlan()
    moves.add(Direction.OUT, [BlockCopy(1, 2)])
    device.runtime.capture(Phase.DECODE, DECODE)
    decodes = tuple(scheduled(i, 300, 1, [1, 2, 60]) for i in range(3))
    run(
        device,
        SchedulerOutput(1, prompts=(scheduled(9, 0, 100, [5]),), decodes=decodes, moves=moves),
    )
    times = device.runtime.times
    assert times.total_s == pytest.approx(device.clock())
    parts = attrs.asdict(times)
    assert parts.pop("collectives_s") == 0  # of several devices alone
    assert all(seconds > 0 for seconds in parts.values())
    assert times.host_s == pytest.approx(device.costs.host_s(4))
    assert times.block_copy_s == pytest.approx(device.costs.swap_s(1))


def test_a_host_that_samples_takes_the_time_of_all_logits() -> None:
    def step_s(*, samples_on_host: bool) -> tuple[float, CostModel]:
        device = Device(samples_on_host=samples_on_host)
        run(device, SchedulerOutput(1, decodes=(scheduled(1, 300, 1, [1, 2, 30]),)))
        return device.clock(), device.costs

    on_device_s, costs = step_s(samples_on_host=False)
    on_host_s, _ = step_s(samples_on_host=True)
    expected_s = costs.host_sample_s(1) + costs.fetch_logits_s(1)
    expected_s -= costs.sample_s(1) + costs.fetch_s(1)
    assert on_host_s - on_device_s == pytest.approx(expected_s)


def test_a_step_without_sequences_takes_no_time_of_the_host() -> None:
    device = Device()
    run(device, SchedulerOutput(1))
    assert device.clock() == 0


def test_a_chunk_that_is_not_the_last_gives_no_token() -> None:
    output = SchedulerOutput(1, prompts=(scheduled(9, 0, 100, [5], samples=False),))
    assert run(Device(), output).token_ids == {}


def test_forks_of_a_prompt_sample_each_their_own() -> None:
    one = scheduled(9, 0, 100, [5])._replace(forks=(10, 11))
    tokens = run(Device(), SchedulerOutput(1, prompts=(one,))).token_ids
    assert sorted(tokens) == [9, 10, 11]
    assert len(set(tokens.values())) == 3


def test_a_shape_past_the_grid_is_served_and_counted() -> None:
    device = Device()
    run(device, SchedulerOutput(1, decodes=(scheduled(1, 12_800, 1, [*range(1, 101)]),)))
    assert device.runner.bucket_misses == 1
    assert device.clock() > 0


def test_copies_take_the_time_of_their_way() -> None:
    device, moves = Device(), CopyPlan()
    for direction, count in ((Direction.OUT, 10), (Direction.IN, 20), (Direction.WITHIN, 30)):
        moves.add(direction, [BlockCopy(i, 100 + i) for i in range(count)])
    timing = run(device, SchedulerOutput(1, moves=moves)).timing
    expected_s = device.costs.swap_s(30) + device.costs.move_s(30)
    assert device.clock() == pytest.approx(expected_s)
    assert timing is not None
    assert timing.swap_out_s == pytest.approx(device.costs.swap_s(10))
    assert timing.swap_in_s == pytest.approx(device.costs.swap_s(20))
    assert device.runner.copied_blocks[Direction.WITHIN] == 30


def test_tokens_depend_on_seed_sequence_and_position_alone() -> None:
    def tokens(seed: int, start: int, *company: ScheduledSequence) -> Mapping[int, int]:
        decodes = (scheduled(1, start, 1, [1]), *company)
        return run(Device(seed=seed), SchedulerOutput(1, decodes=decodes)).token_ids

    alone = tokens(0, 50)
    assert tokens(0, 50, scheduled(2, 9, 1, [2]))[1] == alone[1]
    assert tokens(1, 50) != alone
    assert tokens(0, 51) != alone
    many = {token for position in range(200) for token in tokens(0, position).values()}
    assert len(many) > 190  # of 128,256: hardly any twice
    assert all(0 <= token < 128_256 for token in many)


def test_a_working_board_grows_hot_and_its_sensor_is_never_still() -> None:
    clock = SimulatedClock()
    heat = SimulatedHeat(find_hardware("gaudi3").board, clock, ambient_c=30.0, seed=3)
    idle_c = heat.hottest_c
    assert len({heat.read()[0].temperature_c for _ in range(20)}) == 20
    for _ in range(600):
        clock.advance(0.1)
        heat.follow(0.1, 60.0)
    assert heat.hottest_c > idle_c + 10
    busy_w = heat.model.power_w
    assert busy_w == pytest.approx(600.0)
    assert heat.read()[0].power_w == pytest.approx(600.0, abs=3)
    assert heat.joules == pytest.approx(60 * busy_w)
    heat.reset()
    clock.advance(10.0)
    heat.follow(0.0, 0.0)
    assert heat.joules == pytest.approx(10 * heat.model.power_w)
    assert heat.model.power_w < busy_w


def test_the_power_that_a_sensor_reads_is_the_mean_since_the_last_reading() -> None:
    clock = SimulatedClock()
    board = find_hardware("h200").board
    heat = SimulatedHeat(board, clock, ambient_c=30.0, seed=3)
    clock.advance(1.0)
    heat.follow(1.0, 700.0)
    clock.advance(3.0)
    heat.follow(0.0, 0.0)
    assert heat.read()[0].power_w == pytest.approx((700 + 3 * board.idle_w) / 4, abs=3)
    assert heat.read()[0].power_w == pytest.approx((700 + 3 * board.idle_w) / 4, abs=3)


@pytest.mark.parametrize("device", ["h200", "gaudi3"])
def test_prefill_is_the_hot_phase_and_decode_draws_less_than_half(device: str) -> None:
    runtime, board = Device(name=device).runtime, find_hardware(device).board
    watts = {}
    for phase, shape in (
        (Phase.DECODE, (1, 8)),
        (Phase.DECODE, (128, 1024)),
        (Phase.PROMPT, (1, 16, 0)),
        (Phase.PROMPT, (1, 4096, 0)),
    ):
        axes = ("batch", "blocks") if phase is Phase.DECODE else ("batch", "query", "context")
        runtime.busy_s = runtime.joules = 0.0
        runtime.forward(phase, Bucket(axes, shape))
        watts[shape] = runtime.joules / runtime.busy_s
    assert board.first_decode_w < watts[1, 8] < watts[128, 1024] == board.decode_w
    assert board.decode_w < 0.45 * board.limit_w
    assert watts[1, 16, 0] < 0.7 * board.limit_w, "a short chunk is bound by memory"
    assert 0.9 * board.limit_w < watts[1, 4096, 0] <= board.limit_w
