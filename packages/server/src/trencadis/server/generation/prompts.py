"""Prompts of a request as token ids: chat template, tokenisation, limits of the model."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import attrs

from trencadis.engine import EngineOverloaded, FairThread, InvalidRequest, SlowConversation
from trencadis.server.api.chat_messages import messages_for_template
from trencadis.server.api.protocol import ChatCompletionRequest, CompletionRequest
from trencadis.server.engine_protocol import ServingTokenizer
from trencadis.server.errors import ApiError
from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.generation.served_model import ServedModel

logger = logging.getLogger("trencadis.server")

T = TypeVar("T")

RenderPair: TypeAlias = Callable[..., list[int]]
"""`PairTokenizer.render_pair` of a model and a request, which lacks the texts and ``quick``."""

_LONG = 65_536
"""Characters of a long prompt. Encoding so many takes about 50 ms."""

_CHARACTERS_OF_RENDERING = 1024
"""Characters that are encoded while another process renders a template."""

_MAX_RENDERINGS = 128
"""Most beginnings of a document that are rendered to find the longest that fits. Each fourth halves
what is left, so that these suffice for any document; usually a few are enough."""

_FIELDS_OF_ALL_PAIRS = ("instruction", "chat_template_kwargs", "truncate_prompt_tokens")
"""Fields of a request that concern all of its pairs."""


@attrs.frozen
class Prompt:
    """Token ids of a prompt. ``echo`` is the text that each choice repeats before its output.

    ``echo_has_special``: special tokens of the prompt have their text in it.
    ``answer`` says how the answers to a conversation are read. ``text``: that of the tokens, with
    special ones, where the request asks for it.
    """

    token_ids: Sequence[int]
    echo: str = ""
    echo_has_special: bool = False
    answer: AnswerPlan | None = None
    text: str | None = None


class _LongConversation(Exception):
    """Tools and arguments make a conversation longer than `_LONG`."""


class PromptEncoder:
    """Tokenises prompts in worker threads, so that a long prompt does not block the event loop.

    Long prompts have a thread of their own, so that others do not wait for them; so have
    conversations, which wait for the process that renders them, and those that take long to render.
    At most ``max_pending`` requests wait; a further one raises
    `EngineOverloaded`. Of these, a ``client`` other than "" has at most half, so that the others
    can be served while one floods the server. Each thread works for clients in rotation.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._pending: Counter[str] = Counter()
        """Requests that wait, by client."""
        self._warned: set[str] = set()
        """The models of which the log says that they do not see tools."""
        self._short = FairThread("tokenizer")
        self._long = FairThread("tokenizer-long")
        self._render = FairThread("template")
        self._render_long = FairThread("template-long")

    @property
    def num_pending(self) -> int:
        """Requests whose prompts wait or are being tokenised."""
        return self._pending.total()

    async def chat(
        self, request: ChatCompletionRequest, model: ServedModel, client: str = ""
    ) -> list[Prompt]:
        """The conversation as one prompt for a model, with the plan of its answers.

        Raises `InvalidRequest` if the model cannot take it or cannot answer as it asks, and
        `ApiError` if it leaves no token of the context for the output.
        """
        model.answers.check(request)
        token_ids, field = request.given_prompt, "kv_transfer_params.prompt_token_ids"
        if token_ids is None:
            special, field = bool(request.add_special_tokens), "messages"
            token_ids = await self.conversation(request, model, client, add_special_tokens=special)
        token_ids = request.truncated(token_ids, model.max_model_len)
        _check(token_ids, field, model)
        plan, text = model.answers.plan(request, token_ids), None
        if request.return_prompt_text:
            text = await self.decode(token_ids, model, client, skip_special_tokens=False)
        return [Prompt(token_ids, echo=request.echoed, answer=plan, text=text)]

    async def conversation(
        self,
        request: ChatCompletionRequest,
        model: ServedModel,
        client: str = "",
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """The tokens of a conversation for a model, which may leave none of the context.

        ``add_special_tokens``: with those that a tokenizer adds to a text, besides those of the
        template. Raises `InvalidRequest` if the chat template rejects it, and `ApiError` if it has
        more characters than a context of any tokens.
        """
        token_ids = await self._conversation(request, model, client)
        if add_special_tokens:
            around = model.tokenizer.encode("a", True)
            before, after = _num_special(model.tokenizer)
            token_ids = [*around[:before], *token_ids, *around[len(around) - after :]]
        return token_ids

    async def text(
        self, text: str, model: ServedModel, client: str = "", *, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokens of a text for a model, of any length."""
        thread = self._long if len(text) > _LONG else self._short
        return await self._run(
            lambda: model.tokenizer.encode(text, add_special_tokens), thread, client
        )

    async def token_pieces(
        self, token_ids: Sequence[int], model: ServedModel, client: str = ""
    ) -> list[str]:
        """Each token as the vocabulary writes it."""
        thread = self._long if len(token_ids) > _LONG // 4 else self._short
        return await self._run(
            lambda: list(map(model.tokenizer.token_piece, token_ids)), thread, client
        )

    async def decode(
        self,
        token_ids: Sequence[int],
        model: ServedModel,
        client: str = "",
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text of tokens. Raises `InvalidRequest` for an id outside the vocabulary."""
        _check_vocabulary(token_ids, "tokens", model)
        thread = self._long if len(token_ids) > _LONG // 4 else self._short
        return await self._run(
            lambda: model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
            thread,
            client,
        )

    async def completion(
        self, request: CompletionRequest, model: ServedModel, client: str = ""
    ) -> list[Prompt]:
        """All prompts of a request, in order. Raises as `chat` does."""
        tokenizer = model.tokenizer
        special = request.add_special_tokens is not False

        def encode(prompt: str | list[int]) -> Prompt:
            if isinstance(prompt, str):
                token_ids = request.truncated(tokenizer.encode(prompt, special), limit)
                return Prompt(token_ids, prompt if request.echo else "")
            token_ids = request.truncated(prompt, limit)
            _check(token_ids, "prompt", model)  # decode may fail on ids outside the vocabulary
            # as in vLLM with special tokens: the client sent each of these
            echo = tokenizer.decode(prompt, skip_special_tokens=False) if request.echo else ""
            return Prompt(token_ids, echo, echo_has_special=True)

        limit = model.max_model_len
        lengths = [len(prompt) for prompt in request.prompt if isinstance(prompt, str)]
        if request.truncate_prompt_tokens is None:
            _check_length(max(lengths, default=0), "prompt", model)
        thread = self._long if sum(lengths) > _LONG else self._short
        prompts = await self._run(
            lambda: [encode(prompt) for prompt in request.prompt], thread, client
        )
        for prompt in prompts:
            _check(prompt.token_ids, "prompt", model)
        return prompts

    async def inputs(
        self,
        inputs: Mapping[str, str | Sequence[int]],
        model: ServedModel,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        keeps_end: bool = False,
        client: str = "",
    ) -> list[Sequence[int]]:
        """Token ids of the inputs to embed; ``inputs`` maps fields of the request to them.

        An input with more than ``max_tokens`` tokens is cut to so many, at its end or, where it
        ``keeps_end``, at its beginning: see `_cut`. Of a text that is far longer, only what is near
        to what is kept is encoded. Raises `InvalidRequest` and `ApiError`, which name the field.
        """
        tokenizer = model.tokenizer

        def encode(given: str | Sequence[int]) -> Sequence[int]:
            if not isinstance(given, str):
                if max_tokens is None:
                    return given
                return given[-max_tokens:] if keeps_end else given[:max_tokens]
            if max_tokens is None:
                return tokenizer.encode(given, add_special_tokens)
            part = _part(given, max_tokens, tokenizer.min_num_tokens, is_end=keeps_end)
            token_ids = tokenizer.encode(part, add_special_tokens)
            if len(token_ids) <= max_tokens:
                return token_ids
            num_special = _num_special(tokenizer) if add_special_tokens else (0, 0)
            return _cut(token_ids, max_tokens, *num_special, keeps_end=keeps_end)

        lengths = {field: len(text) for field, text in inputs.items() if isinstance(text, str)}
        if max_tokens is None:
            for field, length in lengths.items():
                _check_length(length, field, model)
        thread = self._long if sum(lengths.values()) > _LONG else self._short
        encoded = await self._run(
            lambda: [encode(given) for given in inputs.values()], thread, client
        )
        for field, token_ids in zip(inputs, encoded, strict=True):
            _check(token_ids, field, model)
        return encoded

    async def beginnings(
        self, texts: Sequence[str], max_tokens: int, model: ServedModel, client: str = ""
    ) -> list[str]:
        """The texts, each cut after its first ``max_tokens`` tokens."""
        tokenizer = model.tokenizer

        def cut(text: str) -> str:
            part = _part(text, max_tokens, tokenizer.min_num_tokens)
            token_ids = tokenizer.encode(part, False)
            if len(token_ids) <= max_tokens:
                return part
            return tokenizer.decode(token_ids[:max_tokens]).rstrip("\ufffd")  # half a character

        thread = self._long if sum(map(len, texts)) > _LONG else self._short
        return await self._run(lambda: [cut(text) for text in texts], thread, client)

    async def pairs(
        self,
        pairs: Mapping[str, tuple[str, str]],
        model: ServedModel,
        render: RenderPair,
        *,
        max_tokens: int | None = None,
        client: str = "",
    ) -> list[Sequence[int]]:
        """Token ids of the prompts of pairs, a query and a document each, by fields of the request.

        Of a pair with more than ``max_tokens`` tokens the document is cut, so that what the model
        has to see after it stays. Raises `InvalidRequest` and `ApiError`, which name the field.
        """
        tokenizer, lengths = model.tokenizer, {}
        for field, (query, document) in pairs.items():
            lengths[field] = len(query) + len(document)
            if max_tokens is None:
                _check_length(lengths[field], field, model)

        def encode(quick: bool | None) -> list[Sequence[int]]:
            return [
                _render_field(
                    field, partial(render, query, quick=quick), document, tokenizer, max_tokens
                )
                for field, (query, document) in pairs.items()
            ]

        work = sum(lengths.values()) + _CHARACTERS_OF_RENDERING * len(pairs)
        if work > _LONG:
            encoded = await self._run(lambda: encode(None), self._render_long, client)
        else:
            try:
                encoded = await self._run(lambda: encode(True), self._render, client)
            except SlowConversation:
                encoded = await self._run(lambda: encode(False), self._render_long, client)
        for field, token_ids in zip(pairs, encoded, strict=True):
            _check(token_ids, field, model)
        return encoded

    def close(self) -> None:
        """End the threads. Requests that wait for them are cancelled."""
        for thread in (self._short, self._long, self._render, self._render_long):
            thread.close()

    def _warn_of_unseen_tools(self, model: ServedModel) -> None:
        """Logs, once for each model, that its template leaves tools out.

        Requests are served all the same: forced calls follow their schema with any template.
        """
        template = model.tokenizer.chat_template  # None: a tokenizer that does not show its own
        if template is None or model.traits.takes_tools or model.name in self._warned:
            return
        self._warned.add(model.name)
        logger.warning(
            "The chat template of %s shows no tools: the model does not see the tools of a request "
            "(--chat-template names another template)",
            model.name,
        )

    async def _conversation(
        self, request: ChatCompletionRequest, model: ServedModel, client: str
    ) -> list[int]:
        # Without them where no call is wanted: no model calls a tool that it does not know.
        may_call = request.choice_of_tools.mode != "none"
        tools = [tool.for_template() for tool in request.tools or ()] if may_call else None
        if tools:
            self._warn_of_unseen_tools(model)
        arguments = {**model.template_arguments, **(request.template_arguments or {})} or None
        continues = bool(request.continue_final_message)
        generation_prompt = request.add_generation_prompt
        if generation_prompt is None:
            generation_prompt = not continues

        def render(quick: bool | None) -> list[int]:
            messages = messages_for_template(
                request.messages,
                text_arguments=model.traits.text_arguments,
                has_thinking=model.traits.has_thinking,
                has_thinking_alone=model.traits.has_thinking_alone,
            )
            work = (messages, tools, arguments)
            if quick and sum(len(str(part)) for part in work) > _LONG:
                raise _LongConversation
            return model.tokenizer.render_chat(
                messages,
                add_generation_prompt=generation_prompt,
                continue_final_message=continues,
                tools=tools,
                chat_template_kwargs=arguments,
                quick=quick,
            )

        length = sum(len(message.content or "") for message in request.messages)
        if request.truncate_prompt_tokens is None:
            _check_length(length, "messages", model)
        if length > _LONG:
            return await self._run(lambda: render(None), self._render_long, client)
        try:
            return await self._run(lambda: render(True), self._render, client)
        except _LongConversation:
            return await self._run(lambda: render(None), self._render_long, client)
        except SlowConversation:
            return await self._run(lambda: render(False), self._render_long, client)

    async def _run(self, work: Callable[[], T], thread: FairThread, client: str) -> T:
        if self.num_pending >= self._max_pending:
            raise EngineOverloaded(
                f"{self.num_pending} prompts are waiting to be tokenised: try again later"
            )
        if client and self._pending[client] >= max(1, self._max_pending // 2):
            raise EngineOverloaded(
                f"{self._pending[client]} prompts of this API key are waiting to be tokenised: try "
                "again later"
            )
        self._pending[client] += 1
        try:
            return await asyncio.wrap_future(thread.submit(client, work))
        finally:
            self._pending[client] -= 1
            if not self._pending[client]:
                del self._pending[client]


def _part(
    text: str, max_tokens: int, min_num_tokens: Callable[[int], int], *, is_end: bool = False
) -> str:
    """The beginning or end of a text, with at least twice ``max_tokens`` tokens where it has more.

    Twice, because the tokens at the cut may not be those that they are in the whole text.
    """
    while min_num_tokens(len(text) // 2) >= 2 * max_tokens:
        text = text[-(len(text) // 2) :] if is_end else text[: len(text) // 2]
    return text


def _render_field(
    field: str,
    render: RenderPair,
    document: str,
    tokenizer: ServingTokenizer,
    max_tokens: int | None,
) -> Sequence[int]:
    """As `_render_within`; an error names the field of the request."""
    try:
        return _render_within(render, document, tokenizer, max_tokens)
    except InvalidRequest as error:
        named = error.field if error.field in _FIELDS_OF_ALL_PAIRS else field
        raise InvalidRequest(f"{field}: {error}", named) from error


def _render_within(
    render: RenderPair, document: str, tokenizer: ServingTokenizer, max_tokens: int | None
) -> Sequence[int]:
    """The prompt of a pair, with as much of the document as ``max_tokens`` leave a place for.

    Raises `InvalidRequest` where they leave none.
    """
    if max_tokens is None:
        return render(document)
    document = _part(document, max_tokens, tokenizer.min_num_tokens)
    longer = render(document)
    if len(longer) <= max_tokens:
        return longer
    # Only the lengths of prompts tell what fits: where a document spells a special token, its own
    # tokens are others than those that it has in a prompt. Without it, the prompt is estimated.
    num_rest = len(longer) - len(tokenizer.encode(document, add_special_tokens=False))
    fitting: Sequence[int] = ()
    low, high, num_low, num_high = 0, len(document), max(0, num_rest), len(longer)
    for probe in range(_MAX_RENDERINGS):
        if high - low <= 1 or len(fitting) == max_tokens:
            break
        share = (max_tokens - num_low) / max(1, num_high - num_low) if probe % 4 < 3 else 0.5
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        token_ids = render(document[:middle])
        if len(token_ids) <= max_tokens:
            fitting, low, num_low = token_ids, middle, len(token_ids)
        else:
            high, num_high = middle, len(token_ids)
    if not fitting:
        raise InvalidRequest(
            f"without its document the prompt fills the {max_tokens} tokens that are kept: "
            "shorten the query or the instruction",
            "truncate_prompt_tokens",
        )
    return fitting


def _num_special(tokenizer: ServingTokenizer) -> tuple[int, int]:
    """How many special tokens a tokenizer adds before a text, and after it."""
    plain, token_ids = tokenizer.encode("a", False), tokenizer.encode("a", True)
    num_special = len(token_ids) - len(plain)
    for start in range(num_special + 1):
        if token_ids[start : start + len(plain)] == plain:
            return start, num_special - start
    return 0, 0


def _cut(
    token_ids: Sequence[int], max_tokens: int, before: int, after: int, *, keeps_end: bool
) -> Sequence[int]:
    """The first or, where it ``keeps_end``, the last ``max_tokens``, within the special tokens.

    A model that pools the last token was trained with its special token there. ``before`` and
    ``after``: how many special tokens there are on each side of the text. Where they leave no
    place for another token, those on the side of the cut are cut, too.
    """
    if before + after >= max_tokens:
        return token_ids[-max_tokens:] if keeps_end else token_ids[:max_tokens]
    if keeps_end:
        return [*token_ids[:before], *token_ids[before - max_tokens :]]
    return [*token_ids[: max_tokens - after], *token_ids[len(token_ids) - after :]]


def max_output_tokens(
    requested: int | None,
    field: str,
    prompt: Prompt,
    max_model_len: int,
    default: int | None = None,
) -> int:
    """Maximum number of output tokens: ``requested``, or the rest of the context if that is less.

    As in vLLM, so that a program with one limit for all turns goes on as its conversation grows.
    ``default`` replaces ``requested``; None for none. ``field`` is the request field of
    ``requested``. Raises `ApiError` if that alone exceeds the context.
    """
    available = max_model_len - len(prompt.token_ids)
    wanted = requested if default is None else default
    if requested is not None and requested > max_model_len:
        raise ApiError(
            400,
            f"{field} is {requested}, but this model's maximum context length is {max_model_len} "
            f"tokens: ask for at most {available} after a prompt of {len(prompt.token_ids)}, or "
            "for none",
            param=field,
            code="context_length_exceeded",
        )
    return available if wanted is None else min(wanted, available)


def _too_long(limit: int) -> str:
    """The words of OpenAI, by which clients such as litellm know what is wrong, and of vLLM."""
    return (
        f"this model's maximum context length is {limit} tokens. Please reduce the length of the "
        "input prompt."
    )


def _check_length(length: int, field: str, model: ServedModel) -> None:
    """Reject a text of so many characters that no tokens could be long enough for it.

    Encoding it would take seconds, only to find that it is too long.
    """
    limit = model.max_model_len
    if model.tokenizer.min_num_tokens(length) > limit - _num_output_tokens(model):
        raise ApiError(
            400,
            f"{field} has {length} characters, too many for its context: {_too_long(limit)}",
            param=field,
            code="context_length_exceeded",
        )


def _check(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    """Reject what the engine would reject, with the client's field name and OpenAI's code.

    The engine would reject the second prompt of a stream after the HTTP status was sent.
    """
    if not token_ids:
        raise InvalidRequest(f"{field} holds no token: give it some text", field)
    limit, num_output_tokens = model.max_model_len, _num_output_tokens(model)
    if len(token_ids) > limit - num_output_tokens:
        rest = ", which leaves none for an answer" if num_output_tokens else ""
        raise ApiError(
            400,
            f"{field} has {len(token_ids)} tokens{rest}: {_too_long(limit)}",
            param=field,
            code="context_length_exceeded",
        )
    _check_vocabulary(token_ids, field, model)


def _check_vocabulary(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    vocab_size = model.tokenizer.vocab_size
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field} holds token id {str(token_id)[:20]}, which is out of vocabulary: this "
                f"model has the ids 0 to {vocab_size - 1}",
                field,
            )


def _num_output_tokens(model: ServedModel) -> int:
    """How many tokens of the context a prompt has to leave."""
    return 0 if model.is_pooling else 1
