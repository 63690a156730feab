"""The validators of settings: what a rejection says, how values are shown, and what is kept."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import ConfigError, InvalidRequest, SamplingParams
from trencadis.engine.core.config_payload import config_of_payload, config_payload
from trencadis.engine.errors import shown
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import (
    Validator,
    boolean,
    integer,
    items_of,
    number,
    one_of,
    plain_number,
    text,
)
from trencadis.kvcache import DefragConfig
from trencadis.warmup import WarmupConfig


def value_of(validator: Validator, value: object) -> object:
    """The value of a field ``x`` with this validator, after validation."""
    holder = attrs.make_class("Holder", {"x": attrs.field(validator=validator)}, frozen=True)
    return holder(x=value).x


@pytest.mark.parametrize(
    ("validator", "value"),
    [
        (integer(), -5),
        (integer(1), 1),
        (integer(0, 65_535), 65_535),
        (integer(2, optional=True), None),
        (number(), -0.5),
        (number(0), 0),
        (number(0, 1, exclusive_low=True), 1.0),
        (number(0, optional=True), None),
        (one_of(("a", "b")), "b"),
        (one_of((True, False, "never")), True),
        (one_of((0, 1)), 1),
        (boolean(), False),
        (boolean(optional=True), None),
        (text(), "é"),
        (text(optional=True), None),
    ],
)
def test_a_value_within_the_bounds_passes(validator: Validator, value: object) -> None:
    assert value_of(validator, value) is value


@pytest.mark.parametrize(
    ("validator", "value", "accepted"),
    [
        (integer(), None, "an integer"),
        (integer(1), 0, "an integer of at least 1"),
        (integer(0, 65_535), 70_000, "an integer from 0 to 65535"),
        (integer(0, 65_535, optional=True), -1, "an integer from 0 to 65535"),
        (number(), None, "a finite number"),
        (number(0), -1, "a finite number of at least 0"),
        (number(0, exclusive_low=True), 0.0, "a finite number above 0"),
        (number(0.0, 1.0, exclusive_low=True), 0, "a finite number above 0 and at most 1"),
        (number(0.0, 1.0, exclusive_low=True), 1.1, "a finite number above 0 and at most 1"),
        (number(-0.5, 2), 2.1, "a finite number from -0.5 to 2"),
        (boolean(), 1, "True or False"),
        (boolean(), "no", "True or False"),
        (boolean(), None, "True or False"),
        (text(), 5, "a text that UTF-8 can encode"),
        (text(), None, "a text that UTF-8 can encode"),
        (text(), "\ud800", "a text that UTF-8 can encode"),
        (one_of(("a", "b")), "c", "one of a, b"),
        (one_of((True, False, "never")), 1, "one of True, False, never"),
        (one_of(("a",)), ["a"], "one of a"),
        (one_of(("a",)), np.array(["a"]), "one of a"),
    ],
)
def test_a_refusal_names_field_bounds_and_value(
    validator: Validator, value: object, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        value_of(validator, value)
    assert str(refusal.value) == f"x must be {accepted}, got {shown(value)}"
    assert refusal.value.field == "x"


def test_the_error_and_the_remedy_can_be_chosen() -> None:
    for validator in (
        integer(1, error=InvalidRequest),
        number(1, error=InvalidRequest),
        one_of(("a",), error=InvalidRequest),
    ):
        with pytest.raises(InvalidRequest, match="x must be") as refusal:
            value_of(validator, 0)
        assert refusal.value.field == "x"
    with pytest.raises(ConfigError, match=r"^x must be an integer of at least 1, got 0: raise it$"):
        integer(1, remedy="raise it").checked("x", 0)

    def renamed(message: str, name: str) -> Any:
        return KeyError(f"{name}: {message}")

    with pytest.raises(KeyError, match="x: x must be an integer"):
        value_of(integer(error=renamed), "y")


def test_a_configuration_with_numbers_of_numpy_survives_the_way_to_the_core() -> None:
    config = EngineConfig(
        model="m",
        max_num_seqs=np.int64(4),
        block_size=np.uint8(16),
        kv_cache_memory=np.int32(1 << 20),
        gpu_memory_utilization=np.float32(0.5),
        thermal_devices=np.arange(2),
        defrag=DefragConfig(threshold=np.int64(7)),
        bucketing=BucketingConfig(prompt_batch=AxisConfig(max=np.int16(8))),
        graphs=WarmupConfig(graph_prompt_ratio=np.float32(0.25)),
    )
    plain = EngineConfig(
        model="m",
        max_num_seqs=4,
        block_size=16,
        kv_cache_memory=1 << 20,
        gpu_memory_utilization=0.5,
        thermal_devices=(0, 1),
        defrag=DefragConfig(threshold=7),
        bucketing=BucketingConfig(prompt_batch=AxisConfig(max=8)),
        graphs=WarmupConfig(graph_prompt_ratio=0.25),
    )
    assert config_payload(config) == config_payload(plain)
    assert config_of_payload(config_payload(config)) == config
    for field in attrs.fields(EngineConfig):
        value = getattr(config, field.name)
        assert type(value) is type(getattr(plain, field.name)), field.name


def test_sampling_parameters_keep_the_numbers_of_numpy_as_plain_ones() -> None:
    params = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0.5), logit_bias={np.int32(7): np.float16(1)}
    )
    assert params == SamplingParams(max_tokens=4, temperature=0.5, logit_bias={7: 1.0})
    assert (type(params.max_tokens), type(params.temperature)) == (int, float)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("a" * 30, repr("a" * 30)),
        (2**255, str(2**255)),
        (10**5000, "an integer of 16610 bits"),
        ([10**5000], "[an integer of 16610 bits]"),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_a_message_shows_any_value(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_message_shows_little_of_a_large_value() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    for value in ("x" * 10**6, list(range(10**6)), {"a": {"b": {"c": {"d": {}}}}}, Silent()):
        assert 0 < len(shown(value)) <= 203


def test_numbers_of_numpy_become_plain_ones_and_other_values_stay() -> None:
    for value, plain in ((np.int64(3), 3), (np.float32(0.5), 0.5), (7, 7), (0.5, 0.5)):
        assert plain_number(value) == plain
        assert type(plain_number(value)) is type(plain)
    for value in (True, "7", None, 1j, np.bool_(True)):
        assert plain_number(value) is value


def test_a_text_has_no_items() -> None:
    assert items_of([1, 2]) == items_of(iter((1, 2))) == (1, 2)
    for value in ("ab", b"ab", 5, None, np.array(5)):
        assert items_of(value) is None


def test_the_bounds_can_be_read() -> None:
    assert (integer(1, 128).low, integer(1, 128).high) == (1, 128)
    bounds = number(0, 1, exclusive_low=True)
    assert (bounds.low, bounds.high, bounds.exclusive_low) == (0, 1, True)
    assert one_of(("a", "b")).choices == ("a", "b")
