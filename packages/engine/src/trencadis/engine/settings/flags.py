"""Settings classes as the one source of flags, variables, keys of files, and documentation.

A settings class is an attrs class whose fields are made by `setting_field`, or carry
``metadata=setting(...)``: type checkers read required fields and converters only from a call of
``attrs.field`` itself. `add_flags`, `given_flags`, `from_env`, `file_settings`, `environment_help`
and `flag_list` derive the rest.
Plain metadata with the keys ``help`` and ``env`` is enough for `flag_list`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs

from trencadis.engine.errors import ConfigError
from trencadis.engine.validators import Validator, is_finite, is_integer

logger = logging.getLogger("trencadis.engine")

GIB = 1 << 30

_PREFIXES = ("VLLM_", "TRENCADIS_")
_SIMILAR = 0.8
"""Similarity of two names without prefix, from 0 to 1, above which one is a misspelling."""

AttrsClass = type[attrs.AttrsInstance]
Parse = Callable[[str], Any]
Field: TypeAlias = "attrs.Attribute[Any]"


def setting(
    *flags: str,
    help: str,
    env: str | None = None,
    env_patterns: tuple[str, ...] = (),
    group: str | None = None,
    metavar: str | None = None,
    default: str | None = None,
    parse: Parse | None = None,
    repeated: bool = False,
    several: bool = False,
    secret: bool = False,
    negatable: bool = False,
) -> dict[str, Any]:
    """Metadata of a field.

    Attributes:
        flags: the flag and its aliases; none where only Python code sets the field.
        help: the meaning of the field, in one sentence without a full stop.
        env: the environment variable that sets the field.
        env_patterns: variables that the settings class of the field reads itself, for the help.
        group: title of the flag's group in ``--help``.
        metavar: placeholder of the flag's value. A field with choices needs none:
            argparse then shows and checks the choices.
        default: the default in words, where the default value does not tell it.
        parse: makes the value from a text and raises `ValueError`. By default the validator says
            it: int for an integer, float for a number, otherwise the text is the value.
        repeated: the flag may be given several times; the values form a tuple.
        several: one flag may have several of them.
        secret: the value must not show in a list of processes: the help recommends ``env``.
        negatable: the field is True, False, or None for a default that is chosen later; the flag
            has a second form, ``--no-...``.

    The flag of a bool field takes no value: it sets the opposite of the default, and ``help`` says
    what that does.
    """
    return {
        "flags": flags,
        "help": help,
        "env": env,
        "env_patterns": env_patterns,
        "group": group,
        "metavar": metavar,
        "default": default,
        "parse": parse,
        "repeated": repeated,
        "several": several,
        "secret": secret,
        "negatable": negatable,
    }


def setting_field(default: Any, validator: Any, /, *flags: str, **words: Any) -> Any:
    """A field with a default and a validator; ``flags`` and ``words`` are those of `setting`."""
    return attrs.field(default=default, validator=validator, metadata=setting(*flags, **words))


def with_defaults(
    words: Mapping[str, str] | None = None, /, **defaults: object
) -> Callable[[type, list[Field]], list[Field]]:
    """A ``field_transformer`` for a subclass that changes the defaults of inherited fields.

    ``words`` are defaults in words, as in `setting`.
    """

    def transform(_: type, fields: list[Field]) -> list[Field]:
        by_name = {field.name: field for field in fields}
        for name, text in (words or {}).items():
            metadata = {**by_name[name].metadata, "default": text}
            by_name[name] = by_name[name].evolve(metadata=metadata)
        for name, default in defaults.items():
            metadata = dict(by_name[name].metadata)
            if name not in (words or {}):
                metadata["default"] = None  # the words for the inherited default
            by_name[name] = by_name[name].evolve(default=default, metadata=metadata)
        return list(by_name.values())

    return transform


def add_flags(
    parser: argparse.ArgumentParser, cls: AttrsClass, group: str | None = None
) -> dict[str, argparse._ArgumentGroup]:
    """Add the flags of a settings class, or of one of its groups, to a parser; returns the groups
    by title.

    A flag that is not given is None in the parsed arguments, under the name of its field.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in attrs.fields(cls):
        flags = _flags(field)
        if not flags or group not in (None, field.metadata["group"]):
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*flags, dest=field.name, **_argument(field))
    return groups


def given_flags(args: argparse.Namespace, cls: AttrsClass) -> dict[str, Any]:
    """The flags of a settings class that were given, by field name."""
    given: dict[str, Any] = {}
    for field in attrs.fields(cls):
        value = getattr(args, field.name, None) if _flags(field) else None
        if value is not None:
            given[field.name] = tuple(value) if field.metadata["repeated"] else value
    return given


def from_env(environ: Mapping[str, str], cls: AttrsClass) -> dict[str, Any]:
    """The settings that the environment gives, by field name. An empty variable gives nothing.

    Raises `ConfigError`, which names the variable.
    """
    given: dict[str, Any] = {}
    for field in attrs.fields(cls):
        name = field.metadata.get("env")
        text = environ.get(name, "") if name else ""
        if not field.metadata.get("secret"):  # a blank key is an error, not an absent one
            text = text.strip()
        if text:
            try:
                value = _parser_of(field)(text)
            except ValueError as error:
                raise ConfigError(f"{name}={text}: {error}", field.name) from None
            given[field.name] = (value,) if field.metadata.get("repeated") else value
    return given


@attrs.frozen
class FileSetting:
    """A setting as a file gives it, under the name of a field or of one of its flags.

    ``is_negated``: the name is that of a flag that sets the opposite, as ``disable_bucketing``.
    """

    field: Field
    is_negated: bool = False

    def read(self, given: Any) -> Any:
        """The value of the field. A text is read as that of the flag.

        Raises `ConfigError` or `ValueError` for a value that the field does not take.
        """
        value = _parser_of(self.field)(given) if isinstance(given, str) else given
        convert: Any = self.field.converter
        if convert is not None:
            value = convert(value)
        if self.field.validator is not None:
            self.field.validator(None, self.field, value)
        return not value if self.is_negated else value


def file_settings(fields: Iterable[Field]) -> dict[str, FileSetting]:
    """The settings that a file may give, by their names: those of fields and flags, with
    underscores."""
    settings: dict[str, FileSetting] = {}
    for field in fields:
        if not (_flags(field) or field.validator is not None):
            continue  # an object, which variables describe
        for flag in _flags(field):
            name = flag.removeprefix("--").replace("-", "_")
            is_negated = field.default is True and not field.metadata["negatable"]
            settings[name] = FileSetting(field, is_negated)
        settings[field.name] = FileSetting(field)
    return settings


def variables_of(cls: AttrsClass) -> tuple[str, ...]:
    """The names of the environment variables that give the fields of a settings class."""
    names = (field.metadata.get("env") for field in attrs.fields(cls))
    return tuple(name for name in names if name)


def warn_of_misspelt_variables(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Log a warning for each variable whose name is nearly one of ``known``.

    Names that resemble none of them are left alone: vLLM has variables of its own.
    """
    names = {_stem(name): name for name in known}
    for variable in environ:
        if variable in names.values() or not variable.startswith(_PREFIXES):
            continue
        nearest = difflib.get_close_matches(_stem(variable), names, n=1, cutoff=_SIMILAR)
        if nearest:
            name = names[nearest[0]]
            logger.warning("The variable %s is not read: did you mean %s?", variable, name)


def _stem(variable: str) -> str:
    return variable.partition("_")[2]


def environment_help(*classes: AttrsClass) -> str:
    """One line for each variable, or family of variables, that the settings classes read."""
    meanings = {
        name: f"see {flags[0]}" if (flags := _flags(field)) else field.metadata["help"]
        for cls in classes
        for field in attrs.fields(cls)
        for name in _variables(field)
    }
    width = max(map(len, meanings), default=0)
    return "".join(f"  {name:<{width}}  {meaning}\n" for name, meaning in meanings.items())


def flag_list(cls: AttrsClass) -> str:
    """The settings of a class as a Markdown list: names, default in brackets, meaning.

    A field whose name is that of its flag, with underscores, stands by the flag alone. What a flag
    without a value sets is the opposite of the default.
    """
    return "".join(f"- {_item(field)}\n" for field in attrs.fields(cls))


def parse_size(text: str) -> int:
    """Bytes of a size. ``KiB`` and ``K`` are 1024 bytes, ``KB`` is 1000, and so on up to T.

    Raises `ValueError`, which says what is accepted.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a unit as in 512MiB or 2GiB")
    number, unit, binary = match.groups()
    decimal = text.rstrip().lower().endswith("b") and not binary
    size = float(number) * (1000 if decimal else 1024) ** " kmgt".index(unit.lower() or " ")
    if size < 1:
        raise ValueError(f"{text!r} is less than a byte")
    return int(size)


def format_size(size: int) -> str:
    """A size for `parse_size`, in the largest unit that divides it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


def parse_gib(text: str) -> int:
    """Bytes of a number of GiB. Raises `ValueError`."""
    try:
        return int(float(text) * GIB)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of GiB") from None


def parse_flag(text: str) -> bool:
    """True or False, as Gaudi's plugin for vLLM reads them. Raises `ValueError`."""
    value = text.strip().lower()
    if value in ("1", "true", "t", "yes", "y", "on"):
        return True
    if value in ("0", "false", "f", "no", "n", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def parse_indices(text: str) -> tuple[int, ...]:
    """Integers, separated by commas. Raises `ValueError`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of indices, as in 0,1") from None


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises `ValueError`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def parse_option(text: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``; the value is JSON, or else the text itself.

    Raises `ValueError`.
    """
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _flags(field: Field) -> tuple[str, ...]:
    flags: tuple[str, ...] = field.metadata.get("flags", ())
    return flags


def _variables(field: Field) -> tuple[str, ...]:
    env = field.metadata.get("env")
    return ((env,) if env else ()) + tuple(field.metadata.get("env_patterns", ()))


def _choices(field: Field) -> tuple[object, ...]:
    """The choices that argparse shows in place of a metavar."""
    if isinstance(field.validator, Validator) and not field.metadata.get("metavar"):
        return tuple(field.validator.choices)
    return ()


def _argument(field: Field) -> dict[str, Any]:
    """What ``add_argument`` needs beside the flags."""
    text = _help(field).replace("%", "%%")
    if field.metadata["negatable"]:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if isinstance(field.default, bool):
        return {"action": "store_const", "const": not field.default, "help": text}
    argument = {"help": text, "required": field.default is attrs.NOTHING}
    if choices := _choices(field):
        return {**argument, "choices": choices}
    argument |= {"metavar": field.metadata["metavar"], "type": _argument_type(_parser_of(field))}
    if field.metadata.get("several"):
        return {**argument, "action": "extend", "nargs": "+"}
    return {**argument, "action": "append"} if field.metadata["repeated"] else argument


def _parser_of(field: Field) -> Parse:
    parse: Parse | None = field.metadata.get("parse")
    if parse is not None:
        return parse
    kind = field.validator.is_kind if isinstance(field.validator, Validator) else None
    return int if kind is is_integer else float if kind is is_finite else str


def _argument_type(parse: Parse) -> Parse:
    """For argparse, which shows the message of its own error alone."""
    if parse in (int, float, str):
        return parse

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _help(field: Field) -> str:
    metadata = field.metadata
    text: str = metadata["help"]
    default = "" if isinstance(field.default, bool) else _default(field)
    if default:
        text += f" (default: {default})"
    if metadata["repeated"]:
        text += "; may be repeated"
    if metadata["secret"]:
        return f"{text}. Other users of this machine can see it: prefer {metadata['env']}"
    return f"{text} [env: {metadata['env']}]" if metadata["env"] else text


def _default(field: Field) -> str:
    words: str | None = field.metadata.get("default")
    value = field.default
    if words is not None:
        return words
    if field.metadata.get("parse") is parse_size and value is not None:
        return format_size(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, (int, str)) else ""


def _item(field: Field) -> str:
    flags, name, default = _flags(field), field.name, _default(field)
    placeholder = field.metadata.get("metavar") or ""
    if flags and (choices := _choices(field)):
        placeholder = f"{{{','.join(map(str, choices))}}}"
    has_flag_of_its_name = f"--{name.replace('_', '-')}" in flags
    if field.metadata.get("negatable"):
        flags = tuple(form for flag in flags for form in (flag, f"--no-{flag[2:]}"))
    elif flags and isinstance(field.default, bool):
        name, default = f"{name}={not field.default}", ""
    forms = (f"{flag} {placeholder}".strip() for flag in flags)
    names = (*(() if has_flag_of_its_name else (name,)), *forms, *_variables(field))
    item = ", ".join(f"`{name}`" for name in names)
    item += f" ({default})" if default else ""
    meaning = field.metadata.get("help")
    return f"{item}: {meaning}" if meaning else item
