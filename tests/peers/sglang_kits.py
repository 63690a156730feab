"""SGLang's own kits of server tests, of the APIs that engine-serve has, on engine-serve.

``nox -s tests_kits`` runs them in an environment with SGLang, with the small model. `FAILS` has
those that fail, with the reason; one that is listed and passes is an error.
"""

from __future__ import annotations

import os
import subprocess
import time
import unittest
from collections.abc import Iterator
from importlib import import_module

import httpx
import openai
import pytest

KITS = {
    "anthropic_messages_kit": ("AnthropicMessagesMixin",),
    "basic_api_contract_kit": ("BasicAPIContractMixin",),
    "json_constrained_kit": ("JSONConstrainedMixin",),
    "json_mode_kit": ("JSONModeMixin",),
    "matched_stop_kit": ("MatchedStopMixin",),
}
MODEL = "default"  # some kits name no other
PORT = 18765
URL = f"http://127.0.0.1:{PORT}"
LIMIT_S = 180.0

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The small model's without its system prompt: a kit expects that a system prompt adds tokens."""

OWN_ROUTE = "SGLang's own route"
FAILS = {
    "test_json_generate": OWN_ROUTE,
    "test_mix_json_and_other": OWN_ROUTE,
    "test_finish_stop_regex_str": "stop_regex is a field of SGLang alone",
}


@pytest.fixture(scope="session", autouse=True)
def server() -> Iterator[None]:
    """engine-serve, from the environment whose Python ``SERVER_PYTHON`` names."""
    command = [os.environ["SERVER_PYTHON"], "-m", "trencadis.server", os.environ["KITS_MODEL"]]
    command += ["--port", str(PORT), "--served-model-name", MODEL]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", "--warmup", "none"]
    command += ["--chat-template", TEMPLATE]
    command += ["--dtype", "float32"]  # in bf16 the small model may repeat itself for ever
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, env=environ) as process:
        try:
            ends = time.monotonic() + LIMIT_S
            while not _answers():
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < ends, f"the server is not ready after {LIMIT_S} s"
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _answers() -> bool:
    try:
        return httpx.get(f"{URL}/health").status_code == 200
    except httpx.TransportError:
        return False


def _kits() -> Iterator[tuple[str, type]]:
    for module, names in KITS.items():
        kits = import_module(f"sglang.test.kits.{module}")
        for name in names:
            fields = {"model": MODEL, "base_url": URL, "api_key": "any"}
            made = type(f"Test{name}", (getattr(kits, name), unittest.TestCase), fields)
            for test in FAILS.keys() & set(dir(made)):
                setattr(made, test, unittest.expectedFailure(getattr(made, test)))
            yield made.__name__, made


globals().update(_kits())

globals()["TestJSONModeMixin"].client = openai.Client(api_key="any", base_url=f"{URL}/v1")
