"""The comparison of two servers, on answers made for it; no server is started."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest
from compare_servers import CHAT, Ask, compare, requests, table

CHAT_ASK = Ask("chat", CHAT, b"{}")
METRICS_ASK = Ask("metrics", "/metrics", method="GET")
OPENAPI_ASK = Ask("other routes", "/openapi.json", method="GET")

ANSWER = {"id": f"chatcmpl-{'0' * 32}", "created": 1, "text": "Paris"}
ERROR = {"error": {"message": "n is 0", "param": "n"}}
METRICS = "# HELP a Help.\n# TYPE a gauge\na 1.0\nvllm:request_success_total 3.0\n"
SCHEMA = {"description": "A route.", "properties": {"title": {"type": "string"}}}


def answer(content: object, status: int = 200, **headers: str) -> httpx.Response:
    text = content if isinstance(content, str) else json.dumps(content)
    return httpx.Response(status, text=text, headers=headers)


@pytest.mark.parametrize(
    ("ask", "first", "second", "kind"),
    [
        (CHAT_ASK, answer(ANSWER), answer({**ANSWER, "id": f"chatcmpl-{'a' * 32}"}), None),
        (CHAT_ASK, answer(ANSWER), answer({**ANSWER, "created": 7}), None),
        (CHAT_ASK, answer(ANSWER), answer({**ANSWER, "text": "Rome"}), "body"),
        (CHAT_ASK, answer(ANSWER), answer(dict(reversed(ANSWER.items()))), "body"),
        (CHAT_ASK, answer(ANSWER), answer(ANSWER, status=201), "status"),
        (CHAT_ASK, answer(ANSWER), answer(ANSWER, allow="GET"), "headers"),
        (CHAT_ASK, answer(ANSWER), answer(ANSWER, date="today"), None),
        (
            CHAT_ASK,
            answer(ERROR, 400),
            answer({"error": {**ERROR["error"], "message": "n must be 1 or more"}}, 400),
            "wording",
        ),
        (
            CHAT_ASK,
            answer(ERROR, 400),
            answer({"error": {**ERROR["error"], "param": "m"}}, 400),
            "body",
        ),
        (METRICS_ASK, answer(METRICS), answer(METRICS.replace("a 1.0", "a 2.0")), None),
        (METRICS_ASK, answer(METRICS), answer(METRICS.replace("Help", "Aid")), "wording"),
        (METRICS_ASK, answer(METRICS), answer(METRICS.replace("a 1.0", "b 1.0")), "body"),
        (METRICS_ASK, answer(METRICS), answer(METRICS.replace("3.0", "4.0")), "body"),
        (OPENAPI_ASK, answer(SCHEMA), answer({**SCHEMA, "description": "Another."}), "wording"),
        (OPENAPI_ASK, answer(SCHEMA), answer({**SCHEMA, "properties": {}}), "body"),
    ],
)
def test_differences_are_told_by_kind(ask, first, second, kind) -> None:
    difference = compare(ask, first, second)
    assert (difference and difference.kind) == kind


def test_a_difference_shows_where_the_answers_part() -> None:
    difference = compare(CHAT_ASK, answer("x" * 500 + "left"), answer("x" * 500 + "right"))
    assert "left" in difference.first
    assert "right" in difference.second
    assert len(difference.first) < 300


def test_the_same_seed_gives_the_same_requests_and_fixed_ones_are_always_there() -> None:
    first = requests(200, 0, "model", 8)
    assert first == requests(200, 0, "model", 8)
    assert len(first) == 200
    groups = Counter(ask.group for ask in first)
    assert groups["bad requests"] > 60
    assert groups["chat, streamed"] > 5
    assert groups["completions"] > 20
    other = requests(200, 1, "model", 8)
    assert other != first
    assert Counter(ask.group for ask in other)["bad requests"] == groups["bad requests"]


def test_the_table_counts_by_group_and_kind() -> None:
    difference = compare(CHAT_ASK, answer("a"), answer("b"))
    lines = table([CHAT_ASK, METRICS_ASK], [difference], Counter({200: 2})).splitlines()
    assert lines[0].split() == ["requests", "status", "headers", "body", "wording"]
    assert lines[1].split() == ["chat", "1", "0", "0", "1", "0"]
    assert lines[-2].split() == ["in", "all", "2", "0", "0", "1", "0"]
    assert lines[-1] == "A answered 2 x 200"
