"""Flags, environment variables, help and tables that are derived from settings classes."""

from __future__ import annotations

import argparse
import ast
import math
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trencadis.engine
from trencadis.bucketing import BucketingConfig, describe_variables
from trencadis.engine import ConfigError, EngineConfig, EngineStats, devices
from trencadis.engine.core import engine_core
from trencadis.engine.settings import (
    add_flags,
    environment_help,
    flag_list,
    format_size,
    from_env,
    given_flags,
    parse_gib,
    parse_json_object,
    parse_option,
    parse_size,
    setting,
    with_defaults,
)
from trencadis.engine.settings.capacity_settings import DeviceDefault
from trencadis.engine.settings.engine_config import DEVICES, SchedulingPolicy
from trencadis.engine.simulated import SimulationConfig
from trencadis.engine.simulated import cli as simulated_cli
from trencadis.engine.validators import integer, number, one_of
from trencadis.kvcache import DefragConfig
from trencadis.scheduler.config import QueuePolicy
from trencadis.scheduler.telemetry.registry import SOURCES
from trencadis.scheduler.thermal import POLICIES
from trencadis.warmup import WarmupConfig


@attrs.frozen(kw_only=True)
class Oven:
    """Settings of every kind."""

    name: str = attrs.field(metadata=setting("--name", group="kitchen", help="its name"))
    celsius: int = attrs.field(
        default=180,
        validator=integer(0, 300),
        metadata=setting(
            "--celsius", "--temp", env="OVEN_C", group="heat", metavar="C", help="100% of the heat"
        ),
    )
    hours: float = attrs.field(
        default=2.0, validator=number(0), metadata=setting("--hours", group="heat", help="how long")
    )
    mode: str = attrs.field(
        default="grill",
        validator=one_of(("grill", "fan")),
        metadata=setting("--mode", group="heat", help="grill or fan"),
    )
    size: int = attrs.field(
        default=4 << 20, metadata=setting("--size", group="kitchen", parse=parse_size, help="bytes")
    )
    light: bool = attrs.field(
        default=True, metadata=setting("--no-light", group="kitchen", help="keep it dark")
    )
    keys: tuple[str, ...] = attrs.field(
        default=(),
        metadata=setting(
            "--key", env="OVEN_KEY", group="kitchen", repeated=True, secret=True, help="opens it"
        ),
    )
    plain: int = attrs.field(default=1, metadata={"help": "a | b", "env": "OVEN_PLAIN"})
    bare: int | None = None


def parse(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Oven)
    return given_flags(parser.parse_args(argv), Oven)


def test_flags_that_are_not_given_give_nothing() -> None:
    assert parse("--name", "x") == {"name": "x"}


def test_flags_become_values_of_their_fields() -> None:
    argv = ("--name=x", "--temp=90", "--hours=1", "--mode=fan", "--size=2KiB", "--no-light")
    assert parse(*argv, "--key=a", "--key=b") == {
        "name": "x",
        "celsius": 90,
        "hours": 1.0,
        "mode": "fan",
        "size": 2048,
        "light": False,
        "keys": ("a", "b"),
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "required: --name"),
        (("--name=x", "--celsius=hot"), "invalid int value: 'hot'"),
        (("--name=x", "--mode=steam"), "invalid choice: 'steam'"),
        (("--name=x", "--size=lots"), "'lots' is not a size"),
    ],
)
def test_a_flag_that_cannot_be_parsed_is_a_usage_error(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert message in capsys.readouterr().err


def test_help_has_groups_placeholders_choices_and_defaults() -> None:
    parser = argparse.ArgumentParser()
    assert list(add_flags(parser, Oven)) == ["kitchen", "heat"]
    text = " ".join(parser.format_help().split())
    for part in (
        "kitchen: --name NAME its name --size SIZE bytes (default: 4MiB) --no-light keep it dark",
        "opens it; may be repeated. Other users of this machine can see it: prefer OVEN_KEY",
        "--celsius C, --temp C 100% of the heat (default: 180) [env: OVEN_C]",
        "--hours HOURS how long (default: 2)",
        "--mode {grill,fan} grill or fan (default: grill)",
    ):
        assert part in text, text


def test_the_environment_gives_the_settings_that_name_a_variable() -> None:
    environ = {"OVEN_C": " 90 ", "OVEN_KEY": " k ", "HOME": "/"}
    assert from_env(environ, Oven) == {"celsius": 90, "keys": (" k ",)}
    assert from_env({"OVEN_C": " ", "OVEN_KEY": ""}, Oven) == {}
    assert from_env({"OVEN_KEY": " "}, Oven) == {"keys": (" ",)}
    with pytest.raises(ConfigError, match="OVEN_C=hot: "):
        from_env({"OVEN_C": "hot"}, Oven)
    lines = environment_help(Oven).splitlines()
    assert lines == [
        "  OVEN_C      see --celsius",
        "  OVEN_KEY    see --key",
        "  OVEN_PLAIN  a | b",
    ]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("VLLM_THERMAL_POLICYS", "VLLM_THERMAL_POLICY"),
        ("VLLM_THERMALPOLICY", "VLLM_THERMAL_POLICY"),
        ("TRENCADIS_THERMAL_POLICY", "VLLM_THERMAL_POLICY"),
        ("VLLM_SKIP_WARM_UP", "VLLM_SKIP_WARMUP"),
        ("VLLM_GRAPH_RESERVED_MEMORY", "VLLM_GRAPH_RESERVED_MEM"),
        ("VLLM_DEBUGG", "VLLM_DEBUG"),
    ],
)
@pytest.mark.parametrize("settings", [{"model": "m"}, {"device": "gaudi3"}])
def test_a_misspelt_variable_is_warned_of(
    caplog: pytest.LogCaptureFixture, variable: str, meant: str, settings: dict[str, Any]
) -> None:
    cls = EngineConfig if "model" in settings else SimulationConfig
    cls.from_env({variable: "true"}, **settings)
    assert caplog.messages == [f"The variable {variable} is not read: did you mean {meant}?"]


def test_the_variables_of_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    environ = dict.fromkeys(
        ("VLLM_USE_V1", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY", "THERMAL_POLICY", "PATH"), "1"
    )
    EngineConfig.from_env({**environ, "VLLM_SKIP_WARMUP": "true"}, model="m")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_model_len", value) for value in (True, 1, 10**30, "128", 1.5)),
        *(("max_num_seqs", value) for value in (0, 10**9, None, True)),
        *(("max_num_batched_tokens", value) for value in (0, 10**9)),
        *(("max_mixed_prefill_tokens", value) for value in (0, True, 10**9)),
        *(("max_waiting", value) for value in (0, 10**10)),
        *(("num_blocks", value) for value in (1, 10**10, "80")),
        *(("num_host_blocks", value) for value in (-1, 10**10)),
        *(("block_size", value) for value in (24, 1 << 40, 8.0, True, 10**5000)),
        *(("seed", value) for value in (-1, 2**63, None)),
        *(("gpu_memory_utilization", value) for value in (0, 1.1, math.nan, 10**400)),
        *(("kv_cache_memory", value) for value in (0, 10**18, "2GiB")),
        *(("swap_space", value) for value in (-1, 1e300, math.inf)),
        *(("swap_bandwidth", value) for value in (0, 1e300, math.nan)),
        *(("model", value) for value in (None, 5, b"m", "\ud800")),
        *(("served_model_name", value) for value in (5, b"m", "\ud800")),
        *(("chat_template", value) for value in (5, b"m", "\ud800")),
        *(("compile_cache", value) for value in (5, b"m")),
        *(("trust_compile_cache", value) for value in ("no", 1, None)),
        *(("cpu_threads", value) for value in (0, -1, 1.5, "2", True, 1025)),
        *(("cpu_numa", value) for value in (True, "on", None)),
        *(("temperature_source", value) for value in (5, ["nvml"])),
        *(("thermal_devices", value) for value in (0, "0,1", (), (-1,), (1, 1), (True,), (0.5,))),
        *(("thermal_policy", value) for value in (5, str)),
        *(("thermal_policy_config", value) for value in (None, "{}", [1], {1: 2})),
        *(("kv_tiers", value) for value in (None, 1, "host", "host:0", "disk:1")),
        *(("kv_events_config", value) for value in (None, "{}", [1], {1: 2}, {"hwm": 0})),
        *(("async_scheduling", value) for value in ("no", 0, 1)),
        *(("enable_prefix_caching", value) for value in ("no", 0, None)),
        *(("use_buckets", value) for value in ("no", 1)),
        *(("compile", value) for value in ("no", 1)),
        *(("fp32_softmax", value) for value in ("no", None)),
        *(("on_bucket_miss", value) for value in (5, "crash")),
        *(("runner", value) for value in (True, "embed", None)),
        *(("score_prompt", value) for value in (5, "yes", None)),
        *(("tensor_parallel_size", value) for value in (0, -1, 1.5, True, None)),
        *(("quantization", value) for value in (8, "bits", None)),
        *(("quant_config", value) for value in (5, b"m")),
        *(("enable_lora", value) for value in (1, "yes", None)),
        *(("lora_modules", value) for value in (["a=b"], {"a": 3}, {"": "b"}, {"a": ""}, None)),
        *(("max_loras", value) for value in (0, 1.5, 1025, None)),
        *(("max_lora_rank", value) for value in (0, "8", 1025, None)),
        *(("max_cpu_loras", value) for value in (0, 1.5, "8")),
        *(("engine_restarts", value) for value in (-1, 1.5, None)),
        *(("hang_timeout", value) for value in (0, -1, "long", None)),
        *(("hang_restart_timeout", value) for value in (-1, "long", None, 90_000)),
        *(("record_traffic", value) for value in (5, b"m")),
        *(("bucket_grid", value) for value in (None, 5, "lists", "fitted:")),
        *(("bucketing", value) for value in ({}, WarmupConfig())),
        *(("graphs", value) for value in (None, BucketingConfig())),
        *(("defrag", value) for value in (None, False)),
        *(("warmup", value) for value in (True, "all")),
        *(("dtype", value) for value in (None, "int8")),
        *(("kv_cache_dtype", value) for value in (None, "int4", "bfloat16")),
        *(("mamba_ssm_cache_dtype", value) for value in (None, "int8", "float16")),
        *(("scheduling_policy", value) for value in (None, "random")),
    ],
    ids=lambda value: f"{value!r:.30}" if not isinstance(value, int) else str(value.bit_length()),
)
def test_a_setting_of_a_wrong_type_or_beyond_sense_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{"model": "m", name: value})


RANGES = {
    "max_model_len": (2, 2**31 - 1),
    "max_num_seqs": (1, 1 << 16),
    "max_num_batched_tokens": (1, 1 << 24),
    "max_mixed_prefill_tokens": (1, 1 << 24),
    "max_waiting": (1, 2**31 - 1),
    "num_blocks": (2, 2**31 - 1),
    "block_size": (1, 1 << 16),
    "seed": (0, 2**63 - 1),
    "gpu_memory_utilization": (1e-9, 1),
    "kv_cache_memory": (1, 1 << 50),
    "swap_space": (0, 1 << 20),
    "num_host_blocks": (0, 2**31 - 1),
    "swap_bandwidth": (1e-9, 1e6),
    "cpu_threads": (1, 1024),
    "tensor_parallel_size": (1, 64),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 1024),
    "max_cpu_loras": (1, 2**31 - 1),
    "engine_restarts": (0, 2**31 - 1),
    "hang_timeout": (2, 86_400),
    "hang_restart_timeout": (0, 86_400),
}
"""The lowest value that is accepted, and the highest one."""


@pytest.mark.parametrize("name", RANGES)
def test_a_range_ends_where_its_setting_says(name: str) -> None:
    low, high = RANGES[name]
    step = 1 if isinstance(high, int) and isinstance(low, int) else 1e-6
    for value in (low, high):
        config = EngineConfig(**{"model": "m", name: value})
        assert getattr(config, name) == value
    for value in (low - step, high + step):
        with pytest.raises(ConfigError, match=name):
            EngineConfig(**{"model": "m", name: value})


def test_every_setting_is_tried_with_wrong_values() -> None:
    (mark,) = test_a_setting_of_a_wrong_type_or_beyond_sense_is_named.pytestmark
    tried = {name for name, _ in mark.args[1]}
    assert tried == {field.name for field in attrs.fields(EngineConfig)} - {"device"}


def test_a_model_may_be_a_path() -> None:
    config = EngineConfig(model=Path("a/b"), compile_cache=Path("c"))
    assert (config.model, config.compile_cache) == ("a/b", "c")


def test_the_help_shows_the_default_of_every_flag_that_takes_a_value() -> None:
    for action in simulated_cli.flag_parser()._actions:
        if action.option_strings and action.nargs != 0 and not action.required:
            assert "(default: " in (action.help or ""), action.option_strings


def test_a_default_that_a_device_may_replace_is_the_one_that_is_told() -> None:
    fields = [field for field in attrs.fields(EngineConfig) if type(field.default) is DeviceDefault]
    assert len(fields) >= 3
    for field in fields:
        assert field.metadata["default"].partition(";")[0] == str(field.default)


def test_the_list_has_every_setting_with_its_names_default_and_meaning() -> None:
    items = flag_list(Oven).splitlines()
    assert items[0] == "- `--name`: its name"
    assert items[1] == "- `--celsius C`, `--temp C`, `OVEN_C` (180): 100% of the heat"
    assert "- `--mode {grill,fan}` (grill): grill or fan" in items
    assert "- `light=False`, `--no-light`: keep it dark" in items
    assert items[-2] == "- `plain`, `OVEN_PLAIN` (1): a | b"
    assert items[-1] == "- `bare`"
    plain = attrs.make_class("Plain", {"x": attrs.field(default=1, metadata={"help": "what"})})
    assert flag_list(plain) == "- `x` (1): what\n"


def test_a_subclass_changes_inherited_defaults() -> None:
    changes = with_defaults({"hours": "all day"}, celsius=220, hours=24.0)
    small = attrs.make_class("Small", {}, bases=(Oven,), kw_only=True, field_transformer=changes)
    assert (small(name="x").celsius, small(name="x").hours) == (220, 24.0)
    assert Oven(name="x").celsius == 180
    assert "- `--hours` (all day): how long\n" in flag_list(small)
    with pytest.raises(KeyError, match="colour"):
        attrs.make_class("Red", {}, bases=(Oven,), field_transformer=with_defaults(colour="red"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 1048576),
        ("1k", 1024),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("512M", 512 * 1024**2),
        ("512MiB", 512 * 1024**2),
        ("2 GiB", 2 * 1024**3),
        ("2GB", 2 * 10**9),
        ("1.5G", 3 * 2**29),
        ("1T", 1024**4),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.2.3", "1XB", "GiB", "1e9", "0.1", "iB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|byte"):
        parse_size(text)


@given(st.integers(1, 1 << 50))
def test_a_size_is_written_as_it_is_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_gib_objects_and_options() -> None:
    assert parse_gib("0.5") == 1 << 29
    assert parse_json_object('{"a": 1}') == {"a": 1}
    assert parse_option("a=1.5") == ("a", 1.5)
    assert parse_option("a=b=c") == ("a", "b=c")


@pytest.mark.parametrize(
    ("parse_text", "text", "message"),
    [
        (parse_gib, "much", "'much' is not a number of GiB"),
        (parse_gib, "nan", "is not a number of GiB"),
        (parse_gib, "inf", "is not a number of GiB"),
        (parse_json_object, "{", "'{' is not JSON"),
        (parse_json_object, "[]", r"'\[\]' is not a JSON object"),
        (parse_option, "a", "'a' is not NAME=VALUE"),
        (parse_option, "=1", "'=1' is not NAME=VALUE"),
    ],
)
def test_values_that_cannot_be_parsed(parse_text: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_text(text)


@pytest.mark.parametrize("cls", [EngineConfig, SimulationConfig])
def test_every_setting_has_a_meaning_and_every_flag_a_group(cls: type[EngineConfig]) -> None:
    for field in attrs.fields(cls):
        assert field.metadata["help"], field.name
        assert field.metadata["group"] or not field.metadata["flags"], field.name


@pytest.mark.parametrize("cls", [EngineConfig, SimulationConfig])
def test_the_help_names_every_variable_of_the_libraries(cls: type[EngineConfig]) -> None:
    known = [line.split()[0] for line in environment_help(cls).splitlines()]
    variables = {*describe_variables(), "VLLM_SKIP_WARMUP", "VLLM_DEBUG"}
    for library in (BucketingConfig, WarmupConfig, DefragConfig):
        variables |= {field.metadata.get("env") for field in attrs.fields(library)} - {None}
    missing = {name for name in variables if not any(fnmatch(name, pattern) for pattern in known)}
    assert not missing


def test_the_libraries_have_their_own_defaults() -> None:
    config = EngineConfig(model="m")
    assert config.graphs == WarmupConfig()
    assert config.defrag == DefragConfig()
    assert EngineConfig.from_env({}, model="m") == config


def test_every_public_name_can_be_imported() -> None:
    for name in trencadis.engine.__all__:
        is_value = name.isupper() or name in {"FinishReason", "EngineRequest", "RequestStatus"}
        assert is_value or getattr(trencadis.engine, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = trencadis.engine.Motor  # type: ignore[attr-defined, unused-ignore]


def test_the_settings_load_no_numpy() -> None:
    code = (
        "import sys; from trencadis.engine import EngineConfig; import trencadis.engine.settings; "
        "print([name for name in ('numpy', 'torch', 'zmq', 'asyncio') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_devices_that_can_be_named_are_those_there_are() -> None:
    """`config` does not import the devices, so it repeats their names."""
    assert set(DEVICES) == set(devices.DEVICES)


def test_the_scheduling_policies_are_those_of_the_scheduler() -> None:
    assert get_args(SchedulingPolicy) == get_args(QueuePolicy)


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(EngineConfig)])
def test_every_setting_is_read_somewhere(name: str) -> None:
    """A setting that is parsed and never read has no effect, and no other test may notice."""
    assert name in attributes_read() or name == "served_model_name", (
        f"nothing reads EngineConfig.{name}"
    )


@cache
def attributes_read() -> set[str]:
    """Names of all attributes that the engine's modules use, without those that make settings."""
    source = Path(trencadis.engine.__file__).parent
    modules = [
        path
        for path in source.rglob("*.py")
        if path.name not in {"engine_config.py", "config.py", "cli.py"}
    ]
    return {
        node.attr
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }


def test_the_core_fills_every_statistic() -> None:
    """A field that it leaves out would always be 0."""
    tree = ast.parse(Path(engine_core.__file__).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EngineStats"
    ]
    (call,) = [call for call in calls if call.keywords]  # the others stand for no totals
    filled = {keyword.arg for keyword in call.keywords}
    counted_by_the_front = {
        "num_core_restarts",
        "core_silence_s",
        "core_silence_limit_s",
    }
    assert filled == {field.name for field in attrs.fields(EngineStats)} - counted_by_the_front


@pytest.mark.parametrize(
    ("name", "choices"),
    [("thermal_policy", POLICIES), ("temperature_source", SOURCES)],
)
def test_the_help_of_a_setting_names_every_choice(name: str, choices: Mapping[str, object]) -> None:
    """`config` does not import the libraries that know the choices."""
    for settings in (EngineConfig, SimulationConfig):
        field = attrs.fields_dict(settings).get(name)
        if field is not None:
            text = field.metadata["help"]
            assert not [choice for choice in choices if choice not in text and choice != "none"]


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("VLLM_BUCKETING_STRATEGY", "exp"),
        ("VLLM_CONTIGUOUS_PA", "true"),
        ("VLLM_EXPONENTIAL_BUCKETING", "true"),
    ],
)
def test_a_bucket_variable_that_is_set_to_its_default_is_set(name, default):
    assert EngineConfig.from_env({name: default}, model="m").bucketing == BucketingConfig()
    for environ in ({}, {name: ""}, {"VLLM_PROMPT_USE_FUSEDSDPA": "true"}):
        assert EngineConfig.from_env(environ, model="m").bucketing is None
