"""Thermal policies: when they cut, when they let go, what they learn, and how they fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest
from harness import Memory, Runner

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    ConfigError,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    ThermalGuard,
)
from trencadis.scheduler.thermal import (
    BOARDS,
    HeatModel,
    NoThermalPolicy,
    PowerBudgetPolicy,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
    SchedulerView,
    WattsModel,
    load_thermal_policy,
    thermal_policy_from_env,
)


@attrs.define
class View:
    """As much of a scheduler as a policy may see."""

    now_s: float = 0.0
    num_running_seqs: int = 0
    max_num_seqs: int = 100

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(max_num_seqs=self.max_num_seqs)


@attrs.define
class State:
    hottest_c: float | None = 20.0
    may_raise_cap: bool = True
    power_w: float | None = None


def caps(
    policy: ProportionalThermalPolicy, temperatures: Sequence[float], step_s: float = 1.0
) -> list[int]:
    view, seen = View(), []
    for temperature in temperatures:
        policy.on_temp_reading(0, temperature)
        seen.append(policy.get_max_running_seqs(view))
        view.now_s += step_s
    return seen


def test_nothing_is_cut_up_to_the_target() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0)
    assert caps(policy, [20.0, 81.9, 82.0]) == [100, 100, 100]


def test_the_cut_is_in_proportion_and_at_once() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0)
    assert caps(policy, [84.0, 86.0, 95.0]) == [80, 60, 1]


def test_seed_gain_drops_one_sequence_per_two_degrees() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=0.5)
    assert caps(policy, [84.0, 86.0]) == [99, 98]


def test_no_change_within_the_hysteresis() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, dwell_s=1.0)
    assert len(set(caps(policy, [85.0, 84.0, 83.0, 82.1, 84.0, 82.1, 85.0]))) == 1


def test_cap_rises_once_per_dwell_by_a_quarter_of_what_was_taken() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, hysteresis_c=3.0, dwell_s=5.0)
    seen = caps(policy, [90.0, *[70.0] * 20])
    assert seen == [20] * 5 + [40] * 5 + [55] * 5 + [66] * 5 + [74]


def test_a_new_cut_after_a_rise_waits_for_the_dwell_unless_it_is_steep() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, hysteresis_c=3.0, dwell_s=5.0)
    caps(policy, [88.0, *[82.0] * 4])
    assert caps_from(policy, 5.0, [82.0, 86.0, 86.0, 90.0]) == [55, 55, 55, 20]
    assert policy.excess_c == 8.0


def caps_from(
    policy: ProportionalThermalPolicy, start_s: float, temperatures: Sequence[float]
) -> list[int]:
    view, seen = View(now_s=start_s), []
    for temperature in temperatures:
        policy.on_temp_reading(0, temperature)
        seen.append(policy.get_max_running_seqs(view))
        view.now_s += 1.0
    return seen


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hysteresis_c": 1.9}, "hysteresis_c must be 2.0 or more, got 1.9"),
        ({"target_temp_c": 96.0}, "target_temp_c.*95.*96"),
        ({"k_p": -1.0}, "k_p must be above 0"),
        ({"dwell_s": 0.0}, "dwell_s"),
        ({"victims": "loudest"}, "loudest.*lru, largest_kv"),
    ],
)
def test_bad_setting_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProportionalThermalPolicy(**settings)


def test_watts_per_sequence_are_learned_from_the_prior_on() -> None:
    model = WattsModel()
    assert model.per_sequence_w == 3.2
    for i in range(200):
        running = 20 + 37 * i % 100
        model.learn(120.0 + 2.5 * running + (i % 3 - 1), running)
    assert model.per_sequence_w == pytest.approx(2.5, rel=0.02)
    assert model.idle_w == pytest.approx(120.0, rel=0.05)
    for nonsense in (math.nan, math.inf, -5.0):
        model.learn(nonsense, 50)
    assert model.per_sequence_w == pytest.approx(2.5, rel=0.02)


def test_power_policy_keeps_to_its_budget() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View(num_running_seqs=100)
    for second in range(60):
        if second % 3 == 0:  # the sensor is slower than the steps
            watts = 110.0 + 4.0 * view.num_running_seqs
        policy.on_power_reading(watts)
        view.num_running_seqs = policy.get_max_running_seqs(view)
        view.now_s += 1.0
    assert 110.0 + 4.0 * view.num_running_seqs <= 400.0
    assert view.num_running_seqs >= 68


def test_sensor_in_doubt_never_loosens_the_cap() -> None:
    state, view = State(90.0), View()
    guard = ThermalGuard(ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0), lambda: state)
    assert guard.cap(view) == 20
    state.hottest_c, state.may_raise_cap = 30.0, False
    for _ in range(100):
        view.now_s += 1.0
        assert guard.cap(view) == 20
    state.may_raise_cap = True
    assert guard.cap(view) == 100


class Broken(NoThermalPolicy):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        if self.where == "reading":
            raise RuntimeError("no idea")

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        if self.where == "cap":
            raise RuntimeError("no idea")
        return int("many") if self.where == "nonsense" else 1

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        if self.where == "strangers":
            return [None] * num_to_evict
        raise RuntimeError("no idea")


@pytest.mark.parametrize("where", ["reading", "cap", "nonsense", "victims", "strangers", "sensor"])
def test_policy_that_fails_is_disabled_and_serving_goes_on(where: str) -> None:
    alerts: list[str] = []

    def read() -> State:
        if where == "sensor":
            raise OSError("unplugged")
        return State()

    now = 0.0
    guard = ThermalGuard(Broken(where), read, alerts.append)
    blocks = BlockManager(CacheConfig(num_blocks=65, block_size=4))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64),
        blocks,
        thermal=guard,
        clock=lambda: now,
    )
    runner = Runner(scheduler, Memory(4))
    groups = [
        runner.add(Request(request_id=name, prompt_token_ids=(1, 2, 3), max_tokens=9))
        for name in "abcd"
    ]
    if where in {"victims", "strangers"}:
        # Something has to be over the cap for victims to be asked for.
        guard.policy, waiting = None, guard.policy
        runner.step()
        guard.policy = waiting
    runner.run()
    assert all(len(group.results[0].output_token_ids) == 9 for group in groups)
    assert guard.policy is None
    assert len(alerts) == 1
    assert "Broken is disabled, serving goes on" in alerts[0]


def test_a_policy_that_names_too_few_victims_is_helped_out() -> None:
    class Lazy(NoThermalPolicy):
        def select_victims(self, running, num_to_evict):
            return []

    guard = ThermalGuard(Lazy(), State)
    blocks = BlockManager(CacheConfig(num_blocks=65, block_size=4))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_model_len=64), blocks)
    runner = Runner(scheduler, Memory(4))
    groups = [
        runner.add(Request(request_id=name, prompt_token_ids=(1, 2), max_tokens=9))
        for name in "abc"
    ]
    runner.step()
    assert guard.victims(groups, 2) == groups[:2]


def test_policies_are_loaded_by_name_and_by_path() -> None:
    assert isinstance(load_thermal_policy("none"), NoThermalPolicy)
    assert isinstance(load_thermal_policy("proportional", k_p=1.0), ProportionalThermalPolicy)
    path = "trencadis.scheduler.thermal.power:PowerBudgetPolicy"
    assert isinstance(load_thermal_policy(path, budget_w=300.0), PowerBudgetPolicy)
    assert thermal_policy_from_env({}) is None
    assert isinstance(
        thermal_policy_from_env({"VLLM_THERMAL_POLICY": "proportional"}), SchedulerThermalPolicy
    )


def test_policies_of_other_packages_are_found_by_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib.metadata import EntryPoint

    from trencadis.scheduler.thermal import loader

    point = EntryPoint("theirs", "trencadis.scheduler.thermal:NoThermalPolicy", loader.GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [point])
    assert isinstance(load_thermal_policy("theirs"), NoThermalPolicy)
    with pytest.raises(ConfigError, match="none, power, proportional, theirs"):
        load_thermal_policy("ours")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cold", {}, "'cold'.*VLLM_THERMAL_POLICY.*proportional"),
        ("no.such.module:Policy", {}, "cannot be imported"),
        ("trencadis.scheduler:Scheduling", {}, "cannot be imported"),
        ("proportional", {"colour": "red"}, "does not take.*colour"),
        ("collections:OrderedDict", {}, "derive it from SchedulerThermalPolicy"),
    ],
)
def test_unusable_policy_is_named(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_thermal_policy(name, **settings)


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=lambda board: board.name)
def test_heat_model_settles_where_its_resistances_say(board: object) -> None:
    model = HeatModel(board, ambient_c=35.0)
    for _ in range(3000):
        model.step(1.0, 10_000)
    full = 35.0 + board.limit_w * (board.chip_k_per_w + board.sink_k_per_w)
    assert model.chip_c == pytest.approx(full, abs=0.1)
    assert model.power_w == board.limit_w
    model.settle(0)
    assert model.step(10.0, 0) == pytest.approx(model.chip_c)


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=lambda board: board.name)
@pytest.mark.parametrize("fan", [0.5, 0.4])
def test_policy_keeps_a_failing_fan_below_the_limit(board: object, fan: float) -> None:
    """The loop of policy and board alone; `benchmarks/thermal.py` has a scheduler in it."""
    policy, view = ProportionalThermalPolicy(), View(max_num_seqs=200, num_running_seqs=200)
    model, unprotected = HeatModel(board, 32.0), HeatModel(board, 32.0)
    hottest, history, turns = 0.0, [], []
    for second in range(2400):
        model.fan = unprotected.fan = fan if second >= 300 else 1.0
        unprotected.step(1.0, 200)
        hottest = max(hottest, model.step(1.0, view.num_running_seqs))
        policy.on_temp_reading(0, round(model.chip_c))
        view.now_s = float(second)
        view.num_running_seqs = policy.get_max_running_seqs(view)
        history.append(view.num_running_seqs)
    direction = 0
    for second in range(1, len(history)):
        now = (history[second] > history[second - 1]) - (history[second] < history[second - 1])
        if now and direction and now != direction:
            turns.append(second)
        direction = now or direction
    assert unprotected.chip_c > board.max_c > hottest
    assert 82.0 - 3.0 <= model.chip_c <= 90.0
    assert all(later - earlier >= 5 for earlier, later in pairwise(turns))
    assert max(history[-600:]) - min(history[-600:]) <= 0.15 * 200
