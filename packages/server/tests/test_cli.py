"""engine-serve's flags, its messages to the user, and its exit codes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trencadis.bucketing import AxisConfig, Bucket, describe_variables
from trencadis.engine import CompileCacheReport, ConfigError, EngineConfig
from trencadis.engine.models import default_model
from trencadis.kvcache import DefragConfig
from trencadis.server import ServerSettings
from trencadis.server.cli import (
    DEFAULT_NAME,
    engine_config,
    flag_parser,
    main,
    server_settings,
    warmup_parser,
)
from trencadis.server.commands import warmup
from trencadis.warmup import Phase, WarmupConfig

ENGINE = {
    "served_model_name": ("name", "name"),
    "chat_template": ("chat.jinja", "chat.jinja"),
    "dtype": ("float32", "float32"),
    "device": ("cpu", "cpu"),
    "tensor_parallel_size": ("2", 2),
    "cpu_threads": ("1", 1),
    "cpu_numa": ("auto", "auto"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("7", 7),
    "max_num_batched_tokens": ("64", 64),
    "max_mixed_prefill_tokens": ("32", 32),
    "max_waiting": ("3", 3),
    "block_size": ("16", 16),
    "num_blocks": ("99", 99),
    "gpu_memory_utilization": ("0.5", 0.5),
    "kv_cache_memory": ("2GiB", 2 * 1024**3),
    "seed": ("5", 5),
    "warmup": ("none", "none"),
    "use_buckets": (None, False),
    "async_scheduling": (None, True),
    "enable_prefix_caching": (None, False),
    "on_bucket_miss": ("refuse", "refuse"),
    "bucket_grid": ("fitted:f.json", "fitted:f.json"),
    "record_traffic": ("f.json", "f.json"),
    "compile": (None, True),
    "compile_cache": ("/cache", "/cache"),
    "trust_compile_cache": (None, True),
    "runner": ("pooling", "pooling"),
    "score_prompt": ("joined", "joined"),
    "quantization": ("int8", "int8"),
    "quant_config": ("quant.json", "quant.json"),
    "kv_cache_dtype": ("fp8", "fp8"),
    "mamba_ssm_cache_dtype": ("bfloat16", "bfloat16"),
    "fp32_softmax": ("true", True),
    "enable_lora": ("", True),
    "lora_modules": ("sql=/adapters/a=b", {"sql": "/adapters/a=b"}),
    "max_loras": ("4", 4),
    "max_lora_rank": ("64", 64),
    "max_cpu_loras": ("9", 9),
    "engine_restarts": ("1", 1),
    "hang_timeout": ("9", 9.0),
    "hang_restart_timeout": ("90", 90.0),
    "scheduling_policy": ("priority", "priority"),
    "swap_space": ("1.5", 1.5),
    "swap_bandwidth": ("8", 8.0),
    "temperature_source": ("nvml", "nvml"),
    "thermal_devices": ("0,2", (0, 2)),
    "thermal_policy": ("proportional", "proportional"),
    "thermal_policy_config": ('{"target_temp_c": 80}', {"target_temp_c": 80}),
    "kv_tiers": (
        "host:1,disk:/kv:2.5,mine.tiers:Remote:4",
        "host:1,disk:/kv:2.5,mine.tiers:Remote:4",
    ),
    "kv_events_config": ('{"topic": "kv@pod@model"}', {"topic": "kv@pod@model"}),
}
SERVER = {
    "host": ("::1", "::1"),
    "uds": ("a.sock", "a.sock"),
    "port": ("9", 9),
    "allowed_hosts": ("a", ("a",)),
    "root_path": ("/llm", "/llm"),
    "enable_force_include_usage": (None, True),
    "return_tokens_as_token_ids": (None, True),
    "enable_tokenizer_info_endpoint": (None, True),
    "enable_request_id_headers": (None, True),
    "default_chat_template_kwargs": ('{"mood": "calm"}', {"mood": "calm"}),
    "api_keys": ("a", ("a",)),
    "api_key_file": ("keys", "keys"),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("qwen3", "qwen3"),
    "enable_auto_tool_choice": (None, True),
    "admin_keys": ("d", ("d",)),
    "lora_directories": ("/adapters", ("/adapters",)),
    "batch_directory": ("/batches", "/batches"),
    "admin_rate_limit": ("3", 3.0),
    "admin_port": ("9", 9),
    "otlp_traces_endpoint": ("http://a:4318/v1/traces", "http://a:4318/v1/traces"),
    "ssl_certfile": ("c.pem", "c.pem"),
    "max_body_size": ("1KiB", 1024),
    "responses_store": ("1", True),
    "responses_store_size": ("2KiB", 2048),
    "max_connections": ("7", 7),
    "shutdown_timeout": ("3", 3.0),
    "access_log": (None, False),
    "server_dev_mode": ("1", True),
    "multi_model_config": ("models.yaml", "models.yaml"),
    "model_stash_gib": ("0", 0.0),
    "min_model_stay": ("3", 3.0),
    "max_switch_waiting": ("3", 3),
}
"""The text of a flag, and the value it gives its field."""

WITH_OTHERS = {
    "auto_switch": (("--multi-model-config", "models.yaml"), (), True),
    "enable_admin_api": (("--admin-api-key", "d"), (), True),
    "admin_signature_window": (
        ("--admin-api-key", "d", "--allowed-hosts", "server"),
        ("60",),
        60.0,
    ),
    "admin_host": (("--admin-port", "9"), ("::1",), "::1"),
    "ssl_keyfile": (("--ssl-certfile", "c.pem"), ("k.pem",), "k.pem"),
    "prefix_cache_per_key": (("--api-key", "a"), (), True),
    "fair_share": (("--api-key", "a"), ("key",), "key"),
    "max_requests_per_key": (("--api-key-file", "keys"), ("3",), 3),
    "ssl_ca_certs": (("--ssl-certfile", "c.pem"), ("a.pem",), "a.pem"),
    "ssl_cert_reqs": (("--ssl-certfile", "c.pem", "--ssl-ca-certs", "a.pem"), ("2",), 2),
}
"""Settings of the server that need others: the flags of those, text and value."""

NO_SETTING = {"-h", "--help", "--version", "--log-level", "--enforce-eager"} | {
    "--enable-chunked-prefill",
    "--exclude-tools-when-tool-choice-none",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
}
"""Flags of no field: `--enforce-eager` belongs to `EngineConfig.graphs`."""


def parse(*argv):
    return flag_parser().parse_args(argv)


def flags_of(cls):
    """Pairs of a field's name and one of its flags, in the form that changes the default."""
    return [
        (field.name, flag if field.default is not True else f"--no-{flag.removeprefix('--')}")
        if field.metadata["negatable"]
        else (field.name, flag)
        for field in attrs.fields(cls)
        for flag in field.metadata["flags"]
    ]


def variables_of(cls):
    """Pairs of a field's name and its environment variable."""
    fields = [(field.name, field.metadata["env"]) for field in attrs.fields(cls)]
    return [(name, variable) for name, variable in fields if variable]


@pytest.mark.parametrize(("name", "flag"), flags_of(EngineConfig))
def test_a_flag_reaches_the_engine(name, flag):
    text, value = ENGINE[name]
    others = ["--enable-lora"] if name == "lora_modules" else []
    without = engine_config(parse("m", *others), {})
    config = engine_config(parse("m", *others, flag, *([text] if text else [])), {})
    assert config == attrs.evolve(without, **{name: value})
    assert config != without


@pytest.mark.parametrize(("name", "flag"), flags_of(ServerSettings))
def test_a_flag_reaches_the_server(name, flag):
    if name in WITH_OTHERS:
        others, text, value = WITH_OTHERS[name]
        without = server_settings(parse(*others), {})
        settings = server_settings(parse(*others, flag, *text), {})
        assert settings == attrs.evolve(without, **{name: value}) != without
        with pytest.raises(ConfigError):
            server_settings(parse(flag, *text), {})
        return
    text, value = SERVER[name]
    settings = server_settings(parse(flag, *([text] if text else [])), {})
    assert settings == ServerSettings(**{name: value})  # a default may depend on it
    assert settings != ServerSettings()


@pytest.mark.parametrize(("name", "variable"), variables_of(EngineConfig))
def test_a_variable_reaches_the_engine(name, variable):
    text, value = ENGINE[name]
    config = engine_config(parse("m"), {variable: text})
    assert config == attrs.evolve(EngineConfig(model="m"), **{name: value})


@pytest.mark.parametrize(("name", "variable"), variables_of(ServerSettings))
def test_a_variable_reaches_the_server(name, variable):
    text, value = SERVER[name]
    settings = server_settings(parse(), {variable: text})
    assert settings == attrs.evolve(ServerSettings(), **{name: value})


def test_every_flag_belongs_to_a_setting():
    flags = {flag for action in flag_parser()._actions for flag in action.option_strings}
    settings = {flag for cls in (EngineConfig, ServerSettings) for _, flag in flags_of(cls)}
    assert flags == settings | NO_SETTING | {
        "--no-async-scheduling",
        "--no-compile",
        "--enable-prefix-caching",
    }
    positional = [action.dest for action in flag_parser()._actions if not action.option_strings]
    assert positional == ["model"]


def test_compilation_is_asked_for_declined_or_left_to_the_device():
    for flags, value in (((), None), (("--compile",), True), (("--no-compile",), False)):
        assert engine_config(parse("m", *flags), {}).compile is value


def test_the_help_names_every_variable_that_is_read():
    text = flag_parser().format_help()
    environment = text[text.index("environment:") :]
    expected = [*describe_variables(), "PT_HPU_LAZY_MODE", "VLLM_FP32_SOFTMAX"]
    for library in (WarmupConfig, DefragConfig):
        expected += [field.metadata.get("env") for field in attrs.fields(library)]
    for name in filter(None, expected):
        assert f"  {name} " in environment, name
    ends = [field.metadata["env"] for field in attrs.fields(AxisConfig)]
    assert f"* is {', '.join(ends[:-1])} or {ends[-1]}" in environment


def test_every_setting_of_the_server_has_a_meaning_and_every_flag_a_group():
    for field in attrs.fields(ServerSettings):
        assert field.metadata["help"], field.name
        assert field.metadata["group"] or not field.metadata["flags"], field.name


def test_graphs_are_switched_off_by_a_flag():
    graphs = engine_config(parse("m", "--enforce-eager"), {"VLLM_GRAPH_RESERVED_MEM": "0.4"}).graphs
    assert graphs == WarmupConfig(enforce_eager=True, graph_reserved_mem=0.4)
    assert not engine_config(parse("m"), {}).graphs.enforce_eager


def test_the_command_line_of_the_seed_is_accepted():
    args = parse("m", "--enable-admin-api", "--enable-chunked-prefill")
    settings = server_settings(args, {"VLLM_ADMIN_TOKEN": "secret"})
    assert settings.enable_admin_api
    assert engine_config(args, {}) == EngineConfig(model="m")
    with pytest.raises(ConfigError, match="needs an admin key: set VLLM_ADMIN_TOKEN"):
        server_settings(args, {})


def test_one_port_cannot_have_two_meanings():
    with pytest.raises(ConfigError, match="admin_port 8000 is that of the server"):
        server_settings(parse("--admin-port", "8000"), {})


def test_a_certificate_that_cannot_be_used_is_one_line(capsys):
    flags = ("--ssl-certfile", "/no/such.pem", "--port", "0")
    assert main(["m", *flags]) == 1
    assert "--ssl-certfile, --ssl-keyfile and --ssl-ca-certs cannot be" in capsys.readouterr().err


def test_a_collector_that_is_no_url_is_one_line_before_the_model_is_loaded(capsys):
    assert main(["m", "--otlp-traces-endpoint", "collector:4317", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "otlp_traces_endpoint 'collector:4317' is not a URL" in line


def test_defragmentation_and_its_warm_up_are_switched_off_by_variables(caplog):
    environ = {"VLLM_DEFRAG": "false", "VLLM_DEFRAG_WARMUP": "0", "VLLM_DEFRAG_WITH_GRAPHS": "1"}
    config = engine_config(parse("m"), environ)
    assert config.defrag == DefragConfig(enabled=False, warm_up=False)
    assert "VLLM_DEFRAG_WITH_GRAPHS has no effect" in caplog.text
    with pytest.raises(ConfigError, match="VLLM_DEFRAG must be true or false, got 'maybe'"):
        engine_config(parse("m"), {"VLLM_DEFRAG": "maybe"})


def test_the_default_model_has_one_name():
    assert DEFAULT_NAME == default_model.SERVED_NAME


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


def test_keys_of_flags_and_environment_are_all_accepted():
    args = parse("--api-key", "a", "--api-key", "b", "--admin-api-key", "d")
    settings = server_settings(args, {"VLLM_API_KEY": "c", "VLLM_ADMIN_TOKEN": "e"})
    assert settings.api_keys == ("a", "b", "c")
    assert settings.admin_keys == ("d", "e")
    assert server_settings(parse(), {"VLLM_API_KEY": ""}).api_keys == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("VLLM_API_KEY", "api_keys .* --api-key or VLLM_API_KEY"),
        ("VLLM_ADMIN_TOKEN", "admin_keys .* --admin-api-key or VLLM_ADMIN_TOKEN"),
    ],
)
def test_a_blank_key_is_refused_and_does_not_leave_the_server_open(name, words):
    with pytest.raises(ConfigError, match=words):
        server_settings(parse(), {name: " "})


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--block-size", "33"], "block_size must be a power of two from 1 to 65536, got 33"),
        (["m", "--max-model-len", "0"], "max_model_len"),
        (["m", "--port", "70000"], "port must be an integer from 0 to 65535, got 70000"),
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
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["--port", "x"], "--port"),
        (["--thermal-policy-config", "{"], "is not JSON"),
        (["--thermal-policy-config", "[]"], "is not a JSON object"),
        (["--max-modl-len", "5", "m"], "--max-modl-len: did you mean --max-model-len?"),
        (["--modellen=5"], "--modellen: did you mean --max-model-len?"),
        (["--max-model-l", "5"], "--max-model-l: did you mean --max-model-len?"),
        (["--ssl-cert", "x"], "unrecognized arguments: --ssl-cert: did you mean --ssl-cert"),
        (["--zzz"], "unrecognized arguments: --zzz ("),
        (["complete", "hi", "--temp", "0"], "--temp: did you mean --temperature?"),
        (["bench", "--num-request", "1"], "--num-request: did you mean --num-requests?"),
    ],
)
def test_a_bad_flag_is_explained_in_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("engine-serve")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the arguments --output --check is required"),
        (["--output", "a", "--check", "a"], "not allowed with argument"),
        (["--output", "a", "--compile-cache", "b"], "leave --compile-cache out"),
        (["--output", "a", "--port", "80"], "unrecognized arguments: --port"),
    ],
)
def test_a_warm_up_without_serving_has_one_task(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        main(["warmup", "m", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_check_of_a_directory_that_is_not_there_is_one_line(capsys, tmp_path):
    missing = tmp_path / "no such directory"
    assert main(["warmup", "m", "--check", str(missing), "--log-level", "error"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"engine-serve warmup: error: {missing} is not a directory")
    assert error.count("\n") == 1


def test_a_warm_up_without_serving_has_every_flag_of_the_engine():
    engine = [action.dest for action in warmup_parser()._actions]
    assert {"output", "check"} < set(engine)
    assert set(ENGINE) - {"fp32_softmax"} <= set(engine), "which is a variable alone"
    assert not set(SERVER) & set(engine)


@pytest.mark.parametrize(
    ("missing", "code", "printed"),
    [
        ((), 0, "2 compiled in 3 s. /d has the programs of all 2 buckets\n"),
        (None, 0, "2 compiled in 3 s. Programs of 2 buckets were made for /d\n"),
        (
            ((Phase.DECODE, Bucket(("batch", "blocks"), (4, 60))),),
            1,
            "missing: decode bucket (4, 60)\n"
            "2 compiled in 3 s. /d lacks programs of 1 of 2 buckets\n",
        ),
    ],
)
def test_what_a_cache_lacks_is_listed_and_is_the_exit_code(
    monkeypatch, capsys, missing, code, printed
):
    asked = []

    def fill(config):
        asked.append(config)
        return CompileCacheReport(Path("/d"), 2, missing, 2, 3.2)

    monkeypatch.setattr(warmup, "fill_compile_cache", fill)
    assert main(["warmup", "m", "--output", "/d", "--max-num-seqs", "7"]) == code
    assert capsys.readouterr().out == printed
    assert (asked[0].model, asked[0].compile_cache, asked[0].max_num_seqs) == ("m", "/d", 7)


def test_a_taken_port_is_one_line_before_any_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # The model does not exist either, so the port was checked before the model.
        assert main(["./no-such-model", "--port", str(port), "--log-level", "error"]) == 1
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
        timeout=600,
        env=os.environ,
    )


def test_help_answers_without_a_web_framework_or_torch():
    code = (
        "import sys; sys.argv = ['engine-serve', '--help']\n"
        "from trencadis.server.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'openai', 'numpy', 'zmq'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "--max-num-batched-tokens" in done.stdout


def test_the_help_shows_the_default_of_every_flag_that_takes_a_value():
    for action in flag_parser()._actions:
        if action.option_strings and action.nargs != 0 and not action.required:
            assert "(default: " in action.help, action.option_strings


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("VLLM_API_KEYS", "VLLM_API_KEY"), ("VLLM_ADMIN_TOKENS", "VLLM_ADMIN_TOKEN")],
)
def test_a_misspelt_variable_is_warned_of(caplog, variable, meant):
    server_settings(parse(), {variable: "secret"})
    assert caplog.messages == [f"The variable {variable} is not read: did you mean {meant}?"]


def test_a_single_text_is_one_key():
    assert ServerSettings(api_keys="secret").api_keys == ("secret",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", 5),
        ("host", "\ud800"),
        ("uds", 5),
        ("port", True),
        ("api_keys", 5),
        ("api_keys", [5]),
        ("api_keys", [""]),
        ("admin_keys", None),
        ("lora_directories", [5]),
        ("batch_directory", 5),
        ("lora_directories", [""]),
        ("max_body_size", 10**20),
        ("max_pending_prompts", 10**10),
        ("body_timeout", float("nan")),
        ("send_timeout", 10**400),
        ("retry_after", 10**9),
        ("model_stash_gib", -0.1),
        ("model_stash_gib", (1 << 20) + 1),
        ("min_model_stay", 0),
        ("min_model_stay", 86_401),
        ("max_switch_waiting", 0),
        ("max_switch_waiting", 1 << 31),
        ("auto_switch", 1),
        ("access_log", "no"),
        ("root_path", "llm"),
        ("root_path", "/llm/"),
        ("root_path", None),
        ("enable_force_include_usage", 1),
        ("return_tokens_as_token_ids", 1),
        ("enable_tokenizer_info_endpoint", "yes"),
        ("enable_request_id_headers", None),
        ("responses_store", "yes"),
        ("responses_store_size", 1023),
        ("responses_store_ttl", 0),
        ("default_chat_template_kwargs", [1]),
        ("default_chat_template_kwargs", {1: 2}),
        ("default_chat_template_kwargs", {"tools": []}),
    ],
)
def test_a_setting_of_a_wrong_type_or_beyond_sense_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        ServerSettings(**{name: value})


RANGES = {
    "port": (0, 65_535),
    "admin_port": (0, 65_535),
    "max_requests_per_key": (1, 2**31 - 1),
    "admin_rate_limit": (1e-9, 1e6),
    "admin_signature_window": (1e-9, 3600),
    "model_stash_gib": (0, 1 << 20),
    "min_model_stay": (1e-9, 86_400),
    "max_switch_waiting": (1, 2**31 - 1),
    "ssl_cert_reqs": (0, 2),
    "max_body_size": (1, 1 << 40),
    "max_connections": (1, 1 << 20),
    "max_pending_prompts": (1, 2**31 - 1),
    "retry_after": (1, 86_400),
    **dict.fromkeys(
        ("health_timeout", "shutdown_timeout", "header_timeout", "body_timeout", "send_timeout"),
        (1e-9, 86_400),
    ),
}
"""The lowest value that is accepted, and the highest one."""


def test_a_range_ends_where_its_setting_says():
    keys = {
        "api_key_file": "keys",
        "admin_keys": ("k",),
        "allowed_hosts": ("h",),
        "ssl_certfile": "c",
        "ssl_ca_certs": "a",
    }
    for name, (low, high) in RANGES.items():
        for value in (low, high):
            assert getattr(ServerSettings(**keys, **{name: value}), name) == value
        step = 1 if isinstance(low, int) else 1e-6
        for value in (low - step, high + step):
            with pytest.raises(ConfigError, match=name):
                ServerSettings(**keys, **{name: value})


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


@pytest.mark.slow
def test_a_device_of_the_users_own_is_named_by_its_class(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "own_device.py").write_text("Wrong = int\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    flags = ("--device", "own_device:Wrong", "--port", "0", "--log-level", "error")
    done = run(str(checkpoint), *flags)
    assert done.returncode == 1
    message = "device 'own_device:Wrong' is not a subclass of trencadis.engine.Device"
    assert done.stderr.startswith(f"engine-serve: error: {message}"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("habana_frameworks") is not None, reason="software for it is there")
def test_a_device_that_is_not_there_is_one_line_that_says_what_to_install(checkpoint):
    done = run(str(checkpoint), "--device", "hpu", "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    assert done.stderr.startswith("engine-serve: error: device hpu needs habana_frameworks")
    assert "habana-torch-plugin" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_wrong_path_is_one_line_and_no_traceback(monkeypatch):
    monkeypatch.setenv("VLLM_PROMPT_BS_BUCKET_MXX", "1")  # a warning, which is not of the level
    done = run("./no-such-model", "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("argv", "text", "message"),
    [
        (["m"], "models: {a: {model: m}}", "MODEL 'm' and a file of models exclude each other"),
        (["--served-model-name", "x"], "models: {a: {model: m}}", "--served-model-name 'x'"),
        ([], "models: {a: {model: m, seed: x}}", "line 1: models.a.seed"),
        ([], "models: {a: {model: m, tool_call_parser: no}}", "tool_call_parser"),
        ([], "models: {a: {model: m, tool_call_parser: x}}", "line 1: models.a.tool_call_parser"),
        ([], "models: {a: {model: m, ttl: 5}}", "a has a ttl, and without --auto-switch"),
    ],
)
def test_a_bad_file_of_models_is_told_before_a_model_is_loaded(
    capsys, tmp_path, argv, text, message
):
    file = tmp_path / "models.yaml"
    file.write_text(text)
    flags = ("--multi-model-config", str(file), "--port", "0", "--log-level", "error")
    assert main([*argv, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine-serve: error: ")
    assert message in error


def test_all_faults_of_a_file_of_models_are_told_at_once_with_their_lines(capsys, tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text(
        """\
models:
  a:
    model: m
    tool_call_parser: x
    reasoning_parser: y
  b: {model: m, maxmodellen: 5, ttl: -1}
"""
    )
    assert main(["--multi-model-config", str(file), "--port", "0", "--log-level", "error"]) == 1
    error = capsys.readouterr().err
    assert "has 4 faults" in error
    places = ("4: models.a.tool_call_parser: ", "5: models.a.reasoning_parser: ")
    for place in (*places, "6: models.b.maxmodellen is unknown", "6: models.b.ttl: "):
        assert f"line {place}" in error, place


def test_adapters_are_named_one_by_one_or_together():
    flags = ("--lora-modules", "a=x", "b=y", "--lora-modules", "c=z", "--enable-lora")
    config = engine_config(parse("m", *flags), {})
    assert config.lora_modules == {"a": "x", "b": "y", "c": "z"}
    with pytest.raises(ConfigError, match="names 'a' twice"):
        engine_config(parse("m", "--lora-modules", "a=x", "a=y"), {})
    for wrong in ("a", "{", "{}", '{"name": "a", "path": 3}', '{"name": "a", "path": "x", "b": 1}'):
        with pytest.raises(SystemExit):
            parse("m", "--lora-modules", wrong)


def test_an_adapter_may_be_an_object_as_vllm_writes_it():
    module = '{"name": "a", "path": "x", "base_model_name": "m"}'
    config = engine_config(parse("m", "--enable-lora", "--lora-modules", module, "b=y"), {})
    assert config.lora_modules == {"a": "x", "b": "y"}
