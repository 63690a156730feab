"""Validators of settings: the errors that they raise, and the bounds that others read."""

from __future__ import annotations

import copy

import attrs
import numpy as np
import pytest

from trencadis.scheduler import (
    BatchControl,
    ConfigError,
    ControlError,
    InvalidResults,
    Request,
    SchedulerConfig,
    UnservableRequest,
)
from trencadis.scheduler.step_results import StepResults
from trencadis.scheduler.thermal import VICTIM_ORDERS
from trencadis.scheduler.validators import integer


def test_an_error_names_the_setting_in_its_message_and_in_its_field() -> None:
    with pytest.raises(ConfigError, match="max_waiting must be an integer of at least 1") as caught:
        SchedulerConfig(max_waiting=0)
    assert caught.value.field == "max_waiting"


def test_the_error_class_can_be_another_of_the_package() -> None:
    with pytest.raises(UnservableRequest, match="size must be an integer"):
        integer(1, error=UnservableRequest).checked("size", 0)


def test_other_layers_can_read_the_bounds_of_a_control_request() -> None:
    fields = attrs.fields(BatchControl)
    assert (fields.max_num_seqs.validator.low, fields.max_num_seqs.validator.high) == (1, 2**63 - 1)
    assert fields.target_temp_c.validator.high == 95
    assert fields.target_temp_c.validator.exclusive_low
    assert list(fields.policy.validator.choices) == list(VICTIM_ORDERS)


@pytest.mark.parametrize("settings", [SchedulerConfig, BatchControl])
def test_every_setting_has_a_help_text(settings: type) -> None:
    for field in attrs.fields(settings):
        assert field.metadata["help"].endswith("."), field.name


def test_a_request_keeps_the_integers_of_numpy_as_plain_ones() -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=np.arange(2),
        stop_token_ids=[np.uint8(7)],
        max_tokens=np.int64(4),
        n=np.int32(2),
    )
    assert (request.max_tokens, request.n) == (4, 2)
    numbers = (request.max_tokens, request.n, *request.prompt_token_ids, *request.stop_token_ids)
    assert set(map(type, numbers)) == {int}


def test_the_tokens_of_a_step_are_kept_as_plain_integers() -> None:
    results = StepResults.of({1: np.int64(7)}, None, {2: [(np.int32(8), -0.5)]}, {1: np.array([9])})
    tokens = (results.tokens[1], *results.forced[1], results.offered(2)[0].token_id)
    assert tokens == (7, 9, 8)
    assert set(map(type, tokens)) == {int}


@pytest.mark.parametrize("token", [True, 1.0, np.bool_(True), -1, 2**31, "1", None])
def test_a_token_that_is_none_is_refused_alone_and_among_others(token: object) -> None:
    message = r"must be an integer from 0 to 2147483647, got "
    with pytest.raises(InvalidResults, match=message):
        StepResults.of({1: 5, 2: token}, None, None, None)
    with pytest.raises(UnservableRequest, match=rf"prompt_token_ids\[1\] {message}"):
        Request(request_id="a", prompt_token_ids=[5, token], max_tokens=1)


def test_an_order_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="force_evict must be an integer from 0 to 92233720"):
        BatchControl(force_evict=10**30)


def test_a_control_error_survives_copying() -> None:
    error = copy.copy(ControlError("too hot", "target_temp_c"))  # by the protocol of pickle
    assert (str(error), error.field) == ("too hot", "target_temp_c")
