"""An error as an HTTP response, in the form of the API that the request was sent to."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.paths import MESSAGES_PATH, is_under
from trencadis.server.request_ids import REQUEST_ID, given_request_id


class ErrorResponse(Response):
    """The response for an error: of the Anthropic API under ``/v1/messages``, else of OpenAI's."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status, headers=error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        is_messages = is_under(scope, MESSAGES_PATH)
        body = error.anthropic_body if is_messages else error.body
        headers = dict(error.headers)
        if name := given_request_id(Headers(scope=scope)):
            headers[REQUEST_ID] = name
        response = JSONResponse(body, status_code=error.status, headers=headers)
        await response(scope, receive, send)
