"""What top_k, top_p and min_p keep: exact for any logits, in few reads of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_reads import logit_reads
from torch import fx

from trencadis.engine import SamplingParams
from trencadis.engine.devices import CPUDevice, HPUDevice
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.draw import NUM_FLOATS, DrawKind, DrawNumbers, kept_of, pack_numbers
from trencadis.engine.runner.sampling_rows import NO_TOKEN
from trencadis.engine.runner.sorted_chunks import CHUNK
from trencadis.engine.runner.step import RowRequest, SampleSettings
from trencadis.engine.simulated.cost_model import LOGIT_READS

VOCABULARY = 128_256
OF_KIND = {
    DrawKind.GREEDY: {"temperature": 0.0},
    DrawKind.RANDOM: {},
    DrawKind.TOP_P: {"top_p": 0.9, "min_p": 0.01},
    DrawKind.TOP_K: {"top_k": 50, "top_p": 0.9},
}


def row(seed: int = 0, **params) -> RowRequest:
    return RowRequest(1, (SampleSettings.of(SamplingParams(**params), seed, (5,), 1),))


def numbers_of(rows: list[RowRequest]) -> DrawNumbers:
    words = torch.from_numpy(pack_numbers(rows, len(rows)))
    return DrawNumbers.unpack(words, words[:, :NUM_FLOATS].view(torch.float32))


def check(logits: np.ndarray, **params: float) -> None:
    """Compare the tokens that a row keeps with the definition, in fp64.

    top_k: those as probable as the k-th or more. top_p: of those the most probable ones whose
    probabilities reach top_p of theirs, with all that are as probable as the last. min_p: not less
    probable than this share of the most probable one.
    """
    chosen = SamplingParams(**params)
    numbers = numbers_of([row(**params)])
    kept = kept_of(torch.from_numpy(logits)[None], numbers, DrawKind.TOP_K)
    scaled = logits / np.float32(chosen.temperature)
    distance = scaled.max() - scaled
    found = distance <= float(kept.limit)
    ordered = np.sort(distance)
    limit_k = ordered[min(chosen.top_k, len(ordered)) - 1] if chosen.top_k > 0 else math.inf
    mass = np.cumsum(np.exp(-ordered.astype(np.float64)) * (ordered <= limit_k))
    # A sum is within a unit of 2**-30 for each token, and a target reached within 2**-22.
    slack = 2.0**-21 + len(logits) * 2.0**-30
    reach = []
    for target in (chosen.top_p - slack, chosen.top_p + slack):
        place = min(int(np.searchsorted(mass, target * mass[-1])), len(ordered) - 1)
        reach.append(ordered[place] if chosen.top_p < 1.0 and target < 1.0 else math.inf)
    floor = -math.log(chosen.min_p) if chosen.min_p else math.inf
    least, most = (
        distance <= min(limit_k, np.float32(floor), max(limit, 2.0**-126)) for limit in reach
    )
    finite = np.isfinite(distance)
    assert not (least & ~found).any()
    assert not (found & ~most & finite).any()


values = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([0.0, 1.0, 1.0 + 2.0**-23, -1.0, 80.0, -math.inf]),
)


@settings(max_examples=100, deadline=None)
@given(
    some=st.lists(values, min_size=1, max_size=60).filter(lambda x: max(x) > -math.inf),
    size=st.sampled_from([1, 3, 63, 64, 65, 4095, 4096, 4097, 9000]),
    jitter=st.sampled_from([0.0, 1e-6, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 40, 2048, 3000, 100_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    temperature=st.sampled_from([0.01, 0.8, 1.0, 2.0]),
)
def test_the_kept_tokens_are_those_of_the_definition(
    some, size, jitter, top_k, top_p, min_p, temperature
) -> None:
    rng = np.random.default_rng(len(some))
    logits = np.resize(np.array(some, np.float32), size)
    logits = rng.permutation(logits + np.float32(jitter) * rng.standard_normal(size, np.float32))
    if logits.max() > -math.inf:
        check(logits, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)


LARGE = np.random.default_rng(0).standard_normal(VOCABULARY, np.float32)
HARD = {
    "all equal": np.zeros(VOCABULARY, np.float32),
    "one alone": np.where(np.arange(VOCABULARY) == 77, 80.0, LARGE).astype(np.float32),
    "nucleus of 100k": LARGE * np.float32(0.1),
    "heavy tail": -np.log(np.arange(1, VOCABULARY + 1, dtype=np.float32)),
    "neighbouring floats": 1.0 + np.arange(VOCABULARY, dtype=np.float32) * np.float32(2.0**-23),
    "one chunk has it all": np.where(np.arange(VOCABULARY) // CHUNK == 5, LARGE, LARGE - 20),
    "bf16": torch.from_numpy(LARGE * 3).bfloat16().float().numpy(),
    "masked": np.where(np.arange(VOCABULARY) % 997 == 0, LARGE, -np.inf).astype(np.float32),
}


@pytest.mark.parametrize("name", HARD)
def test_no_logits_are_too_hard(name: str) -> None:
    for top_p in (1e-9, 0.3, 0.99, 0.9999):
        check(HARD[name], top_p=top_p)
    check(HARD[name], top_k=1500, top_p=0.9, temperature=0.7)
    check(HARD[name], top_k=100_000, min_p=1e-4)


class Compiling(CPUDevice):
    """A device that keeps the programs that it is given."""

    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[fx.GraphModule] = []

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def compile(self, module, inputs):
        self.graphs.append(module)
        return module


def drawn(device, logits: torch.Tensor, rows: list[RowRequest]) -> list[int]:
    sampler = DeviceSampler(device, logits.shape[-1], num_slots=len(rows) + 1, compiled=True)
    words = device.upload(torch.from_numpy(sampler.words(rows, len(rows))))
    pending = sampler.launch(device.upload(logits), words, rows)
    results = pending.read(device.fetch(pending.outputs).wait())
    return [result.tokens[0].token_id for result in results]


@pytest.mark.parametrize("kind", DrawKind)
def test_a_draw_reads_the_logits_at_most_six_times(kind: DrawKind) -> None:
    """As often as the simulator charges."""
    device, logits = Compiling(), torch.from_numpy(np.stack([LARGE] * 32))
    drawn(device, logits, [row(**OF_KIND[kind])] * 32)
    reads = logit_reads(device.graphs[0], logits.shape)
    assert reads <= 6
    assert LOGIT_READS[kind.name.lower()] - 0.1 < reads <= LOGIT_READS[kind.name.lower()]


def test_nothing_is_drawn_where_no_logit_is_a_number() -> None:
    logits = torch.from_numpy(np.stack([LARGE[: 2 * CHUNK + 100]] * 3))
    logits[0, 17], logits[1] = math.nan, -math.inf
    for params in OF_KIND.values():
        found = drawn(Compiling(), logits, [row(**params)] * 3)
        assert found[:2] == [NO_TOKEN, NO_TOKEN]
        assert 0 <= found[2] < logits.shape[-1]


@pytest.mark.slow
def test_on_a_gaudi_each_kind_is_one_program_without_fallbacks(stand_in) -> None:
    logits = torch.from_numpy(np.stack([LARGE[: 2 * CHUNK + 100]] * 2))
    with stand_in("eager") as bridge:
        for kind, params in OF_KIND.items():
            before = bridge.counters.copy()
            rows = [row(seed, **params) for seed in range(2)]
            found = drawn(HPUDevice(), logits, rows)
            assert found == drawn(Compiling(), logits, rows), kind
            assert bridge.counters.since(before).fallbacks == 0
