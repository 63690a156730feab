"""The settings of a thermal policy inside another runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trencadis.scheduler import ConfigError, sglang_plugin
from trencadis.scheduler.runtime_settings import OF_SGLANG, checked_settings, reader_and_guard
from trencadis.scheduler.thermal import ProportionalThermalPolicy


@pytest.mark.parametrize("wrong", [None, [], "nvml", {"temperature": "nvml"}, {1: 2}])
def test_other_settings_are_rejected_with_their_place(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"HERE has .* give an object with"):
        checked_settings("HERE", wrong)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"thermal_policy": "proportional"}, "needs temperature_source"),
        ({"thermal_devices": [0]}, "needs temperature_source"),
        ({"temperature_source": "nvml", "thermal_policy_config": {"k_p": 1.0}}, "needs thermal_po"),
        ({"temperature_source": "nothing"}, "nothing"),
        ({"temperature_source": "recorded:/none", "thermal_policy": "none_such"}, "none_such"),
        ({"temperature_source": "nvml", "thermal_policy": ""}, "thermal policy '' is unknown"),
        ({"temperature_source": "nvml", "thermal_policy_config": []}, r"\[\]: give an object"),
        ({"temperature_source": "nvml", "thermal_policy_config": "80"}, "'80': give an object"),
        (
            {
                "temperature_source": "nvml",
                "thermal_policy": "proportional",
                "thermal_policy_config": {"name": "two_phase"},
            },
            "'proportional' does not take {'name': 'two_phase'}",
        ),
    ],
)
def test_settings_without_what_they_need_are_rejected(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        reader_and_guard(checked_settings("HERE", settings))


def test_a_source_and_a_policy_make_a_reader_and_a_guard(tmp_path: Path) -> None:
    file = tmp_path / "heat.csv"
    file.write_text("time_s,device,temperature_c,power_w\n0,3,91.0,\n")
    settings = {
        "temperature_source": f"recorded:{file}",
        "thermal_policy": "proportional",
        "thermal_policy_config": {"target_temp_c": 70.0},
        "thermal_devices": [3],
    }
    reader, guard = reader_and_guard(checked_settings("HERE", settings))
    assert reader is not None
    assert guard is not None
    assert isinstance(guard.policy, ProportionalThermalPolicy)
    assert guard.target_temp_c == 70.0
    reader.poll()
    assert reader.state().temperatures_c == {3: 91.0}


def test_without_a_source_there_are_orders_alone() -> None:
    assert reader_and_guard({}) == (None, None)


def test_sglang_keeps_its_scheduler_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OF_SGLANG, raising=False)
    sglang_plugin.install()
    assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)
    monkeypatch.setenv(OF_SGLANG, "{}")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        sglang_plugin.install()
