"""Thermal policies: how the cap falls and rises, what they estimate, and how they fail."""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import Any

import attrs
import pytest
from harness import POLICY_SETTINGS
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    ConfigError,
    Scheduler,
    SchedulerConfig,
    ThermalGuard,
    thermal,
)
from trencadis.scheduler.thermal import (
    BOARDS,
    GROUP_DEVICE,
    POLICIES,
    HeatModel,
    NoThermalPolicy,
    PowerBudgetPolicy,
    PowerModel,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
    TwoPhaseThermalPolicy,
    load_thermal_policy,
)
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.registry import ENTRY_POINT_GROUP
from trencadis.scheduler.thermal.victims import first_victims, victim_order


@attrs.define
class View:
    """The view of a scheduler that a policy gets."""

    now_s: float = 0.0
    num_running_seqs: int = 0
    max_num_seqs: int = 100
    num_prefill_tokens: int = 0
    longest_wait_s: float = 0.0

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(max_num_seqs=self.max_num_seqs)


@attrs.define
class State:
    hottest_c: float | None = 20.0
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


def caps(
    policy: ProportionalThermalPolicy, temperatures: Sequence[float], step_s: float = 1.0
) -> list[int]:
    view, seen = View(), []
    for temperature in temperatures:
        policy.on_temp_reading(0, temperature)
        seen.append(policy.get_max_running_seqs(view))
        view.now_s += step_s
    return seen


def test_the_cap_is_unchanged_up_to_the_target() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0)
    assert caps(policy, [20.0, 81.9, 82.0]) == [100, 100, 100]


def test_the_cap_falls_in_proportion_and_at_once() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0)
    assert caps(policy, [84.0, 86.0, 95.0]) == [80, 60, 1]


def test_the_gain_of_seed_003_removes_one_sequence_per_two_degrees() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=0.5)
    assert caps(policy, [84.0, 86.0]) == [99, 98]


def test_the_cap_is_unchanged_within_the_hysteresis() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, dwell_s=1.0)
    assert len(set(caps(policy, [85.0, 84.0, 83.0, 82.1, 84.0, 82.1, 85.0]))) == 1


def test_the_cap_rises_once_per_dwell_time_by_a_quarter_of_the_removed_sequences() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, hysteresis_c=3.0, dwell_s=5.0)
    seen = caps(policy, [90.0, *[70.0] * 20])
    assert seen == [20] * 5 + [40] * 5 + [55] * 5 + [66] * 5 + [74]


def test_the_cap_rises_no_further_than_the_temperature_and_the_hysteresis_allow() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0, hysteresis_c=3.0, dwell_s=5.0)
    assert caps(policy, [90.0, *[86.5] * 5]) == [20] * 5 + [25]
    assert policy.excess_c == 7.5


def test_a_fall_after_a_rise_waits_for_the_dwell_time_unless_it_is_steep() -> None:
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
        ({"hysteresis_c": 1.9}, "hysteresis_c must be a finite number of at least 2, got 1.9"),
        (
            {"target_temp_c": 96.0},
            "target_temp_c must be .* above 0 and at most 95, got 96.0",
        ),
        ({"k_p": -1.0}, "k_p must be a finite number above 0, got -1.0"),
        ({"dwell_s": 0.0}, "dwell_s must be a finite number above 0, got 0.0"),
        ({"min_seqs": 0}, "min_seqs must be an integer of at least 1, got 0"),
        (
            {"victims": "loudest"},
            "victims must be one of lru, largest_kv, .*, got 'loudest'",
        ),
    ],
)
def test_an_invalid_setting_is_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProportionalThermalPolicy(**settings)


def test_the_power_model_converges_from_the_prior() -> None:
    model = PowerModel()
    assert model.per_sequence_w == 3.2
    for i in range(200):
        running = 20 + 37 * i % 100
        model.observe(120.0 + 2.5 * running + (i % 3 - 1), running)
    assert model.per_sequence_w == pytest.approx(2.5, rel=0.02)
    assert model.base_w == pytest.approx(120.0, rel=0.05)
    for invalid in (math.nan, math.inf, -5.0):
        model.observe(invalid, 50)
    assert model.per_sequence_w == pytest.approx(2.5, rel=0.02)


def test_the_cap_does_not_rise_while_a_sensor_is_stale() -> None:
    state, view = State(90.0), View()
    guard = ThermalGuard(ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0), lambda: state)
    assert guard.cap(view) == 20
    state.hottest_c, state.may_raise_cap = 30.0, False
    for _ in range(100):
        view.now_s += 1.0
        assert guard.cap(view) == 20
    state.may_raise_cap = True
    assert guard.cap(view) == 100


def test_policies_are_loaded_by_name_and_by_path() -> None:
    assert isinstance(load_thermal_policy("none"), NoThermalPolicy)
    assert isinstance(load_thermal_policy("proportional", k_p=1.0), ProportionalThermalPolicy)
    path = "trencadis.scheduler.thermal.power_budget:PowerBudgetPolicy"
    assert isinstance(load_thermal_policy(path, budget_w=300.0), PowerBudgetPolicy)


def test_policies_of_other_packages_are_loaded_by_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "trencadis.thermal_policies", "packages of others name it"
        paths = {"external": "trencadis.scheduler.thermal:NoThermalPolicy", "broken": "nowhere:X"}
        return [importlib.metadata.EntryPoint(name, path, group) for name, path in paths.items()]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert isinstance(load_thermal_policy("external"), NoThermalPolicy)
    with pytest.raises(ConfigError, match="'broken' cannot be imported: No module named 'nowhere'"):
        load_thermal_policy("broken")
    names = ", ".join(sorted(["broken", "external", *POLICIES]))
    with pytest.raises(ConfigError, match=f"{re.escape(names)}, or module"):
        load_thermal_policy("unknown")


def test_every_built_in_policy_is_registered_once_and_loads() -> None:
    for name, path in POLICIES.items():
        policy = load_thermal_policy(name, **POLICY_SETTINGS.get(name, {}))
        class_name = type(policy).__name__
        assert path == f"{type(policy).__module__}:{class_name}"
        assert getattr(thermal, class_name, None) is type(policy), "scheduler/thermal/__init__.py"
        assert class_name in thermal.__all__
    assert ENTRY_POINT_GROUP not in (Path(__file__).parents[1] / "pyproject.toml").read_text()


LIMITING = [name for name in POLICIES if name != "none"]
"""The policies that have settings and limit something."""


def test_the_page_describes_every_policy() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scheduler" / "thermal.md").read_text()
    for name in LIMITING:
        described = f"- **`{name}`** (`{POLICIES[name].partition(':')[2]}`) "
        assert described in page, "docs/scheduler/thermal.md"


@pytest.mark.parametrize("name", LIMITING)
def test_every_setting_of_a_policy_has_a_help_sentence(name: str) -> None:
    for field in attrs.fields(resolve_name(POLICIES[name])):
        if field.init:
            assert field.metadata["help"].endswith("."), field.name


def test_a_policy_without_a_target_or_limits_of_its_own_says_so() -> None:
    policy = NoThermalPolicy()
    assert policy.retarget(80.0) is False
    assert policy.get_max_prefill_tokens(View()) is None
    assert policy.get_max_running_seqs(View()) == View().scheduler_config.max_num_seqs


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=lambda board: board.name)
@pytest.mark.parametrize("num_running", [0, 1, 40])
def test_a_settled_board_keeps_its_temperatures(board: object, num_running: int) -> None:
    model = HeatModel(board, ambient_c=35.0, fan=0.5)
    model.settle(num_running)
    before = (model.chip_c, model.sink_c)
    assert 35.0 < model.sink_c < model.chip_c
    model.step(60.0, num_running)
    assert (model.chip_c, model.sink_c) == pytest.approx(before)


@attrs.frozen
class Candidate:
    """What can be evicted."""

    request_id: str
    num_seqs: int = 1
    priority: int = 0
    arrival: int = 0
    started_at_s: float = 0.0
    last_scheduled_step: int = 5
    num_tokens_left: int = 10
    num_kv_blocks: int = 4

    def get_num_kv_blocks(self) -> int:
        return self.num_kv_blocks


@pytest.mark.parametrize(
    ("name", "first", "second", "third"),
    [
        ("lru", {"last_scheduled_step": 4}, {"started_at_s": -1.0}, {"arrival": -1}),
        ("largest_kv", {"num_kv_blocks": 5}, {"arrival": 2}, {"arrival": 1}),
        ("lowest_priority", {"priority": 1}, {"arrival": 2}, {"arrival": 1}),
        ("longest_remaining", {"num_tokens_left": 11}, {"arrival": 2}, {"arrival": 1}),
        (
            "cheapest",
            {"num_kv_blocks": 6, "num_seqs": 2},
            {"arrival": 2},
            {"num_kv_blocks": 9, "num_seqs": 2},
        ),
    ],
)
def test_the_order_of_victims(
    name: str, first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]
) -> None:
    last = Candidate("last", num_kv_blocks=5) if name == "cheapest" else Candidate("last")
    victims = [Candidate("first", **first), Candidate("second", **second)]
    victims += [Candidate("third", **third), last]
    for running in itertools.permutations(victims):
        found = first_victims(victim_order(name), running, 99)
        assert [victim.request_id for victim in found] == ["first", "second", "third", "last"]
    assert first_victims(victim_order(name), victims, 0) == []
    assert first_victims(victim_order(name), victims, victims[0].num_seqs) == victims[:1]
    assert first_victims(victim_order(name), victims, victims[0].num_seqs + 1) == victims[:2]


def test_an_unknown_order_of_victims_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="victim order 'oldest' is unknown: use one of lru, larg"):
        victim_order("oldest")


def test_a_new_target_is_validated() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0)
    assert policy.retarget(80.0)
    assert caps(policy, [84.0]) == [60]
    with pytest.raises(ConfigError, match=r"target_temp_c .* at most 95, got 96\.0"):
        policy.retarget(96.0)
    assert policy.target_temp_c == 80.0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cold", {}, f"'cold' is unknown: use one of {', '.join(sorted(POLICIES))}"),
        ("no.such.module:Policy", {}, "cannot be imported"),
        ("trencadis.scheduler:Scheduling", {}, "cannot be imported"),
        ("proportional", {"colour": "red"}, "does not take.*colour"),
        ("collections:OrderedDict", {}, "derive it from SchedulerThermalPolicy"),
    ],
)
def test_an_unusable_policy_is_named(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_thermal_policy(name, **settings)


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=lambda board: board.name)
def test_the_heat_model_settles_at_the_temperature_of_its_resistances(board: object) -> None:
    model = HeatModel(board, ambient_c=35.0)
    for _ in range(3000):
        model.step(1.0, 10_000)
    full = 35.0 + board.limit_w * (board.chip_k_per_w + board.sink_k_per_w)
    assert full == pytest.approx(78.0, abs=1.0), "what the resistances are chosen for"
    assert 15 < board.sink_k_per_w * board.sink_j_per_k < 25, "seconds, of a sink of one kilogram"
    assert model.chip_c == pytest.approx(full, abs=0.1)
    assert model.power_w == board.limit_w
    model.settle(0)
    assert model.step(10.0, 0) == pytest.approx(model.chip_c)
    passes = [board.prefill_pass_w(share) for share in (0.0, 0.25, 1.0)]
    assert passes[0] == board.decode_w < board.limit_w == passes[2]
    assert passes[1] == pytest.approx(0.75 * passes[0] + 0.25 * passes[2])


@pytest.mark.parametrize("board", list(BOARDS.values()), ids=lambda board: board.name)
@pytest.mark.parametrize("fan", [0.5, 0.4])
def test_the_policy_keeps_a_board_with_a_failing_fan_below_its_limit(
    board: object, fan: float
) -> None:
    """Policy and board without a scheduler; `benchmarks/thermal.py` has one."""
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


def test_every_built_in_policy_is_registered() -> None:
    modules = (f"trencadis.scheduler.thermal.{m.name}" for m in iter_modules(thermal.__path__))
    classes = {
        f"{module}:{name}"
        for module in modules
        for name, item in vars(importlib.import_module(module)).items()
        if isinstance(item, type)
        and issubclass(item, SchedulerThermalPolicy)
        and item.__module__ == module
        and item is not SchedulerThermalPolicy
    }
    assert classes == set(POLICIES.values())


@pytest.mark.parametrize("name", POLICIES)
def test_the_state_of_a_policy_is_not_among_its_options(name: str) -> None:
    policy_class = resolve_name(POLICIES[name])
    for field in attrs.fields(policy_class) if attrs.has(policy_class) else ():
        assert field.init != field.name.startswith("_"), field.name


def test_a_target_is_set_unless_only_its_cap_is_asked_for() -> None:
    policy = ProportionalThermalPolicy(target_temp_c=90.0)
    guard = ThermalGuard(policy, State)
    guard.retarget(70.0, "lru", View(), dry_run=True)
    assert policy.target_temp_c == 90.0
    guard.retarget(70.0, "lru", View())
    assert policy.target_temp_c == 70.0


class Recording(NoThermalPolicy):
    """Remembers the readings that it gets."""

    def __init__(self) -> None:
        self.readings: list[tuple[int, float]] = []

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self.readings.append((gpu_idx, temp_c))


def test_a_policy_gets_the_temperature_of_every_device_the_hottest_last() -> None:
    policy, state = Recording(), State(81.0, temperatures_c={0: 70.0, 1: 81.0, 2: 64.0})
    guard = ThermalGuard(policy, lambda: state)
    guard.cap(View())
    assert policy.readings == [(2, 64.0), (0, 70.0), (1, 81.0)]
    policy.readings.clear()
    state.hottest_c = 88.0
    guard.cap(View())
    assert policy.readings[-1] == (GROUP_DEVICE, 88.0), "a device of another rank is hotter"
    policy.readings.clear()
    state.hottest_c, state.temperatures_c = 81.0, {0: math.nan, 1: 81.0}
    guard.cap(View())
    assert (policy.readings, guard.num_rejected_readings) == ([(1, 81.0)], 1)


# A guard outlives its scheduler: the engine makes a new one for another model and after a sleep.


moments = st.lists(
    st.tuples(
        st.sampled_from([0.125, 1.0, 7.0, 40.0]),  # seconds, whose sums are exact
        st.sampled_from([40.0, 79.0, 83.0, 90.0, 97.0]),  # degrees C
        st.sampled_from([None, 250.0, 520.0, 700.0]),  # watts
        st.integers(0, 100),  # running sequences
        st.integers(0, 4000),  # prefill tokens
        st.booleans(),  # a new scheduler
    ),
    min_size=2,
    max_size=60,
)


@pytest.mark.parametrize("name", LIMITING)
@given(moments=moments)
def test_a_new_scheduler_changes_no_cap(name: str, moments: list[tuple[Any, ...]]) -> None:
    state = State()
    policies = (load_thermal_policy(name, **POLICY_SETTINGS.get(name, {})) for _ in range(2))
    lasting, restarted = (ThermalGuard(policy, lambda: state) for policy in policies)
    whole, life = View(), View()
    for seconds, temp_c, watts, running, tokens, is_new in moments:
        state.hottest_c, state.power_w = temp_c, watts
        if is_new:
            life = View()
        else:  # a new scheduler is asked before its clock and its total have moved
            for view in (whole, life):
                view.now_s += seconds
                view.num_prefill_tokens += tokens
        whole.num_running_seqs = life.num_running_seqs = running
        assert restarted.cap(life) == lasting.cap(whole)
        assert restarted.prefill_limit == lasting.prefill_limit


def test_the_cap_rises_again_in_a_new_scheduler() -> None:
    """The clock of a new scheduler begins at 0, long before the last change of the policy."""
    now = 0.0
    state = State()
    guard = ThermalGuard(ProportionalThermalPolicy(target_temp_c=82.0), lambda: state)

    def serve(seconds: int, last_c: float) -> int:
        """The running limit in the last of so many steps, one each second."""
        nonlocal now
        blocks = BlockManager(CacheConfig(num_blocks=9, block_size=4))
        scheduler = Scheduler(SchedulerConfig(), blocks, thermal=guard, clock=lambda: now)
        limit = 0
        for left in reversed(range(seconds)):
            now += 1.0
            if left == 150:
                state.hottest_c = last_c
            output = scheduler.schedule()
            limit = output.max_running_seqs
            scheduler.update(output, {})
        return limit

    assert serve(1000, 95.0) == 1
    assert serve(200, 60.0) == SchedulerConfig().max_num_seqs
    assert serve(200, 95.0) == 1


class Reading(NoThermalPolicy):
    """Remembers what it reads of schedulers, also for an order with a target."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def retarget(self, target_temp_c: float) -> bool:
        return True

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        self.seen.append((scheduler.now_s, scheduler.num_prefill_tokens))
        return scheduler.scheduler_config.max_num_seqs


def test_time_and_total_of_a_policy_never_go_back() -> None:
    policy = Reading()
    guard = ThermalGuard(policy, State)
    guard.cap(View(now_s=9.0, num_prefill_tokens=50))
    guard.retarget(80.0, "lru", View())
    guard.cap(View(now_s=1.0, num_prefill_tokens=7))
    assert policy.seen == [(9.0, 50), (9.0, 50), (10.0, 57)]


@pytest.mark.parametrize(
    ("policy", "budget_w"),
    [
        (PowerBudgetPolicy(budget_w=300.0), 300.0),
        (TwoPhaseThermalPolicy(target_temp_c=80.0, budget_w=450.0), 450.0),
        (TwoPhaseThermalPolicy(target_temp_c=80.0), None),
        (ProportionalThermalPolicy(target_temp_c=80.0), None),
        (None, None),
    ],
)
def test_a_guard_tells_the_power_budget_of_its_policy(
    policy: SchedulerThermalPolicy | None, budget_w: float | None
) -> None:
    assert ThermalGuard(policy, State).power_budget_w == budget_w
