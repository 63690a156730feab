"""Validators: what they accept, what their errors say, and the bounds that others read."""

from __future__ import annotations

import copy
import math

import attrs
import numpy as np
import pytest

from trencadis.scheduler import (
    BatchControl,
    ConfigError,
    ControlError,
    Request,
    SchedulerConfig,
    UnservableRequest,
)
from trencadis.scheduler.thermal import VICTIM_ORDERS
from trencadis.scheduler.validators import integer, number, one_of


def validate(validator: object, value: object) -> None:
    made = attrs.make_class("Settings", {"size": attrs.field(validator=validator)})
    made(value)


@pytest.mark.parametrize(
    ("validator", "accepted"),
    [
        (integer(1), [1, 10**30]),
        (integer(1, 8, optional=True), [1, 8, None]),
        (number(), [-1e300, 0, 0.5]),
        (number(0), [0, 0.0, 3]),
        (number(0, 95, exclusive_low=True, optional=True), [1e-9, 95, None]),
        (one_of("fcfs", "priority"), ["fcfs", "priority"]),
    ],
)
def test_values_within_the_bounds_are_accepted(validator: object, accepted: list[object]) -> None:
    for value in accepted:
        validate(validator, value)


@pytest.mark.parametrize(
    ("validator", "refused", "message"),
    [
        (integer(1), [0, True, 1.0, None, "1"], "size must be an integer of at least 1, got "),
        (integer(1, 8), [0, 9], "size must be an integer from 1 to 8, got "),
        (integer(0, optional=True), [-1, False], "size must be an integer of at least 0 or None, "),
        (
            number(),
            [math.nan, math.inf, -math.inf, True, "1"],
            "size must be a finite number, got ",
        ),
        (number(0), [-1e-9, None], "size must be a finite number, at least 0, got "),
        (
            number(0, 95.0, exclusive_low=True, optional=True),
            [0, 95.5, math.nan],
            "size must be a finite number, above 0 and at most 95, or None, got ",
        ),
        (number(high=1), [1.5], "size must be a finite number, at most 1, got "),
        (one_of("fcfs", "priority"), ["lifo", None], "size must be one of fcfs, priority, got "),
    ],
)
def test_other_values_are_refused_with_field_bounds_and_value(
    validator: object, refused: list[object], message: str
) -> None:
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            validate(validator, value)
        assert str(caught.value).startswith(message)
        assert str(caught.value).endswith(f"got {value!r}")


def test_the_error_class_can_be_another_of_the_package() -> None:
    with pytest.raises(UnservableRequest, match="size"):
        validate(integer(1, error=UnservableRequest), 0)


def test_other_layers_can_read_the_bounds_of_a_control_request() -> None:
    fields = attrs.fields(BatchControl)
    assert (fields.max_num_seqs.validator.low, fields.max_num_seqs.validator.high) == (1, 2**63 - 1)
    assert fields.target_temp_c.validator.high == 95
    assert fields.target_temp_c.validator.exclusive_low
    assert fields.policy.validator.accepted == tuple(VICTIM_ORDERS)


@pytest.mark.parametrize("settings", [SchedulerConfig, BatchControl])
def test_every_setting_has_a_help_text(settings: type) -> None:
    for field in attrs.fields(settings):
        assert field.metadata["help"].endswith("."), field.name


def test_numpy_integers_are_integers() -> None:
    request = Request(request_id="a", prompt_token_ids=[1], max_tokens=np.int64(4), n=np.int32(2))
    assert (request.max_tokens, request.n) == (4, 2)


def test_an_order_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="force_evict must be an integer from 0 to 92233720"):
        BatchControl(force_evict=10**30)


def test_a_control_error_survives_copying() -> None:
    error = copy.copy(ControlError("too hot", "target_temp_c"))  # by the protocol of pickle
    assert (str(error), error.field) == ("too hot", "target_temp_c")
