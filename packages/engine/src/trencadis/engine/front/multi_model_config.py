"""The file of models that one process serves in turn: aliases with their settings, in YAML.

The form is that of Gaudi's vLLM plugin (``VLLM_HPU_MULTI_MODEL_CONFIG``, seed 004): the key
``models`` maps aliases to settings, and ``default_model`` names the alias that is served first. The
file is checked as a whole, and all faults are reported at once, each with its line.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.core.config_payload import OF_THE_DEVICE
from trencadis.engine.errors import ConfigError, EngineError, InvalidRequest, ModelError, shown
from trencadis.engine.front.yaml_nodes import (
    YamlFault,
    YamlMapping,
    YamlNode,
    YamlScalar,
    read_yaml,
)
from trencadis.engine.models.checkpoint import check_checkpoint
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.settings.flags import FileSetting, file_settings, variables_of
from trencadis.engine.settings.library_settings import library_variables
from trencadis.engine.validators import is_text, number, text

MAX_FILE_BYTES = 1 << 18
MAX_TTL_SECONDS = 365 * 86_400.0
MAX_ALIAS = 200
"""Characters of the longest alias."""

_MAX_FAULTS = 20
"""Faults that a message lists; it counts the others."""

DEFAULT_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens"),
)
"""The sampling parameters that may have a default of a model's own. None of them contradicts
another, so a request that sets some of them cannot become invalid by the defaults of others."""

_DEFAULT, _MODELS = "default_model", "models"
_MODEL, _SAMPLING, _ENVIRONMENT = "model", "default_sampling", "environment"
_TTL = "ttl"
_NOT_IN_A_FILE = ("served_model_name", _MODEL)
_EAGER = "enforce_eager"


def _check_alias(_: object, __: object, alias: Any) -> None:
    if not is_text(alias) or alias != alias.strip() or not 0 < len(alias) <= MAX_ALIAS:
        raise ConfigError(
            f"an alias must be a text of 1 to {MAX_ALIAS} characters without spaces at its ends, "
            f"got {shown(alias)}",
            "alias",
        )


_SECONDS = number(0, MAX_TTL_SECONDS, remedy="0 is never")


@attrs.frozen
class ModelEntry:
    """A model that is served under ``alias`` while it is active.

    ``chat_template`` replaces that of ``config`` and of the model. ``default_sampling``: parameters
    of `DEFAULT_SAMPLING` for requests that do not set them. ``frontend``: settings of the server
    that serves the engine, such as the parsers of `trencadis.server`. ``ttl``: seconds without a
    request after which the server lets the engine sleep; 0: never. Raises `ConfigError`.
    """

    alias: str = attrs.field(validator=_check_alias)
    config: EngineConfig = attrs.field(validator=attrs.validators.instance_of(EngineConfig))
    chat_template: str | None = attrs.field(default=None, validator=text(optional=True))
    default_sampling: Mapping[str, Any] = attrs.field(factory=dict)
    frontend: Mapping[str, Any] = attrs.field(factory=dict)
    ttl: float = attrs.field(default=0.0, validator=_SECONDS)

    def __attrs_post_init__(self) -> None:
        for name, value in self.default_sampling.items():
            _check_sampling(name, value)


@attrs.frozen
class MultiModelConfig:
    """The models of a file, in its order, and the alias of the one that is served first."""

    models: tuple[ModelEntry, ...]
    active: str


def read_multi_model_config(
    path: str | Path,
    environ: Mapping[str, str] | None = None,
    *,
    frontend: Iterable[attrs.Attribute[Any]] = (),
    **settings: Any,
) -> MultiModelConfig:
    """Read a file of models.

    Each model has the settings of ``environ`` and ``settings``, as `EngineConfig.from_env` takes
    them, unless the file gives its own. ``frontend`` are settings that the file may give besides
    those of `EngineConfig`, as fields of a settings class. A relative path of a model or a chat
    template is looked up beside the file, then in the working directory.

    Raises `ConfigError`, whose message lists all faults of the file with their lines.
    """
    environ = environ or {}
    base = {name: value for name, value in settings.items() if name != _EAGER}
    EngineConfig.from_env(environ, model="-", **base)  # its faults are not those of the file
    reader = _Reader(Path(path), environ, settings, tuple(frontend))
    config = reader.read()
    if config is None or reader.faults:
        raise ConfigError(_message(path, sorted(reader.faults)), "multi_model_config")
    return config


def _message(path: str | Path, faults: list[tuple[int, str]]) -> str:
    if len(faults) == 1:
        ((line, text),) = faults
        return f"{path}, line {line}: {text}"
    lines = [f"\n  line {line}: {text}" for line, text in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        lines.append(f"\n  and {len(faults) - _MAX_FAULTS} more")
    return f"{path} has {len(faults)} faults:{''.join(lines)}"


@attrs.define
class _Given:
    """What an entry of the file gives. ``model``: "" where its value is a fault."""

    model: str | None = None
    engine: dict[str, Any] = attrs.field(factory=dict)
    frontend: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, str] = attrs.field(factory=dict)
    sampling: dict[str, Any] = attrs.field(factory=dict)
    ttl: float = 0.0


@attrs.define
class _Reader:
    """Reads one file, and collects its faults: pairs of a line and a text."""

    path: Path
    environ: Mapping[str, str]
    settings: Mapping[str, Any]
    frontend_fields: tuple[attrs.Attribute[Any], ...]
    faults: list[tuple[int, str]] = attrs.field(factory=list)
    engine_settings: dict[str, FileSetting] = attrs.field(init=False)
    frontend_settings: dict[str, FileSetting] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        engine = file_settings(attrs.fields(EngineConfig))
        self.engine_settings = {
            name: each for name, each in engine.items() if each.field.name not in _NOT_IN_A_FILE
        }
        self.frontend_settings = file_settings(self.frontend_fields)

    def read(self) -> MultiModelConfig | None:
        """The models of the file; None where it has faults."""
        try:
            document = read_yaml(_text_of(self.path))
        except YamlFault as fault:
            self.faults.append((fault.line, str(fault)))
            return None
        top = dict(self._pairs(document, "the file", (_DEFAULT, _MODELS)))
        if not isinstance(document, YamlMapping):
            return None
        listed = top.get(_MODELS)
        if listed is None:
            self.faults.append((1, f"{_MODELS} is missing: it maps aliases to settings"))
            return None
        entries = [(key, self._entry(key, node)) for key, node in self._keyed(listed, _MODELS)]
        self._check_device(entries)
        models = tuple(entry for _, entry in entries if entry is not None)
        if isinstance(listed, YamlMapping) and not entries:
            self.faults.append((listed.line, f"{_MODELS} names no model"))
        if self.faults:
            self._active(top.get(_DEFAULT), self._aliases(listed))
            return None
        active = self._active(top.get(_DEFAULT), [entry.alias for entry in models])
        return MultiModelConfig(models, active)

    def _check_device(self, entries: list[tuple[YamlScalar, ModelEntry | None]]) -> None:
        """All models are on one device, which keeps its settings through a switch."""
        valid = [(key, entry.config) for key, entry in entries if entry is not None]
        for key, config in valid[1:]:
            first, shared = valid[0]
            for name in OF_THE_DEVICE:
                ours, theirs = getattr(shared, name), getattr(config, name)
                if ours != theirs:
                    self.faults.append(
                        (
                            key.line,
                            f"{_MODELS}.{key.text}: {name} is {shown(theirs)}, and {shown(ours)} "
                            f"for {first.text}: give all models the same, since it is a setting "
                            "of the device",
                        )
                    )

    def _aliases(self, listed: YamlNode) -> list[str]:
        return [key.text for key, _ in listed.pairs] if isinstance(listed, YamlMapping) else []

    def _active(self, node: YamlNode | None, aliases: list[str]) -> str:
        first = aliases[0] if aliases else ""
        if node is None:
            return first
        name = node.text if isinstance(node, YamlScalar) else ""
        if name not in aliases:
            listed = ", ".join(aliases) or "none"
            fault = f"{_DEFAULT} must be one of the aliases ({listed}), got {shown(node.value)}"
            self.faults.append((node.line, fault))
        return name

    def _entry(self, alias: YamlScalar, node: YamlNode) -> ModelEntry | None:
        """The model of an alias; None where the entry has faults."""
        num_faults = len(self.faults)
        where = f"{_MODELS}.{alias.text}"
        self._try(alias.line, where, lambda: _check_alias(None, None, alias.text))
        given = _Given()
        for name, key, value in self._named(node, where):
            self._read_setting(given, name, value, f"{where}.{key.text}")
        if given.model is None and isinstance(node, YamlMapping):
            self.faults.append((alias.line, f"{where} has no {_MODEL}: name its checkpoint"))
        if len(self.faults) > num_faults:
            return None
        config = self._config(alias, where, given)
        if config is None:
            return None
        return ModelEntry(
            alias.text,
            config,
            default_sampling=given.sampling,
            frontend=given.frontend,
            ttl=given.ttl,
        )

    def _read_setting(self, given: _Given, name: str, node: YamlNode, place: str) -> None:
        if name == _MODEL:
            given.model = self._model(node, place)
        elif name == _SAMPLING:
            given.sampling = self._sampling(node, place)
        elif name == _TTL:
            ttl: Any = node.value
            self._try(node.line, place, lambda: _SECONDS.checked(_TTL, ttl))
            given.ttl = ttl
        elif name == _ENVIRONMENT:
            given.environment = self._environment(node, place)
        elif name == _EAGER:  # a flag of `EngineConfig.graphs`
            given.engine[_EAGER] = self._one_of((True, False), node, place)
        elif name in self.frontend_settings:
            self._set(given.frontend, self.frontend_settings[name], node, place)
        else:
            self._set(given.engine, self.engine_settings[name], node, place)

    def _one_of(self, choices: tuple[object, ...], node: YamlNode, place: str) -> Any:
        if not any(type(node.value) is type(choice) and node.value == choice for choice in choices):
            listed = " or ".join(map(str, choices))
            self.faults.append((node.line, f"{place} must be {listed}, got {shown(node.value)}"))
        return node.value

    def _named(self, node: YamlNode, where: str) -> Iterator[tuple[str, YamlScalar, YamlNode]]:
        """The known keys of an entry, under their names with underscores. Others are faults."""
        known = (
            *(_MODEL, _SAMPLING, _TTL, _ENVIRONMENT, _EAGER),
            *self.engine_settings,
            *self.frontend_settings,
        )
        for key, value in self._keyed(node, where):
            name = key.text.removeprefix("--").replace("-", "_")
            if name == "served_model_name":
                self.faults.append(
                    (key.line, f"{where}.{key.text}: clients address a model by its alias")
                )
            elif name not in known:
                self.faults.append((key.line, _unknown(f"{where}.{key.text}", name, known)))
            else:
                yield name, key, value

    def _pairs(
        self, node: YamlNode | None, where: str, known: tuple[str, ...]
    ) -> Iterator[tuple[str, YamlNode]]:
        for key, value in self._keyed(node, where):
            if key.text in known:
                yield key.text, value
            else:
                self.faults.append((key.line, _unknown(key.text, key.text, known)))

    def _keyed(self, node: YamlNode | None, where: str) -> Iterator[tuple[YamlScalar, YamlNode]]:
        """The pairs of a mapping. What is none, and a key that occurs again, is a fault."""
        if not isinstance(node, YamlMapping):
            line, got = (1, None) if node is None else (node.line, node.value)
            self.faults.append((line, f"{where} must map names to values, got {shown(got)}"))
            return
        lines: dict[str, int] = {}
        for key, value in node.pairs:
            if key.text in lines:
                fault = f"{where} has {shown(key.text)} again, first in line {lines[key.text]}"
                self.faults.append((key.line, fault))
                continue
            lines[key.text] = key.line
            yield key, value

    def _set(self, into: dict[str, Any], setting: FileSetting, node: YamlNode, place: str) -> None:
        if setting.field.name in into:
            self.faults.append((node.line, f"{place} is given twice, under two names"))
            return

        def put() -> None:
            value = setting.read(node.value)
            is_template = setting.field.name == "chat_template" and value is not None
            into[setting.field.name] = self._template(value) if is_template else value

        self._try(node.line, place, put)

    def _try(self, line: int, place: str, step: Any) -> None:
        """Run a step; an error of the value is a fault."""
        try:
            step()
        except (EngineError, ValueError) as error:
            self.faults.append((line, f"{place}: {error}"))

    def _model(self, node: YamlNode, place: str) -> str:
        # The text itself: a directory may be called 123 or on.
        name = node.text if isinstance(node, YamlScalar) else ""
        if not name.strip() or not name.isprintable() or node.value is None:
            self.faults.append(
                (node.line, f"{place} must name a checkpoint, got {shown(node.value)}")
            )
            return ""
        found = self._beside(name)
        try:
            check_checkpoint(found)
        except (ModelError, OSError, ValueError) as error:  # a name that no file can have
            self.faults.append((node.line, f"{place}: {error}"))
        return found

    def _template(self, template: str) -> str:
        """A chat template, or the path of its file. Raises `ConfigError`."""
        if "{{" in template or "{%" in template:
            return template
        found = self._beside(template)
        try:
            Path(found).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{shown(template)} cannot be read: {error}") from None
        return found

    def _beside(self, name: str) -> str:
        """A path beside the file, if it is there, otherwise the name itself."""
        try:
            path = self.path.parent / name
            return str(path) if path.exists() else name
        except (OSError, ValueError):  # too long, or with a null character
            return name

    def _sampling(self, node: YamlNode, place: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in self._keyed(node, place):

            def put(name: str = key.text, value: YamlNode = value) -> None:
                _check_sampling(name, value.value)
                found[name] = value.value

            self._try(key.line, f"{place}.{key.text}", put)
        return found

    def _environment(self, node: YamlNode, place: str) -> dict[str, str]:
        """Variables of the libraries' settings, which have no flags: of buckets, graphs, defrag."""
        patterns = _variable_patterns()
        found: dict[str, str] = {}
        for key, value in self._keyed(node, place):
            if not any(fnmatch.fnmatchcase(key.text, pattern) for pattern in patterns):
                fault = f"{place}.{key.text} is not a variable of a model's settings"
                self.faults.append((key.line, fault))
            elif not isinstance(value, YamlScalar):
                fault = f"{place}.{key.text} must be a text, got {shown(value.value)}"
                self.faults.append((value.line, fault))
            else:
                found[key.text] = value.text
        return found

    def _config(self, alias: YamlScalar, where: str, given: _Given) -> EngineConfig | None:
        """The settings of one model; None where they contradict each other."""
        settings = {**self.settings, **given.engine, "served_model_name": alias.text}
        eager = settings.pop(_EAGER, False)
        environ = {**self.environ, **given.environment}
        try:
            config = EngineConfig.from_env(environ, model=given.model or "", **settings)
        except (EngineError, ValueError) as error:
            self.faults.append((alias.line, f"{where}: {error}"))
            return None
        if eager:
            graphs = attrs.evolve(config.graphs, enforce_eager=True)
            config = attrs.evolve(config, graphs=graphs)
        return config


def _text_of(path: Path) -> str:
    """The text of a file. Raises `YamlFault`."""
    try:
        if path.exists() and not path.is_file():
            raise YamlFault(1, "is not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise YamlFault(1, f"is larger than {MAX_FILE_BYTES // 1024} KiB")
        return content.decode()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise YamlFault(1, f"cannot be read: {error}") from None


def _unknown(place: str, name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    meant = f": did you mean {nearest[0]}?" if nearest else ""
    return f"{place} is unknown{meant}"


def _check_sampling(name: str, value: Any) -> None:
    """Raise `ConfigError` for what is not a default of a request."""
    if name not in DEFAULT_SAMPLING:
        raise ConfigError(_unknown(shown(name), str(name), DEFAULT_SAMPLING), "default_sampling")
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        raise ConfigError(str(error), "default_sampling") from None


def _variable_patterns() -> tuple[str, ...]:
    from trencadis.bucketing import describe_variables  # noqa: PLC0415  (loads NumPy)

    return (*variables_of(EngineConfig), *library_variables(), *describe_variables())
