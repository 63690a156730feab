"""A tiny checkpoint with random weights, for what does not need a model that makes sense."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import is_torch_hpu_available

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules of these tests

from child_processes import own_processes  # noqa: F401  (a fixture)

STANDIN = Path(__file__).parent / "habana_standin"
SESSION_DEVICE = os.environ.get("TRENCADIS_TEST_DEVICE")
"""``hpu-lazy`` or ``hpu-eager``: the whole suite runs on the stand-in for a Gaudi. ``gaudi``: on a
real one, without the tests that need what the stand-in counts."""

_WITHOUT_DEVICE = (
    *(
        "channel",
        "cpu_threads",
        "detokenizer",
        "doctor",
        "engine_front",
        "heat",
        "heat_switches",
        "line_process",
    ),
    *("doctor_checks", "gaudi_operations"),
    "multi_model_config",
    *(
        "native_kernel",
        "rank_faults",
        "rank_parts",
        "ranks",
        "request_stream",
        "rotary",
        "sampling_params",
        "simulated_cli",
    ),
    *("simulated_costs", "simulated_published", "simulated_runner", "simulation", "validators"),
)
"""What they test uses no device, so a session on another one would only repeat them."""

collect_ignore = [f"test_{name}.py" for name in _WITHOUT_DEVICE if SESSION_DEVICE is not None]

STAND_INS = {"lazy_gaudi", "eager_gaudi", "gaudi", "stand_in", "stand_in_for_cores"}
"""The fixtures that give a test the stand-in."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that load the stand-in themselves: each mode has its session of the rest."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("soak")
        if names & STAND_INS and not is_long:
            item.add_marker("gaudi")


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def save_tiny_model(directory: Path, **changes: object) -> Path:
    """A two-layer Llama over bytes, grouped-query, in fp32; ``changes`` are of its config."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 258,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "initializer_range": 0.6,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def save_byte_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "<bos>": 256, "<eos>": 257}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Path]:
    return save_tiny_model


@pytest.fixture(scope="session")
def add_tokenizer() -> Callable[[Path], None]:
    """Adds the tokenizer of `save_tiny_model` to a checkpoint."""
    return save_byte_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def stand_in(mode: str) -> Generator[Any, None, None]:
    """The stand-in for a Gaudi in this process; gives its machinery, for what it counted."""
    if SESSION_DEVICE is not None:
        if f"hpu-{mode}" != SESSION_DEVICE:
            pytest.skip(f"the session runs on {SESSION_DEVICE}")
        bridge = importlib.import_module("gaudi_standin").BRIDGE
        gc.collect()  # what earlier tests left must not be freed while this one counts
        limit = bridge.memory.limit
        try:
            yield bridge
        finally:
            bridge.memory.limit = limit
        return
    # transformers asks once whether there is a Gaudi, and then changes functions of PyTorch.
    is_torch_hpu_available()
    with pytest.MonkeyPatch.context() as patch:
        _load_stand_in(patch, mode)
        try:
            yield importlib.import_module("gaudi_standin").BRIDGE
        finally:
            _unload_stand_in()


def _load_stand_in(patch: pytest.MonkeyPatch, mode: str) -> None:
    patch.setenv("PT_HPU_LAZY_MODE", {"lazy": "1", "eager": "0"}[mode])
    # Set, so that the recipes of tests are not announced in the user's cache directory.
    patch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", ",false,1024,false")
    patch.syspath_prepend(STANDIN)
    importlib.import_module("habana_frameworks.torch")
    _prepare_device(patch)


def _prepare_device(patch: pytest.MonkeyPatch) -> None:
    # In fp32 it computes what the CPU computes, so that tokens can be compared.
    from trencadis.engine.devices import HPUDevice

    patch.setattr(HPUDevice, "dtypes", (torch.bfloat16, torch.float32))
    # A compilation takes half a second here: few buckets, except in tests of the default grid.
    patch.setattr(HPUDevice, "exponential_grid", False)


def _take_small_defaults(patch: pytest.MonkeyPatch) -> None:
    """Batches and blocks as on the CPU, as ``gaudi_standin.engine_tests`` does."""
    from trencadis.engine.devices import HPUDevice

    init = HPUDevice.__init__

    def init_small(self: HPUDevice, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.defaults = {"compile": self.defaults["compile"]}

    patch.setattr(HPUDevice, "__init__", init_small)


def _unload_stand_in() -> None:
    importlib.import_module("gaudi_standin.torch_patches").take_back()
    for name in list(sys.modules):
        if name.partition(".")[0] in ("gaudi_standin", "habana_frameworks"):
            del sys.modules[name]


@contextmanager
def stand_in_for_cores(mode: str) -> Generator[None, None, None]:
    """The stand-in for a Gaudi in the cores that start now, and not in this process."""
    if SESSION_DEVICE is not None:
        if f"hpu-{mode}" != SESSION_DEVICE:
            pytest.skip(f"the session runs on {SESSION_DEVICE}")
        yield
        return
    is_torch_hpu_available()  # as above: it is to find none here
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAUDI_STANDIN_ENGINE_TESTS", "1")
        patch.setenv("PT_HPU_LAZY_MODE", {"lazy": "1", "eager": "0"}[mode])
        patch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", ",false,1024,false")
        patch.syspath_prepend(STANDIN)
        yield


@pytest.fixture(scope="session", autouse=SESSION_DEVICE is not None)
def session_device() -> Generator[None, None, None]:
    """The device of the whole session, also for the processes that it starts."""
    if SESSION_DEVICE is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if SESSION_DEVICE == "gaudi":
            _prepare_device(patch)
            _take_small_defaults(patch)
            yield
            return
        patch.setenv("GAUDI_STANDIN_ENGINE_TESTS", "1")
        _load_stand_in(patch, SESSION_DEVICE.removeprefix("hpu-"))
        yield


@pytest.fixture(scope="session", name="stand_in")
def stand_in_fixture() -> Callable[..., Any]:
    return stand_in


@pytest.fixture(scope="session", name="stand_in_for_cores")
def stand_in_for_cores_fixture() -> Callable[..., Any]:
    return stand_in_for_cores


@pytest.fixture
def lazy_gaudi() -> Generator[Any, None, None]:
    with stand_in("lazy") as machinery:
        yield machinery


@pytest.fixture
def eager_gaudi() -> Generator[Any, None, None]:
    with stand_in("eager") as machinery:
        yield machinery
