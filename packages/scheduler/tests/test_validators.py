"""Validators of settings: the errors that they raise, and the bounds that others read."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter
from trencadis.scheduler import (
    BatchControl,
    CannotCopy,
    ConfigError,
    ControlError,
    InvalidResults,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    StepTiming,
    ThermalGuard,
    UnservableRequest,
    control,
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


def blocks() -> BlockManager:
    return BlockManager(CacheConfig(num_blocks=16, block_size=4))


@pytest.mark.parametrize("seconds", ["1", b"", True, [1.0], 1j])
@pytest.mark.parametrize("name", ["prompts_s", "swap_out_s", "swap_in_s"])
def test_a_duration_that_is_no_number_is_refused_before_it_can_lose_a_step(
    name: str, seconds: Any
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} must be a number, got .*: pass seconds, or None"
    ):
        StepTiming(**{name: seconds})
    for known in (None, 0, 1.5, np.float32(2), math.nan, -1.0):
        StepTiming(**{name: known})


@pytest.mark.parametrize("cost", [None, "1", -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", [field.name for field in attrs.fields(PreemptionCosts)])
def test_a_cost_is_a_finite_number(name: str, cost: Any) -> None:
    costs = PreemptionCosts()
    before = attrs.astuple(costs)
    for change in (lambda: PreemptionCosts(**{name: cost}), lambda: setattr(costs, name, cost)):
        with pytest.raises(ConfigError, match=f"{name} must be a finite number of at least 0"):
            change()
    assert attrs.astuple(costs) == before


class FailingCosts(PreemptionCosts):
    def update(self, *_: object) -> None:
        raise RuntimeError("broken")


def test_a_step_stays_in_flight_when_its_durations_cannot_be_counted() -> None:
    scheduler = Scheduler(SchedulerConfig(), blocks(), costs=FailingCosts())
    scheduler.add(Request(request_id="a", prompt_token_ids=(1,), max_tokens=1))
    output = scheduler.schedule()
    with pytest.raises(RuntimeError, match="broken"):
        scheduler.update(output, {0: 1}, timing=StepTiming())
    (update,) = scheduler.update(output, {0: 1})
    assert update.token_id == 1


@pytest.mark.parametrize("clock", [None, 5, "now", lambda: None, lambda: math.nan])
def test_a_clock_is_a_function_that_returns_seconds(clock: Any) -> None:
    with pytest.raises(ConfigError, match="clock must be a function that returns seconds, got"):
        Scheduler(SchedulerConfig(), blocks(), clock=clock)


@pytest.mark.parametrize("name", ["config", "blocks", "thermal", "defragmenter", "costs"])
def test_a_scheduler_is_made_of_objects_of_their_classes(name: str) -> None:
    parts: dict[str, Any] = {"config": SchedulerConfig(), "blocks": blocks(), name: "auto"}
    with pytest.raises(ConfigError, match=f"{name} must be of type .*, got 'auto'"):
        Scheduler(**parts)
    with pytest.raises(ConfigError, match=r"policy must be of type .*, got 'auto'"):
        ThermalGuard("auto", lambda: None)  # type: ignore[arg-type, return-value]


def test_a_guard_needs_functions() -> None:
    for name in ("read", "alert", "forget"):
        functions: dict[str, Any] = {"read": lambda: None, name: 5}
        with pytest.raises(ConfigError, match=f"{name} must be a function, got 5"):
            ThermalGuard(None, **functions)


def test_a_defragmenter_of_other_blocks_is_refused() -> None:
    own = blocks()
    Scheduler(SchedulerConfig(), own, defragmenter=Defragmenter(own))
    with pytest.raises(ConfigError, match=r"make it with Defragmenter\(blocks\)") as caught:
        Scheduler(SchedulerConfig(), own, defragmenter=Defragmenter(blocks()))
    assert caught.value.field == "defragmenter"


def test_a_scheduler_is_not_copied_because_both_would_schedule_its_requests() -> None:
    scheduler = Scheduler(SchedulerConfig(), blocks())
    scheduler.add(Request(request_id="a", prompt_token_ids=(1,), max_tokens=1))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CannotCopy, match="a Scheduler with 1 requests cannot be copied"):
            copied(scheduler)


def test_a_text_is_no_list_of_request_ids() -> None:
    with pytest.raises(ControlError, match="abort_and_swap\\(\\) needs request ids, got 'ab'"):
        Scheduler(SchedulerConfig(), blocks()).abort_and_swap("ab")


def test_as_many_request_ids_as_a_call_may_have_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_REQUEST_IDS", 3)
    scheduler = Scheduler(SchedulerConfig(), blocks())
    assert scheduler.abort_and_swap(["a", "b", "c"]) == ()
    with pytest.raises(ControlError, match="a list of them, of at most 3"):
        scheduler.abort_and_swap(["a", "b", "c", "d"])


def test_request_ids_without_end_are_refused() -> None:
    with pytest.raises(ControlError, match="of at most 1048576"):
        Scheduler(SchedulerConfig(), blocks()).abort_and_swap(itertools.repeat("a"))
