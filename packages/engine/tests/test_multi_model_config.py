"""The file of models: what it accepts, and that all of its faults are told, with their lines."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import ConfigError, EngineConfig, ModelEntry, read_multi_model_config
from trencadis.engine.front.multi_model_config import DEFAULT_SAMPLING, MAX_FILE_BYTES
from trencadis.engine.front.yaml_nodes import MAX_DEPTH, YamlFault, read_yaml

PLUGIN = """\
default_model: qwen
models:
  llama:
    model: meta-llama/Llama-3.1-8B-Instruct
    tensor_parallel_size: 1
    max_model_len: 4096
  qwen:
    model: Qwen/Qwen3-0.6B
    tensor_parallel_size: 1
    max_model_len: 2048
"""


@pytest.fixture
def read(tmp_path):
    def read(text, environ=None, **settings):
        file = tmp_path / "models.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_multi_model_config(file, environ, **settings)

    return read


@pytest.fixture
def faults(read):
    """The lines and the texts of the faults of a file."""

    def faults(text, **settings):
        with pytest.raises(ConfigError) as refusal:
            read(text, **settings)
        found = re.findall(r"line (\d+): (.*)", str(refusal.value))
        return [(int(line), fault) for line, fault in found]

    return faults


def test_a_file_of_the_plugin_is_read(read):
    config = read(PLUGIN)
    assert config.active == "qwen"
    assert [entry.alias for entry in config.models] == ["llama", "qwen"]
    llama, qwen = config.models
    assert llama.config == EngineConfig(
        model="meta-llama/Llama-3.1-8B-Instruct", served_model_name="llama", max_model_len=4096
    )
    assert qwen.config.name == "qwen"


def test_without_a_default_the_first_model_is_active(read):
    assert read("models: {b: {model: x}, a: {model: x}}").active == "b"


def test_any_setting_has_the_name_of_its_flag_or_field_and_its_own_type(read):
    (entry,) = read(
        """\
models:
  a:
    model: m
    kv-cache-memory: 2GiB
    block_size: 16
    num_gpu_blocks_override: 99
    disable_bucketing: true
    enable_prefix_caching: no
    compile: off
    swap_space: 1
    thermal_devices: [0, 2]
    thermal_policy: "proportional"
    thermal_policy_config: {target_temp_c: 80}
    fp32_softmax: "true"
    enforce_eager: true
"""
    ).models
    config = entry.config
    assert config.kv_cache_memory == 2 << 30
    assert (config.block_size, config.num_blocks) == (16, 99)
    assert (config.use_buckets, config.enable_prefix_caching, config.compile) == (False,) * 3
    assert config.thermal_devices == (0, 2)
    assert config.thermal_policy_config == {"target_temp_c": 80}
    assert config.fp32_softmax
    assert config.graphs.enforce_eager


def test_a_model_has_the_flags_and_variables_that_it_does_not_set(read):
    text = "models: {a: {model: m, block_size: 64}, b: {model: m}}"
    a, b = read(
        text, {"VLLM_SKIP_WARMUP": "true"}, block_size=16, seed=7, enforce_eager=True
    ).models
    assert (a.config.block_size, b.config.block_size) == (64, 16)
    assert all(entry.config.seed == 7 and entry.config.warmup == "none" for entry in (a, b))
    assert a.config.graphs.enforce_eager


def test_each_model_may_have_its_own_buckets(read):
    text = "models: {a: {model: m, environment: {VLLM_DECODE_BS_BUCKET_MAX: 8}}, b: {model: m}}"
    a, b = read(text).models
    assert a.config.bucketing is not None
    assert b.config.bucketing is None


def test_paths_are_looked_up_beside_the_file(read, tmp_path, tiny_model):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "mine").symlink_to(tiny_model)
    (entry,) = read("models: {a: {model: ./mine, chat_template: chat.jinja}}").models
    assert entry.config.model == str(tmp_path / "mine")
    assert entry.config.chat_template == str(tmp_path / "chat.jinja")


def test_a_template_may_be_in_the_file(read):
    text = 'models:\n  a:\n    model: m\n    chat_template: |\n      {{ messages[0]["content"] }}\n'
    assert "messages[0]" in read(text).models[0].config.chat_template


def test_a_model_has_defaults_of_sampling(read):
    (entry,) = read(
        "models: {a: {model: m, default_sampling: {temperature: 0.2, top_k: 5}}}"
    ).models
    assert entry.default_sampling == {"temperature": 0.2, "top_k": 5}


def test_all_faults_are_told_at_once_with_their_lines(faults):
    found = faults(
        """\
default_model: c
color: red
models:
  a:
    model: m
    max_model_len: many
    maxnumseqs: 3
    block_size: 33
    default_sampling:
      temperature: 9
      stop: x
  b:
    dtype: int4
    environment:
      VLLM_API_KEY: secret
  b:
    model: m
  "":
    model: ./no/such/model
  d: 7
"""
    )
    assert [line for line, _ in found] == [1, 2, 6, 7, 8, 10, 11, 12, 13, 15, 16, 18, 19, 20]
    texts = " ".join(text for _, text in found)
    for words in (
        "default_model must be one of the aliases",
        "color is unknown",
        "max_num_seqs?",
        "power of two",
        "temperature must be",
        "'stop' is unknown",
        "models.b has no model",
        "dtype must be one of",
        "VLLM_API_KEY is not a variable",
        "models has 'b' again, first in line 12",
        "alias must be",
        "there is no directory ./no/such/model",
        "models.d must map names to values, got 7",
    ):
        assert words in texts, words


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "must map"),
        ("models:", 1, "must map"),
        ("models: {}", 1, "names no model"),
        ("default_model: a", 1, "models is missing"),
        ("- a\n- b", 1, "the file must map names"),
        ("models:\n  a: [\n", 3, "no YAML"),
        ("models:\n\ta: 1", 2, "no YAML"),
        ("models: {a: {model: m}}\n---\nmodels: {}", 2, "second document"),
        ("a: &x 1\nb: *x", 1, "anchors"),
        ("models:\n  a: !!python/object/apply:os.system [ls]", 2, "tags are rejected"),
        (b"models: \xff\xfe", 1, "cannot be read"),
        ("models: \x07", 1, "no YAML"),
        ("models: {a: {model: m, tensor_parallel_size: 0}}", 1, "from 1 to 64"),
        ("models:\n  a: {model: m}\n  b: {model: m, tensor_parallel_size: 2}", 3, "is 2, and 1 "),
        ("models: {a: {model: m, served_model_name: b}}", 1, "by its alias"),
        ("models: {a: {model: }}", 1, "must name a checkpoint"),
        ("models: {a: {model: [m]}}", 1, "must name a checkpoint"),
        ('models: {a: {model: "a\\0b"}}', 1, "must name a checkpoint"),
        ("models: {a: {model: m, chat_template: ./no.jinja}}", 1, "cannot be read"),
        ("models: {a: {model: m, enforce_eager: 3}}", 1, "True or False"),
        ("models: {a: {model: m, num_blocks: 9, num_gpu_blocks_override: 9}}", 1, "given twice"),
        ("models: {a: {model: m, warmup: none, on_bucket_miss: refuse}}", 1, "full warm-up"),
        ("models: {a: {model: m, seed: 1" + "0" * 5000 + "}}", 1, "seed"),
        ("models: {a: {model: m, ? [x] : 1}}", 1, "a key must be a text"),
    ],
)
def test_a_file_that_is_no_file_of_models_is_refused(faults, text, line, words):
    (found,) = faults(text)
    assert found[0] == line
    assert words in found[1]


def test_a_bomb_of_aliases_is_refused_at_once(faults):
    bomb = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(50))
    ((line, words),) = faults(bomb)
    assert (line, words) == (1, "anchors and aliases (& and *) are rejected: write the value again")


@pytest.mark.parametrize("opening", ["[", "{a: "])
def test_deep_nesting_is_refused_at_once(faults, opening):
    ((_, words),) = faults("models: " + opening * 5000)
    assert f"more than {MAX_DEPTH}" in words


def test_a_huge_file_and_what_is_no_file_are_refused(faults, tmp_path):
    ((_, words),) = faults("#" * (MAX_FILE_BYTES + 1))
    assert "larger than 256 KiB" in words
    for path in (tmp_path, tmp_path / "no.yaml", "/dev/zero", "a\0b"):
        with pytest.raises(ConfigError, match=r"line 1: (is not a file|cannot be read)"):
            read_multi_model_config(path)


def test_settings_of_the_device_are_the_same_for_all_models(faults):
    found = faults(
        "models:\n  a: {model: m, device: cpu}\n  b: {model: m, device: cuda}\n  c: {model: m}"
    )
    assert [line for line, _ in found] == [3, 4]
    assert found[0][1] == (
        "models.b: device is 'cuda', and 'cpu' for a: give all models the same, since it is a "
        "setting of the device"
    )


def test_many_faults_are_counted(read):
    settings = "".join(f"    x{i}: 1\n" for i in range(30))
    with pytest.raises(ConfigError, match="has 30 faults") as refusal:
        read(f"models:\n  a:\n    model: m\n{settings}")
    assert "and 10 more" in str(refusal.value)


def test_a_fault_of_the_command_line_is_not_one_of_the_file(read):
    with pytest.raises(ConfigError, match=r"^block_size must be") as refusal:
        read("models: {a: {model: m}}", block_size=33)
    assert "line" not in str(refusal.value)


@pytest.mark.parametrize("alias", ["", " a", "a" * 201, 5, None, "\ud800"])
def test_an_alias_that_clients_cannot_send_is_refused(alias):
    with pytest.raises(ConfigError, match="alias"):
        ModelEntry(alias, EngineConfig(model="m"))


def test_a_default_that_no_request_could_have_is_refused():
    with pytest.raises(ConfigError, match="did you mean top_p"):
        ModelEntry("a", EngineConfig(model="m"), default_sampling={"topp": 1})
    assert "structured_output" not in DEFAULT_SAMPLING


@given(st.text(st.sampled_from("ab:-[]{}#&*!|>'\"%@ \n\t?,~01."), max_size=60))
def test_any_text_is_read_or_refused_with_a_line(text):
    try:
        node = read_yaml(text)
    except YamlFault as fault:
        assert 1 <= fault.line <= text.count("\n") + 2
    else:
        assert node is None or node.line >= 1


def test_a_model_may_have_an_idle_limit(read, faults):
    text = "models:\n  a: {model: org/m, ttl: %s}\n  b: {model: org/n}\n"
    assert [entry.ttl for entry in read(text % "600").models] == [600, 0]
    for wrong in ("-1", "soon", "true", ".inf", "[5]"):
        ((line, fault),) = faults(text % wrong)
        assert line == 2
        assert "ttl must be a finite number from 0 to 31536000, got" in fault
    with pytest.raises(ConfigError, match="ttl"):
        ModelEntry("a", EngineConfig(model="m"), ttl=True)
