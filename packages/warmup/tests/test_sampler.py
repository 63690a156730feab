"""The sampler is warmed up in the documented order, with the documented log lines."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trencadis.bucketing import BucketGrid
from trencadis.warmup import (
    SAMPLER_CONFIGS,
    ConfigError,
    DummyRequest,
    SamplerConfig,
    sampler_batch_sizes,
    warm_up_sampler,
)


class RecordingSampler:
    """Records its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[str, object]] = []
        self.fails = fails

    def open_batch(self, batch_size: int, requests: tuple[DummyRequest, ...]) -> None:
        self.calls.append(("open", (batch_size, len(requests))))
        assert all(len(request.block_ids) == 1 for request in requests)
        assert len({request.request_id for request in requests}) == len(requests)

    def sample(self, config: SamplerConfig) -> None:
        if self.fails:
            raise RuntimeError("no such branch")
        self.calls.append(("sample", config))

    def reset(self) -> None:
        self.calls.append(("reset", None))

    def close_batch(self) -> None:
        self.calls.append(("close", None))

    def synchronize(self) -> None:
        self.calls.append(("synchronize", None))


# "Sampler Warm-up" of the plugin's page on warm-up: temperature, top_p, top_k, batch_changed.
LOGGED = [
    (0.0, 1.0, 0, True),
    (1.0, 1.0, 0, True),
    (0.7, 0.9, 50, True),
    (0.3, 0.95, 20, True),
    (1.2, 0.8, 100, True),
    (0.8, 0.85, 0, True),
    (0.0, 1.0, 0, False),
    (1.0, 1.0, 0, False),
    (0.7, 0.9, 50, False),
    (0.3, 0.95, 20, False),
    (1.2, 0.8, 100, False),
    (0.8, 0.85, 0, False),
]


def test_the_configs_are_the_twelve_of_the_documentation() -> None:
    found = [(c.temperature, c.top_p, c.top_k, c.batch_changed) for c in SAMPLER_CONFIGS]
    assert found == LOGGED
    assert [config.greedy for config in SAMPLER_CONFIGS] == ([True] + [False] * 5) * 2


def test_zero_and_one_are_always_among_the_batch_sizes() -> None:
    grid = BucketGrid({"batch": (1, 2, 4), "blocks": (128, 256)})
    assert sampler_batch_sizes(grid) == (0, 1, 2, 4)
    assert sampler_batch_sizes(()) == (0, 1)
    assert sampler_batch_sizes(BucketGrid({"batch": (7,)}), grid) == (0, 1, 2, 4, 7)


def test_every_size_is_sampled_with_every_config_and_a_reset_in_between() -> None:
    sampler = RecordingSampler()
    warm_up_sampler(sampler, (0, 1, 138))
    calls = sampler.calls
    assert [call for call in calls if call[0] == "open"] == [
        ("open", (0, 1)),
        ("open", (1, 1)),
        ("open", (138, 138)),
    ]
    per_size = 1 + 2 * len(SAMPLER_CONFIGS) + 1
    assert len(calls) == 3 * per_size + 1
    first = calls[:per_size]
    assert [config for kind, config in first if kind == "sample"] == list(SAMPLER_CONFIGS)
    assert [kind for kind, _ in first[2:-1:2]] == ["reset"] * len(SAMPLER_CONFIGS)
    assert first[-1][0] == "close"
    assert calls[-1] == ("synchronize", None)


def test_log_lines_are_those_of_the_documentation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trencadis.warmup"):
        warm_up_sampler(RecordingSampler(), (0, 1, 138))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Warming up sampler with batch sizes: [0, 1, 138] and following configs:"
    assert lines[1] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=True"
    assert lines[3] == "temp=0.7, top_p=0.9, top_k=50, batch_changed=True"
    assert lines[12] == "temp=0.8, top_p=0.85, top_k=0, batch_changed=False"
    assert lines[13:] == ["Starting sampler warmup...", "Sampler warmup completed successfully"]


def test_the_batch_is_closed_when_sampling_fails() -> None:
    sampler = RecordingSampler(fails=True)
    with pytest.raises(RuntimeError, match="no such branch"):
        warm_up_sampler(sampler, (4,))
    assert sampler.calls[-1] == ("close", None)


@pytest.mark.parametrize("sizes", [None, [-1], ["4"], [1.5], [True], [1 << 40], [(1 << 20) + 1]])
def test_a_wrong_batch_size_is_refused_before_sampling(sizes: Any) -> None:
    sampler = RecordingSampler()
    with pytest.raises(ConfigError, match=r"batch.* an integer from 0 to 1048576, got"):
        warm_up_sampler(sampler, sizes)
    assert not sampler.calls


def test_a_dummy_request_decodes_its_first_token_in_the_padding_block() -> None:
    request = DummyRequest("warmup-1-0")
    assert request.prompt_token_ids == request.output_token_ids == request.block_ids == (0,)


def test_a_wrong_config_or_sampler_is_refused() -> None:
    sampler = RecordingSampler()
    with pytest.raises(ConfigError, match="configs must be of type SamplerConfig"):
        warm_up_sampler(sampler, (1,), [0.7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="has no open_batch, sample, reset, close_batch"):
        warm_up_sampler(object(), (1,))  # type: ignore[arg-type]
    assert not sampler.calls


def test_decode_buckets_without_a_batch_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="name one of them batch"):
        sampler_batch_sizes(BucketGrid({"rows": (1, 2)}))
