"""What the server derives from the model that the engine serves now."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.engine import ModelEntry, Scoring, TextPrompts
from trencadis.server.engine_protocol import (
    ServingEngine,
    ServingTokenizer,
    as_switching,
    embedding_size,
    scoring,
    text_prompts,
)
from trencadis.server.generation.answer_plan import AnswerPlanner
from trencadis.server.parsers.chat_template import TemplateTraits
from trencadis.server.parsers.selection import select_parsers
from trencadis.server.settings import ServerSettings

logger = logging.getLogger("trencadis.server")


@attrs.frozen
class ServedModel:
    """A model as requests to it see it. A request keeps its own through all of its steps.

    ``default_sampling``: the sampling parameters of a request that does not set them.
    ``template_arguments``: those of its chat template that a request need not send.
    ``embedding_size``: numbers of an embedding; 0 for a model that generates or scores.
    ``scoring``: how it scores pairs, where it does. ``text_prompts``: the prompts that it declares
    for texts to embed. ``lora``: the adapter with which requests are computed.
    """

    name: str
    tokenizer: ServingTokenizer
    max_model_len: int
    traits: TemplateTraits
    answers: AnswerPlanner
    default_sampling: Mapping[str, Any] = attrs.field(factory=dict)
    template_arguments: Mapping[str, Any] = attrs.field(factory=dict)
    embedding_size: int = 0
    scoring: Scoring | None = None
    text_prompts: TextPrompts = attrs.field(factory=TextPrompts)
    lora: str | None = None

    @property
    def shown_name(self) -> str:
        """The name that requests and their answers have: the adapter's, if there is one."""
        return self.name if self.lora is None else self.lora

    @property
    def is_pooling(self) -> bool:
        """Whether it generates nothing: requests get embeddings or scores."""
        return self.embedding_size > 0 or self.scoring is not None


class ServedModels:
    """The served model of an engine, derived again when the engine has switched to another.

    Raises `ConfigError` for parsers that do not exist, and where the first model has no tool call
    parser and ``enable_auto_tool_choice`` demands one.
    """

    def __init__(self, engine: ServingEngine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._served = self._derive(is_first=True)

    @property
    def current(self) -> ServedModel:
        """The model that the engine serves now."""
        engine, served = self._engine, self._served
        if engine.tokenizer is not served.tokenizer or engine.model_name != served.name:
            self._served = self._derive(is_first=False)
        return self._served

    def inactive(self, alias: str, tokenizer: ServingTokenizer) -> ServedModel:
        """A model that the engine does not serve now, for what needs its tokenizer alone.

        Without a ``max_model_len`` of its entry its longest sequence is not known before it is
        loaded, and counts as unbounded.
        """
        switching = as_switching(self._engine)
        if switching is None:
            return self.current
        entry = switching.entry_of(alias)
        longest = entry.config.max_model_len or sys.maxsize
        return self._model(alias, tokenizer, longest, entry, is_first=False)

    def _derive(self, *, is_first: bool) -> ServedModel:
        engine = self._engine
        switching = as_switching(engine)
        entry = None if switching is None else switching.entry
        model = self._model(
            engine.model_name, engine.tokenizer, engine.max_model_len, entry, is_first=is_first
        )
        return attrs.evolve(
            model,
            embedding_size=embedding_size(engine),
            scoring=scoring(engine),
            text_prompts=text_prompts(engine),
        )

    def _model(
        self,
        name: str,
        tokenizer: ServingTokenizer,
        max_model_len: int,
        entry: ModelEntry | None,
        *,
        is_first: bool,
    ) -> ServedModel:
        settings, defaults = self._settings, {}
        if entry is not None:
            settings = attrs.evolve(settings, **entry.frontend)
            defaults = dict(entry.default_sampling)
        parsers = select_parsers(
            settings.tool_call_parser,
            settings.reasoning_parser,
            tokenizer.chat_template,
            needs_tools=is_first and settings.enable_auto_tool_choice,
        )
        if settings.enable_auto_tool_choice and parsers.tools is None:
            logger.warning(
                "The model %s has no tool call parser: name one with tool_call_parser",
                name,
            )
        return ServedModel(
            name=name,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            traits=parsers.traits,
            answers=AnswerPlanner(parsers, tokenizer),
            default_sampling=defaults,
            template_arguments=settings.default_chat_template_kwargs,
        )
