"""What a checkpoint declares in the files of sentence-transformers: modules, lengths, prompts."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from trencadis.engine.api.scoring import Activation
from trencadis.engine.api.text_prompts import TextPrompts
from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.validators import is_text

SETTINGS_FILE = "config_sentence_transformers.json"
"""Has the prompts, the name of the default one, and the activation of scores."""

TRANSFORMER_FILE = "sentence_bert_config.json"
"""Has the longest text, and the arguments of the chat template."""

_MODULES = "modules.json"

_OF_EMBEDDINGS = ("Transformer", "Pooling", "Normalize")
"""The modules of sentence-transformers that an embedding may pass through. All embeddings are
normalised, whether the last one is there or not."""

_OF_SCORES = ("Transformer", "LogitScore")

_LAST_TOKEN = "lasttoken"  # noqa: S105 - no password
_LONG_MODE = {"pooling_mode_lasttoken": _LAST_TOKEN, "pooling_mode_mean_tokens": "mean"}
"""How sentence-transformers before version 5 spells two of its modes: a flag for each."""

_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}

_OF_TOKENS_ALONE = frozenset({"padding", "truncation", "max_length", "return_tensors"})
"""Arguments that sentence-transformers passes with those of a chat template, for the tokenizer."""

_OWN_ARGUMENTS = frozenset({"restore_suffix"})
"""Arguments among them that sentence-transformers itself takes: a suffix is never cut here."""

_OF_ENGINE = frozenset(
    {
        *("chat_template", "conversations", "messages", "tools", "documents"),
        *("continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""Arguments among them that the engine gives itself."""


def read_pooling(source: str) -> str:
    """How a checkpoint says that it pools, for the log.

    Read from ``modules.json`` and the file of the pooling module; without them the last token.
    Raises `ModelError` for another way of pooling, and for modules that are not supported.
    """
    kinds = _read_modules(source)
    if kinds is None:
        return f"the last token, because there is no {_MODULES}"
    _check_modules(source, kinds, _OF_EMBEDDINGS, "embeddings")
    if "Pooling" not in kinds:
        return f"the last token, because {_MODULES} has no pooling"
    file = _file_of(kinds["Pooling"])
    modes = _modes(_read_object(source, file))
    if modes != [_LAST_TOKEN]:
        raise ModelError(
            f"{source} pools by {' and '.join(modes) or 'no known mode'} ({file}), and this "
            "engine by the last token alone: serve a checkpoint that was trained for that"
        )
    return f"the last token ({file})"


def has_modules(source: str) -> bool:
    """Whether a checkpoint has ``modules.json``, which says what is computed after the model."""
    return _read_modules(source) is not None


def read_score_tokens(source: str, vocab_size: int) -> tuple[int, ...] | None:
    """The tokens whose logits are a checkpoint's score, the true one first; None without such.

    Raises `ModelError` for tokens that the model does not have, and for further modules.
    """
    kinds = _read_modules(source) or {}
    if "LogitScore" not in kinds:
        return None
    _check_modules(source, kinds, _OF_SCORES, "scores of tokens")
    file = _file_of(kinds["LogitScore"])
    declared = _read_object(source, file)
    true, false = declared.get("true_token_id"), declared.get("false_token_id")
    tokens: tuple[Any, ...] = (true,) if false is None else (true, false)
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ModelError(
                f"the {file} of {source} cannot be used: it names the token {token!r}, and the "
                f"model has those from 0 to {vocab_size - 1}"
            )
    if true == false:
        raise ModelError(
            f"the {file} of {source} cannot be used: its true and its false token are both {true}, "
            "so that all scores would be the same"
        )
    return tokens


def check_score_modules(source: str) -> None:
    """Raise `ModelError` where something is computed after a score head."""
    _check_modules(source, _read_modules(source) or {}, ("Transformer",), "scores of a head")


def read_activation(source: str, config: PreTrainedConfig) -> Activation:
    """What turns a checkpoint's logits into its scores; sigmoid where it names nothing.

    Raises `ModelError` for another one.
    """
    nested = getattr(config, "sentence_transformers", None)
    named = (
        _read_object(source, SETTINGS_FILE).get("activation_fn")
        or (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or getattr(config, "sbert_ce_default_activation_function", None)
    )
    if named is None:
        return "sigmoid"
    activation = _ACTIVATIONS.get(str(named).rpartition(".")[2])
    if activation is None:
        raise ModelError(
            f"{source} applies {named} to its scores, and this engine knows "
            f"{' and '.join(_ACTIVATIONS)} alone: serve another checkpoint"
        )
    return activation


def read_prompts(source: str) -> TextPrompts:
    """The prompts that a checkpoint declares for its texts.

    Raises `ModelError` for what are not texts by name, and for a default that is not among them.
    """
    settings = _read_object(source, SETTINGS_FILE)
    texts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    is_named = isinstance(texts, dict) and all(map(is_text, (*texts, *texts.values())))
    is_known = default is None or (isinstance(default, str) and default in texts)
    if not is_named or not is_known:
        raise ModelError(
            f"the {SETTINGS_FILE} of {source} cannot be used: its prompts are {texts!r}, the "
            f"default {default!r}"
        )
    return TextPrompts(texts, default)


def read_template_arguments(source: str) -> dict[str, Any]:
    """The arguments that a checkpoint gives to its chat template.

    Raises `ModelError` for those that say what is rendered, which the requests do.
    """
    processing = _read_object(source, TRANSFORMER_FILE).get("processing_kwargs")
    arguments = processing.get("chat_template") if isinstance(processing, dict) else None
    if not isinstance(arguments, dict):
        return {}
    if taken := sorted(_OF_ENGINE & arguments.keys()):
        raise ModelError(
            f"{source} gives its chat template the arguments {', '.join(taken)} "
            f"({TRANSFORMER_FILE}), which requests alone may say: remove them there"
        )
    left_out = _OF_TOKENS_ALONE | _OWN_ARGUMENTS
    return {name: value for name, value in arguments.items() if name not in left_out}


def read_max_seq_length(source: str) -> int | None:
    """The tokens after which a checkpoint's texts are cut; None where it does not say.

    Raises `ModelError` for what is not a length, and for texts in lower case, which no tokenizer of
    a decoder wants.
    """
    settings = _read_object(source, TRANSFORMER_FILE)
    if settings.get("do_lower_case"):
        raise ModelError(
            f"{source} wants its texts in lower case ({TRANSFORMER_FILE}), and this engine changes "
            "no text: serve a checkpoint whose tokenizer does it"
        )
    length = settings.get("max_seq_length")
    if length is None:
        return None
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ModelError(
            f"the {TRANSFORMER_FILE} of {source} cannot be used: max_seq_length is {length!r}"
        )
    return length


def _read_modules(source: str) -> dict[str, dict[str, Any]] | None:
    """The modules of a checkpoint by their kind, as ``Pooling``; None without ``modules.json``.

    Raises `ModelError` for several of a kind: here each is computed once.
    """
    modules = _read_json(source, _MODULES)
    if modules is None:
        return None
    listed = modules if isinstance(modules, list) else [modules]
    described = [module if isinstance(module, dict) else {} for module in listed]
    kinds: dict[str, dict[str, Any]] = {}
    for module in described:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind in kinds:
            raise ModelError(
                f"the {_MODULES} of {source} cannot be used: it has the module {kind!r} twice, and "
                "this engine computes each once"
            )
        kinds[kind] = module
    return kinds


def _check_modules(
    source: str, kinds: dict[str, dict[str, Any]], supported: tuple[str, ...], purpose: str
) -> None:
    for kind in kinds:
        if kind not in supported:
            raise ModelError(
                f"{source} needs the module {kind!r} of its {_MODULES}, and {purpose} are "
                f"computed with {', '.join(supported)} alone: serve another checkpoint"
            )


def _file_of(module: dict[str, Any]) -> str:
    return str(PurePosixPath(str(module.get("path", "")), "config.json"))


def _modes(pooling: dict[str, Any]) -> list[str]:
    """The modes of a pooling module; several are joined."""
    if "pooling_mode" in pooling:
        mode = pooling["pooling_mode"]
        return list(map(str, mode if isinstance(mode, list) else [mode]))
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    return [_LONG_MODE.get(name, name.removeprefix("pooling_mode_")) for name in flags]


def _read_object(source: str, name: str) -> dict[str, Any]:
    """The object in a file of a checkpoint; empty where there is none."""
    value = _read_json(source, name)
    return value if isinstance(value, dict) else {}


def _read_json(source: str, name: str) -> Any:
    """A file of a checkpoint; None where it has none."""
    try:
        path = cached_file(source, name)
    except OSError:
        return None
    if path is None:
        return None
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except BROKEN_FILE_ERRORS as error:
        raise ModelError(f"the {name} of {source} cannot be used: {reason_of(error)}") from error
    if value is None:
        raise ModelError(f"the {name} of {source} cannot be used: it holds null alone")
    return value
