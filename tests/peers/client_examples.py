"""The first documented example of clients of the OpenAI API and of vLLM, against engine-serve.

Of each client the example is its own; the address, the model and limits of an answer are ours.
`nox -s tests_clients` installs the clients, each into an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_process import SMALL_MODEL, START_SECONDS, ServerProcess

from trencadis.engine.models.default_model import default_model

QUESTION = "What is the capital of France?"
KEY = "none"


class User(BaseModel):
    """A person, as in the examples of instructor."""

    name: Literal["Jason", "Anna"]
    age: Literal[25, 30]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sizes = ("--max-model-len", "2048", "--max-num-seqs", "8", "--dtype", "float32")
    server = ServerProcess(*sizes, "--warmup", "none", "--tool-call-parser", "hermes")
    try:
        yield server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
    finally:
        server.kill()


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=getattr(instructor.Mode, mode)
    )
    user = client.chat.completions.create(
        model=SMALL_MODEL,
        messages=[{"role": "user", "content": "Jason is 25 years old."}],
        response_model=User,
    )
    assert isinstance(user, User)


def test_llama_index(url: str) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    model = module.OpenAILike(
        model=SMALL_MODEL, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, max_tokens=32
    )
    assert "Paris" in str(model.complete(QUESTION))
    assert "Paris" in "".join(part.delta for part in model.stream_complete(QUESTION))


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api(api)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
    agent = agents.Agent(
        name="Assistant",
        instructions="You are a helpful assistant",
        model=SMALL_MODEL,
        model_settings=agents.ModelSettings(max_tokens=64),
    )
    result = asyncio.run(agents.Runner.run(agent, QUESTION))
    assert result.final_output


def test_dspy(url: str) -> None:
    dspy = pytest.importorskip("dspy")
    model = dspy.LM(
        f"openai/{SMALL_MODEL}",
        api_base=f"{url}/v1",
        api_key=KEY,
        model_type="chat",
        cache=False,
        temperature=0,
        max_tokens=128,
    )
    assert "Paris" in model(QUESTION)[0]


def test_outlines(url: str) -> None:
    outlines = pytest.importorskip("outlines")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    model = outlines.from_vllm(client, SMALL_MODEL)
    assert model(QUESTION, Literal["Paris", "London"]) in ("Paris", "London")
    assert User.model_validate_json(model("Create a user.", User, max_tokens=64))
    assert model("A number:", outlines.regex("[0-9]{3}"), max_tokens=16).isdigit()


def test_guidellm(url: str, tmp_path: Path) -> None:
    pytest.importorskip("guidellm")
    file = tmp_path / "report.json"
    model, tokenizer = f"kind=openai_http,target={url},model={SMALL_MODEL}", default_model()
    command = [sys.executable, "-m", "guidellm", "run", "--backend", model]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--output", f"kind=json,path={file}", "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"successful"' in file.read_text("utf-8")


QUESTIONS = (
    ("The capital of France is", ("London", "Paris", "Rome"), 1),
    ("Water is made of hydrogen and", ("iron", "gold", "oxygen", "salt"), 2),
    ("The opposite of hot is", ("cold", "warm"), 0),
    ("Two plus two is", ("three", "four", "five"), 1),
)


def test_lm_eval_scores_as_transformers(url: str, tmp_path: Path) -> None:
    """Multiple choice on local data: each log-likelihood to five digits, in fp32."""
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    data = tmp_path / "questions.jsonl"
    lines = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    manager = tasks.TaskManager()
    served = f"model={SMALL_MODEL},base_url={url}/v1/completions,tokenizer={default_model()}"
    local = f"pretrained={default_model()},dtype=float32,device=cpu"
    found: dict[str, Any] = {}
    for model, arguments in (("local-completions", served), ("hf", local)):
        found[model] = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=[dict(task)],
            task_manager=manager,
            batch_size=1,
        )
    scores = {
        model: [
            answer[0]
            for sample in result["samples"]["questions"]
            for answer in sample["filtered_resps"]
        ]
        for model, result in found.items()
    }
    assert len(scores["hf"]) == sum(len(choices) for _, choices, _ in QUESTIONS)
    assert scores["local-completions"] == pytest.approx(scores["hf"], rel=1e-5)
    accuracies = {result["results"]["questions"]["acc,none"] for result in found.values()}
    assert len(accuracies) == 1
