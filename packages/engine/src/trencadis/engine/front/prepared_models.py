"""The models of an engine by alias, and what a front has of each: settings and tokenizer.

What a switch needs and the active model need not wait for is done here, before the switch: the
download or the conversion of the checkpoint, and loading the tokenizer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from trencadis.engine.core.config_payload import OF_THE_DEVICE, config_payload
from trencadis.engine.errors import (
    ConfigError,
    ModelError,
    RequestFailed,
    UnknownModelError,
    shown,
)
from trencadis.engine.front.async_engine import load_tokenizer
from trencadis.engine.front.multi_model_config import ModelEntry
from trencadis.engine.line_process import LineProcess
from trencadis.engine.models.checkpoint import check_checkpoint, locate
from trencadis.engine.models.weight_files import WEIGHT_FILES
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import is_text

if TYPE_CHECKING:
    from trencadis.engine.front.tokenizer import Tokenizer

logger = logging.getLogger("trencadis.engine")

_FETCH_SECONDS = 86_400.0
"""Longest download or conversion of a checkpoint."""

_Result = TypeVar("_Result")


class PreparedModels:
    """The models of an engine, of which some are prepared for a switch.

    Raises `ConfigError` for models that one engine cannot serve in turn.
    """

    def __init__(self, models: Sequence[ModelEntry]) -> None:
        _check_models(models)
        self._entries = {entry.alias: entry for entry in models}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._sources: dict[str, str] = {}
        """Where the checkpoints are that need no download and no conversion any more."""
        self._fetching: _SharedTasks[str] = _SharedTasks()
        self._loading: _SharedTasks[Tokenizer] = _SharedTasks()
        self._processes: set[LineProcess] = set()
        self._is_closed = False

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases of all models, in their order."""
        return tuple(self._entries)

    def entry_of(self, alias: str) -> ModelEntry:
        """The entry of a model. Raises `UnknownModelError`, which names those that there are."""
        entry = self._entries.get(alias) if isinstance(alias, str) else None
        if entry is None:
            names = ", ".join(self._entries)
            raise UnknownModelError(f"there is no model {shown(alias)}: name one of {names}")
        return entry

    def config_of(self, alias: str) -> EngineConfig:
        """The configuration of a model, with the entry's chat template and alias."""
        return _config_of(self.entry_of(alias))

    def add(self, alias: str, tokenizer: Tokenizer) -> None:
        """The model is served, with this tokenizer: it needs no preparation."""
        self._is_closed = False
        self._tokenizers[alias] = tokenizer
        self._sources[alias] = self.config_of(alias).model

    async def tokenizer_of(self, alias: str) -> Tokenizer:
        """The tokenizer of a model; loaded once, for all who call meanwhile.

        Raises `ConfigError` for a chat template that cannot be used, and `ModelError`.
        """
        if alias in self._tokenizers:
            return self._tokenizers[alias]
        config = self.config_of(alias)
        # That of a GGUF file comes with the conversion, that of a hub id without the weights.
        source = config.model if _is_hub_id(config.model) else await self._fetched(alias)
        if alias in self._tokenizers:
            return self._tokenizers[alias]
        self._check_open()
        return await self._loading.result_of(alias, lambda: self._load(alias, source))

    async def prepare(self, alias: str) -> Tokenizer:
        """Download or convert the checkpoint, if need be, and load the tokenizer.

        All who call meanwhile share the work and its error; a later call tries again. A download
        or conversion ends when each of them was cancelled. Raises the errors of `tokenizer_of`.
        """
        await self._fetched(alias)
        tokenizer = await self.tokenizer_of(alias)
        if alias not in self._sources:
            raise ModelError(
                f"the hub has no weights of {self.config_of(alias).model}: neither "
                f"{' nor '.join(WEIGHT_FILES)}, nor an index of several such files"
            )
        return tokenizer

    def release_all_but(self, active: str) -> None:
        """End the processes that render the chat templates of other models."""
        # In threads, because a conversation may still be rendered; its request then learns of the
        # switch.
        loop = asyncio.get_running_loop()
        for alias, tokenizer in self._tokenizers.items():
            if alias != active:
                loop.run_in_executor(None, tokenizer.release)

    def close(self) -> None:
        """End what prepares a model, and the processes that render chat templates.

        Callers that wait for a model, or ask for one that is not prepared, get `ModelError`.
        """
        self._is_closed = True
        for process in tuple(self._processes):
            process.close_for_good()
        self._fetching.cancel()
        self._loading.cancel()
        for tokenizer in self._tokenizers.values():
            tokenizer.close()
        self._tokenizers.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelError("the engine was stopped: start it to prepare a model")

    async def _fetched(self, alias: str) -> str:
        """The local directory of a checkpoint, or its hub id once its weights are in the cache."""
        if alias in self._sources:
            return self._sources[alias]
        self._check_open()
        return await self._fetching.result_of(
            alias, lambda: self._fetch(alias), ends_unawaited=True
        )

    async def _load(self, alias: str, source: str) -> Tokenizer:
        template = self.config_of(alias).chat_template
        tokenizer = await asyncio.to_thread(load_tokenizer, source, template)
        return self._tokenizers.setdefault(alias, tokenizer)  # it may be active by now

    async def _fetch(self, alias: str) -> str:
        name = self.config_of(alias).model
        if not _is_hub_id(name) and not _is_file(name):
            source, has_weights = locate(name), True
        else:
            source, has_weights = await self._ask_process(name)
        if has_weights:  # otherwise they may be there next time
            self._sources[alias] = source
        return source

    async def _ask_process(self, name: str) -> tuple[str, bool]:
        logger.info("Looking up %s: it is downloaded or converted unless it was before", name)
        process = LineProcess("trencadis.engine.models.checkpoint_process", answer_s=_FETCH_SECONDS)
        self._processes.add(process)
        try:
            answer = await asyncio.to_thread(process.ask, name)
        except RequestFailed as error:
            raise ModelError(f"{name} was not downloaded or converted: {error}") from error
        finally:
            self._processes.discard(process)
            process.close_for_good()  # a cancelled question may not have started it yet
        if "error" in answer:
            raise ModelError(answer["error"])
        return str(answer["source"]), bool(answer["has_weights"])


class _SharedTasks(Generic[_Result]):
    """One task for each model: all callers that ask while it runs get its result or its error."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[_Result]] = {}
        self._num_waiting: Counter[asyncio.Task[_Result]] = Counter()

    async def result_of(
        self,
        alias: str,
        work: Callable[[], Coroutine[Any, Any, _Result]],
        *,
        ends_unawaited: bool = False,
    ) -> _Result:
        """The result of the work that runs for a model, or of ``work``, which is then started.

        It goes on when a caller is cancelled; with ``ends_unawaited`` as long as others wait.
        Raises `ModelError` where it was cancelled, and the errors of the work.
        """
        task = self._tasks.get(alias)
        if task is None:
            task = self._tasks[alias] = asyncio.create_task(work(), name=f"prepare-{alias}")
            task.add_done_callback(functools.partial(self._forget, alias))
        self._num_waiting[task] += 1
        try:
            await asyncio.wait((task,))  # unlike the task itself, cancelled without it
        finally:
            self._num_waiting[task] -= 1
            if not self._num_waiting[task]:
                del self._num_waiting[task]
                if ends_unawaited and not task.done():
                    task.cancel()
                    self._forget(alias, task)  # who comes now is not to get its end
        if task.cancelled():
            raise ModelError("the engine was stopped while it prepared a model: start it again")
        return task.result()

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, alias: str, task: asyncio.Task[_Result]) -> None:
        if self._tasks.get(alias) is task:
            del self._tasks[alias]
        if task.done() and not task.cancelled():
            task.exception()  # retrieved: there may be no caller left that would


def _is_hub_id(name: str) -> bool:
    """Raises `ModelError` for a path that is not a checkpoint."""
    check_checkpoint(name)
    return not Path(name).expanduser().exists()


def _is_file(name: str) -> bool:
    return Path(name).expanduser().is_file()


def _config_of(entry: ModelEntry) -> EngineConfig:
    template = entry.chat_template or entry.config.chat_template
    return attrs.evolve(entry.config, chat_template=template, served_model_name=entry.alias)


def _check_models(models: Sequence[ModelEntry]) -> None:
    """Raise `ConfigError` for models that one engine cannot serve in turn."""
    if not models:
        raise ConfigError("there is no model: give at least one ModelEntry")
    first = models[0]
    seen: set[str] = set()
    for entry in models:
        if not is_text(entry.alias) or not entry.alias:
            raise ConfigError(f"the alias of a model must be a text, got {shown(entry.alias)}")
        if entry.alias in seen:
            raise ConfigError(f"two models have the alias {entry.alias!r}: rename one")
        seen.add(entry.alias)
        try:
            config_payload(_config_of(entry))
        except ConfigError as error:
            raise ConfigError(f"model {entry.alias}: {error}", error.field) from error
        for name in OF_THE_DEVICE:
            ours, theirs = getattr(first.config, name), getattr(entry.config, name)
            if ours != theirs:
                raise ConfigError(
                    f"{name} is {shown(theirs)} for model {entry.alias} and {shown(ours)} for "
                    f"{first.alias}: it is a setting of the device, give all models the same",
                    name,
                )
