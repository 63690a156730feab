"""engine-serve's flags, its messages to the user, and its exit codes."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trencadis.engine import ConfigError, EngineConfig
from trencadis.server.cli import engine_config, main, server_settings
from trencadis.server.flags import flag_parser
from trencadis.server.sizes import parse_size


def parse(*argv):
    return flag_parser().parse_args(argv)


def test_flags_reach_the_engine():
    args = parse(
        *("./model", "--served-model-name", "name", "--dtype", "float32", "--device", "cpu"),
        *("--max-model-len", "512", "--max-num-seqs", "7", "--max-num-batched-tokens", "64"),
        *("--block-size", "16", "--num-gpu-blocks-override", "99", "--max-waiting", "3"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory", "2GiB", "--seed", "5"),
        *("--warmup", "none", "--disable-bucketing", "--compile-cache", "/cache"),
        *("--scheduling-policy", "priority"),
        *("--swap-space", "1.5", "--swap-bandwidth", "8", "--temperature-source", "nvml"),
        *("--thermal-policy", "proportional"),
        *("--thermal-policy-config", '{"target_temp_c": 80}'),
    )
    assert engine_config(args, {}) == EngineConfig(
        model="./model",
        served_model_name="name",
        dtype="float32",
        device="cpu",
        max_model_len=512,
        max_num_seqs=7,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=99,
        max_waiting=3,
        gpu_memory_utilization=0.5,
        kv_cache_memory=2 * 1024**3,
        seed=5,
        warmup="none",
        compile_cache="/cache",
        use_buckets=False,
        scheduling_policy="priority",
        swap_space=1.5,
        swap_bandwidth=8.0,
        temperature_source="nvml",
        thermal_policy="proportional",
        thermal_policy_config={"target_temp_c": 80},
    )


def test_flags_that_are_not_given_leave_the_engine_its_defaults():
    assert engine_config(parse("./model"), {}) == EngineConfig(model="./model")


def test_without_a_model_the_default_one_is_served_under_a_readable_name(monkeypatch):
    monkeypatch.setattr("trencadis.engine.default_model", lambda: "/cache/model-0123abcd")
    config = engine_config(parse(), {})
    assert config.model == "/cache/model-0123abcd"
    assert config.name == "SmolLM2-135M-Instruct"
    assert engine_config(parse("--served-model-name", "x"), {}).name == "x"


def test_a_bad_flag_or_a_taken_port_shows_before_the_default_model_is_made(monkeypatch, capsys):
    made = []
    monkeypatch.setattr("trencadis.engine.default_model", lambda: made.append(1) or "/nowhere")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--port", port]) == 1
    assert main(["--port", "0", "--block-size", "33"]) == 1
    assert not made
    assert capsys.readouterr().err.count("engine-serve: error: ") == 2


def test_the_environment_reaches_the_engine():
    environ = {
        "VLLM_SKIP_WARMUP": "true",
        "VLLM_PROMPT_BS_BUCKET_MAX": "8",
        "VLLM_THERMAL_POLICY": "power",
    }
    config = engine_config(parse("./model"), environ)
    assert config.warmup == "none"
    assert config.bucketing is not None
    assert config.thermal_policy == "power"
    given = parse("./model", "--thermal-policy", "proportional")
    assert engine_config(given, environ).thermal_policy == "proportional"


def test_a_bad_environment_is_a_config_error():
    with pytest.raises(ConfigError):
        engine_config(parse("./model"), {"VLLM_PROMPT_BS_BUCKET_MAX": "many"})


def test_flags_reach_the_server():
    args = parse(
        *("--host", "::1", "--port", "9", "--api-key", "a", "--api-key", "b"),
        *(
            "--admin-api-key",
            "d",
            "--max-body-size",
            "1KiB",
            "--shutdown-timeout",
            "3",
            "--disable-access-log",
        ),
    )
    settings = server_settings(args, {"VLLM_API_KEY": "c", "VLLM_ADMIN_TOKEN": "e"})
    assert (settings.host, settings.port) == ("::1", 9)
    assert settings.api_keys == ("a", "b", "c")
    assert settings.admin_keys == ("d", "e")
    assert settings.max_body_size == 1024
    assert settings.shutdown_timeout == 3
    assert not settings.access_log
    assert server_settings(parse(), {}).api_keys == ()


def test_every_flag_has_an_effect():
    flags = {
        action.dest
        for group in flag_parser()._action_groups
        for action in group._group_actions
        if not isinstance(action, (argparse._HelpAction, argparse._VersionAction))
    }
    from trencadis.server import cli

    by_hand = {"model", "api_key", "admin_api_key", "disable_access_log", "log_level"}
    by_hand |= {"enforce_eager", "disable_bucketing"}
    assert flags == by_hand | set(cli._ENGINE_FLAGS) | set(cli._SERVER_FLAGS)


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
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.2.3", "1XB", "GiB", "1e9", "0.1", "iB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"size|byte"):
        parse_size(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--block-size", "33"], "block_size must be a power of two, got 33"),
        (["m", "--max-model-len", "0"], "max_model_len"),
        (["m", "--port", "70000"], "port must be from 0 to 65535, got 70000"),
        (["m", "--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["m", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_a_bad_setting_is_one_line(capsys, argv, message):
    assert main([*argv, "--log-level", "error"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine-serve: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-cache-memory", "lots"], "'lots' is no size"),
        (["--port", "x"], "--port"),
        (["--thermal-policy-config", "{"], "is not JSON"),
        (["--thermal-policy-config", "[]"], "is no JSON object"),
    ],
)
def test_a_bad_flag_is_explained(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_one_line_before_any_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        begun = time.monotonic()
        assert main(["./no-such-model", "--port", str(port), "--log-level", "error"]) == 1
        assert time.monotonic() - begun < 5
    error = capsys.readouterr().err
    assert f"port {port}" in error
    assert "--port" in error
    assert error.count("\n") == 1


def run(*argv):
    return subprocess.run(
        [sys.executable, "-m", "trencadis.server", *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )


def test_help_answers_without_a_web_framework_or_torch():
    code = (
        "import sys; sys.argv = ['engine-serve', '--help']\n"
        "from trencadis.server.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'openai'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--max-num-batched-tokens" in done.stdout


def test_the_module_is_the_command():
    assert run("--version").stdout.startswith("engine-serve ")


@pytest.fixture
def checkpoint(tmp_path):
    """As much of one as is read before a device is looked for."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=8, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.skipif(find_spec("habana_frameworks") is not None, reason="software for it is there")
def test_a_device_that_is_not_there_is_one_line_that_says_what_to_install(checkpoint):
    done = run(str(checkpoint), "--device", "hpu", "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    assert done.stderr.startswith("engine-serve: error: device hpu needs habana_frameworks")
    assert "habana-torch-plugin" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_wrong_path_is_one_line_and_no_traceback():
    done = run("./no-such-model", "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
