"""Finds out how a checkpoint scores pairs: of which tokens, and from which prompt."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from trencadis.engine.api.scoring import PairForm, PairPrompt, Scoring
from trencadis.engine.errors import ConfigError, ModelError, shown
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.models.chat_templates import template_text
from trencadis.engine.models.declared_modules import (
    SETTINGS_FILE,
    TRANSFORMER_FILE,
    check_score_modules,
    has_modules,
    read_activation,
    read_prompts,
    read_score_tokens,
    read_template_arguments,
)

logger = logging.getLogger("trencadis.engine")

ANSWERS = ("yes", "no")
"""The answers of Qwen3-Reranker, of which its score is the probability of the first."""

_FAMILY = "qwen3-reranker"
_ROLES = tuple(re.compile(rf"""(["']){role}\1""") for role in ("query", "document"))
"""What a chat template has that looks for messages of these roles. Others write any role."""


def find_scoring(
    source: str,
    name: str,
    config: PreTrainedConfig,
    *,
    has_score_head: bool,
    form: PairForm | None,
    chat_template: str | None,
) -> Scoring | None:
    """How a checkpoint scores pairs; None for one that does not, whose embeddings are served.

    Scores are those of its head, of the tokens in ``modules.json``, or of the answers of
    Qwen3-Reranker. That family is recognised by ``name``, since nothing else distinguishes its
    first releases from other models, or by ``form``. ``form``: that of the prompt, where the user
    names one. ``chat_template``: replaces that of the checkpoint. Raises `ModelError` for what
    cannot be served, and where neither the checkpoint nor the user gives the form, and
    `ConfigError` for a form without place for the default prompt of the checkpoint, or for the
    arguments of its chat template.
    """
    vocab_size = config.get_text_config(decoder=True).vocab_size
    is_family = _names_family(name) or form == _FAMILY
    if has_score_head:
        check_score_modules(source)
        tokens: tuple[int, ...] | None = ()
    else:
        tokens = read_score_tokens(source, vocab_size)
        if tokens is None and is_family and (form is not None or not has_modules(source)):
            tokens = _answers(source, vocab_size)
    if tokens is None:
        if form is not None:
            raise ModelError(
                f"{name} computes no scores of pairs: it has neither a score head nor score tokens "
                "in its modules.json. Leave score_prompt out to serve its embeddings"
            )
        return None
    template, texts = _template(source, chat_template), read_prompts(source)
    prompt = PairPrompt(
        form or _form(name, template, is_family=is_family),
        texts.prefix(),
        read_template_arguments(source),
        # As transformers: a score head is applied to the last token that is not padding.
        config.get_text_config().pad_token_id if has_score_head else None,
    )
    _check_form(name, prompt.form, template)
    if prompt.form == "joined":
        _check_joined(name, prompt, texts.default)
    # The softmax of two tokens, whatever is declared: it is what they were trained by.
    activation = "sigmoid" if len(tokens) == 2 else read_activation(source, config)
    logger.info(
        "Scores of pairs: %s of %s, from the prompt %s",
        activation,
        f"the logits of tokens {', '.join(map(str, tokens))}" if tokens else "the score head",
        prompt.form,
    )
    return Scoring(prompt, tokens, activation)


def _form(name: str, template: str, *, is_family: bool) -> PairForm:
    if _has_roles(template):
        return "template"
    if is_family:
        return "qwen3-reranker"
    raise ModelError(
        f"{name} does not tell how a query and a document become its prompt: its chat template has "
        "no places for the roles query and document. Say it with --score-prompt: conversation for "
        "a reward model, qwen3-reranker for a model of that family, joined where clients write the "
        "prompt in two parts; or give the template of its model card with --chat-template"
    )


def _check_form(name: str, form: PairForm, template: str) -> None:
    if form == "template" and not _has_roles(template):
        raise ModelError(
            f"the chat template of {name} has no places for the roles query and document: give one "
            "that has with --chat-template, or choose another --score-prompt"
        )
    if form == "conversation" and not template:
        raise ModelError(
            f"{name} has no chat template, of which the score prompt conversation is made: give it "
            "one with --chat-template, or choose another --score-prompt"
        )


def _check_joined(name: str, prompt: PairPrompt, default: str | None) -> None:
    """Raise `ConfigError` for what a checkpoint declares for a template, which is not used."""
    if prompt.instruction:
        raise ConfigError(
            f"score_prompt joined has no place for the default prompt {default!r} that the "
            f"{SETTINGS_FILE} of {name} declares, so every request would be rejected: remove "
            "default_prompt_name there and let clients write the prompt into the query, or choose "
            "another score_prompt",
            "score_prompt",
        )
    if prompt.arguments:
        declared = ", ".join(f"{key} {shown(value)}" for key, value in prompt.arguments.items())
        raise ConfigError(
            "score_prompt joined uses no chat template, and so not the arguments that the "
            f"{TRANSFORMER_FILE} of {name} declares for it ({declared}): remove them from "
            "processing_kwargs there and let clients write what they stand for into query and "
            "document, or choose another score_prompt",
            "score_prompt",
        )


def _has_roles(template: str) -> bool:
    return all(role.search(template) for role in _ROLES)


def _names_family(name: str) -> bool:
    """Whether a file, a directory or a hub id is called after Qwen3-Reranker.

    Of a directory in the hub's cache that is the part that names the model.
    """
    path = PurePath(name)
    named = [path.name, *(part for part in path.parts if part.startswith("models--"))]
    return any(_FAMILY in part.lower() for part in named)


def _template(source: str, chat_template: str | None) -> str:
    """The text of the chat template; "" without one."""
    if chat_template is not None:
        return template_text(chat_template)
    template = _tokenizer(source).chat_template
    if isinstance(template, Mapping):  # templates by name
        template = template.get("default")
    return str(template or "")


def _answers(source: str, vocab_size: int) -> tuple[int, ...]:
    """The tokens of Qwen3-Reranker. Raises `ModelError` for a tokenizer without them."""
    vocabulary = _tokenizer(source).get_vocab()
    missing = [text for text in ANSWERS if not 0 <= vocabulary.get(text, -1) < vocab_size]
    if missing:
        raise ModelError(
            f"{source} has no token {' and no token '.join(map(repr, missing))}, of which "
            "Qwen3-Reranker makes its score: it is not of that family. Serve it under a name "
            "without qwen3-reranker, or choose another --score-prompt"
        )
    return tuple(vocabulary[text] for text in ANSWERS)


def _tokenizer(source: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except BROKEN_FILE_ERRORS as error:
        raise ModelError(f"{source} has no usable tokenizer: {reason_of(error)}") from error
