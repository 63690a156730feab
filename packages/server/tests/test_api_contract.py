"""Requests that are generated from ``/openapi.json``: every answer is one that it describes.

`CASES` for each operation with the slow tests, `SOAK_CASES` in the soak. A failure prints the
request as a curl command.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from stand_in_engine import StandInEngine

from trencadis.server import ServerSettings, create_app

schemathesis = pytest.importorskip("schemathesis")

CASES = 150
SOAK_CASES = 1250
CHECKS = (*("status_code_conformance", "content_type_conformance", "response_schema_conformance"),)
KEY = {"Authorization": "Bearer boss"}
OPERATIONS = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/admin/batch"),
    *("POST /v1/responses", "POST /v1/messages", "POST /v1/messages/count_tokens"),
    *("POST /v1/admin/drain", "GET /v1/models", "GET /v1/models/{name}", "GET /v1/admin/state"),
    *("POST /tokenize", "POST /detokenize", "POST /v1/chat/completions/batch"),
    *("GET /health", "GET /ping", "GET /ready", "GET /live", "GET /version", "GET /metrics"),
    *("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/responses/{response_id}/cancel",
    *("GET /load", "GET /health_generate", "GET /model_info", "GET /server_info"),
    "POST /invocations",
    *("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"),
)
EMBEDDING_OPERATIONS = (
    *("POST /v1/embeddings", "POST /v1/score", "POST /score"),
    *("POST /v1/rerank", "POST /v2/rerank", "POST /rerank", "POST /pooling", "POST /v2/embed"),
)
"""Those that a model of embeddings serves."""


def described(embedding_size: int = 0):
    engine = StandInEngine()
    engine.embedding_size = embedding_size
    app = create_app(engine, ServerSettings(admin_keys=["boss"], admin_rate_limit=1e6))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def check_operation(label: str, cases: int) -> None:
    """Send requests, valid and mutated. Statuses, media types and bodies must be as described."""
    schema = described(embedding_size=8 if label in EMBEDDING_OPERATIONS else 0)
    (operation,) = (each.ok() for each in schema.get_all_operations() if each.ok().label == label)
    modes = schemathesis.GenerationMode
    strategy = operation.as_strategy(generation_mode=modes.POSITIVE)
    if operation.body:
        strategy = strategy | operation.as_strategy(generation_mode=modes.NEGATIVE)
    checks = schemathesis.checks.CHECKS.get_by_names(CHECKS)
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def send(case) -> None:
        response = case.call(headers=KEY)
        statuses[response.status_code] += 1
        # A schema cannot say which requests this model can serve, so a 400 is always right.
        case.validate_response(response, checks=checks)

    send()
    print(label, dict(statuses))
    assert max(statuses) < 500, "a 503 is described, but this engine serves"


@pytest.mark.slow
@pytest.mark.parametrize("label", [*OPERATIONS, *EMBEDDING_OPERATIONS])
def test_every_answer_is_one_that_the_description_has(label: str) -> None:
    check_operation(label, CASES)


@pytest.mark.soak
@pytest.mark.parametrize(
    "label", [label for label in (*OPERATIONS, *EMBEDDING_OPERATIONS) if "POST" in label]
)
def test_thousands_of_answers_are_as_described(label: str) -> None:
    check_operation(label, SOAK_CASES)


@pytest.mark.slow
def test_no_operation_is_left_out() -> None:
    found = {each.ok().label for each in described().get_all_operations()}
    assert found == {*OPERATIONS, *EMBEDDING_OPERATIONS}
