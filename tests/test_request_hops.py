"""The count of hops, on functions made for it; the measurement itself takes a served model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from request_hops import Counts, Profile, delegations, steady_steps

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")

SOURCE = '''
class EngineCore:
    def step(self):
        return self.inner()

    def inner(self):
        """Calls twice."""
        return [helper(number) for number in range(2)] + list(numbers())

    def delegate(self):
        """Delegates."""
        return self.inner()

    @property
    def attribute(self):
        return self.step.name


def helper(number):
    number += 1
    return number


def numbers():
    yield 1
    yield 2


def between():
    def nested():
        helper(1)

    nested()
'''


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "package" / "made.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("made", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def profiled(module: ModuleType, tmp_path: Path) -> list[list]:
    """Three segments: before a step, in it, and after it."""
    profile = Profile([str(tmp_path)])
    core = module.EngineCore()
    module.helper(0)
    profile.recording = True
    previous = sys.getprofile()
    sys.setprofile(profile.hook)
    try:
        core.step()
        module.between()
    finally:
        sys.setprofile(previous)
    return profile.report()


def test_a_step_and_what_follows_are_told_apart(profiled) -> None:
    before, step, after = (Counts([segment]) for segment in profiled)
    assert before.functions == frozenset()
    assert step.files == {"package/made.py"}
    assert {name for _, name in step.functions} == {
        "EngineCore.step",
        "EngineCore.inner",
        "helper",
        "numbers",
    }
    assert {name for _, name in after.functions} == {
        "between",
        "between.<locals>.nested",
        "helper",
    }


def test_entries_count_calls_and_resumptions_and_callers_are_named(profiled) -> None:
    step = Counts(profiled[1:2])
    assert step.entries["package/made.py", "helper"] == 2
    assert step.entries["package/made.py", "numbers"] >= 3
    assert step.callers["package/made.py", "helper"] == {"EngineCore.inner"}
    assert step.entries["package/made.py", "EngineCore.inner"] == 1


def test_pure_delegation_is_recognised(module: ModuleType) -> None:
    assert delegations(Path(module.__file__)) == {
        "EngineCore.step",
        "EngineCore.delegate",
        "EngineCore.attribute",
        "between.<locals>.nested",
    }


def test_the_steady_step_is_of_the_largest_set_alike() -> None:
    def step(*names: str) -> tuple[list, list]:
        return [[None, ["made.py", name, 1], 1] for name in names], []

    steps = [step("a"), step("a", "b"), step("b", "a"), step("c")]
    assert steady_steps(steps) == steps[1:3]
