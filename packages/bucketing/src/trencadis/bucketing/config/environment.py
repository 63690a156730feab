"""Settings from environment variables.

The fields of a settings class (attrs) name their variables in their metadata:

    help: the meaning, one sentence with the unit.
    env: the variable. For a field that is an `AxisConfig`, the pattern of its variables, with `{}`
        for the end that the metadata of AxisConfig's fields has.
    env_alias: another pattern, read where the variable of the first is not set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trencadis.bucketing.config.axis_config import AxisConfig
from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.validators import instance_of

_TRUE, _FALSE = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def read_settings(settings_class: type[attrs.AttrsInstance], environ: Mapping[str, str]) -> Any:
    """The value of each field by name, from `environ`; an empty or missing variable is the default.

    Raises:
        BucketingError: a value that cannot be used, with its variable.
    """
    instance_of(Mapping).checked("environ", environ)
    return {
        attribute.name: _read_field(attribute, environ)
        for attribute in attrs.fields(settings_class)
    }


def variable_of(settings_class: type[attrs.AttrsInstance], field: str) -> str:
    """The environment variable of one field, or the pattern of an axis's variables."""
    name: str = attrs.fields_dict(settings_class)[field].metadata["env"]
    return name


def all_variables(settings_class: type[attrs.AttrsInstance]) -> list[str]:
    """Every variable of the settings, those of the axes and aliases included."""
    return [name for pattern in _patterns(settings_class) for name in _axis_variables(pattern)] + [
        attribute.metadata["env"]
        for attribute in attrs.fields(settings_class)
        if not isinstance(attribute.default, AxisConfig)
    ]


def describe_settings(settings_class: type[attrs.AttrsInstance]) -> dict[str, str]:
    """The meaning of every variable; those of an axis stand together, with `*` for their end."""
    meanings: dict[str, str] = {}
    for attribute in attrs.fields(settings_class):
        variable, alias = attribute.metadata["env"], attribute.metadata.get("env_alias")
        default = str(attribute.default).lower() if attribute.default is not None else ""
        is_axis = isinstance(attribute.default, AxisConfig)
        shown = "" if is_axis or not default else f"; default: {default}"
        meanings[variable.format("*")] = attribute.metadata["help"] + shown
        if alias:
            meanings[alias.format("*")] = f"read where {variable.format('*')} is not set"
    return meanings


def _patterns(settings_class: type[attrs.AttrsInstance]) -> Iterator[str]:
    for attribute in attrs.fields(settings_class):
        if isinstance(attribute.default, AxisConfig):
            yield attribute.metadata["env"]
            if "env_alias" in attribute.metadata:
                yield attribute.metadata["env_alias"]


def _axis_variables(pattern: str) -> list[str]:
    """The variables of one axis, in the order of the fields of `AxisConfig`."""
    return [pattern.format(field.metadata["env"]) for field in attrs.fields(AxisConfig)]


def _read_field(attribute: attrs.Attribute[Any], environ: Mapping[str, str]) -> Any:
    name = attribute.metadata["env"]
    if isinstance(attribute.default, AxisConfig):
        return _read_axis(environ, name, attribute.metadata.get("env_alias"))
    text = _text(environ, name)
    if not text:
        return attribute.default
    return read_flag(name, text) if isinstance(attribute.default, bool) else text


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not isinstance(value, str):
        raise BucketingError(f"{name}={shown(value)} is not text: give a string")
    return value


def _read_axis(environ: Mapping[str, str], pattern: str, alias: str | None) -> AxisConfig:
    settings: dict[str, int] = {}
    for field in attrs.fields(AxisConfig):
        name = pattern.format(field.metadata["env"])
        if alias and not _text(environ, name):
            name = alias.format(field.metadata["env"])
        text = _text(environ, name)
        if text:
            settings[field.name] = _read_axis_setting(field.name, name, text)
    try:
        return AxisConfig(**settings)
    except BucketingError as error:
        names = f"{pattern.format('MIN')} and {pattern.format('MAX')}"
        raise BucketingError(f"{names}: {error}") from None


def _read_axis_setting(field: str, name: str, text: str) -> int:
    try:
        value = int(text)
        AxisConfig(**{field: value})
    except BucketingError as error:
        raise BucketingError(f"{name}={text}: {error}") from None
    except ValueError:
        raise BucketingError(f"{name}={text} is not an integer: change it") from None
    return value


def read_flag(name: str, text: str) -> bool:
    """A variable that is true or false, in the spellings that the plugin accepts."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise BucketingError(f"{name}={text} is neither true nor false: set it to true or false")
