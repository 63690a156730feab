"""The model's tokenizer and chat template, from transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trencadis.engine.errors import InvalidRequest, ModelError
from trencadis.engine.grammars.grammar import tokenizer_json
from trencadis.engine.validators import is_text, shown


class Tokenizer:
    """The tokenizer of a checkpoint. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, source: str) -> Tokenizer:
        """The tokenizer in a directory or of a hub id. Raises `ModelError` when there is none."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{source} has no usable tokenizer: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(
                f"{source} has a slow tokenizer only: save its fast form (tokenizer.json) there"
            )
        return cls(tokenizer)

    @property
    def backend(self) -> FastTokenizer:
        """The ``tokenizers`` object, for incremental decoding."""
        return self._tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return len(self._tokenizer)

    def to_json(self) -> str:
        """The text of ``tokenizer.json``, without padding and truncation."""
        return tokenizer_json(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `InvalidRequest` for what UTF-8 cannot encode."""
        if not is_text(text):
            raise InvalidRequest(
                f"the prompt must be a text that UTF-8 can encode, got {shown(text)}", "prompt"
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Text of a single token. An incomplete character becomes U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the model's chat template.

        Raises `InvalidRequest` for messages that the template rejects, and for a model without a
        template.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template: use the completions endpoint", "messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=[dict(tool) for tool in tools] if tools is not None else None,
                **(chat_template_kwargs or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template rejects these messages: {error}", "messages"
            ) from error
        try:
            return self.encode(str(text), add_special_tokens=False)
        except InvalidRequest as error:
            raise InvalidRequest(f"the rendered messages: {error}", "messages") from error
