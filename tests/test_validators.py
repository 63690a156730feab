"""Integers, numbers and booleans are the same values in every package, and so is a refusal."""

from __future__ import annotations

import ast
import enum
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.bucketing import AxisConfig, BucketingConfig, fitted_range
from trencadis.bucketing import validators as bucketing
from trencadis.engine import EngineConfig
from trencadis.engine import validators as engine
from trencadis.kvcache import CacheConfig, DefragConfig
from trencadis.kvcache import validators as kvcache
from trencadis.scheduler import BatchControl, SchedulerConfig
from trencadis.scheduler import validators as scheduler
from trencadis.warmup import GraphBudget, WarmupConfig
from trencadis.warmup import validators as warmup

ROOT = Path(__file__).parent.parent
PACKAGES: dict[str, Any] = {
    "bucketing": bucketing,
    "kvcache": kvcache,
    "warmup": warmup,
    "scheduler": scheduler,
    "engine": engine,
}


class Level(enum.IntEnum):
    ONE = 1


NUMPY_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
NUMPY_FLOATS = (np.float16, np.float32, np.float64, np.longdouble)

INTEGERS: list[Any] = [1, Level.ONE, *(kind(1) for kind in NUMPY_INTEGERS)]
FRACTIONS: list[Any] = [1.0, 0.5, 1e-9, Fraction(1, 2), *(kind(0.5) for kind in NUMPY_FLOATS)]
BOOLEANS: list[Any] = [True, False]
OTHERS: list[Any] = [
    *(math.nan, math.inf, -math.inf, *(kind("nan") for kind in NUMPY_FLOATS)),
    *(
        np.float32("inf"),
        np.longdouble("1e4000"),
        Fraction(10**400),
        Decimal(1),
        1j,
        np.complex64(1),
    ),
    *(
        None,
        "1",
        "true",
        b"1",
        [1],
        (1,),
        {},
        object,
        np.bool_(True),
        np.array(1),
        np.array([1, 2]),
    ),
    *(np.timedelta64(1, "s"), np.datetime64("2026-01-01"), np.str_("1")),
]
VALUES = [*INTEGERS, *FRACTIONS, *BOOLEANS, *OTHERS]


def setting(cls: type, name: str, **others: Any) -> Callable[[Any], Any]:
    """What a field of a settings class keeps of a value."""
    return lambda value: getattr(cls(**{**others, name: value}), name)


SETTINGS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "an integer": {
        "bucketing": ("limit", setting(AxisConfig, "limit")),
        "kvcache": (
            "num_host_blocks",
            setting(CacheConfig, "num_host_blocks", num_blocks=2, block_size=16),
        ),
        "warmup": ("total", setting(GraphBudget, "total", free=1)),
        "scheduler": ("max_waiting", setting(SchedulerConfig, "max_waiting")),
        "engine": ("max_waiting", setting(EngineConfig, "max_waiting", model="m")),
    },
    "a finite number": {
        "bucketing": ("fit tail", lambda value: fitted_range([1], 1, 2, 1, tail=value) and None),
        "kvcache": ("keep_from", setting(DefragConfig, "keep_from")),
        "warmup": ("graph_prompt_ratio", setting(WarmupConfig, "graph_prompt_ratio")),
        "scheduler": ("force_evict_hold_s", setting(SchedulerConfig, "force_evict_hold_s")),
        "engine": ("swap_bandwidth", setting(EngineConfig, "swap_bandwidth", model="m")),
    },
    "True or False": {
        "bucketing": ("contiguous_pa", setting(BucketingConfig, "contiguous_pa")),
        "kvcache": ("warm_up", setting(DefragConfig, "warm_up")),
        "warmup": ("skip", setting(WarmupConfig, "skip")),
        "scheduler": ("dry_run", setting(BatchControl, "dry_run")),
        "engine": ("use_buckets", setting(EngineConfig, "use_buckets", model="m")),
    },
}
"""For each kind of value a setting of each package: its name, and what it keeps of a value."""

ACCEPTED = {
    "an integer": INTEGERS,
    "a finite number": [*INTEGERS, *FRACTIONS],
    "True or False": BOOLEANS,
}
BOUNDS = re.compile(r"( of at least \S+| from \S+ to \S+| above \S+( and at most \S+)?)?")

OPTIONAL = {"limit"}
"""Settings that may be None."""

PLAIN = {int, float, bool, Level}


def is_among(value: object, values: list[Any]) -> bool:
    return any(value is other for other in values)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_setting_accepts_the_values_of_its_kind_and_keeps_plain_ones(
    package: str, kind: str
) -> None:
    _, keep = SETTINGS[kind][package]
    for value in ACCEPTED[kind]:
        kept = keep(value)
        if kept is not None:
            assert kept == float(value)
            assert type(kept) in PLAIN, repr(value)
            json.dumps(kept)


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_package_refuses_the_other_values_in_the_same_words(kind: str) -> None:
    for value in VALUES:
        if is_among(value, ACCEPTED[kind]):
            continue
        shown = set()
        for name, keep in SETTINGS[kind].values():
            if value is None and name in OPTIONAL:
                continue
            with pytest.raises(ValueError, match=f"^{name} must be {kind}") as refusal:
                keep(value)
            assert refusal.value.field == name
            words, _, rest = str(refusal.value).partition(", got ")
            assert BOUNDS.fullmatch(words.removeprefix(f"{name} must be {kind}"))
            shown.add(rest.partition(": ")[0])
        assert len(shown) == 1, shown


@pytest.mark.parametrize("package", PACKAGES)
def test_the_validators_of_a_package_have_its_own_error_and_the_same_words(package: str) -> None:
    validators = PACKAGES[package]
    errors = {
        validators.integer: "x must be an integer, got nan",
        validators.number: "x must be a finite number, got nan",
        validators.boolean: "x must be True or False, got nan",
        lambda: validators.integer(1): "x must be an integer of at least 1, got nan",
        lambda: validators.integer(1, 8): "x must be an integer from 1 to 8, got nan",
        lambda: validators.number(0, 0.5): "x must be a finite number from 0 to 0.5, got nan",
        lambda: validators.number(0, exclusive_low=True): (
            "x must be a finite number above 0, got nan"
        ),
        lambda: validators.integer(1, remedy="raise it"): (
            "x must be an integer of at least 1, got nan: raise it"
        ),
    }
    for validator, message in errors.items():
        with pytest.raises(ValueError, match="x must be") as refusal:
            validator().checked("x", math.nan)
        assert str(refusal.value) == message
        assert type(refusal.value).__module__ == f"trencadis.{package}.errors"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_integer_that_no_float_holds_is_an_integer_and_no_number(package: str) -> None:
    validators = PACKAGES[package]
    assert validators.integer(1).checked("x", 10**5000) == 10**5000
    for validator in (validators.number(), validators.integer(1, 8)):
        with pytest.raises(ValueError, match=r"x must be .*, got an integer of 16610 bits$"):
            validator.checked("x", 10**5000)


def definitions(path: Path) -> dict[str, str]:
    """The definitions and assignments of a module, by name, without imports."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node.value)
    return found


@pytest.mark.parametrize("module", ["validators", "errors"])
def test_what_stands_in_several_packages_is_the_same_in_each(module: str) -> None:
    first, *others = (
        definitions(ROOT / f"packages/{package}/src/trencadis/{package}/{module}.py")
        for package in ("bucketing", "kvcache", "engine")
    )
    shared = {"validators": {"Validator", "integer", "number", "one_of"}, "errors": {"shown"}}
    for other in others:
        both = first.keys() & other.keys()
        assert shared[module] <= both
        assert {name: first[name] for name in both} == {name: other[name] for name in both}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_few_lines_of_validators(package: str) -> None:
    path = ROOT / f"packages/{package}/src/trencadis/{package}/validators.py"
    assert len(path.read_text().splitlines()) <= 120


def test_settings_from_numbers_of_numpy_equal_those_from_plain_ones() -> None:
    config = DefragConfig(threshold=np.int64(3))
    assert attrs.asdict(config)["threshold"] == 3
    assert hash(config) == hash(DefragConfig(threshold=3))
    assert repr(config) == repr(DefragConfig(threshold=3))
