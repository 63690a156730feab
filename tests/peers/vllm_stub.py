"""A package `vllm` without content, so that vLLM's tests of a server can be imported.

What tests of a server use of it, the tokenizer of their model, is that of the small model. Whatever
else a test takes from it is vLLM's own code, which is not under test here: the test is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import reference_model
import torch
from pydantic import BaseModel
from pydantic_core import core_schema
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

import trencadis.server
from trencadis.engine.models.default_model import default_model

running = False
"""Whether a test runs or is being set up, rather than modules being imported."""

RANK = 4
"""Of the adapter."""

OPTIONAL = ("lm_eval", "openai_harmony", "model_hosting_container_standards", "pybase64", "mteb")
"""Other packages that tests import, of which those that are missing are replaced too."""


class _Error(Exception):
    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args)


class _StubType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if running:
            pytest.skip(f"uses vLLM's own {cls.__name__}")
        # As a decorator, `@stub(...)` or `@stub`, it leaves the function as it is.
        return args[0] if len(args) == 1 and callable(args[0]) else stub(cls.__name__)

    def __str__(cls) -> str:
        return cls.__name__.rpartition(".")[2]

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())

    def __setitem__(cls, key: object, value: object) -> None: ...

    def _same(cls, other: object) -> Any:
        return cls

    __or__ = __ror__ = __truediv__ = __getitem__ = _same


def stub(name: str) -> Any:
    """A class in place of a name of vLLM. Errors are exceptions, which `pytest.raises` takes."""
    last = name.rpartition(".")[2]
    if last.endswith(("Error", "Exception")):
        return type(last, (_Error,), {})
    anything = classmethod(lambda cls, source, handler: core_schema.any_schema())
    return _StubType(name, (), {"__get_pydantic_core_schema__": anything})


class _BatchResponse(BaseModel):
    status_code: int
    request_id: str
    body: Any


class _BatchRequestOutput(BaseModel):
    id: str
    custom_id: str
    response: _BatchResponse | None
    error: Any | None


class _Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class _Document(BaseModel):
    text: str | None


class _Ranked(BaseModel):
    index: int
    document: _Document
    relevance_score: float


class _Score(BaseModel):
    index: int
    object: str
    score: float


class _ScoreResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    data: list[_Score]
    usage: _Usage


class _RerankResponse(BaseModel):
    id: str
    model: str
    usage: _Usage
    results: list[_Ranked]


class _Pooled(BaseModel):
    index: int
    object: str
    data: list[list[float]] | list[float] | str


class _PoolingResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    data: list[_Pooled]
    usage: _Usage


class _Vector(BaseModel):
    index: int
    object: str
    embedding: list[float] | str


class _EmbeddingResponse(BaseModel):
    id: str = ""  # which vLLM's class makes up, too, as the time
    object: str
    created: int = 0
    model: str
    data: list[_Vector]
    usage: _Usage


@cache
def random_adapter() -> str:
    """The directory of an adapter for the small model, in place of those that tests download."""
    directory, config = Path(tempfile.mkdtemp()), AutoConfig.from_pretrained("")
    sizes = {"lora_A": (RANK, config.hidden_size), "lora_B": (config.hidden_size, RANK)}
    prefix = "base_model.model.model.layers"
    tensors = {
        f"{prefix}.{layer}.self_attn.q_proj.{name}.weight": torch.randn(size) / 100
        for layer in range(config.num_hidden_layers)
        for name, size in sizes.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    return str(directory)


_USED = {
    "get_tokenizer": lambda: AutoTokenizer.from_pretrained,
    "__version__": lambda: trencadis.server.__version__,
    "BatchRequestOutput": lambda: _BatchRequestOutput,
    "EmbeddingResponse": lambda: _EmbeddingResponse,
    "PoolingResponse": lambda: _PoolingResponse,
    "RerankResponse": lambda: _RerankResponse,
    "ScoreResponse": lambda: _ScoreResponse,
    "check_embeddings_close": lambda: reference_model.check_embeddings_close,
    "float_embeddings": lambda: reference_model.float_embeddings,
    "run_embedding_correctness_test": lambda: reference_model.run_embedding_correctness_test,
    "MiB_bytes": lambda: 1 << 20,
    "AudioAsset": lambda: lambda name: SimpleNamespace(url=f"https://localhost/{name}"),
    "current_platform": lambda: SimpleNamespace(is_rocm=lambda: False, is_xpu=lambda: False),
    "hf_api": lambda: (
        lambda: SimpleNamespace(snapshot_download=lambda *names, **options: random_adapter())
    ),
}
"""What tests of a server use, by its name in any module."""


class _StubModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name in _USED:
            return _USED[name]()
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Its names are made when they are asked for."""


def _of_the_small_model(load: Any) -> Any:
    return lambda *names, **options: load(os.environ.get("PEERS_MODEL", default_model()))


def install() -> None:
    """From now on `import vllm` finds the stub, even where vLLM is installed.

    Tokenizers and configurations are those of the small model, whichever is named.
    """
    for auto in (AutoConfig, AutoTokenizer):
        auto.from_pretrained = _of_the_small_model(auto.from_pretrained)
    missing = tuple(name for name in OPTIONAL if importlib.util.find_spec(name) is None)
    sys.meta_path.insert(0, _Finder("vllm", "tests.models", "tests.v1", *missing))
