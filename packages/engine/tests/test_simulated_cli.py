"""The command ``trencadis-simulate``: what it prints and writes, and how it rejects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from trencadis.engine.settings import given_flags
from trencadis.engine.simulated import SimulationConfig
from trencadis.engine.simulated.cli import flag_parser, main

DATA = Path(__file__).parent / "data"
MODEL, TRACE = str(DATA / "llama-3.1-8b.json"), str(DATA / "azure_conv_excerpt.csv")


VALUES = {
    "device": ("h100", "h100"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("7", 7),
    "max_num_batched_tokens": ("64", 64),
    "max_mixed_prefill_tokens": ("32", 32),
    "max_waiting": ("3", 3),
    "block_size": ("16", 16),
    "num_blocks": ("99", 99),
    "gpu_memory_utilization": ("0.5", 0.5),
    "quantization": ("inc", "inc"),
    "tensor_parallel_size": ("2", 2),
    "kv_cache_dtype": ("fp8_inc", "fp8_inc"),
    "sampling": ("host", "host"),
    "draw": ("top_p", "top_p"),
    "async_scheduling": (None, True),
    "compile": (None, True),
    "swap_space": ("1.5", 3 << 29),
    "seed": ("5", 5),
    "thermal_policy": ("power", "power"),
    "thermal_options": ("target_temp_c=60", {"target_temp_c": 60}),
    "ambient_c": ("20", 20.0),
}
"""The text of a flag, and the value it gives its field."""

NEEDED = {"thermal_options": ("--thermal-policy", "proportional")}
"""Flags without which another is rejected."""

NO_SETTING = {"-h", "--help", "--model", "--trace", "--rate-scale", "--num-requests"}
NO_SETTING |= {"--json", "--plot", "--version", "--shared-prefix"}
FLAGS = [
    (field.name, flag)
    for field in attrs.fields(SimulationConfig)
    for flag in field.metadata["flags"]
]


def arguments(*more: str, **changes: str) -> list[str]:
    given = {"device": "gaudi3", "model": MODEL, "trace": TRACE, **changes}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    return [*flags, "--num-requests", "20", *more]


def test_the_table_has_what_one_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments()) == 0
    printed = capsys.readouterr().out
    for name in (
        "throughput",
        "TTFT",
        "ITL",
        "padding",
        "graphs",
        "live compilations",
        "time by part",
    ):
        assert re.search(rf"^{name} .*\d", printed, re.MULTILINE), name
    assert "20 done, 0 rejected" in printed
    assert re.search(r"^swap traffic +0 B out, 0 B in", printed, re.MULTILINE)
    assert re.search(r"^temperature .*°C", printed, re.MULTILINE)
    assert re.search(r"^simulated in .* steps/s$", printed, re.MULTILINE)


def test_two_runs_write_the_same_json(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        assert main(arguments("--json", str(file), "--seed", "7")) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    content = json.loads(files[0].read_text())
    assert content["generated_tokens"] == content["asked_tokens"] > 0
    assert content["between_tokens_s"]["p50"] < content["first_token_s"]["p50"]
    assert len(content["samples"]["at_s"]) == len(content["samples"]["temperature_c"]) > 0


@pytest.mark.parametrize("model", ["gemma-3-27b", "mixtral-8x7b"])
def test_models_with_windows_and_experts_are_served(tmp_path: Path, model: str) -> None:
    file = tmp_path / "report.json"
    config = str(Path(__file__).parent / "data" / f"{model}.json")
    assert main(arguments("--json", str(file), model=config)) == 0
    report = json.loads(file.read_text())
    assert report["generated_tokens"] == report["asked_tokens"] > 0


def test_flags_reach_the_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ("--num-gpu-blocks-override", "150", "--max-num-seqs", "4", "--swap-space", "0.5")
    assert main(arguments(*flags, "--block-size", "64", "--json", str(file))) == 0
    report = json.loads(file.read_text())
    assert report["num_blocks"] == 150
    assert report["block_bytes"] == 64 * 131_072
    assert max(report["samples"]["running"]) <= 4
    heat = ("--thermal-policy", "proportional", "--thermal-option", "target_temp_c=500")
    assert main(arguments(*heat)) == 2
    assert "target_temp_c" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_flag_reaches_its_setting(name: str, flag: str) -> None:
    text, value = VALUES[name]
    needed = NEEDED.get(name, ())
    given = (flag,) if text is None else (flag, text)
    default, config = (
        SimulationConfig.from_env({}, **given_flags(args, SimulationConfig))
        for args in map(flag_parser().parse_args, (arguments(*needed), arguments(*needed, *given)))
    )
    assert config == attrs.evolve(default, **{name: value})
    assert config != default


def test_every_flag_belongs_to_a_setting_or_names_a_file() -> None:
    flags = {flag for action in flag_parser()._actions for flag in action.option_strings}
    assert flags == {flag for _, flag in FLAGS} | NO_SETTING


def test_a_shared_prefix_is_computed_once(tmp_path: Path) -> None:
    file, computed = tmp_path / "report.json", []
    for tokens in ("0", "2048"):
        assert main(arguments("--json", str(file), "--shared-prefix", tokens)) == 0
        computed.append(json.loads(file.read_text())["times"]["matrices_s"])
    assert computed[1] < computed[0]


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "run.png"
    assert main(arguments("--plot", str(file))) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": "nowhere.csv"}, "nowhere.csv"),
        ({"model": "nowhere.json"}, "nowhere.json"),
        ({"model": TRACE}, "is not JSON"),
        ({"trace": MODEL}, "name the one with the prompt length"),
        ({"device": "abacus"}, "device must be one of gaudi2, gaudi3"),
        ({"thermal-policy": "arctic"}, "thermal policy 'arctic'"),
        ({"thermal-option": "target_temp_c=60"}, "has no policy: name one with --thermal-policy"),
        ({"rate-scale": "0"}, "rate_scale"),
        ({"shared-prefix": "-1"}, "shared_prefix"),
        ({"swap-space": "-1"}, "swap_space"),
        ({"json": "/nowhere/report.json"}, "/nowhere/report.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(
    changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(**changes)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("trencadis-simulate: ")
    assert said.count("\n") == 1


def test_an_empty_trace_and_a_model_too_large_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert main(arguments(trace=str(empty))) == 2
    assert "has no requests" in capsys.readouterr().err
    large = tmp_path / "config.json"
    large.write_text(json.dumps({**json.loads(Path(MODEL).read_text()), "num_hidden_layers": 800}))
    assert main(arguments(model=str(large))) == 2
    assert "gaudi3 has 126.2 GiB: choose a smaller model" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(trace="nope.csv")) == 2
    expected = "trencadis-simulate: nope.csv cannot be used: No such file or directory\n"
    assert capsys.readouterr().err == expected


def test_a_flag_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments("--num-req", "3"))
    assert "--num-req: did you mean --num-requests?" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["target_temp_c", "=60"])
def test_a_malformed_option_is_a_usage_error(value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments("--thermal-option", value))
    assert stop.value.code == 2


def test_the_simulator_starts_without_torch() -> None:
    code = (
        "import sys, trencadis.engine.simulated.cli; "
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
