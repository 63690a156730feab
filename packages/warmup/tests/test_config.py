"""Settings: the environment variables of the plugin, the README, and the accepted values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from trencadis.warmup import ConfigError, WarmupConfig

README = Path(__file__).parents[1] / "README.md"


def test_settings_are_read_from_the_variables_of_the_plugin() -> None:
    config = WarmupConfig.from_env(
        {
            "VLLM_SKIP_WARMUP": "true",
            "VLLM_GRAPH_RESERVED_MEM": "0.4",
            "VLLM_GRAPH_PROMPT_RATIO": "0.2",
            "VLLM_GRAPH_PROMPT_STRATEGY": "Traffic",
            "VLLM_GRAPH_DECODE_STRATEGY": "min_tokens",
        }
    )
    assert config == WarmupConfig(
        skip=True,
        graph_reserved_mem=0.4,
        graph_prompt_ratio=0.2,
        prompt_strategy="traffic",
        decode_strategy="min_tokens",
    )
    assert WarmupConfig.from_env({"VLLM_SKIP_WARMUP": "", "PATH": "/bin"}) == WarmupConfig()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VLLM_SKIP_WARMUP", "perhaps", "must be true or false"),
        ("VLLM_GRAPH_RESERVED_MEM", "40%", "could not convert"),
        ("VLLM_GRAPH_RESERVED_MEM", "1.4", "must be a finite number from 0 to 1, got 1.4"),
        ("VLLM_GRAPH_PROMPT_RATIO", "nan", "must be a finite number from 0 to 1, got nan"),
        ("VLLM_GRAPH_PROMPT_STRATEGY", "max_tokens", "one of min_tokens, max_bs, traffic"),
    ],
)
def test_an_invalid_variable_is_named_with_its_value(
    variable: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{variable}={value}: .*{message}"):
        WarmupConfig.from_env({variable: value})


def test_every_setting_has_a_help_sentence() -> None:
    for field in attrs.fields(WarmupConfig):
        assert field.metadata["help"].endswith("."), field.name


def test_the_readme_has_each_variable_with_its_default_and_help() -> None:
    def written(default: object) -> str:
        return str(default).lower() if isinstance(default, (bool, float)) else f"`{default}`"

    rows = re.findall(r"^\| `(VLLM_\w+)` \| (.*?) \| (.*?) \|$", README.read_text(), re.MULTILINE)
    assert rows == [
        (field.metadata["env"], written(field.default), field.metadata["help"])
        for field in attrs.fields(WarmupConfig)
        if "env" in field.metadata
    ]


def test_an_error_names_the_setting_in_its_message_and_in_its_field() -> None:
    with pytest.raises(ConfigError, match="prompt_strategy must be one of min_tokens") as refusal:
        WarmupConfig(prompt_strategy="c")
    assert refusal.value.field == "prompt_strategy"


def test_the_first_example_of_the_readme_captures_the_graphs_that_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def captured(table: str) -> list[tuple[str, ...]]:
        """Stage, buckets and memory of each line, without times."""
        return re.findall(r"^(\S+) +(\d[^.]*?)  .*?([\d.]+ [MG]iB)?$", table, re.MULTILINE)

    match = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    exec(compile(match[1], "README.md", "exec"), {})  # noqa: S102 - the example is our own
    assert captured(match[2]) == captured(capsys.readouterr().out)
    assert len(captured(match[2])) == 4


def test_both_ends_of_a_range_are_accepted() -> None:
    config = WarmupConfig(graph_reserved_mem=0, graph_prompt_ratio=1)
    assert (config.graph_reserved_mem, config.graph_prompt_ratio) == (0, 1)


@pytest.mark.parametrize("setting", ["skip", "enforce_eager"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_is_a_bool(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be True or False, got {value!r}"):
        WarmupConfig(**{setting: value})


@pytest.mark.parametrize("environ", [None, "VLLM_SKIP_WARMUP=1", []])
def test_an_environment_is_a_mapping(environ: Any) -> None:
    with pytest.raises(ConfigError, match="environ must be of type Mapping"):
        WarmupConfig.from_env(environ)


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "0", "false", "No"])
def test_a_switch_of_the_environment_has_these_spellings(text: str) -> None:
    config = WarmupConfig.from_env({"VLLM_SKIP_WARMUP": text})
    assert config.skip is (text.lower() in ("1", "true", "yes"))
