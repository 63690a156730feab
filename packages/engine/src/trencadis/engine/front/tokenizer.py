"""The model's tokenizer and chat template, from transformers."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trencadis.engine.errors import ConfigError, InvalidRequest, ModelError
from trencadis.engine.grammars.grammar import tokenizer_json
from trencadis.engine.validators import is_text, shown

_TEMPLATE_ERRORS = (
    *(TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""What a template raises for messages and arguments that it cannot take."""


class Tokenizer:
    """The tokenizer of a checkpoint. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        special = [
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special and len(token.content) > 1
        ]
        # A lookahead, because occurrences may overlap.
        self._special = re.compile(f"(?=(?:{'|'.join(map(re.escape, special))}))")
        self._has_special = bool(special)
        self._longest_token = max(map(len, map(str.encode, tokenizer.get_vocab())))

    @classmethod
    def load(cls, source: str, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer in a directory or of a hub id, with another chat template if one is given.

        Raises `ModelError` when there is none, and `ConfigError` for a template that cannot be read
        or parsed.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{source} has no usable tokenizer: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(
                f"{source} has a slow tokenizer only: save its fast form (tokenizer.json) there"
            )
        if chat_template is not None:
            tokenizer.chat_template = _template_text(chat_template)
            _check_syntax(tokenizer)
        return cls(tokenizer)

    @property
    def backend(self) -> FastTokenizer:
        """The ``tokenizers`` object, for incremental decoding."""
        return self._tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return len(self._tokenizer)

    @property
    def chat_template(self) -> str | None:
        """The chat template in Jinja, for conversations with tools; None if there is none."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):  # templates by name, as transformers chooses them
            template = template.get("tool_use", template.get("default"))
        return str(template) if template else None

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

    def min_num_tokens(self, length: int) -> int:
        """The fewest tokens that a text of ``length`` characters can have."""
        return length // self._longest_token

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

        Special tokens come from the template alone: where a message or an argument spells one, it
        is encoded as ordinary text, so that no content can end its message or begin another.
        Raises `InvalidRequest` for messages that the template rejects, and for a model without a
        template.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template: use the completions endpoint", "messages"
            )
        given = (
            [dict(message) for message in messages],
            None if tools is None else [dict(tool) for tool in tools],
            dict(chat_template_kwargs or {}),
        )
        try:
            # Random digits, so that no content can have it and no filter of a template changes it.
            separator = f"\ue000{secrets.randbits(64)}\ue001"
            listed, listed_tools, named = self._without_special(given, separator)
            text = self._tokenizer.apply_chat_template(
                listed,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=listed_tools,
                **named,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the chat template rejects these messages: {error}", "messages"
            ) from error
        try:
            parts = [
                self.encode(part, add_special_tokens=False) for part in str(text).split(separator)
            ]
        except InvalidRequest as error:
            raise InvalidRequest(f"the rendered messages: {error}", "messages") from error
        return list(itertools.chain.from_iterable(parts))

    def _without_special(self, value: Any, separator: str) -> Any:
        """``value`` with a separator after the first character of each special token in a text."""
        if isinstance(value, str):
            if not self._has_special:
                return value
            cuts = [found.start() + 1 for found in self._special.finditer(value)]
            bounds = itertools.pairwise([0, *cuts, len(value)])
            return separator.join(value[low:high] for low, high in bounds)
        if isinstance(value, (list, tuple)):
            return [self._without_special(item, separator) for item in value]
        if isinstance(value, Mapping):
            return {
                self._without_special(key, separator): self._without_special(item, separator)
                for key, item in value.items()
            }
        return value


def _template_text(template: str) -> str:
    """The text of a template that is given as itself, or as the name of its file."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise ConfigError(
            f"chat_template {shown(template)} cannot be read: {error}", "chat_template"
        ) from error


def _check_syntax(tokenizer: PreTrainedTokenizerFast) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template is no Jinja template: {error}, in line {error.lineno}", "chat_template"
        ) from error
    except _TEMPLATE_ERRORS:
        pass  # it may refuse this conversation, which is an example
