"""`tests/utils.py` of vLLM, as far as tests of its server use it: the server is engine-serve.

The small model is served under the name of the test's own. Flags that engine-serve has are passed
on. Servers with the same flags are one process, and two are kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import anthropic
import conversations
import openai
import pytest
import vllm_stub
from reference_model import HfRunner, reranker
from server_process import START_SECONDS, ServerProcess

from trencadis.engine.models.default_model import default_model

PASSED = {
    "--chat-template": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-force-include-usage": 0,
    "--enable-lora": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-request-id-headers": 0,
    "--enable-server-load-tracking": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--host": 1,
    "--lora-modules": None,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-model-len": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--no-async-scheduling": 0,
    "--no-enable-prefix-caching": 0,
    "--reasoning-parser": 1,
    "--return-tokens-as-token-ids": 0,
    "--root-path": 1,
    "--runner": 1,
    "--seed": 1,
    "--served-model-name": 1,
    "--shutdown-timeout": 1,
    "--tool-call-parser": 1,
    "--uds": 1,
    "--api-key": 1,
}
"""Flags of engine-serve, with how many values each takes; None: those before the next flag."""

DROPPED = {
    "--dtype": 1,  # of the tests' GPU
    "--gpu-memory-utilization": 1,  # of the tests' GPU
    "--load-format": 1,
    "--structured-outputs-config.backend": 1,  # here is one
    "--tensor-parallel-size": 1,
    "--trust-remote-code": 0,  # the small model has none
    "--max-logprobs": 1,
    "--enable-log-requests": 0,
    "--show-hidden-metrics-for-version": 1,
    "--no-enable-log-requests": 0,
    "--config-format": 1,
    "--enable-sleep-mode": 0,
    "--ignore-patterns": 1,
    "--tokenizer-mode": 1,
    "--hf-overrides": 1,
    "--limit-mm-per-prompt": 1,  # of the test of the API description, which sends no images
    "--pooler-config": 1,
    "--port": 1,  # one that is free
    "--reasoning-config": 1,
    "--enable-scale-out": 0,
    "--enable-metrics": 0,
    "--chat-template-content-format": 1,
    "--trust-request-chat-template": 0,
}
"""Flags of vLLM that engine-serve lacks and whose tests run without them."""

OTHER_MODELS = {
    "--enable-prompt-embeds": "prompts of embeddings",
    "--limit-mm-per-prompt": "a model for images, sounds or videos",
    "--lora-module": "adapters (LoRA)",
    "--pooler-config.task": "a model for pooling",
    "--speculative-config": "a second model as draft",
    "--tool-server": "tools of the server",
    "--watermark-config": "watermarks",
    "--worker-extension-cls": "vLLM's own workers",
    "--model": "tensorizer's own format",
    "--skip-tokenizer-init": "a server without tokenizer",
}
"""Flags whose tests are skipped, with what they need."""

ON_A_CPU = ("--warmup", "none", "--dtype", "float32")
CONTEXT = 8192
"""That of the small model."""

PART = os.environ.get("PEERS_PART", "small")
"""Which tests run, see `tests_peers` of the noxfile."""

MODEL = "PEERS_MODEL"
"""The variable with the model that all servers serve instead of the small one."""

RERANKERS = ("reranker",)
"""Parts of the names of models that read query and document."""

POOLED = ("e5-small", "bge-", "MiniLM")
"""Parts of the names of models that do not generate: the small one's embeddings replace them."""

KEPT = 2
_servers: OrderedDict[tuple[str, ...], ServerProcess] = OrderedDict()


def flags_of(arguments: list[str]) -> list[str]:
    """Those of vLLM, as engine-serve takes them. Skips the test if they need another model."""
    left = []
    for word in arguments:
        left += word.split("=", 1) if word.startswith("--") else [word]
    flags = []
    while left:
        word = left.pop(0)
        name = "--" + word[2:].replace("_", "-")
        if name in OTHER_MODELS and not (PART == "schema" and name == "--limit-mm-per-prompt"):
            pytest.skip(f"needs {OTHER_MODELS[name]}")
        if name in PASSED:
            values = [left.pop(0) for _ in range(_num_values(PASSED[name], left))]
            if name == "--max-model-len":
                values = [str(min(int(values[0]), CONTEXT))]
            flags += [name, *values]
        elif name in DROPPED:
            # A list of values ends at the next flag.
            for _ in range(DROPPED[name]):
                if left and not left[0].startswith("--"):
                    left.pop(0)
        else:
            pytest.fail(f"engine-serve has no {word}")
    return flags


def _num_values(number: int | None, words: list[str]) -> int:
    if number is not None:
        return number
    flags = (place for place, word in enumerate(words) if word.startswith("--"))
    return next(flags, len(words))


def runner_of(model: str) -> list[str]:
    """The flag that makes the small model one for embeddings, where the test's own is."""
    return ["--runner", "pooling"] if any(part in model for part in POOLED) else []


def set_model(directory: str) -> None:
    """From now on servers serve this model, also those of other processes that start then."""
    os.environ[MODEL] = directory


def model_of_test(name: str) -> list[str]:
    """The model for a test whose own has this name, as arguments; none for the small one."""
    if trained := os.environ.get(MODEL):
        arguments = json.dumps({"date_string": conversations.DATE})
        return [trained, "--default-chat-template-kwargs", arguments]
    if any(part in name for part in RERANKERS):
        return [reranker(default_model()), "--score-prompt", "joined"]
    return []


class RemoteOpenAIServer:
    """Its constructor waits until the server listens; `with` ends nothing, see `end_all`."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        override_hf_configs: dict[str, Any] | None = None,
        **options: object,
    ) -> None:
        given = [str(argument) for argument in vllm_serve_args]
        flags = [*model_of_test(model), *flags_of(given)]
        if MODEL in os.environ and "--chat-template" not in flags:
            template = conversations.template_of(given)
            flags += [] if template is None else ["--chat-template", template]
        if "--served-model-name" not in flags:
            flags += ["--served-model-name", model]
        if "--runner" not in flags:
            flags += runner_of(model)
        if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in (env_dict or {}):
            flags += ["--admin-api-key", self.DUMMY_API_KEY, "--lora-directory", "/"]
        if seed is not None:
            flags += ["--seed", str(seed)]
        key = (*flags, *(f"{name}={value}" for name, value in (env_dict or {}).items()))
        if key not in _servers or _servers[key].process.poll() is not None:
            while len(_servers) >= KEPT:
                _servers.popitem(last=False)[1].kill()
            server = ServerProcess(*ON_A_CPU, *flags, environ=env_dict)
            try:
                server.url = server.wait_for(r" at ((http|unix):\S+) ", START_SECONDS)[1]
            except BaseException:
                server.kill()
                raise
            _servers[key] = server
        _servers.move_to_end(key)
        self._server = _servers[key]
        self.proc = self._server.process
        scheme, _, place = self._server.url.partition(":")
        self.uds = place if scheme == "unix" else None
        self.host, _, port = place.rpartition("/")[2].partition(":")
        self.port = int(port or 0)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exception: object) -> None:
        """The next test may need the same server."""

    @property
    def url_root(self) -> str:
        return self._server.url if self.uds is None else "http://localhost"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", options))

    def _options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        defaults = {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return {"base_url": self.url_for(path), **defaults, **options}


def end_all() -> None:
    while _servers:
        _servers.popitem()[1].kill()


class _Utils(ModuleType):
    RemoteOpenAIServer = RemoteOpenAIServer
    RemoteVLLMServer = RemoteOpenAIServer
    VLLM_PATH = Path.cwd()
    ROCM_EXTRA_ARGS: ClassVar[list[str]] = []
    ROCM_ENV_OVERRIDES: ClassVar[dict[str, str]] = {}
    HfRunner = HfRunner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vllm_stub.stub(name)


def install() -> None:
    """From now on `tests.utils` is this; tests/conftest.py is vLLM's own engine's."""
    vllm_stub.install()
    sys.modules["tests.utils"] = _Utils("tests.utils")
    sys.modules["tests.conftest"] = _Utils("tests.conftest")
    HfRunner.base = default_model()
