"""Traces served on simulated devices: sums that must hold, and what pressure does."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import BucketingConfig, BucketingError
from trencadis.engine.errors import ConfigError
from trencadis.engine.simulated import (
    ModelShape,
    Simulation,
    SimulationConfig,
    SimulationReport,
    Workload,
    find_hardware,
    read_model_shape,
    read_workload,
    report_of,
    static_batch_s,
)
from trencadis.engine.simulated.records import StepTimes
from trencadis.engine.simulated.report import Percentiles
from trencadis.warmup import WarmupConfig

DATA = Path(__file__).parent / "data"
LLAMA = read_model_shape(DATA / "llama-3.1-8b.json")
TRACE = DATA / "azure_conv_excerpt.csv"

TINY = attrs.evolve(LLAMA, num_layers=2, vocab_size=1000)


def serve(
    workload: Workload, model: ModelShape = LLAMA, **config: object
) -> tuple[Simulation, SimulationReport]:
    simulation = Simulation(SimulationConfig(**{"device": "gaudi3", **config}), model, workload)
    warmup = simulation.warm_up()
    done = sum(1 for _ in simulation.serve())
    assert done == len(workload)
    return simulation, report_of(simulation, warmup)


def made_up(*requests: tuple[float, int, int]) -> Workload:
    """A workload of (arrival in seconds, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Workload(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def check_sums(simulation: Simulation, report: SimulationReport) -> None:
    assert report.generated_tokens == report.asked_tokens
    assert report.requests + report.refused == len(simulation.workload)
    assert simulation.blocks.pool.num_used_blocks == report.used_blocks_at_end == 0
    assert simulation.blocks.host_pool.num_free_blocks == simulation.blocks.config.num_host_blocks
    first, between = simulation.records.first_token_s, simulation.records.between_tokens_s
    assert len(first) == report.requests
    assert len(first) + len(between) == report.generated_tokens
    assert all(seconds > 0 for seconds in (*first, *between))


@pytest.fixture(scope="module")
def excerpt() -> tuple[Simulation, SimulationReport]:
    return serve(read_workload(TRACE))


def test_a_real_trace_is_served_to_its_end(excerpt: tuple[Simulation, SimulationReport]) -> None:
    simulation, report = excerpt
    check_sums(simulation, report)
    workload = read_workload(TRACE)
    assert report.requests == 240
    assert report.prompt_tokens == workload.prompt_tokens.sum()
    assert report.asked_tokens == workload.output_tokens.sum()
    assert report.seconds >= workload.arrivals_s[-1]
    assert sum(sample.tokens for sample in report.samples) <= report.generated_tokens


def test_nothing_is_compiled_after_warm_up(excerpt: tuple[Simulation, SimulationReport]) -> None:
    _, report = excerpt
    assert report.warmup_compilations == report.buckets
    assert report.live_compilations == report.bucket_misses == 0
    assert report.graph_replays > 0


def test_the_same_run_twice_is_the_same_report(
    excerpt: tuple[Simulation, SimulationReport],
) -> None:
    _, again = serve(read_workload(TRACE))
    assert again == excerpt[1]


def test_a_lone_request_takes_the_time_of_its_forwards() -> None:
    """By hand: 16.06 GB of weights less 1.05 of the embedding, 1 prefix bucket of 128 blocks of
    16.8 MB, at 3/4 of 3.67 TB/s: 6.23 ms a token, and 0.5 ms of the host and of calls.
    """
    _, report = serve(made_up((0.0, 1000, 50)))
    weights_and_prefix = 2 * (8_030_261_248 - 128_256 * 4096) + 128 * 128 * 131_072
    expected_s = weights_and_prefix / (0.75 * 3.67e12) + 0.5e-3
    assert report.between_tokens_s.mean == pytest.approx(expected_s, rel=0.03)
    assert report.between_tokens_s.p99 < 1.01 * report.between_tokens_s.p50
    assert report.first_token_s.p50 > report.between_tokens_s.p50


def test_fp8_makes_tokens_faster_and_room_for_more_blocks() -> None:
    crowd = made_up(*((0.0, 1000, 40) for _ in range(16)))
    room = {"max_model_len": 60_000}  # more than fits, so that memory sets the number of blocks
    reports = {
        (weights, cache): serve(crowd, quantization=weights, kv_cache_dtype=cache, **room)[1]
        for weights in ("none", "fp8", "inc")
        for cache in ("auto", "fp8", "fp8_inc")
    }
    bf16 = reports["none", "auto"]
    weights, cache = reports["fp8", "auto"], reports["none", "fp8"]
    both = reports["fp8", "fp8"]
    assert bf16.between_tokens_s.p50 > weights.between_tokens_s.p50 > both.between_tokens_s.p50
    assert bf16.between_tokens_s.p50 > cache.between_tokens_s.p50
    assert 2 * cache.block_bytes == bf16.block_bytes == weights.block_bytes
    assert cache.num_blocks == pytest.approx(2 * bf16.num_blocks, rel=0.01)
    assert weights.num_blocks > bf16.num_blocks
    # vLLM's names for Gaudi mean the same.
    assert attrs.evolve(reports["inc", "fp8_inc"], samples=()) == attrs.evolve(both, samples=())


def test_sampling_on_the_host_costs_a_crowd_most_of_its_speed() -> None:
    crowd = made_up(*((0.0, 100, 40) for _ in range(128)))
    on_device, on_host = (serve(crowd, sampling=where)[1] for where in ("device", "host"))
    assert on_host.tokens_per_s < 0.5 * on_device.tokens_per_s
    assert on_host.times.sample_s + on_host.times.fetch_s > 0.5 * on_host.times.total_s


def test_the_report_has_the_time_of_each_part(
    excerpt: tuple[Simulation, SimulationReport],
) -> None:
    _, report = excerpt
    assert 0 < report.times.total_s < report.seconds  # the device is idle between two requests
    assert report.times.compile_s == 0
    busy = made_up(*((0.0, 500, 100) for _ in range(20)))
    served = serve(busy)[1]
    assert served.times.total_s == pytest.approx(served.seconds, rel=1e-6)


def test_a_batch_without_the_hosts_time_takes_as_long_as_offline(tmp_path: Path) -> None:
    """All prompts in one step, then decodes in buckets of one more block per sequence."""
    batch, prompt, output = 8, 128, 200
    buckets = tmp_path / "buckets.txt"
    buckets.write_text(f"({batch}, 1, [{', '.join(str(batch * n + 1) for n in range(1, 5))}])\n")
    hardware = attrs.evolve(find_hardware("gaudi3"), step_s=0.0, sequence_s=0.0)
    config = SimulationConfig(
        device="gaudi3",
        max_num_seqs=batch,
        bucketing=BucketingConfig(bucket_file=str(buckets)),
    )
    crowd = made_up(*((0.0, prompt, output) for _ in range(batch)))
    simulation = Simulation(config, LLAMA, crowd, hardware=hardware)
    warmup = simulation.warm_up()
    assert len(list(simulation.serve())) == batch
    offline_s = static_batch_s(simulation.runtime.costs, batch, prompt, output)
    assert report_of(simulation, warmup).seconds == pytest.approx(offline_s, rel=0.01)


def test_another_accelerator_can_replace_the_one_of_the_settings() -> None:
    slow = attrs.evolve(find_hardware("gaudi3"), hbm_bytes_per_s=1e12)
    simulation = Simulation(
        SimulationConfig(device="gaudi3"), LLAMA, made_up((0.0, 100, 20)), hardware=slow
    )
    warmup = simulation.warm_up()
    assert len(list(simulation.serve())) == 1
    slow_s = report_of(simulation, warmup).between_tokens_s.p50
    assert slow_s > 3 * serve(made_up((0.0, 100, 20)))[1].between_tokens_s.p50


def test_a_request_that_comes_late_finds_an_idle_device() -> None:
    _, report = serve(made_up((0.0, 200, 5), (100.0, 200, 5)))
    assert 100 < report.seconds < 101
    first, second = report.first_token_s, report.latency_s
    assert first.p99 == pytest.approx(first.p50, rel=1e-6)
    assert second.p99 < 0.1
    assert report.steps == 10


def test_twice_the_rate_takes_half_the_time() -> None:
    slow, fast = (read_workload(TRACE, rate_scale=scale, num_requests=60) for scale in (1.0, 2.0))
    assert fast.arrivals_s[-1] == pytest.approx(slow.arrivals_s[-1] / 2)
    (_, served), (_, faster) = serve(slow, TINY), serve(fast, TINY)
    assert faster.tokens_per_s > 1.8 * served.tokens_per_s


def test_a_small_cache_swaps_and_loses_nothing() -> None:
    crowd = made_up(*((0.0, 500, 300) for _ in range(24)))
    ample = serve(crowd)[1]
    simulation, report = serve(crowd, num_blocks=60)
    check_sums(simulation, report)
    assert report.preemptions > 0
    assert report.blocks_out >= report.blocks_in > 0
    assert report.swap_s > 0
    assert 50 < report.longest_prefix <= 60
    assert "60 blocks, 960 MiB; longest" in report.table()  # 16 MiB each
    assert f"{16 * report.blocks_out} MiB out, {16 * report.blocks_in} MiB in" in report.table()
    assert report.seconds > ample.seconds
    assert ample.preemptions == 0


def test_without_host_memory_it_computes_again() -> None:
    crowd = made_up(*((0.0, 500, 300) for _ in range(24)))
    simulation, report = serve(crowd, num_blocks=60, swap_space=0)
    check_sums(simulation, report)
    assert report.preemptions == report.recomputations > 0
    assert report.blocks_out == 0


def test_without_warm_up_traffic_compiles() -> None:
    _, warm = serve(made_up((0.0, 300, 20)))
    _, cold = serve(made_up((0.0, 300, 20)), warmup=WarmupConfig(skip=True))
    assert cold.warmup_s == cold.graphs == cold.graph_replays == 0
    assert cold.live_compilations == 2  # one prompt bucket, one decode bucket
    assert cold.first_token_s.p50 > warm.first_token_s.p50 + 0.3


def test_an_eager_device_captures_nothing() -> None:
    _, report = serve(made_up((0.0, 300, 20)), warmup=WarmupConfig(enforce_eager=True))
    assert report.graphs == report.live_compilations == 0
    assert report.graph_misses == 20


def test_a_thermal_policy_keeps_the_board_cooler() -> None:
    crowd = made_up(*((0.0, 100, 900) for _ in range(100)))
    _, hot = serve(crowd, ambient_c=45.0)
    target_c = (45.0 + hot.hottest_c) / 2
    simulation, cool = serve(
        crowd,
        ambient_c=45.0,
        thermal_policy="proportional",
        thermal_options={"target_temp_c": target_c},
    )
    check_sums(simulation, cool)
    assert cool.hottest_c < hot.hottest_c - 1
    assert min(s.running_limit for s in cool.samples) < min(s.running_limit for s in hot.samples)
    assert cool.seconds > hot.seconds


@pytest.mark.slow
def test_at_the_same_peak_less_prefill_costs_less_than_fewer_sequences() -> None:
    """The law of `benchmarks/heat_soak.py`, with less traffic; its targets give equal peaks."""
    bursts = made_up(*((3.2 * (i // 50) + 0.01 * (i % 50), 1200, 150) for i in range(1500)))
    reports = []
    for policy, target_c in (("proportional", 76.0), ("two_phase", 78.6)):
        simulation, report = serve(
            bursts,
            device="h200",
            ambient_c=52.0,
            thermal_policy=policy,
            thermal_options={"target_temp_c": target_c},
        )
        check_sums(simulation, report)
        reports.append(report)
    proportional, two_phase = reports
    assert two_phase.hottest_c <= proportional.hottest_c + 0.1
    assert min(sample.prefill_limit for sample in two_phase.samples) < 2048
    assert min(sample.prefill_limit for sample in proportional.samples) == 2048
    assert two_phase.preemptions == 0 < proportional.preemptions
    assert two_phase.first_token_s.p99 < 0.8 * proportional.first_token_s.p99
    assert two_phase.between_tokens_s.p99 < proportional.between_tokens_s.p99
    assert two_phase.seconds < proportional.seconds


def test_an_unseen_idle_hour_does_not_look_like_a_broken_sensor() -> None:
    _, report = serve(
        made_up((0.0, 300, 20), (3600.0, 300, 20)),
        thermal_policy="proportional",
    )
    assert [sample.running_limit for sample in report.samples] == [128, 128]
    assert report.latency_s.p99 < 1.01 * report.latency_s.p50


def test_what_a_server_would_refuse_is_refused() -> None:
    _, crowded = serve(made_up(*((0.0, 100, 5) for _ in range(10))), max_waiting=4)
    assert (crowded.requests, crowded.refused) == (4, 6)
    lengths = ((0.0, 2000, 5), (0.0, 900, 101), (0.0, 900, 100))
    simulation, long = serve(made_up(*lengths), max_model_len=1000)
    assert (long.requests, long.refused) == (1, 2)
    check_sums(simulation, long)


def test_a_run_without_any_result_can_be_shown() -> None:
    _, report = serve(made_up((0.0, 2000, 5)), max_model_len=1000)
    assert "0 done, 1 rejected" in report.table()
    assert report.tokens_per_s == report.latency_s.p99 == 0


requests = st.tuples(st.floats(0, 2), st.integers(1, 700), st.integers(1, 120))


@settings(max_examples=25, deadline=None)
@given(
    arrived=st.lists(requests, min_size=1, max_size=25),
    num_blocks=st.integers(60, 90),
    block_size=st.sampled_from([16, 32]),
    max_num_seqs=st.integers(1, 12),
    swap_space=st.sampled_from([0, 1 << 26]),
)
def test_sums_hold_under_any_load(
    arrived: list[tuple[float, int, int]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    swap_space: int,
) -> None:
    simulation, report = serve(
        made_up(*sorted(arrived)),
        TINY,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        swap_space=swap_space,
        warmup=WarmupConfig(enforce_eager=True),
    )
    check_sums(simulation, report)
    assert report.refused == 0
    assert report.live_compilations == report.bucket_misses == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"device": "gaudi1"}, "device must be one of gaudi2, gaudi3, h100, h200"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1 to 65536"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a finite number above 0"),
        (
            {"ambient_c": float("nan")},
            "ambient_c must be a finite number above -50 and at most 100, got nan",
        ),
        ({"max_model_len": 200_000}, "max_model_len 200000 is above .* 131072"),
        ({"num_blocks": 100_000}, "num_blocks 100000 is above the .* that fit gaudi"),
        ({"num_blocks": 3}, "3 blocks of 128 tokens cannot hold one sequence"),
        ({"gpu_memory_utilization": 1e-5}, "do not hold two blocks"),
        ({"block_size": 100}, "block_size must be a power of two"),
        ({"quantization": "int4"}, "quantization must be one of none, fp8, inc"),
        ({"kv_cache_dtype": "bf16"}, "kv_cache_dtype must be one of auto, fp8, fp8_inc"),
        ({"sampling": "nowhere"}, "sampling must be one of device, host"),
        ({"thermal_options": {"target_temp_c": 60}}, "has no policy: name one"),
        ({"thermal_policy": "arctic"}, "thermal policy 'arctic'"),
        ({"thermal_policy": "proportional", "thermal_options": {"x": 1}}, "does not take"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_that_cannot_be_simulated_are_named(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(made_up((0.0, 1000, 50)), **config)


def test_the_environment_is_that_of_the_plugin() -> None:
    config = SimulationConfig.from_env(
        {
            "VLLM_DECODE_BS_BUCKET_MAX": "16",
            "VLLM_SKIP_WARMUP": "true",
            "VLLM_DEFRAG_THRESHOLD": "7",
            "VLLM_THERMAL_POLICY": "proportional",
        },
        device="gaudi2",
        seed=5,
    )
    assert config.bucketing.decode_batch.max == 16
    assert config.warmup.skip
    assert config.defrag.threshold == 7
    assert config.thermal_policy == "proportional"
    assert SimulationConfig.from_env({}, device="h100").thermal_policy == "none"
    with pytest.raises(ConfigError, match="VLLM_DEFRAG_THRESHOLD"):
        SimulationConfig.from_env({"VLLM_DEFRAG_THRESHOLD": "many"}, device="gaudi2")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("ContextTokens,GeneratedTokens\n5,5\n", ConfigError, "lacks arrivals or outputs"),
        ("TIMESTAMP,ContextTokens\n0,5\n", ConfigError, "lacks arrivals or outputs"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,0\n", BucketingError, "no request that"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", BucketingError, "has no requests"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_named(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(error, match=message):
        read_workload(path)


def test_a_workload_is_in_order_of_arrival_without_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_length,output_length\n9,1,2\n5,3,4\n6,5,0\n7,7,8\n")
    workload = read_workload(path)
    assert workload.arrivals_s.tolist() == [0, 2, 4]
    assert workload.prompt_tokens.tolist() == [3, 7, 1]
    assert workload.output_tokens.tolist() == [4, 8, 2]
    assert len(read_workload(path, num_requests=2)) == 2
    for settings_, message in (({"rate_scale": 0.0}, "rate_scale"), ({"num_requests": 0}, "num_")):
        with pytest.raises(ConfigError, match=message):
            read_workload(path, **settings_)


def test_arguments_of_a_workload_end_where_they_say() -> None:
    assert read_workload(TRACE, num_requests=1, shared_prefix=1 << 24).shared_prefix == 1 << 24
    assert read_workload(TRACE, num_requests=1, rate_scale=1e-9).shared_prefix == 0
    for wrong in (
        {"shared_prefix": -1},
        {"shared_prefix": (1 << 24) + 1},
        {"num_requests": 0},
        {"rate_scale": 0.0},
        {"rate_scale": float("inf")},
        {"rate_scale": float("nan")},
    ):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            read_workload(TRACE, **wrong)


def test_without_a_step_or_a_request_every_time_is_0() -> None:
    assert StepTimes().total_s == 0
    assert Percentiles.of([]) == Percentiles(0, 0, 0, 0)
    assert Percentiles.of([1.0, 3.0]) == Percentiles(
        2.0, 2.0, pytest.approx(2.8), pytest.approx(2.98)
    )


def with_system_prompt(tokens: int, requests: int = 64) -> Workload:
    """Requests that come together, 2,600 tokens each, whose first ``tokens`` are the same."""
    workload = made_up(*[(0.0, 2600, 40)] * requests)
    return attrs.evolve(workload, shared_prefix=tokens)


def num_passes(simulation: Simulation) -> int:
    return simulation.runtime.launches + simulation.runtime.replays


def test_a_shared_prefix_is_computed_once_and_decoded_in_one_pass() -> None:
    alone, without = serve(with_system_prompt(0), compile=True)
    shared, report = serve(with_system_prompt(2560), compile=True)
    check_sums(shared, report)
    blocks = 2560 // 128
    assert without.prompt_tokens == report.prompt_tokens  # of the requests; not all are computed
    assert shared.runner.prompt_tokens.real < alone.runner.prompt_tokens.real / 10
    assert shared.runner.longest_prefix < 64 * 3 + 2 * blocks < alone.runner.longest_prefix
    assert report.seconds < without.seconds / 2
    decodes = num_passes(shared) - shared.runtime.compilations
    assert decodes <= shared.steps + 5 * report.requests


def test_a_device_that_gathers_shared_blocks_divides_its_batches() -> None:
    """As CUDA: more pairs than a bucket has blocks are read by further passes."""
    workload = with_system_prompt(2560)
    scoring = find_hardware("gaudi3")
    passes = []
    for hardware in (scoring, attrs.evolve(scoring, scores_shared=False)):
        config = SimulationConfig(device="gaudi3", max_num_seqs=64, compile=True)
        simulation = Simulation(config, LLAMA, workload, hardware)
        simulation.warm_up()
        before = num_passes(simulation)
        for _ in simulation.serve():
            pass
        passes.append(num_passes(simulation) - before)
    assert passes[1] > 3 * passes[0]


def test_nothing_is_compiled_in_traffic_that_shares() -> None:
    simulation = Simulation(
        SimulationConfig(device="gaudi3"), LLAMA, with_system_prompt(2560, requests=20)
    )
    simulation.warm_up()
    compiled = simulation.runtime.compilations
    for _ in simulation.serve():
        pass
    assert simulation.runtime.compilations == compiled
