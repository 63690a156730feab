"""A model in two ranks behind HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, save_tiny_model, session_members, wait_until

START_SECONDS = 240


@pytest.mark.slow
def test_a_server_with_two_ranks_answers_as_one_with_a_process_and_leaves_none(
    tmp_path: Path,
) -> None:
    answers = []
    for size in ("1", "2"):
        server = ServerProcess(
            *(str(save_tiny_model(tmp_path / size)), "--dtype", "float32", "--warmup", "none"),
            *("--tensor-parallel-size", size),
        )
        try:
            url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
            body = {"prompt": "a b c", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["text"])
            assert server.end() == 0
            wait_until(lambda leader=server.process.pid: not session_members(leader))
        finally:
            server.kill()
    assert answers[0] == answers[1]
    assert answers[0]


@pytest.mark.slow
def test_two_ranks_switch_to_the_model_of_each_request(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        save_tiny_model(tmp_path / name, seed=seed)
    file = tmp_path / "models.yaml"
    file.write_text("models: {first: {model: ./one}, second: {model: ./two, block_size: 16}}")
    answers = []
    for size in ("1", "2"):
        server = ServerProcess(
            *("--multi-model-config", str(file), "--dtype", "float32", "--warmup", "none"),
            *("--auto-switch", "--min-model-stay", "0.1", "--tensor-parallel-size", size),
        )
        try:
            url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
            for model in ("first", "second", "first"):
                body = {"model": model, "prompt": "a b c", "max_tokens": 32, "temperature": 0}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json()["choices"][0]["text"])
            assert server.end() == 0
            wait_until(lambda leader=server.process.pid: not session_members(leader))
        finally:
            server.kill()
    assert answers[:3] == answers[3:]
    assert answers[0] == answers[2] != answers[1]
