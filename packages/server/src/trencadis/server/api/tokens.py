"""``/tokenize`` and ``/detokenize`` of vLLM: texts and conversations as the model's token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from trencadis.engine import InvalidRequest
from trencadis.server.api.characters import Text
from trencadis.server.api.chat_messages import ChatMessage
from trencadis.server.api.protocol import MAX_MESSAGES, ChatCompletionRequest, TemplateArguments
from trencadis.server.api.tools import MAX_TOOLS, FunctionTool
from trencadis.server.api.translation import chat_request
from trencadis.server.api.unsupported_fields import refuse_undeclared


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: a ``prompt``, or ``messages`` as the chat template renders them.

    ``add_special_tokens``: whether the tokens are added that begin and end a text; by default for a
    prompt alone, since templates write their own.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: Text | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        refuse_undeclared(self.model_extra)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("needs either prompt or messages", "prompt")
        return self

    def chat(self) -> ChatCompletionRequest:
        """The conversation as a chat request. Raises `InvalidRequest`."""
        continues = self.continue_final_message
        return chat_request(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=False if continues else self.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        refuse_undeclared(self.model_extra)
        return self


class TokenizeResponse(BaseModel):
    """The token ids. ``token_strs``: each as the vocabulary writes it, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of the tokens, without special tokens."""

    prompt: str
