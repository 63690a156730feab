"""The model's tokenizer and chat template, from transformers."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trencadis.engine.api.scoring import PairPrompt
from trencadis.engine.errors import ConfigError, InvalidRequest, ModelError, shown
from trencadis.engine.front.chat_renderer import PATIENT_SECONDS, ChatRenderer
from trencadis.engine.grammars.grammar import tokenizer_json
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.models.chat_templates import template_text
from trencadis.engine.validators import is_text

_TEMPLATE_ERRORS = (
    *(TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""What a template raises for messages that it cannot take."""

_UNSENDABLE = (ValueError, TypeError, RecursionError)
"""What is raised for messages and arguments that JSON cannot hold."""


_OWN_ARGUMENTS = frozenset(
    {
        *("chat_template", "conversations", "tools", "return_assistant_tokens_mask"),
        *("add_generation_prompt", "continue_final_message"),
    }
)
"""Arguments of ``render_jinja_template`` that are not arguments of the template."""

_QWEN3_RERANKER = (
    "{%- set task = instruction or 'Given a web search query, retrieve relevant passages that "
    "answer the query' -%}"
    "{%- set query = messages | selectattr('role', 'eq', 'query') | first -%}"
    "{%- set document = messages | selectattr('role', 'eq', 'document') | first -%}"
    "{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>'
    "\\n<|im_start|>user\\n<Instruct>: ' + task + '\\n<Query>: ' + query.content + "
    "'\\n<Document>: ' + document.content + '<|im_end|>\\n<|im_start|>assistant\\n<think>"
    "\\n\\n</think>\\n\\n' -}}"
)
"""The prompt of the model card: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""


def _characters_of_bytes() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for, as in GPT-2.

    Printable characters of Latin-1 stand for themselves; the characters from U+0100 stand for the
    other bytes, in their order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


_BYTE_OF = _characters_of_bytes()

_SLICE_CHARACTERS = 1 << 14
"""Characters that are searched for special tokens at once: milliseconds with 256 of them."""

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token of a vocabulary with byte fallback that stands for one byte."""


def _as_json(value: Any) -> Any:
    """A value of a tokenizer's configuration: of a special token its text."""
    if isinstance(value, AddedToken):
        return value.content
    if isinstance(value, Mapping):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


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
        self._longest_special = max(map(len, special), default=0)
        self._renderer = ChatRenderer()
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
        self._decoder = json.dumps(decoder, ensure_ascii=False)
        """The decoder of ``tokenizer.json``, which says how tokens spell bytes and spaces."""
        self._longest_token = max(map(len, map(str.encode, tokenizer.get_vocab())))

    @classmethod
    def load(cls, source: str, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer in a directory or of a hub id, with another chat template if one is given.

        Raises `ModelError` when there is none, and `ConfigError` for a template that cannot be read
        or parsed.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except BROKEN_FILE_ERRORS as error:
            raise ModelError(f"{source} has no usable tokenizer: {reason_of(error)}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(
                f"{source} has a slow tokenizer only: save its fast form (tokenizer.json) there"
            )
        _check_vocabulary(tokenizer, source)
        if chat_template is not None:
            tokenizer.chat_template = template_text(chat_template)
            _check_syntax(tokenizer)
        return cls(tokenizer)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The UTF-8 bytes that a token adds to a text.

        Several tokens may share the bytes of a character. A special token that is skipped adds
        none.
        """
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        if added is not None:
            is_skipped = added.special and skip_special_tokens
            return b"" if is_skipped else str(added.content).encode()
        piece = self.backend.id_to_token(token_id) or ""
        if '"ByteLevel"' in self._decoder:
            if set(piece) <= _BYTE_OF.keys():
                return bytes(_BYTE_OF[character] for character in piece)
        elif '"ByteFallback"' in self._decoder and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        elif "\u2581" in self._decoder:
            return piece.replace("\u2581", " ").encode()
        return self.token_text(token_id).encode()

    def start_renderer(self) -> None:
        """Start the process that renders chat templates, so that no request waits for it.

        Raises `RequestFailed` where it cannot be started, and after `close`.
        """
        if self._tokenizer.chat_template:
            self._renderer.start()

    def close(self) -> None:
        """End the processes that render chat templates, for good: later conversations fail."""
        self._renderer.close()

    def release(self) -> None:
        """End the processes that render chat templates, after the conversations that are rendered
        now. A later conversation starts them again."""
        self._renderer.release()

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

    @property
    def configuration(self) -> dict[str, Any]:
        """What ``tokenizer_config.json`` says, as values of JSON, without paths of this machine."""
        values = {
            name: value
            for name, value in self._tokenizer.init_kwargs.items()
            if name != "name_or_path" and not name.endswith("_file")
        }
        return {**_as_json(values), "tokenizer_class": type(self._tokenizer).__name__}

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
        """Text of tokens. An incomplete character becomes U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Text of a single token. An incomplete character becomes U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it, such as ``Ġis``; "" for one that it lacks."""
        return str(self.backend.id_to_token(token_id) or "")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        quick: bool | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the model's chat template.

        Special tokens come from the template alone: where a message or an argument spells one, it
        is encoded as ordinary text, so that no content can end its message or begin another.
        The template is rendered in a separate process (`template_process`). ``quick``: True to give
        up early with `SlowConversation`, False for a conversation with which that happened; None
        for both (`ChatRenderer`). Raises `InvalidRequest` for messages that the template rejects or
        that take too long to render, and for a model without a template; `RequestFailed` where the
        process does not answer.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template: use the completions endpoint", "messages"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        _check_template_arguments(chat_template_kwargs)
        fixed = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self._rendered(None, messages, tools, chat_template_kwargs or {}, fixed, quick)

    def render_pair(
        self,
        prompt: PairPrompt,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
        quick: bool | None = None,
    ) -> list[int]:
        """Token ids of the prompt by which a model scores a document for a query.

        ``instruction`` is the system message of a template, and its argument of this name, as in
        sentence-transformers and in vLLM. ``add_special_tokens`` matters to texts that are joined;
        a template has its own, and what texts spell is ordinary text, as in `render_chat`. Raises
        as that does; an instruction that the form has no place for is an `InvalidRequest`.
        """
        texts = {"query": query, "document": document}
        if instruction is not None:
            texts["instruction"] = instruction
        for name, text in texts.items():
            if not is_text(text):
                raise InvalidRequest(
                    f"the {name} must be a text that UTF-8 can encode, got {shown(text)}", name
                )
        _check_template_arguments(chat_template_kwargs)
        _check_sendable(chat_template_kwargs)
        if prompt.form == "joined":
            declared = prompt.instruction or None
            _check_joined(declared if instruction is None else instruction, chat_template_kwargs)
            token_ids = self.encode(query + document, add_special_tokens)
        else:
            token_ids = self._rendered_pair(
                prompt, query, document, instruction, chat_template_kwargs or {}, quick
            )
        return _without_padding(token_ids, prompt.pad_token_id)

    def _rendered_pair(
        self,
        prompt: PairPrompt,
        query: str,
        document: str,
        instruction: str | None,
        arguments: Mapping[str, Any],
        quick: bool | None,
    ) -> list[int]:
        """Token ids of what a template makes of a pair, with the ``arguments`` of a client."""
        # What the checkpoint declares are defaults: what a client sends replaces them.
        replaced = {*arguments, *([] if instruction is None else ["instruction"])}
        fixed = {"add_generation_prompt": False} | {
            name: value for name, value in prompt.arguments.items() if name not in replaced
        }
        if instruction is None:
            instruction = prompt.instruction or None
        roles = ("user", "assistant") if prompt.form == "conversation" else ("query", "document")
        messages = [
            *([] if instruction is None else [{"role": "system", "content": instruction}]),
            {"role": roles[0], "content": query},
            {"role": roles[1], "content": document},
        ]
        given = {} if instruction is None else {"instruction": instruction}
        given |= arguments
        template = _QWEN3_RERANKER if prompt.form == "qwen3-reranker" else None
        return self._rendered(template, messages, None, given, fixed, quick)

    def _rendered(
        self,
        template: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        fixed: Mapping[str, Any],
        quick: bool | None,
    ) -> list[int]:
        """Token ids of what a template makes of messages; None for the model's own template.

        ``arguments`` of the template may come from a client, ``fixed`` ones may not.
        """
        given = (
            [_without_none(message) for message in messages],
            None if tools is None else [dict(tool) for tool in tools],
            dict(arguments),
        )
        # Random digits, so that no content can have it and no filter of a template changes it.
        separator = f"\ue000{secrets.randbits(64)}\ue001"
        try:
            listed, listed_tools, named = self._without_special(given, separator)
            rendered = {
                "chat_template": template or self._tokenizer.get_chat_template(None, listed_tools),
                "conversations": [listed],
                "tools": listed_tools,
                **fixed,
            }
            answer = self._renderer.render(
                self._tokenizer.special_tokens_map | named | rendered, quick
            )
        except _UNSENDABLE as error:
            raise _rejected(error) from error
        if "timed_out" in answer:
            raise _rejected(f"rendering them takes more than {PATIENT_SECONDS:.0f} s")
        if "text" not in answer:
            raise _rejected(answer["error"])
        try:
            texts = answer["text"].split(separator)
            parts = [self.encode(part, add_special_tokens=False) for part in texts]
        except InvalidRequest as error:
            raise InvalidRequest(f"the rendered messages: {error}", "messages") from error
        return list(itertools.chain.from_iterable(parts))

    def _special_starts(self, text: str) -> Iterator[int]:
        """Where a special token begins. A search keeps all threads of the process waiting, so it
        goes through a long text in slices."""
        for low in range(0, len(text), _SLICE_CHARACTERS):
            high = low + _SLICE_CHARACTERS
            for found in self._special.finditer(text, low, high + self._longest_special):
                if found.start() < high:
                    yield found.start()

    def _without_special(self, value: Any, separator: str) -> Any:
        """``value`` with a separator after the first character of each special token in a text."""
        if isinstance(value, str):
            if not self._has_special:
                return value
            cuts = [start + 1 for start in self._special_starts(value)]
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


def _check_template_arguments(arguments: Mapping[str, Any] | None) -> None:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"chat_template_kwargs must be arguments by name, got {shown(arguments)}",
            "chat_template_kwargs",
        )
    if taken := sorted(_OWN_ARGUMENTS & (arguments or {}).keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs"
        )


def _check_sendable(arguments: Mapping[str, Any] | None) -> None:
    """Raise `InvalidRequest` for arguments of a template that cannot be sent to its process."""
    try:
        json.dumps(dict(arguments or {}), ensure_ascii=False).encode()
    except _UNSENDABLE as error:
        raise InvalidRequest(
            f"chat_template_kwargs must be JSON that UTF-8 can encode: {error}",
            "chat_template_kwargs",
        ) from error


def _check_joined(instruction: str | None, arguments: Mapping[str, Any] | None) -> None:
    """Raise `InvalidRequest` for what a prompt without a template has no place for."""
    if instruction is not None or arguments:
        field = "chat_template_kwargs" if instruction is None else "instruction"
        raise InvalidRequest(
            "this model's prompt is the query and the document alone, without place for "
            f"{field}: leave it out, or write it into the query",
            field,
        )


def _without_padding(token_ids: list[int], pad_token_id: int | None) -> list[int]:
    """Token ids without padding at their end; of padding alone, the first token."""
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad_token_id:
        end -= 1
    return token_ids[:end]


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, source: str) -> None:
    """Raise `ModelError` for a tokenizer of special tokens alone, which encodes no text.

    transformers makes one for several architectures where the checkpoint has no tokenizer files.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token.content) for token in added if token.special}
    if tokenizer.get_vocab().keys() <= special | set(tokenizer.all_special_tokens):
        raise ModelError(
            f"{source} has no usable tokenizer: its vocabulary is empty, as without tokenizer "
            "files. Save tokenizer.json there"
        )


def _check_syntax(tokenizer: PreTrainedTokenizerFast) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"chat_template is not a Jinja template: {error}, in line {error.lineno}",
            "chat_template",
        ) from error
    except _TEMPLATE_ERRORS:
        pass  # it may reject this conversation, which is an example


def _rejected(reason: object) -> InvalidRequest:
    return InvalidRequest(f"the chat template rejects these messages: {reason}", "messages")


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers: templates expect no ``content: None``."""
    return {name: value for name, value in message.items() if value is not None}
