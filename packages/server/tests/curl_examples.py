"""The requests of the curl examples in OpenAI's API reference, and curl to send them.

They are those of the descriptions that OpenAI publishes as openapi.yaml, in their fields and
values; only host, key and model are other ones.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import attrs
import pytest

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@attrs.frozen
class Example:
    """``path`` below /v1; MODEL in it stands for the name. ``body``: of a POST, without the model.

    ``param``: the field that a server of texts rejects; None for an example that it answers.
    """

    path: str
    body: dict[str, Any] | None = None
    param: str | None = None


IMAGE = (
    "https://upload.wikimedia.org/wikipedia/commons/thumb/d/dd/Gfp-wisconsin-madison-the-nature-"
    "boardwalk.jpg/2560px-Gfp-wisconsin-madison-the-nature-boardwalk.jpg"
)
HELLO = [{"role": "user", "content": "Hello!"}]
HELPFUL = [{"role": "developer", "content": "You are a helpful assistant."}, *HELLO]
BOSTON = "What is the weather like in Boston today?"
TEST = {"prompt": "Say this is a test", "max_tokens": 7, "temperature": 0}
LOCATION = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
WEATHER = {
    "name": "get_current_weather",
    "description": "Get the current weather in a given location",
}


def parameters(*required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"location": LOCATION, "unit": UNIT},
        "required": list(required),
    }


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


CHAT = {
    "default": Example("chat/completions", {"messages": HELPFUL}),
    "image input": Example(
        "chat/completions",
        {
            "messages": asking(
                {"type": "text", "text": "What is in this image?"},
                {"type": "image_url", "image_url": {"url": IMAGE}},
            ),
            "max_tokens": 300,
        },
        param="messages[0].content",
    ),
    "streaming": Example("chat/completions", {"messages": HELPFUL, "stream": True}),
    "functions": Example(
        "chat/completions",
        {
            "messages": [{"role": "user", "content": BOSTON}],
            "tools": [
                {"type": "function", "function": {**WEATHER, "parameters": parameters("location")}}
            ],
            "tool_choice": "auto",
        },
    ),
    "logprobs": Example(
        "chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    ),
}
COMPLETIONS = {
    "no streaming": Example("completions", TEST),
    "streaming": Example("completions", {**TEST, "stream": True}),
}
RESPONSES = {
    "text input": Example(
        "responses", {"input": "Tell me a three sentence bedtime story about a unicorn."}
    ),
    "image input": Example(
        "responses",
        {
            "input": asking(
                {"type": "input_text", "text": "what is in this image?"},
                {"type": "input_image", "image_url": IMAGE},
            )
        },
        param="input[0].content",
    ),
    "file input": Example(
        "responses",
        {
            "input": asking(
                {"type": "input_text", "text": "what is in this file?"},
                {
                    "type": "input_file",
                    "file_url": "https://www.berkshirehathaway.com/letters/2024ltr.pdf",
                    "detail": "auto",
                },
            )
        },
        param="input[0].content",
    ),
    "web search": Example(
        "responses",
        {
            "tools": [{"type": "web_search_preview"}],
            "input": "What was a positive news story from today?",
        },
        param="tools[0].type",
    ),
    "file search": Example(
        "responses",
        {
            "tools": [
                {
                    "type": "file_search",
                    "vector_store_ids": ["vs_1234567890"],
                    "max_num_results": 20,
                }
            ],
            "input": "What are the attributes of an ancient brown dragon?",
        },
        param="tools[0].type",
    ),
    "streaming": Example(
        "responses",
        {"instructions": "You are a helpful assistant.", "input": "Hello!", "stream": True},
    ),
    "functions": Example(
        "responses",
        {
            "input": BOSTON,
            "tools": [
                {"type": "function", **WEATHER, "parameters": parameters("location", "unit")}
            ],
            "tool_choice": "auto",
        },
    ),
    "reasoning": Example(
        "responses",
        {"input": "How much wood would a woodchuck chuck?", "reasoning": {"effort": "high"}},
    ),
}
MODELS = {"list": Example("models"), "retrieve": Example("models/MODEL")}
EMBEDDINGS = Example(
    "embeddings",
    {"input": "The food was delicious and the waiter...", "encoding_format": "float"},
)

EXAMPLES = {
    f"{group} {title}": example
    for group, examples in (
        ("chat", CHAT),
        ("completions", COMPLETIONS),
        ("responses", RESPONSES),
        ("models", MODELS),
    )
    for title, example in examples.items()
}
"""Those for a server that generates, by name. `EMBEDDINGS` is for one of embeddings."""

OBJECTS = {
    "chat/completions": "chat.completion",
    "completions": "text_completion",
    "responses": "response",
    "models": "list",
    "models/MODEL": "model",
    "embeddings": "list",
}


def printed_by_curl(url: str, model: str, example: Example) -> tuple[int, str]:
    """The status of the answer to an example, and what curl prints."""
    command = ["curl", f"{url}/v1/{example.path.replace('MODEL', model)}"]
    if example.body is not None:
        command += ["-H", "Content-Type: application/json"]
    command += ["-H", "Authorization: Bearer sk-none"]
    if example.body is not None:
        command += ["-d", json.dumps({"model": model, **example.body}, indent=2)]
    command += ["--silent", "--write-out", "%{stderr}%{http_code}", "--max-time", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return int(done.stderr), done.stdout


def check_answer(example: Example, status: int, printed: str) -> None:
    """The answer is one of the example's kind, or the error that names what is not supported."""
    if example.param is not None:
        assert status == 400, printed
        assert json.loads(printed)["error"]["param"] == example.param
        return
    assert status == 200, printed
    if not (example.body or {}).get("stream"):
        assert json.loads(printed)["object"] == OBJECTS[example.path]
    elif example.path == "responses":  # a small model may write until its context is full
        last = printed.rpartition("event: ")[2].partition("\n")[0]
        assert last in ("response.completed", "response.incomplete")
    else:
        assert printed.endswith("data: [DONE]\n\n")
