"""The doctor's checks one by one, in this process: what each finds, and what it says."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from capturing_device import CapturingCPU, CompilingCPU

from trencadis.bucketing import AxisConfig
from trencadis.engine import EngineConfig, GenerateRequest, SamplingParams
from trencadis.engine.devices import CPUDevice
from trencadis.engine.devices.kernel_trial import MissingKernelError
from trencadis.engine.doctor import Finding, Status, device_findings, full_warm_up, step_findings
from trencadis.engine.doctor.check_list import CHECKS, PROGRAMS
from trencadis.engine.doctor.check_process import CheckProcess
from trencadis.engine.doctor.device_counts import count_calls
from trencadis.engine.doctor.predicted_step import PredictedStep
from trencadis.engine.doctor.program_runs import run_program, start_engine
from trencadis.engine.doctor.served_engine import ServedEngine
from trencadis.engine.doctor.token_comparison import (
    SETTINGS,
    compare_tokens,
    is_near,
    num_unequal,
    reference_tokens,
)
from trencadis.engine.errors import ConfigError, DeviceError, GraphError, ModelError

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 48,
    "num_host_blocks": 4,
    "use_buckets": False,
}


def config_of(model: object, device: object, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(model), device=device, **{**SMALL, **changes})


def released(engine: ServedEngine) -> None:
    engine.core.close()


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[ServedEngine]:
    """On a device with memory of its own."""
    engine = ServedEngine(config_of(tiny_model, CompilingCPU(), compile=False))
    yield engine
    released(engine)


@pytest.fixture(scope="module")
def bare(tiny_model) -> Iterator[ServedEngine]:
    """On a CPU that compiles nothing, without a cache of prefixes or host blocks."""
    changes = {"num_host_blocks": 0, "enable_prefix_caching": False, "max_model_len": 31}
    engine = ServedEngine(config_of(tiny_model, "cpu", **changes))
    yield engine
    released(engine)


def outcome(finding: Finding) -> tuple[Status, str]:
    return finding.status, finding.detail


# The engine and its programs.


def test_the_start_says_what_was_started(engine):
    found = start_engine(engine)
    values = dict(found.values)
    assert values.pop("start_s") >= 0
    assert values.pop("weight_bytes") == engine.worker.weight_bytes > 0
    assert values == {
        "dtype": "float32",
        "max_model_len": 64,
        "block_size": 8,
        "num_blocks": 48,
        "num_host_blocks": 4,
        "num_buckets": engine.core.facts.num_buckets,
        "compiles": False,
        "captures_graphs": False,
    }
    said = "float32, 265.8 KiB of weights, 48 blocks of 8 tokens, 0 buckets"
    assert outcome(found) == (Status.OK, said)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_runs_where_the_engine_works(engine, name):
    found = run_program(engine, name)
    assert outcome(found) == (Status.OK, "0 programs compiled")
    assert found.values["compiled"] == 0
    assert 0 <= found.values["run_s"] < 300
    assert not engine.is_broken


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prompt with context", "prefix caching is off"),
        ("decode with shared blocks", "prefix caching is off"),
        ("swap", "there are no host blocks"),
    ],
)
def test_a_program_that_the_settings_exclude_is_absent(bare, name, said):
    assert outcome(run_program(bare, name)) == (Status.ABSENT, said)


def test_prompts_that_share_a_block_need_room_behind_it(tiny_model):
    """A block of 8, 8 tokens that differ, 8 of an answer."""
    names = ("prompt with context", "decode with shared blocks")
    engine = ServedEngine(config_of(tiny_model, "cpu", max_model_len=23))
    for name in names:
        said = "max_model_len is too small for a block of context"
        assert outcome(run_program(engine, name)) == (Status.ABSENT, said)
    released(engine)
    engine = ServedEngine(config_of(tiny_model, "cpu", max_model_len=24))
    for name in names:
        assert run_program(engine, name).status is Status.OK
    prompts = engine.prompts_with_block(3)
    assert {prompt[:8] for prompt in prompts} == {prompts[0][:8]}
    assert [len(prompt) for prompt in prompts] == [16] * 3
    assert len({prompt[-1] for prompt in prompts}) == 3
    released(engine)


def test_the_requests_of_a_program_are_of_its_kind(engine, monkeypatch):
    asked: dict[str, list[GenerateRequest]] = {}
    answers = ServedEngine.answers

    def noted(served: ServedEngine, requests: Sequence[GenerateRequest]) -> Any:
        asked[name] += requests
        return answers(served, requests)

    monkeypatch.setattr(ServedEngine, "answers", noted)
    for name in PROGRAMS:
        asked[name] = []
        run_program(engine, name)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    drawn = attrs.evolve(greedy, temperature=0.8, seed=1)
    params = {name: [each.params for each in requests] for name, requests in asked.items()}
    assert params["prompt"] == [attrs.evolve(greedy, max_tokens=1)]
    assert params["prompt with context"] == [greedy] * 2
    assert params["decode"] == [attrs.evolve(greedy, max_tokens=4)]
    assert params["decode with shared blocks"] == [greedy] * 4
    assert params["draw random"] == [drawn]
    assert params["draw top-p"] == [attrs.evolve(drawn, top_p=0.9)]
    assert params["draw top-k"] == [attrs.evolve(drawn, top_k=20)]
    [probabilities] = params["log-probabilities"]
    assert (probabilities.logprobs, probabilities.logprob_token_ids) == (3, (1,))
    [edits] = params["edits"]
    assert (edits.repetition_penalty, edits.presence_penalty) == (1.1, 0.5)
    assert dict(edits.logit_bias) == {1: -1.0}
    [beams] = params["beam search"]
    assert (beams.use_beam_search, beams.n, beams.ignore_eos) == (True, 2, False)
    assert params["block copies"] == [attrs.evolve(greedy, n=2, best_of=2)]
    if params["mask"]:
        assert params["mask"][0].structured_output.json_object
    lengths = {name: {len(each.prompt_token_ids) for each in asked[name]} for name in asked}
    assert lengths["decode"] == lengths["block copies"] == {5}


def test_a_prefix_that_is_not_found_in_the_cache_differs(engine, monkeypatch):
    """Prompts that share nothing, in place of those that share a block."""
    monkeypatch.setattr(
        engine,
        "prompts_with_block",
        lambda count: [engine.prompt(16, number=90 + i) for i in (0, 5)],
    )
    said = "0 tokens of a block were found in the cache"
    assert outcome(run_program(engine, "prompt with context")) == (Status.DIFFERS, said)


def test_two_greedy_samples_that_differ_are_found(engine, monkeypatch):
    monkeypatch.setattr(engine, "answers", lambda requests: [[[1, 2], [1, 3]]])
    said = "two samples differ, one of which has a copied block"
    assert outcome(run_program(engine, "block copies")) == (Status.DIFFERS, said)


@pytest.mark.parametrize("lost", ["swap_out", "swap_in"])
def test_a_block_that_comes_back_changed_is_found(engine, monkeypatch, lost):
    cache = engine.worker.cache
    rows = cache.key(0).view(cache.num_blocks, -1)
    with torch.inference_mode():
        rows[1], rows[-1] = 2.0, 3.0
    assert run_program(engine, "swap").status is Status.OK
    with torch.inference_mode():
        rows[1], rows[-1] = 5.0, 6.0
    monkeypatch.setattr(cache, lost, lambda copies: None)
    said = "a block came back from the host changed"
    assert outcome(run_program(engine, "swap")) == (Status.FAILED, said)


def test_prompts_of_other_numbers_begin_differently(engine):
    assert engine.prompt(3, number=0) == (0, 7, 14)
    assert engine.prompt(3, number=2) == (62, 69, 76)
    assert all(0 <= token < 258 for token in engine.prompt(50, number=7))
    first = engine.prompt(4)
    engine.answers([GenerateRequest(first, SamplingParams(max_tokens=1))])
    assert engine.prompt(4) != first
    assert len(engine.prompt(4)) == 4


def test_an_engine_starts_without_warm_up_with_the_settings_of_its_user(engine):
    config = engine.core.config
    assert (config.warmup, config.on_bucket_miss) == ("none", "auto")
    assert config.block_size == 8
    assert engine.used_before > 0
    assert engine.used_bytes() == pytest.approx(engine.used_before, rel=0.5)


def test_an_engine_that_is_started_again_has_the_changes_and_no_others(tiny_model, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)  # of all that other tests have made
    engine = ServedEngine(config_of(tiny_model, "cpu"))
    first = engine.core
    engine.start_again(max_num_seqs=2)
    assert engine.core is not first
    assert (engine.core.config.max_num_seqs, engine.core.config.max_model_len) == (2, 64)
    engine.start_again()
    assert engine.core.config.max_num_seqs == 4
    released(engine)


def test_answers_are_by_request_and_sample_and_each_step_is_told(engine):
    steps: list[int] = []
    two = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=2, best_of=2)
    one = attrs.evolve(two, n=1, best_of=1, max_tokens=2)
    requests = [GenerateRequest((1, 2, 3), two), GenerateRequest((4, 5), one)]
    [pair, [alone]] = engine.answers(requests, steps.append)
    assert pair[0] == pair[1]
    assert [len(each) for each in (*pair, alone)] == [3, 3, 2]
    assert sum(steps) == 8
    assert engine.answers(requests) == [pair, [alone]], "the next ones have other keys"


def test_an_error_ends_the_answers_and_says_whether_blocks_are_left(engine, monkeypatch):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    failures = [SimpleNamespace(message="planted")]
    monkeypatch.setattr(engine.core, "take_failures", lambda: failures)
    with pytest.raises(ModelError, match="a request ended: planted"):
        engine.answers([GenerateRequest((1, 2), params)])
    assert not engine.is_broken, "all its blocks are free again"
    assert not engine.core.has_work
    monkeypatch.setattr(engine.core, "abort_all", lambda: None)
    with pytest.raises(ModelError):
        engine.answers([GenerateRequest((1, 2), params)])
    assert engine.is_broken
    monkeypatch.undo()
    engine.core.abort_all()
    engine.answers([GenerateRequest((1, 2), params)])
    assert not engine.is_broken


def test_a_step_that_raises_leaves_the_engine_broken(engine, monkeypatch):
    def raising() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.core, "step", raising)
    with pytest.raises(RuntimeError, match="planted"):
        engine.answers([GenerateRequest((1, 2), SamplingParams())])
    assert engine.is_broken
    monkeypatch.undo()
    engine.core.abort_all()
    engine.is_broken = False


@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
def test_whether_the_cache_rounds_is_told_by_its_type(tiny_model, kept):
    class Rounding(CPUDevice):
        kv_cache_dtypes = frozenset({"fp8_e4m3"})

    engine = ServedEngine(config_of(tiny_model, Rounding(), kv_cache_dtype=kept))
    assert engine.rounds_cache is (kept != "auto")
    assert not engine.rounds_inputs, "a model of fp32 has no packed weights"


# Steps.


class Steps:
    """An engine whose answers are steps of so many tokens, and whose counts grow with them."""

    def __init__(
        self,
        *steps: Sequence[int],
        captures: bool = True,
        compiles: bool = False,
        graphs: int = 3,
        used: int = 0,
        max_num_seqs: int = 8,
    ) -> None:
        self._answers = iter(steps)
        self._used = used
        self.asked: list[list[GenerateRequest]] = []
        names = ("compiled", "programs", "captured", "replays", "uploads", "downloads")
        self.counts = step_findings.DeviceCounts(**dict.fromkeys(names, 100))
        config = SimpleNamespace(compile=compiles, max_num_seqs=max_num_seqs, block_size=128)
        stats = SimpleNamespace(num_graphs=graphs, highest_block_in_use=0)
        facts = SimpleNamespace(dtype="bfloat16")
        self.core = SimpleNamespace(config=config, stats=stats, facts=facts, spec=None)
        self.worker = SimpleNamespace(captures_graphs=captures)
        self.device = SimpleNamespace(shares_host_memory=False, product_name=lambda: "X")
        self.spec = SimpleNamespace(layers=[1, 2])
        self.rounds_inputs = self.rounds_cache = False

    def prompt(self, length: int, *, number: int | None = None) -> tuple[int, ...]:
        return (number or 0,) * length

    def answers(
        self,
        requests: list[GenerateRequest],
        on_step: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.asked.append(requests)
        for num_tokens in next(self._answers):
            self.counts.replays += self._used
            self.counts.programs += 2 * self._used
            self.counts.uploads += 1
            self.core.stats.highest_block_in_use += 5
            on_step(num_tokens)


@pytest.mark.parametrize(
    ("steps", "modes", "expected"),
    [
        (7, {}, (Status.OK, "7 graph replays in 7 decode steps")),
        (6, {}, (Status.FAILED, "6 graph replays in 7 decode steps, at least 7 expected")),
        (
            7,
            {"captures": False, "compiles": True},
            (Status.OK, "14 program runs in 7 decode steps"),
        ),
        (
            6,
            {"captures": False, "compiles": True},
            (Status.FAILED, "12 program runs in 7 decode steps, at least 14 expected"),
        ),
        (
            7,
            {"graphs": 0},
            (Status.FAILED, "no graph was captured: the memory for graphs may be 0"),
        ),
        (7, {"graphs": 1}, (Status.OK, "7 graph replays in 7 decode steps")),
        (7, {"captures": False}, (Status.ABSENT, "nothing is captured or compiled here")),
    ],
)
def test_each_decode_step_must_use_what_was_prepared(steps, modes, expected):
    engine = Steps([1], [1] * steps, used=1, **modes)
    found = step_findings.check_replay(engine)
    assert outcome(found) == expected
    if found.status is not Status.ABSENT:
        assert found.values == {
            "graphs": engine.core.stats.num_graphs,
            "replays": steps,
            "programs": 2 * steps,
        }
        assert [[each.params.max_tokens for each in asked] for asked in engine.asked] == [[8]] * 2
    assert (found.remedy == "see VLLM_GRAPH_RESERVED_MEM") == (modes.get("graphs") == 0)


def test_programs_of_host_memory_are_not_counted():
    engine = Steps(captures=False, compiles=True)
    engine.device.shares_host_memory = True
    said = "programs of this device are not counted"
    assert outcome(step_findings.check_replay(engine)) == (Status.ABSENT, said)


@pytest.fixture
def ticks(monkeypatch):
    """A clock that goes on by a millisecond each time that it is read."""
    clock = itertools.count()
    time = SimpleNamespace(perf_counter=lambda: next(clock) / 1000)
    monkeypatch.setattr(step_findings, "time", time)


@pytest.mark.parametrize(
    ("predicted_ms", "status"),
    [
        (0.5, Status.OK),
        (0.49, Status.DIFFERS),
        (2.0, Status.OK),
        (2.01, Status.DIFFERS),
        (1.0, Status.OK),
    ],
)
@pytest.mark.usefixtures("ticks")
def test_a_step_may_take_half_or_twice_what_is_simulated(monkeypatch, predicted_ms, status):
    asked: dict[str, Any] = {}

    def predicted(*given: Any, **named: Any) -> PredictedStep:
        asked.update(named, given=given)
        return PredictedStep(predicted_ms, 5)

    monkeypatch.setattr(step_findings, "predicted_step", predicted)
    engine = Steps([8], [8, 8, 3, 8, 9], used=1)
    found = step_findings.measure_step(engine)
    assert found.status is status
    assert found.detail == (
        "1.00 ms, 2 programs, 1 replays, 1 uploads, 0 downloads for 8 sequences; "
        f"simulated {predicted_ms:.2f} ms, 5 launches"
    )
    assert found.values == {
        **{"rows": 8, "blocks": 26, "measured_ms": 1.0},
        **{"programs": 2, "replays": 1, "uploads": 1, "downloads": 0},
        **{"predicted_ms": predicted_ms, "predicted_launches": 5},
    }
    assert asked.pop("given") == (None, "bfloat16", "X", 128, (8, 26))
    modes = {"captured": True, "compiled": True, "in_fp8": False, "cache_in_8_bits": False}
    assert asked == modes
    first, second = engine.asked
    assert first == second
    assert [each.params.max_tokens for each in first] == [24] * 8
    assert [each.prompt_token_ids for each in first] == [(i,) * 5 for i in range(8)]


@pytest.mark.usefixtures("ticks")
def test_a_step_has_no_more_rows_than_the_engine(monkeypatch):
    monkeypatch.setattr(step_findings, "predicted_step", lambda *given, **named: "no figures of X")
    engine = Steps([3], [3], max_num_seqs=3, graphs=0)
    found = step_findings.measure_step(engine)
    said = "1.00 ms, 0 programs, 0 replays, 1 uploads, 0 downloads for 3 sequences; no figures of X"
    assert outcome(found) == (Status.ABSENT, said)
    assert found.values["rows"] == 3
    assert "predicted_ms" not in found.values
    found = step_findings.measure_step(Steps([3], [2, 1], max_num_seqs=3))
    assert outcome(found) == (Status.FAILED, "no step decoded 3 sequences")


def test_a_replay_and_a_step_of_an_engine_with_graphs(tiny_model):
    changes = {"use_buckets": True, "max_model_len": 32, "max_num_seqs": 2}
    engine = ServedEngine(config_of(tiny_model, CapturingCPU("box"), **changes))
    assert start_engine(engine).values["captures_graphs"]
    found = step_findings.check_replay(engine)
    assert found.status is Status.OK
    assert found.values["graphs"] > 0
    assert found.values["programs"] == 0
    found = step_findings.measure_step(engine)
    assert found.detail.endswith("for 2 sequences; the simulator knows no box")
    names = ("rows", "programs", "replays", "uploads", "downloads")
    assert [found.values[name] for name in names] == [2, 0, 1, 1, 1]
    released(engine)


# Tokens.


def test_the_reference_has_prompts_and_tokens_of_each_kind(tiny_model):
    engine = ServedEngine(config_of(tiny_model, "cpu", enable_prefix_caching=False))
    served = {"weight_bytes": 1, "block_size": 8}
    found = reference_tokens(engine, served)
    assert found.status is Status.OK
    assert list(found.values) == list(SETTINGS)
    for name, params in SETTINGS.items():
        reference = found.values[name]
        requests = [
            GenerateRequest(tuple(prompt), each)
            for prompt, each in zip(reference["prompts"], params, strict=True)
        ]
        assert [[len(t) for t in reference["tokens"]]] == [[16] * 4]
        assert [samples[0] for samples in engine.answers(requests)] == reference["tokens"]
    texts, shared = found.values["greedy"]["prompts"], found.values["of a shared prefix"]["prompts"]
    assert [prompt[8:] for prompt in shared] == texts
    assert all(prompt[:8] == texts[0][:8] for prompt in shared)
    released(engine)
    longest = max(map(len, texts))
    for length, names in ((longest + 16, ["greedy", "seeded"]), (longest + 15, [])):
        changes = {"enable_prefix_caching": False, "max_model_len": length}
        engine = ServedEngine(config_of(tiny_model, "cpu", **changes))
        assert list(reference_tokens(engine, served).values) == names
        released(engine)


def test_weights_that_the_host_has_no_room_for_have_no_reference(bare, monkeypatch):
    memory = SimpleNamespace(available=1 << 20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    found = reference_tokens(bare, {"weight_bytes": (1 << 20) + 1, "block_size": 8})
    said = "the weights take 1 MiB, and 1 MiB are free"
    assert outcome(found) == (Status.FAILED, said)
    assert reference_tokens(bare, {"weight_bytes": 1 << 20, "block_size": 8}).status is Status.OK


def test_tokens_are_compared_with_those_of_the_same_settings(engine, tiny_model):
    cpu = ServedEngine(config_of(tiny_model, "cpu", enable_prefix_caching=False))
    reference = dict(reference_tokens(cpu, {"weight_bytes": 1, "block_size": 8}).values)
    released(cpu)
    for name in SETTINGS:
        found = compare_tokens(engine, name, reference)
        said = "64 of 64 tokens are those of the CPU"
        assert outcome(found) == (Status.OK, said)
        assert found.values == {"equal": 64, "total": 64}
    wrong = [[(token + 1) % 258 for token in tokens] for tokens in reference["greedy"]["tokens"]]
    found = compare_tokens(engine, "greedy", {"greedy": {**reference["greedy"], "tokens": wrong}})
    assert found.status is Status.DIFFERS
    assert found.values["total"] == 64
    said = "max_model_len is too small for these prompts"
    assert outcome(compare_tokens(engine, "seeded", {})) == (Status.ABSENT, said)


def test_without_a_cache_of_prefixes_shared_ones_are_not_compared(bare):
    reference = {"of a shared prefix": {"prompts": [], "tokens": []}}
    found = compare_tokens(bare, "of a shared prefix", reference)
    assert outcome(found) == (Status.ABSENT, "prefix caching is off")


def test_nine_tokens_of_ten_are_near():
    assert is_near(1, 10)
    assert not is_near(2, 10)
    assert is_near(0, 0)
    assert is_near(3, 10, 0.7)
    assert not is_near(4, 10, 0.7)


def test_each_request_goes_on_behind_the_expected_token():
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Engine:
        def answers(self, requests: list[GenerateRequest]) -> list[list[list[int]]]:
            asked.extend((each.prompt_token_ids, each.output_token_ids) for each in requests)
            return [[[0] * (4 - len(each.output_token_ids))] for each in requests]

    params = [SamplingParams(max_tokens=4)] * 2
    assert num_unequal(Engine(), [[7], [8]], params, [[0, 0, 1, 0], [0, 0, 0, 0]]) == 1
    assert asked == [((7,), ()), ((8,), ()), ((7,), (0, 0, 1))]
    asked.clear()
    assert num_unequal(Engine(), [[7]], params, [[1, 1, 0, 1]]) == 3
    assert [before for _, before in asked] == [(), (1,), (1, 1)]


# The warm-up.


class WarmedUp(Steps):
    """An engine that is started again, with a device that counts compilations."""

    def __init__(self, tokens: int, *, served: int = 0, block_size: int = 16, **modes: Any) -> None:
        super().__init__(**modes)
        self.core.max_model_len = 64
        self.core.config = EngineConfig(model="m", block_size=block_size, device="cpu")
        self.core.config = attrs.evolve(self.core.config, compile=modes.get("compiles", False))
        self.core.facts = SimpleNamespace(num_buckets=3)
        self._made, self._served, self._tokens = [4, 9, 9 + served], served, tokens
        self.device.num_compilations = lambda: self._made.pop(0)
        self.started: list[dict[str, Any]] = []

    def start_again(self, **changes: Any) -> None:
        self.started.append(changes)

    def answers(self, requests: list[GenerateRequest]) -> list[list[list[int]]]:  # type: ignore[override]
        self.asked.append(requests)
        token = 0 if len(self.asked) == 1 else self._tokens
        return [
            [[token] * (each.params.max_tokens - len(each.output_token_ids))] for each in requests
        ]


def test_a_warm_up_that_keeps_its_promise():
    engine = WarmedUp(0)
    found = full_warm_up.check_full_warm_up(engine)
    said = (
        "3 buckets, 5 compilations; then 0 while serving, 16 of 16 tokens are those without warm-up"
    )
    assert outcome(found) == (Status.OK, said)
    assert found.values == {
        **{"buckets": 3, "warm_up_compiled": 5, "compiled": 0},
        **{"equal": 16, "total": 16},
    }
    first, second = engine.asked
    assert first == second
    assert [each.params.max_tokens for each in first] == [8, 8]
    assert [each.prompt_token_ids for each in first] == [(0,) * 8, (1,) * 8]
    changed, user = engine.started
    assert user == {}, "the engine of the user's settings comes back"
    bucketing = changed.pop("bucketing")
    graphs = changed.pop("graphs")
    assert not graphs.skip
    assert changed == {
        "warmup": "full",
        "on_bucket_miss": "auto",
        "max_model_len": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "num_blocks": 3,
        "use_buckets": True,
        "bucket_grid": "paged",
        "record_traffic": None,
    }
    axes = ("prompt_batch", "prompt_query", "decode_batch", "decode_blocks")
    for name, size in zip(axes, (1, 16, 2, 3), strict=True):
        assert getattr(bucketing, name) == AxisConfig(min=size, step=size, max=size)
    assert (bucketing.strategy, bucketing.contiguous_pa) == ("lin", True)


def test_a_warm_up_that_compiles_again_has_failed():
    found = full_warm_up.check_full_warm_up(WarmedUp(0, served=1))
    assert found.status is Status.FAILED
    assert found.values["compiled"] == 1
    assert "then 1 while serving" in found.detail


def test_a_warm_up_that_changes_tokens_differs():
    found = full_warm_up.check_full_warm_up(WarmedUp(1))
    assert found.status is Status.DIFFERS
    assert found.values["equal"] == 0


@pytest.mark.parametrize(
    ("block_size", "tokens"), [(1, None), (2, (1, 1)), (8, (4, 4)), (16, (8, 8)), (128, (8, 8))]
)
def test_an_answer_ends_within_a_block(block_size, tokens):
    engine = WarmedUp(0, block_size=block_size)
    found = full_warm_up.check_full_warm_up(engine)
    if tokens is None:
        assert outcome(found) == (Status.ABSENT, "a block holds a single token")
        return
    request = engine.asked[0][0]
    assert (len(request.prompt_token_ids), request.params.max_tokens) == tokens


def test_where_nothing_is_prepared_there_is_no_warm_up():
    found = full_warm_up.check_full_warm_up(WarmedUp(0, captures=False))
    assert outcome(found) == (Status.ABSENT, "nothing is captured or compiled here")
    assert full_warm_up.check_full_warm_up(WarmedUp(0, captures=False, compiles=True)).values


def test_an_engine_whose_warm_up_raises_is_started_again():
    engine = WarmedUp(0)
    engine._made = []
    with pytest.raises(IndexError):
        full_warm_up.check_full_warm_up(engine)
    assert len(engine.started) == 2


# The device.


def test_the_device_is_told_by_name_and_modes(engine, monkeypatch):
    memory = {"total_memory": lambda _: 3 << 30, "free_memory": lambda _: 1 << 30}
    for name, method in memory.items():
        monkeypatch.setattr(CPUDevice, name, method)
    found = device_findings.describe_device(engine)
    said = "GAUDI3, has compiler, 1 GiB of 3 GiB free"
    assert outcome(found) == (Status.OK, said)
    assert found.values == {
        **{"name": "cpu", "product": "GAUDI3", "captures_graphs": False, "has_compiler": True},
        **{"total_bytes": 3 << 30, "free_bytes": 1 << 30},
    }
    monkeypatch.setattr(CompilingCPU, "supports_graphs", True)
    found = device_findings.describe_device(engine)
    assert found.values["captures_graphs"]
    assert found.detail.startswith("GAUDI3, captures graphs, has compiler, ")
    monkeypatch.setattr(engine, "used_before", 1 << 20)
    found = device_findings.describe_memory(engine)
    said = "1 MiB in use before the engine, 2 GiB now"
    assert outcome(found) == (Status.OK, said)
    assert found.values == {"before_bytes": 1 << 20, "after_bytes": 2 << 30}


@pytest.mark.parametrize("chosen", ["auto", "cpu"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_gaudi_that_was_not_found_is_asked_for_its_reason(bare, monkeypatch, chosen, installed):
    monkeypatch.setattr(bare, "config", attrs.evolve(bare.config, device=chosen))
    monkeypatch.setattr(device_findings, "is_installed", lambda: installed)
    if chosen == "auto" and installed:
        with pytest.raises(DeviceError):
            device_findings.describe_device(bare)
    else:
        assert device_findings.describe_device(bare).status is Status.OK


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0.0, (Status.OK, "error 0, accepted 1e-05")),
        (5e-6, (Status.OK, "error 5e-06, accepted 1e-05")),
        (0.5, (Status.DIFFERS, "error 0.5, accepted 1e-05")),
        (float("nan"), (Status.DIFFERS, "error inf, accepted 1e-05")),
    ],
)
def test_a_kernel_is_near_the_host_or_differs(bare, monkeypatch, error, expected):
    def trial() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1.0 + error]), torch.tensor([1.0])

    monkeypatch.setattr(bare.device, "kernel_trials", lambda spec, dtype: {"k": trial})
    accepted = device_findings.TOLERANCE[torch.float32]
    found = device_findings.try_kernel(bare, "k")
    assert found.status is expected[0]
    assert found.values["accepted"] == accepted
    assert f"accepted {accepted:g}" in found.detail


def test_a_kernel_that_a_release_lacks_is_absent(bare, monkeypatch):
    def missing() -> Any:
        raise MissingKernelError("no fp8_gemm_v2")

    monkeypatch.setattr(bare.device, "kernel_trials", lambda spec, dtype: {"k": missing})
    said = "this release lacks it: no fp8_gemm_v2"
    assert outcome(device_findings.try_kernel(bare, "k")) == (Status.ABSENT, said)
    assert outcome(device_findings.try_kernel(bare, "other")) == (
        Status.ABSENT,
        "cpu has no such kernel",
    )


# The process.


def ask(process: CheckProcess, name: str, **given: Any) -> dict[str, Any]:
    return process.answer({"check": name, "given": given})


def test_each_check_has_an_answer(tiny_model):
    process = CheckProcess(config_of(tiny_model, "cpu"))
    wanted = [check.name for check in CHECKS if check.name.partition(" ")[0] != "program"]
    for name in (*wanted, "program decode"):
        answer = ask(process, name)
        assert answer["status"] in ("ok", "not on this device"), (name, answer)
        assert not answer["is_broken"]
    assert ask(process, "tokens seeded")["detail"] == "max_model_len is too small for these prompts"
    assert ask(process, "engine start")["values"]["num_blocks"] == 48
    assert set(ask(process, "reference", weight_bytes=1, block_size=8)["values"]) == set(SETTINGS)
    released(process._engine)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("one line\nand another"), "raised RuntimeError: one line"),
        (RuntimeError(), "raised RuntimeError"),
        (ConfigError("a setting is wrong\nso it is"), "a setting is wrong"),
        (ConfigError(""), "raised ConfigError"),
    ],
)
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_check_that_raises_is_a_finding(tiny_model, monkeypatch, error, said, is_broken):
    def raising(engine: ServedEngine) -> Finding:
        engine.is_broken = is_broken
        raise error

    monkeypatch.setattr(device_findings, "describe_memory", raising)
    answer = ask(CheckProcess(config_of(tiny_model, "cpu")), "device memory")
    assert answer == {
        **{"status": "failed", "detail": said, "remedy": "", "values": {}},
        "is_broken": is_broken,
    }


def test_a_check_of_software_needs_no_device():
    answer = ask(CheckProcess(EngineConfig(model="none", device="no:Device")), "python")
    assert answer["status"] == "ok"
    answer = ask(CheckProcess(EngineConfig(model="none", device="no:Device")), "device")
    assert (answer["status"], answer["is_broken"]) == ("failed", False)


# What the device starts.


def test_programs_and_graphs_are_counted_when_they_are_made_and_when_they_run():
    def counted(device: CPUDevice) -> dict[str, int]:
        counts = count_calls(device)
        module = torch.fx.symbolic_trace(torch.nn.ReLU())
        program = device.compile(module, [torch.ones(2)])
        for _ in range(2):
            program(torch.ones(2))
        graph = device.capture(torch.neg, [torch.ones(2)])
        for value in (1.0, 2.0, 3.0):
            assert graph.replay([torch.full((2,), value)]).tolist() == [-value] * 2
        graph.forget()
        graph.release()
        with pytest.raises(GraphError):
            graph.replay([torch.ones(2)])
        return attrs.asdict(counts)

    apart = {"captured": 1, "replays": 4, "uploads": 0, "downloads": 0}
    assert counted(CapturingCPU()) == {**apart, "compiled": 1, "programs": 2}
    shared = CapturingCPU()
    shared.shares_host_memory = True
    assert counted(shared) == {**apart, "compiled": 0, "programs": 0}
