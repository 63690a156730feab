"""Every setting with a number: its default, and the ends of its range."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis.scheduler import (
    BatchControl,
    BeamSearch,
    ConfigError,
    PreemptionCosts,
    Request,
    SchedulerConfig,
    SchedulerError,
)
from trencadis.scheduler.telemetry import ReaderConfig
from trencadis.scheduler.telemetry.sidecar.config import SidecarConfig
from trencadis.scheduler.thermal import (
    PowerBudgetPolicy,
    ProportionalThermalPolicy,
    TwoPhaseThermalPolicy,
)

MOST = (1 << 63) - 1
"""What a signed 64-bit integer holds."""

ABOVE_0 = "above 0"
"""In place of the lowest value: 0 is refused, and any number above it is none too small."""

NEEDED: dict[type, dict[str, Any]] = {
    # A step holds a full decode batch.
    SchedulerConfig: {"max_num_seqs": 1},
    Request: {"request_id": "a", "prompt_token_ids": (1,), "max_tokens": 9},
    PowerBudgetPolicy: {"budget_w": 400.0},
    BeamSearch: {"width": 2},
}
"""What is set beside the setting under test."""

Range = tuple[Any, Any, Any]
"""The default, the lowest and the highest value; None: any value below the highest of its kind."""

RANGES: dict[type, dict[str, Range]] = {
    SchedulerConfig: {
        "max_num_seqs": (128, 1, None),
        "max_num_batched_tokens": (2048, 1, None),
        "max_prefill_tokens": (None, 1, None),
        "max_mixed_prefill_tokens": (None, 1, None),
        "max_model_len": (4096, 1, None),
        "max_chunk_tokens": (None, 1, None),
        "max_waiting": (2048, 1, None),
        "max_steps_in_flight": (1, 1, 2),
        "lookahead": (8, 1, None),
        "max_bypasses": (16, 0, None),
        "max_adapters": (None, 1, None),
        "force_evict_hold_s": (5.0, 0.0, None),
    },
    BatchControl: {
        "max_num_seqs": (None, 1, MOST),
        "max_prefill_tokens": (None, 1, MOST),
        "force_evict": (None, 0, MOST),
        "hold_s": (None, 0.0, 86_400.0),
        "target_temp_c": (None, ABOVE_0, 95.0),
        "forget_device": (None, 0, MOST),
    },
    PreemptionCosts: {
        "swap_out_s_per_block": (4e-5, 0.0, None),
        "swap_in_s_per_block": (5e-5, 0.0, None),
        "prefill_s_per_token": (4e-5, 0.0, None),
        "blocks_per_state": (0.0, 0.0, None),
    },
    BeamSearch: {"width": (2, 1, None)},
    Request: {
        "max_tokens": (9, 1, None),
        "min_tokens": (0, 0, None),
        "n": (1, 1, None),
        "best_of": (None, 1, None),
        "prompt_token_cost": (1.0, 1.0, None),
    },
    ReaderConfig: {
        "period_s": (1.0, ABOVE_0, None),
        "stale_after_s": (5.0, ABOVE_0, None),
        "failed_after_s": (30.0, ABOVE_0, None),
        "assumed_hot_c": (95.0, ABOVE_0, None),
        "max_c": (125.0, ABOVE_0, None),
        "max_jump_c": (25.0, ABOVE_0, None),
        "max_slew_c_per_s": (10.0, ABOVE_0, None),
        "confirmations": (3, 1, None),
        "frozen_after_s": (120.0, ABOVE_0, None),
        "frozen_coarse_after_s": (900.0, ABOVE_0, None),
    },
    SidecarConfig: {"period_s": (1.0, 0.01, 3600.0), "max_streams": (16, 1, 1024)},
    PowerBudgetPolicy: {
        "budget_w": (400.0, ABOVE_0, None),
        "prior_w": (3.2, ABOVE_0, None),
        "dwell_s": (5.0, 0.0, None),
        "retry_s": (60.0, 0.0, None),
        "min_seqs": (1, 1, None),
    },
    ProportionalThermalPolicy: {
        "target_temp_c": (82.0, ABOVE_0, 95.0),
        "k_p": (None, ABOVE_0, None),
        "hysteresis_c": (3.0, 2.0, None),
        "dwell_s": (5.0, ABOVE_0, None),
        "min_seqs": (1, 1, None),
    },
    TwoPhaseThermalPolicy: {
        "target_temp_c": (82.0, ABOVE_0, 95.0),
        "budget_w": (None, ABOVE_0, None),
        "max_ttft_s": (10.0, 0.0, None),
        "max_itl_s": (0.2, 0.0, None),
        "dwell_s": (5.0, ABOVE_0, None),
        "min_prefill_tokens": (128, 1, None),
        "min_seqs": (1, 1, None),
    },
}

SETTINGS = [
    pytest.param(kind, name, *of_name, id=f"{kind.__name__}.{name}")
    for kind, of_kind in RANGES.items()
    for name, of_name in of_kind.items()
]


def made(kind: Any, **settings: Any) -> Any:
    return kind(**{**NEEDED.get(kind, {}), **settings})


@pytest.mark.parametrize(("kind", "name", "default", "lowest", "highest"), SETTINGS)
def test_a_setting_has_a_default_and_is_refused_beyond_the_ends_of_its_range(
    kind: Any, name: str, default: Any, lowest: Any, highest: Any
) -> None:
    needed = {key: value for key, value in NEEDED.get(kind, {}).items() if key != name}
    assert attrs.fields_dict(kind)[name].default in (default, attrs.NOTHING)
    assert getattr(made(kind, **({} if name in needed else {name: default})), name) == default
    step = 1 if isinstance(lowest, int) else 0.001
    ends = [end for end in (lowest, highest) if end not in (None, ABOVE_0)]
    beyond = [0 if lowest == ABOVE_0 else lowest - step]
    if highest is not None:
        beyond.append(highest + step)
    for value in ends:
        assert getattr(made(kind, **{name: value}), name) == value
    for value in beyond:
        with pytest.raises((ConfigError, SchedulerError), match=rf"{name} must be an? .*, got"):
            made(kind, **{name: value})


def test_a_full_decode_batch_may_be_as_large_as_a_step() -> None:
    assert SchedulerConfig(max_num_seqs=2048).max_num_batched_tokens == 2048
    with pytest.raises(ConfigError, match="max_num_batched_tokens 2048 is below max_num_seqs 2049"):
        SchedulerConfig(max_num_seqs=2049)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("period_s", "stale_after_s"),
        ("stale_after_s", "failed_after_s"),
        ("frozen_after_s", "frozen_coarse_after_s"),
        ("assumed_hot_c", "max_c"),
    ],
)
def test_times_and_temperatures_of_a_reader_ascend(low: str, high: str) -> None:
    most = getattr(ReaderConfig(), high)
    assert getattr(ReaderConfig(**{low: most - 0.001}), low) < most
    with pytest.raises(ConfigError, match=f"{low} {most} must be below {high} {most} "):
        ReaderConfig(**{low: most})


@pytest.mark.parametrize("devices", [(0,), [3, 0], None])
def test_devices_are_indices_each_once(devices: Any) -> None:
    expected = None if devices is None else tuple(devices)
    assert ReaderConfig(devices=devices).devices == expected
    for wrong in ((), (-1,), (1, 1), (True,), 3):
        with pytest.raises(ConfigError, match="devices must be distinct device indices of at"):
            ReaderConfig(devices=wrong)
