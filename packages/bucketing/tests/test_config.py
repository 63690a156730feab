"""Settings: from the environment and back, and errors."""

from __future__ import annotations

import logging
import math
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.bucketing import AxisConfig, BucketingConfig, BucketingError
from trencadis.bucketing.strategies import STRATEGIES

NAMES = ", ".join(STRATEGIES)

AXES = ("prompt_batch", "prompt_query", "prompt_context", "decode_batch", "decode_blocks")

optional = st.none() | st.integers(1, 10_000)
axis_configs = st.builds(
    AxisConfig,
    min=st.none() | st.integers(0, 10),
    step=optional,
    max=st.none() | st.integers(10, 10_000),
    limit=optional,
    pad_max=optional,
    pad_percent=st.none() | st.integers(0, 50),
)
strategies = st.sampled_from(sorted(STRATEGIES))
paths = st.none() | st.text("abc/._-", min_size=1)
configs = st.builds(
    BucketingConfig,
    strategy=strategies,
    prompt_strategy=st.none() | strategies,
    decode_strategy=st.none() | strategies,
    **dict.fromkeys((*AXES, "decode_seq"), axis_configs),
    bucket_file=paths,
    prompt_traffic=paths,
    decode_traffic=paths,
    contiguous_pa=st.booleans(),
)


def variables_of(config: BucketingConfig) -> dict[str, str]:
    """The environment in which a user sets these values."""
    variables: dict[str, str] = {}
    for field in attrs.fields(BucketingConfig):
        value, name = getattr(config, field.name), field.metadata["env"]
        if isinstance(value, AxisConfig):
            sizes = zip(attrs.fields(AxisConfig), attrs.astuple(value), strict=True)
            variables |= {
                name.format(end.metadata["env"]): str(size)
                for end, size in sizes
                if size is not None
            }
        elif value is not None:
            variables[name] = str(value).lower() if isinstance(value, bool) else value
    return variables


@given(configs)
def test_settings_survive_the_environment_and_pickling(config: BucketingConfig) -> None:
    assert BucketingConfig.from_env(variables_of(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own


def test_nothing_set_is_the_default() -> None:
    assert BucketingConfig.from_env({}) == BucketingConfig()
    assert BucketingConfig().strategy == "exp"
    assert BucketingConfig.from_env({"VLLM_BUCKETING_STRATEGY": ""}) == BucketingConfig()


def test_every_axis_variable_of_the_plugin_sets_its_field() -> None:
    places = {
        "PROMPT_BS": "prompt_batch",
        "PROMPT_QUERY": "prompt_query",
        "PROMPT_SEQ": "prompt_query",
        "PROMPT_CTX": "prompt_context",
        "DECODE_BS": "decode_batch",
        "DECODE_BLOCK": "decode_blocks",
        "DECODE_SEQ": "decode_seq",
    }
    for part, field in places.items():
        for parameter in ("min", "step", "max", "limit", "pad_max", "pad_percent"):
            name = f"VLLM_{part}_BUCKET_{parameter.upper()}"
            config = BucketingConfig.from_env({name: "7"})
            assert getattr(getattr(config, field), parameter) == 7
            assert attrs.evolve(config, **{field: AxisConfig()}) == BucketingConfig()


def test_seq_is_read_for_each_query_setting_that_is_not_set() -> None:
    config = BucketingConfig.from_env(
        {
            "VLLM_PROMPT_QUERY_BUCKET_MAX": "2048",
            "VLLM_PROMPT_SEQ_BUCKET_MAX": "1024",
            "VLLM_PROMPT_SEQ_BUCKET_STEP": "64",
        }
    )
    assert config.prompt_query == AxisConfig(step=64, max=2048)


@pytest.mark.parametrize(("value", "strategy"), [("true", "exp"), ("0", "lin")])
def test_the_deprecated_flag_overrides_every_strategy(
    value: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = BucketingConfig.from_env(
        {
            "VLLM_EXPONENTIAL_BUCKETING": value,
            "VLLM_BUCKETING_STRATEGY": "pad",
            "VLLM_DECODE_BUCKETING_STRATEGY": "pad",
        }
    )
    assert (config.strategy, config.decode_strategy) == (strategy, None)
    assert f"set VLLM_BUCKETING_STRATEGY={strategy}" in caplog.text


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("VLLM_PROMPT_BS_BUCKET_MXA", "VLLM_PROMPT_BS_BUCKET_MAX"),
        ("VLLM_PROMPT_BS_MAX", "VLLM_PROMPT_BS_BUCKET_MAX"),
        ("VLM_PROMPT_BS_BUCKET_MAX", "VLLM_PROMPT_BS_BUCKET_MAX"),
        ("vllm_decode_bs_bucket_max", "VLLM_DECODE_BS_BUCKET_MAX"),
        ("VLLM_DECODE_BLOCKS_BUCKET_STEP", "VLLM_DECODE_BLOCK_BUCKET_STEP"),
        ("VLLM_BUCKET_STRATEGY", "VLLM_BUCKETING_STRATEGY"),
        ("VLLM_BUCKETING_FILE", "VLLM_BUCKETING_FROM_FILE"),
        ("VLLM_CONTIGOUS_PA", "VLLM_CONTIGUOUS_PA"),
        ("VLLM_EXPONENTIAL_BUCKETTING", "VLLM_EXPONENTIAL_BUCKETING"),
        # An axis that decode grids do not have.
        ("VLLM_DECODE_CTX_BUCKET_MIN", "VLLM_DECODE_BS_BUCKET_MIN"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_nearest_one(
    misspelt: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert BucketingConfig.from_env({misspelt: "1"}) == BucketingConfig()
    assert [record.getMessage() for record in caplog.records] == [
        f"{misspelt} has no effect: no bucketing setting has this name; the nearest is {meant}"
    ]


def test_other_variables_of_vllm_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    others = (
        *("VLLM_PROMPT_USE_FUSEDSDPA", "VLLM_PROMPT_USE_FLEX_ATTENTION", "VLLM_PROFILE_PROMPT"),
        *("VLLM_GRAPH_PROMPT_STRATEGY", "VLLM_GRAPH_DECODE_STRATEGY", "VLLM_ENABLE_BUCKETING"),
        *("VLLM_TPU_BUCKET_PADDING_GAP", "VLLM_CONFIG_ROOT", "AWS_S3_BUCKET", "PATH"),
    )
    own = BucketingConfig.from_env(dict.fromkeys(others, "1"))
    assert own == BucketingConfig()
    assert not caplog.records


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"VLLM_PROMPT_BS_BUCKET_STEP": "0"}, "VLLM_PROMPT_BS_BUCKET_STEP=0: .* from 1 to"),
        ({"VLLM_DECODE_BLOCK_BUCKET_MIN": "-1"}, "VLLM_DECODE_BLOCK_BUCKET_MIN=-1: .* from 0 to"),
        ({"VLLM_DECODE_BS_BUCKET_MAX": "nan"}, "VLLM_DECODE_BS_BUCKET_MAX=nan is not an integer"),
        ({"VLLM_PROMPT_CTX_BUCKET_PAD_PERCENT": "51"}, "PAD_PERCENT=51: .* 0 to 50"),
        ({"VLLM_PROMPT_SEQ_BUCKET_STEP": "x"}, "VLLM_PROMPT_SEQ_BUCKET_STEP=x"),
        (
            {"VLLM_PROMPT_BS_BUCKET_MIN": "8", "VLLM_PROMPT_BS_BUCKET_MAX": "4"},
            "VLLM_PROMPT_BS_BUCKET_MIN and VLLM_PROMPT_BS_BUCKET_MAX: bucket min 8 is above max 4",
        ),
        (
            {"VLLM_BUCKETING_STRATEGY": "linear"},
            f"VLLM_BUCKETING_STRATEGY: strategy must be one of {NAMES}, got 'linear'",
        ),
        ({"VLLM_PROMPT_BUCKETING_STRATEGY": "x"}, "VLLM_PROMPT_BUCKETING_STRATEGY: .* got 'x'"),
        ({"VLLM_CONTIGUOUS_PA": "maybe"}, "VLLM_CONTIGUOUS_PA=maybe is neither true nor false"),
        ({"VLLM_EXPONENTIAL_BUCKETING": "2"}, "VLLM_EXPONENTIAL_BUCKETING=2 is neither"),
    ],
)
def test_a_bad_value_names_its_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        BucketingConfig.from_env(environ)


def test_an_environment_that_is_none_is_refused() -> None:
    for environ in (None, 3, ["VLLM_PROMPT_BS_BUCKET_MIN"]):
        with pytest.raises(BucketingError, match="environ must be of type Mapping"):
            BucketingConfig.from_env(environ)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="VLLM_CONTIGUOUS_PA=True is not text"):
        BucketingConfig.from_env({"VLLM_CONTIGUOUS_PA": True})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(AxisConfig)])
def test_both_ends_of_a_setting_are_accepted_and_no_more(name: str) -> None:
    low = 1 if name in ("step", "limit") else 0
    high = 50 if name == "pad_percent" else 1 << 40
    for end, above in ((low, low - 1), (high, high + 1)):
        assert getattr(AxisConfig(**{name: end}), name) == end
        with pytest.raises(BucketingError, match=f"{name} must be .* from {low} to {high}, got"):
            AxisConfig(**{name: above})
    assert AxisConfig(min=8, max=8).min == 8


@pytest.mark.parametrize("value", [10**13, 10**5000], ids=["large", "too long to print"])
def test_a_setting_beyond_sense_is_refused(value: int) -> None:
    with pytest.raises(
        BucketingError, match="limit must be an integer from 1 to 1099511627776, got"
    ):
        AxisConfig(limit=value)


def test_integers_of_numpy_are_kept_as_those_of_python() -> None:
    assert type(AxisConfig(min=np.int64(3)).min) is int
    assert type(AxisConfig(step=np.uint8(3)).step) is int


def test_a_bad_value_in_code_names_its_setting() -> None:
    with pytest.raises(BucketingError, match=r"step must be an integer .*, got nan"):
        AxisConfig(step=math.nan)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match=r"max must be an integer .*, got True"):
        AxisConfig(max=True)
    with pytest.raises(BucketingError, match="contiguous_pa must be True or False, got 'no'"):
        BucketingConfig(contiguous_pa="no")  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="bucket_file must be of type str, got 3"):
        BucketingConfig(bucket_file=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [[], {}, 1, b"exp"])
def test_a_strategy_that_is_no_text_is_refused(strategy: object) -> None:
    with pytest.raises(BucketingError, match=f"strategy must be one of {NAMES}, got"):
        BucketingConfig(strategy=strategy)
