"""``POST /v1/chat/completions/batch`` of vLLM: several conversations in one request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from trencadis.engine import InvalidRequest
from trencadis.server.api.chat_messages import ChatMessage
from trencadis.server.api.protocol import (
    MAX_CHOICES,
    MAX_MESSAGES,
    ChatCompletionRequest,
    RequestBody,
)
from trencadis.server.api.translation import chat_request

_ONE_CONVERSATION: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": ({},),
    "n": (1,),
    "prompt_logprobs": (),
    "return_prompt_text": (False,),
    "stream": (False,),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Fields for one conversation alone, in vLLM, too, with the values without effect."""


class ChatBatchRequest(RequestBody):
    """Conversations, and the fields of a chat request, which hold for each of them."""

    messages: Annotated[
        list[
            Annotated[
                list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
            ]
        ],
        Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
    ]

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if sum(map(len, self.messages)) > MAX_MESSAGES:
            raise InvalidRequest(
                f"the conversations have more than {MAX_MESSAGES} messages together", "messages"
            )
        for name, without_effect in _ONE_CONVERSATION.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in without_effect:
                raise InvalidRequest(
                    f"{name} is not supported for several conversations: leave it out, or send "
                    "each to /v1/chat/completions",
                    name,
                )
        return self

    def chats(self) -> list[ChatCompletionRequest]:
        """A chat request for each conversation. Raises `ValidationError`."""
        fields = self.model_extra or {}
        first = chat_request(
            model=self.model, messages=self.messages[0], **self.engine_fields, **fields
        )
        others = self.messages[1:]
        return [first, *(first.model_copy(update={"messages": each}) for each in others)]
