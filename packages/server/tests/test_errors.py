"""What an error becomes: status, code and form, and whether a client is told to try again."""

from __future__ import annotations

import pytest

from trencadis.engine import (
    BucketMiss,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineSleeping,
    EngineUnresponsive,
    InvalidRequest,
    ModelNotActiveError,
    ProcessUnresponsive,
    SwitchFailedError,
    SwitchInProgressError,
    UnknownModelError,
)
from trencadis.server.errors import ApiError, RequestAbortedError, as_api_error, server_stopping


@pytest.mark.parametrize(
    ("error", "status", "code", "may_retry"),
    [
        (InvalidRequest("no"), 400, "invalid_value", False),
        (UnknownModelError("no"), 404, "model_not_found", False),
        (SwitchFailedError("no", "prepare", "m"), 500, "model_switch_failed", False),
        (RuntimeError("no"), 500, "internal_error", False),
        (EngineError("no"), 500, "internal_error", False),
        (SwitchInProgressError("no"), 503, "model_switching", True),
        (ModelNotActiveError("no"), 503, "model_switching", True),
        (EngineSleeping("no"), 503, "engine_sleeping", False),
        (EngineOverloaded("no"), 503, "engine_overloaded", True),
        (EngineRestarting("no"), 503, "engine_restarting", True),
        (EngineUnresponsive("no"), 503, "engine_unresponsive", False),
        (EngineDead("no"), 503, "engine_dead", False),
        (ProcessUnresponsive("no"), 503, "process_unresponsive", True),
        (BucketMiss("no"), 503, "bucket_miss", False),
        (RequestAbortedError("no"), 503, "request_aborted", True),
    ],
)
def test_an_error_says_whether_a_later_try_may_succeed(error, status, code, may_retry):
    answer = as_api_error(error, retry_after=7)
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers == ({"Retry-After": "7"} if may_retry else {})
    assert as_api_error(answer) is answer
    kind = "invalid_request_error" if status < 500 else "server_error"
    assert answer.body["error"]["type"] == kind


def test_a_client_is_told_to_wait_for_a_second_where_nothing_else_is_set():
    assert as_api_error(EngineOverloaded("no")).headers == {"Retry-After": "1"}
    assert server_stopping().headers == {"Retry-After": "1", "Connection": "close"}
    assert server_stopping(9).headers["Retry-After"] == "9"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (409, "api_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "api_error"),
    ],
)
def test_an_error_has_the_type_of_its_status_in_anthropics_api(status, kind):
    error = ApiError(status, "no", param="p", code="c")
    written = {"type": kind, "message": "no", "param": "p", "code": "c"}
    assert error.anthropic_body == {"type": "error", "error": written}
    overloaded = ApiError(status, "no", code="engine_overloaded").anthropic_body
    assert overloaded["error"]["type"] == "overloaded_error"


def test_a_message_above_600_characters_is_cut():
    assert ApiError(400, "x" * 600).message == str(ApiError(400, "x" * 600)) == "x" * 600
    assert ApiError(400, "x" * 601).message == "x" * 599 + "…"
