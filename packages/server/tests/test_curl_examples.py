"""The curl examples of OpenAI's API reference, against a process with the small real model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from curl_examples import EMBEDDINGS, EXAMPLES, check_answer, needs_curl, printed_by_curl
from server_process import SMALL_MODEL, runs_small_model, serving_small_model

pytestmark = [*runs_small_model, needs_curl]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # The parser is for the examples with functions: this model's chat template tells none.
    with serving_small_model("--tool-call-parser", "hermes") as url:
        yield url


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_answered_or_refused_by_what_is_not_supported(url, name):
    example = EXAMPLES[name]
    status, printed = printed_by_curl(url, SMALL_MODEL, example)
    check_answer(example, status, printed)


def test_log_probabilities_are_printed(url):
    _, printed = printed_by_curl(url, SMALL_MODEL, EXAMPLES["chat logprobs"])
    (choice,) = json.loads(printed)["choices"]
    content = choice["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert choice["message"]["content"].startswith(content[0]["token"])


def test_the_example_of_embeddings_is_answered():
    with serving_small_model("--runner", "pooling") as url:
        status, printed = printed_by_curl(url, SMALL_MODEL, EMBEDDINGS)
    check_answer(EMBEDDINGS, status, printed)
    (item,) = json.loads(printed)["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    assert len(item["embedding"]) == 576
