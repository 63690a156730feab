"""A simulated model that several devices divide between them."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import Bucket
from trencadis.engine.errors import ConfigError
from trencadis.engine.simulated import CostModel, find_hardware, read_model_shape
from trencadis.engine.simulated.cli import main
from trencadis.warmup import Phase

DATA = Path(__file__).parent / "data"
LLAMA_70B = DATA / "llama-3.1-70b.json"
TRACE = DATA / "azure_conv_excerpt.csv"

US = 1e-6


@pytest.mark.parametrize(
    ("device", "ranks", "size", "microseconds"),
    [
        ("gaudi3", 1, 10**6, 0.0),
        # Two devices have three of the 21 ports between them: 75 GB/s. Each sends half, twice.
        ("gaudi3", 2, 75_000_000, 60 + 1000),
        # Eight use all: an eighth to each of seven, twice.
        ("gaudi3", 8, 300_000_000, 60 + 1000),
        ("gaudi2", 2, 37_500_000, 60 + 1000),
        # Behind a switch a device reaches each other one with all its links.
        ("h100", 2, 450_000_000, 60 + 1000),
        ("h100", 4, 450_000_000, 60 + 1500),
    ],
)
def test_a_sum_takes_its_bytes_over_the_links(
    device: str, ranks: int, size: int, microseconds: float
) -> None:
    assert find_hardware(device).sum_s(ranks, size) == pytest.approx(microseconds * US)


def costs(ranks: int, device: str = "gaudi3") -> CostModel:
    model = read_model_shape(LLAMA_70B).divided(ranks)
    return CostModel(model, find_hardware(device), 128, num_ranks=ranks)


def test_a_forward_pass_sums_twice_in_each_layer_and_gathers_the_logits() -> None:
    """As the engine's ranks do (docs/engine/devices.md): 2 L + 1 sums, and the logits."""
    hardware = find_hardware("gaudi3")
    decode = Bucket(("batch", "blocks"), (32, 64))
    hidden, logits = 32 * 8192 * 2, 32 * 128256 * 4
    expected_s = 161 * hardware.sum_s(8, hidden) + hardware.sum_s(8, logits // 2)
    assert costs(8).collectives_s(Phase.DECODE, decode) == pytest.approx(expected_s)
    prompt = Bucket(("batch", "query", "context_blocks"), (2, 16, 0))
    expected_s += hardware.sum_s(8, 2 * 128256 * 4 // 2) - hardware.sum_s(8, logits // 2)
    assert costs(8).collectives_s(Phase.PROMPT, prompt) == pytest.approx(expected_s)
    times = costs(8).forward_times(Phase.DECODE, decode)
    parts_s = times.matrices_s + times.attention_s + times.head_s
    assert times.total_s == pytest.approx(parts_s + times.collectives_s)
    assert costs(1).forward_times(Phase.DECODE, decode).collectives_s == 0


def test_ranks_divide_weights_and_cache() -> None:
    whole, part = read_model_shape(LLAMA_70B), read_model_shape(LLAMA_70B).divided(8)
    assert 8 * part.layer_matrices == whole.layer_matrices
    assert 8 * part.kv_bytes_per_token == whole.kv_bytes_per_token
    assert 8 * part.vocab_size == whole.vocab_size
    assert part.hidden_size == whole.hidden_size
    few = attrs.evolve(whole, num_kv_heads=2).divided(8)
    assert few.num_kv_heads == 1  # each is on four ranks


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 512), st.integers(1, 4096))
def test_a_rank_computes_no_more_than_a_device_alone(ranks: int, batch: int, blocks: int) -> None:
    bucket = Bucket(("batch", "blocks"), (batch, blocks))
    alone, together = (costs(n).forward_times(Phase.DECODE, bucket) for n in (1, ranks))
    assert together.matrices_s <= alone.matrices_s
    assert together.attention_s <= alone.attention_s


def test_heads_that_cannot_be_divided_are_named() -> None:
    with pytest.raises(ConfigError, match="3 does not divide 64 attention heads with 8 KV heads"):
        read_model_shape(LLAMA_70B).divided(3)


def test_eight_devices_serve_what_one_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "gaudi3", "--model", str(LLAMA_70B), "--trace", str(TRACE)]
    command += ["--num-requests", "20"]
    assert main(command) == 2
    assert "the model needs" in capsys.readouterr().err
    assert main([*command, "--tensor-parallel-size", "8"]) == 0
    assert "20 done" in capsys.readouterr().out
    assert main([*command, "--tensor-parallel-size", "3"]) == 2
    assert "does not divide 64 attention heads" in capsys.readouterr().err
