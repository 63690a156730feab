"""The device samples as the host does: the same tokens, in static shapes, with few copies."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    PositionLogprobs,
    SamplingParams,
)
from trencadis.engine.devices import CPUDevice, Device, HPUDevice, PendingCopy
from trencadis.engine.runner import device_sampler
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.draw import (
    NUM_FLOATS,
    DrawKind,
    DrawNumbers,
    draw_tokens,
    pack_numbers,
)
from trencadis.engine.runner.sampler import HostSampler
from trencadis.engine.runner.sampling_rows import RowResult, Sampler
from trencadis.engine.runner.step import RowRequest, SampleSettings


class DeviceOnCPU(CPUDevice):
    """The CPU, taken for a device with memory of its own. It counts what crosses to and fro."""

    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.uploads = self.syncs = self.fetched_bytes = 0

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.uploads += 1
        return host.clone()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        self.fetched_bytes += sum(tensor.nbytes for tensor in tensors)
        copies = [tensor.clone() for tensor in tensors]
        return PendingCopy(copies, self._wait if copies else lambda: None)

    def _wait(self) -> None:
        self.syncs += 1


def row(seed: int = 0, prompt=(5,), output=(), num_candidates=0, **params) -> RowRequest:
    tokens = (*prompt, *output)
    settings = SampleSettings.of(
        SamplingParams(**params), seed, tokens, len(prompt), frozenset({0})
    )
    return RowRequest(len(tokens), (settings,), None, num_candidates)


def of_samples(rows: Iterable[RowRequest]) -> RowRequest:
    """The samples of all rows from one row of logits."""
    first, *others = rows
    return first._replace(samples=sum((other.samples for other in others), first.samples))


def sample(
    sampler: Sampler,
    device: Device,
    logits: torch.Tensor,
    requests: list[RowRequest],
    spare: int = 0,
) -> list[RowResult]:
    """The results for a batch with ``spare`` rows of padding."""
    padded = torch.cat((logits, torch.zeros(spare, logits.shape[1])))
    words = device.upload(torch.from_numpy(sampler.words(requests, len(padded))))
    pending = sampler.launch(padded, words, requests)
    return pending.read(device.fetch(pending.outputs).wait())


def both(
    logits: torch.Tensor, requests: list[RowRequest], spare: int = 0
) -> tuple[list[RowResult], list[RowResult]]:
    """The results of the host and of the device."""
    cpu, device = CPUDevice(), DeviceOnCPU()
    return (
        sample(HostSampler(), cpu, logits, requests, spare),
        sample(DeviceSampler(device, logits.shape[1]), device, logits, requests, spare),
    )


parameters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 1, 2, 7, 40, 2000]),
        "top_p": st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.5]),
        "min_tokens": st.sampled_from([0, 2, 16]),
        "logit_bias": st.sampled_from([{}, {1: 100.0}, {0: -100.0, 2: 0.5}]),
        "logprobs": st.sampled_from([None, 0, 2]),
    },
)
tokens = st.lists(st.integers(0, 3), max_size=6)
rows = st.builds(
    lambda seed, prompt, output, params: row(seed, prompt, output, **params),
    st.integers(-(2**63), 2**63 - 1),
    tokens,
    tokens,
    parameters,
)


@settings(max_examples=120, deadline=None)
@given(
    logits=st.lists(
        st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=30), min_size=1, max_size=4
    ),
    drawn=st.lists(rows, min_size=4, max_size=4),
    spare=st.integers(0, 2),
)
def test_the_device_samples_the_tokens_of_the_host(
    logits: list[list[float]], drawn: list[RowRequest], spare: int
) -> None:
    width = min(map(len, logits))
    given = torch.tensor([values[:width] for values in logits])
    host, device = both(given, drawn[: len(given)], spare)
    assert [[t.token_id for t in r.tokens] for r in device] == [
        [t.token_id for t in r.tokens] for r in host
    ]
    for ours, theirs in zip(device, host, strict=True):
        assert (ours.tokens[0].logprobs is None) == (theirs.tokens[0].logprobs is None)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_large_vocabularies_too_with_nuclei_of_every_size(spread: float) -> None:
    """Beyond 1024 tokens the host leaves its short way."""
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(1)) * spread
    ways = [{"top_p": p} for p in (0.1, 0.6, 0.99)] + [{"top_k": k} for k in (1, 1024, 1025, 6000)]
    ways += [{"top_k": k, "top_p": 0.9} for k in (50, 1024, 1500, 5000)] + [{"min_p": 0.3}]
    host, device = both(logits, [row(i, **way) for i, way in enumerate(ways)])
    assert device == host


def test_log_probabilities_are_those_of_the_host() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    listed = row(3, logprobs=2, logprob_token_ids=(299, 0, 7))
    asked = [row(3, logprobs=20, logit_bias={7: 3.0}), row(4), listed]
    host, device = both(logits, asked)
    assert [t.token_id for t in device[2].tokens[0].logprobs.top] == [299, 0, 7]
    of_rows = [(device[i].tokens[0].logprobs, host[i].tokens[0].logprobs) for i in (0, 2)]
    for found, expected in of_rows:
        assert_close(found, expected)
    assert device[1].tokens[0].logprobs is None


def assert_close(found: PositionLogprobs, expected: PositionLogprobs) -> None:
    assert [t.token_id for t in found.top] == [t.token_id for t in expected.top]
    for ours, theirs in zip(
        (found.chosen, *found.top), (expected.chosen, *expected.top), strict=True
    ):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_samples_that_share_a_prompt_are_drawn_from_one_row() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    asked = [
        row(1),
        of_samples(row(seed, logprobs=1, repetition_penalty=1.2) for seed in range(5)),
        None,
    ]
    host, device = both(logits, asked, spare=1)
    assert [len(result.tokens) for result in device] == [1, 5, 0]
    for ours, theirs in zip(device, host, strict=True):
        assert [t.token_id for t in ours.tokens] == [t.token_id for t in theirs.tokens]
    assert len({t.token_id for t in device[1].tokens}) > 1


def test_beams_beside_samples() -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(4))
    params = {"use_beam_search": True, "repetition_penalty": 1.5, "logit_bias": {9: 4.0}}
    asked = [
        row(1),
        row(output=(1, 2), num_candidates=256, **params),
        row(num_candidates=4, **params),
    ]
    host, device = both(logits, asked)
    assert device[0].tokens == host[0].tokens
    for ours, theirs in zip(device[1:], host[1:], strict=True):
        assert [token for token, _ in ours.candidates] == [token for token, _ in theirs.candidates]
        assert [p for _, p in ours.candidates] == pytest.approx([p for _, p in theirs.candidates])


def test_a_prompt_longer_than_a_chunk_of_edits_is_penalised_whole() -> None:
    logits = torch.zeros(2, 10_000)
    logits[:, -1] = -1.0
    seen = row(prompt=range(9_999), repetition_penalty=2.0, temperature=0.0, logit_bias={3: -1.0})
    settings = SampleSettings.of(seen.samples[0].params, 0, range(9_999), 9_998)
    seen = RowRequest(9_999, (settings,))
    positive = row(prompt=range(9_999), repetition_penalty=2.0, temperature=0.0)
    host, device = both(logits + torch.tensor([[0.0], [5.0]]), [seen, positive])
    assert device == host
    assert device[1].tokens[0].token_id == 9_999


def test_of_equal_scores_the_lowest_token_wins() -> None:
    tied = torch.zeros(1, 3000)
    tied[0, [7, 2900]] = 1.0
    for kind in DrawKind:
        words = torch.from_numpy(pack_numbers([None], 1))
        numbers = DrawNumbers.unpack(words, words[:, :NUM_FLOATS].view(torch.float32))
        ids = torch.arange(3000, dtype=torch.int32)[None]
        assert draw_tokens(tied, numbers, ids, kind).tolist() == [7]


def test_top_k_keeps_all_tokens_that_tie_with_the_last() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    asked = [row(seed, top_k=2) for seed in range(300)]
    for results in both(logits, asked):
        assert {result.tokens[0].token_id for result in results} == {0, 1, 2, 3}


# In the engine.

MIXED = [
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(seed=11, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.7, seed=12, max_tokens=4, logprobs=3),
    SamplingParams(top_k=9, min_p=0.02, seed=13, max_tokens=4, n=3),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9, seed=14, max_tokens=4, min_tokens=4),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.7, seed=15, max_tokens=4),
    SamplingParams(temperature=0.0, frequency_penalty=1.1, logit_bias={65: 3.0}, max_tokens=4),
    SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=4),
]


FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=16, step=16, max=16),
    prompt_context=AxisConfig(min=8, step=8, max=8),
    decode_batch=AxisConfig(min=4, step=4, max=4),
    decode_blocks=AxisConfig(min=40, step=40, max=40),
)


def settings_of(model: Path, **changes: object) -> EngineConfig:
    settings = {"max_model_len": 64, "block_size": 8, "max_num_batched_tokens": 16}
    settings |= {"dtype": "float32", "max_num_seqs": 4, "num_blocks": 40, "warmup": "none"}
    settings |= {"bucketing": FEW_BUCKETS, **changes}
    return EngineConfig(model=str(model), **settings)


def serve(core: EngineCore, asked: Sequence[SamplingParams]) -> dict[tuple[str, int], list[int]]:
    rng = random.Random(5)
    for key, params in enumerate(asked):
        core.add(str(key), GenerateRequest(tuple(rng.choices(range(250), k=3 + 5 * key)), params))
    found: dict[tuple[str, int], list[int]] = {}
    while core.has_work:
        for token in core.step():
            found.setdefault((token.key, token.index), []).append(token.token_id)
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[tuple[str, int], list[int]]:
    core = EngineCore(settings_of(tiny_model, device="cpu"))
    core.warm_up()
    return serve(core, MIXED)


def test_seeds_and_greedy_give_the_same_tokens_on_cpu_and_device(
    tiny_model: Path, expected: dict[tuple[str, int], list[int]]
) -> None:
    core = EngineCore(settings_of(tiny_model, device=DeviceOnCPU()))
    core.warm_up()
    assert serve(core, MIXED) == expected


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_and_on_a_gaudi(stand_in, mode, tiny_model, expected) -> None:
    with stand_in(mode):
        core = EngineCore(settings_of(tiny_model, device=HPUDevice()))
        core.warm_up()
        assert serve(core, MIXED) == expected


def decoding(model: Path, device: Device, params: SamplingParams, **changes: object) -> EngineCore:
    """A warm core in which four requests decode together."""
    core = EngineCore(settings_of(model, warmup="full", **changes, device=device))
    core.warm_up()
    for key in range(4):
        core.add(str(key), GenerateRequest((key, 7), params))
    core.step()
    return core


@pytest.mark.parametrize(
    ("params", "uploads"),
    [
        (SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), 1),
        (SamplingParams(top_p=0.9, top_k=20, seed=1, max_tokens=20, ignore_eos=True), 1),
        (SamplingParams(logprobs=5, max_tokens=20, ignore_eos=True), 1),
        (SamplingParams(repetition_penalty=1.2, max_tokens=20, ignore_eos=True), 2),
    ],
    ids=["greedy", "top-p", "logprobs", "penalty"],
)
def test_a_decode_step_uploads_once_and_waits_once(
    tiny_model: Path, params: SamplingParams, uploads: int
) -> None:
    device = DeviceOnCPU()
    core = decoding(tiny_model, device, params)
    for _ in range(3):
        before = device.uploads, device.syncs
        core.step()
        assert (device.uploads - before[0], device.syncs - before[1]) == (uploads, 1)


def test_the_bytes_of_a_decode_step_do_not_depend_on_the_vocabulary(make_tiny_model, tmp_path):
    params = SamplingParams(top_p=0.9, max_tokens=20, ignore_eos=True)
    fetched = []
    for vocabulary in (258, 2580):
        model = make_tiny_model(tmp_path / str(vocabulary), vocab_size=vocabulary)
        device = DeviceOnCPU()
        core = decoding(model, device, params)
        before = device.fetched_bytes
        core.step()
        fetched.append(device.fetched_bytes - before)
    assert fetched == [4 * 4] * 2, "one int32 for each of four rows"


def test_a_chunk_that_samples_nothing_is_not_waited_for(tiny_model: Path) -> None:
    device = DeviceOnCPU()
    core = EngineCore(settings_of(tiny_model, device=device))
    core.warm_up()
    core.add(
        "long", GenerateRequest(tuple(range(60)), SamplingParams(temperature=0.0, max_tokens=1))
    )
    syncs = device.syncs
    per_token = core.scheduler.costs.prefill_s_per_token
    while core.has_work:
        assert (device.syncs, device.fetched_bytes) == (syncs, 0)
        core.step()
    assert device.syncs == syncs + 1
    assert core.scheduler.costs.prefill_s_per_token == per_token, (
        "the launch of a chunk does not tell how long the chunk takes"
    )


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_on_a_gaudi_a_step_uploads_once_and_reads_once(stand_in, mode, tiny_model) -> None:
    with stand_in(mode) as bridge:
        params = SamplingParams(top_p=0.9, top_k=20, seed=1, max_tokens=20, ignore_eos=True)
        core = decoding(tiny_model, HPUDevice(), params)
        for _ in range(3):
            before = bridge.counters.copy()
            core.step()
            counted = bridge.counters.since(before)
            assert (counted.uploads, counted.syncs) == (1, 1)
        assert core.stats.num_compilations == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_that_the_device_cannot_sample_ends_alone(
    tiny_model: Path, monkeypatch, async_scheduling: bool
) -> None:
    """Of a batch whose sampling raises, each row is sampled again alone, into its slot alone."""
    core = EngineCore(
        settings_of(tiny_model, device=DeviceOnCPU(), async_scheduling=async_scheduling)
    )
    core.warm_up()
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    drawn = attrs.evolve(greedy, temperature=1.5, seed=4)
    requests = {"a": ((3, 4), drawn), "b": ((5, 6, 7), greedy), "c": ((6, 7), greedy)}

    def serve(*keys: str) -> dict[str, list[int]]:
        for key in keys:
            core.add(key, GenerateRequest(*requests[key]))
        found: dict[str, list[int]] = {}
        while core.has_work:
            for token in core.step():
                found.setdefault(token.key, []).append(token.token_id)
        return found

    expected = serve("a", "c")
    find_edits = device_sampler.find_edits

    def broken(rows: Sequence[RowRequest | None]) -> object:
        if any(one is not None and one.samples[0].num_prompt_tokens == 3 for one in rows):
            raise RuntimeError("defect in the sampler")
        return find_edits(rows)

    monkeypatch.setattr(device_sampler, "find_edits", broken)
    assert serve("a", "b", "c") == expected
    assert [failure.key for failure in core.take_failures()] == ["b"]
