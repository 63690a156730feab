"""Checks an API request, and converts it into the scheduler's: one sequence group, or several."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trencadis.engine.api.sampling_params import MAX_TOKEN_ID, POOLING, SamplingParams
from trencadis.engine.errors import InvalidRequest, shown
from trencadis.engine.validators import is_text, items_of, plain_number
from trencadis.scheduler import BatchControl, BeamSearch, Request

MAX_CACHE_SALT = 1024
"""Most characters of a cache salt."""

MAX_CLIENT = 256
"""Most characters of a client's name."""

_INT64_MAX = 2**63 - 1
"""The largest integer that a message can carry to the core."""


def check_arguments(
    request_id: str,
    prompt_token_ids: Iterable[int],
    params: SamplingParams,
    priority: int,
    cache_salt: str | None,
    client: str = "",
) -> tuple[int, ...]:
    """The token ids of a request whose arguments have the right types.

    Needs no model, so the front calls it before it sends anything. Raises `InvalidRequest`, naming
    the field.
    """
    check_request_id(request_id)
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}", "params")
    is_integer = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_integer or not -_INT64_MAX - 1 <= priority <= _INT64_MAX:
        raise InvalidRequest(
            f"priority must be an integer from -2**63 to 2**63 - 1, got {shown(priority)}",
            "priority",
        )
    if cache_salt is not None:
        _check_cache_salt(cache_salt)
    if not is_text(client) or len(client) > MAX_CLIENT:
        raise InvalidRequest(
            f"client must be a text of at most {MAX_CLIENT} characters that UTF-8 can encode, "
            f"got {shown(client)}",
            "client",
        )
    return _token_ids(prompt_token_ids)


def check_request_id(request_id: str) -> None:
    """Raise `InvalidRequest` for what cannot name a request."""
    if not is_text(request_id):
        raise InvalidRequest(
            f"request_id must be a text that UTF-8 can encode, got {shown(request_id)}",
            "request_id",
        )


def _check_cache_salt(cache_salt: str) -> None:
    if not is_text(cache_salt) or not 1 <= len(cache_salt) <= MAX_CACHE_SALT:
        raise InvalidRequest(
            f"cache_salt must be a text of 1 to {MAX_CACHE_SALT} characters that UTF-8 can encode, "
            f"got {shown(cache_salt)}",
            "cache_salt",
        )


def check_order(order: BatchControl) -> None:
    """Raise `InvalidRequest` for what is not an order."""
    if not isinstance(order, BatchControl):
        raise InvalidRequest(
            f"an order must be a BatchControl, as in BatchControl(max_num_seqs=4), "
            f"got {shown(order)}",
            "order",
        )


def _token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    if isinstance(prompt, (str, bytes)):
        raise InvalidRequest(
            f"the prompt must be token ids, got the text {shown(prompt)}: encode it first, with "
            "tokenizer.encode",
            "prompt",
        )
    token_ids = items_of(prompt)
    if token_ids is None:
        raise InvalidRequest(f"the prompt must be token ids, got {shown(prompt)}", "prompt")
    if not set(map(type, token_ids)) <= {int}:
        token_ids = tuple(map(plain_number, token_ids))
        wrong = [token for token in token_ids if type(token) is not int]
        if wrong:
            raise InvalidRequest(
                f"token ids of the prompt must be integers, got {shown(wrong[0])}", "prompt"
            )
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:
        raise InvalidRequest(
            f"token ids of the prompt must be from 0 to {MAX_TOKEN_ID}, "
            f"got {shown(min(token_ids))} to {shown(max(token_ids))}",
            "prompt",
        )
    return token_ids


def check_request(
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    *,
    is_pooling: bool = False,
) -> None:
    """Raise `InvalidRequest`, naming the field, for a request that this model cannot serve.

    ``is_pooling``: it computes embeddings or scores; a prompt may take all of the context.
    """
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
        raise InvalidRequest(
            f"token ids of the prompt must be from 0 to {vocab_size - 1}", "prompt"
        )
    if is_pooling:
        _check_pooling(length, params, max_model_len)
        return
    if length >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens and the model's context is {max_model_len}, of which "
            "at least one is needed for the output: shorten the prompt",
            "prompt",
        )
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        raise InvalidRequest(
            f"max_tokens {params.max_tokens} and a prompt of {length} tokens exceed the model's "
            f"context of {max_model_len}: lower max_tokens to {max_model_len - length}",
            "max_tokens",
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            raise InvalidRequest(f"{name} has token ids past the vocabulary of {vocab_size}", name)


def _check_pooling(length: int, params: SamplingParams, max_model_len: int) -> None:
    if params != POOLING:
        raise generates_nothing()
    if length > max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens and the model's context is {max_model_len}: shorten "
            "the prompt",
            "prompt",
        )


def generates_nothing() -> InvalidRequest:
    """The error for a request to generate, of an engine that computes embeddings or scores."""
    return InvalidRequest(
        "this engine has the runner pooling: it computes embeddings or scores and generates "
        "nothing. Call embed or score, or start it with the runner generate",
        "params",
    )


def check_output(
    output_token_ids: Iterable[int], params: SamplingParams, vocab_size: int
) -> tuple[int, ...]:
    """The tokens after which a request goes on. Raises `InvalidRequest` where it cannot."""
    output = _token_ids(output_token_ids)
    limit = params.max_tokens
    if output and (params.num_seqs != 1 or params.use_beam_search):
        raise InvalidRequest("only a request for one sequence goes on after tokens", "prompt")
    if output and (max(output) >= vocab_size or (limit is not None and len(output) >= limit)):
        raise InvalidRequest(
            f"{len(output)} generated tokens leave none of max_tokens {limit}, or are past the "
            f"vocabulary of {vocab_size}",
            "prompt",
        )
    return output


@attrs.frozen(eq=False)
class CoreRequest:
    """A request whose arguments were checked, with the limit under which the core got it.

    It goes on after ``output_token_ids``, of which `check_output` says where there may be any. If
    it ``is_resumed``, it was accepted before. Its samples are split into groups of at most
    ``running_limit`` sequences, the number that may run when it is added.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    client: str
    running_limit: int
    output_token_ids: tuple[int, ...] = ()
    is_resumed: bool = False


def scheduler_requests(
    request: CoreRequest, eos_token_ids: frozenset[int], max_model_len: int
) -> list[Request]:
    """The scheduler's requests, each of which becomes a group.

    ``eos_token_ids`` end an answer unless the request ignores them.
    """
    params = request.params
    max_new_tokens = max_model_len - len(request.prompt_token_ids)
    eos = frozenset() if params.ignore_eos else eos_token_ids
    group = _as_group(request, max_new_tokens, eos)
    if output := request.output_token_ids:  # computed as a prompt, and counted as output
        group = attrs.evolve(
            group,
            prompt_token_ids=(*request.prompt_token_ids, *output),
            max_tokens=group.max_tokens - len(output),
            min_tokens=max(0, group.min_tokens - len(output)),
        )
    # A group above the running limit would wait until temperature or an order raise it.
    # Samples that are compared in the end (best_of, beams) must stay in one group.
    return [group] if params.needs_ranking else _split_samples(group, max(1, request.running_limit))


def _as_group(request: CoreRequest, max_new_tokens: int, eos_token_ids: frozenset[int]) -> Request:
    """One scheduler request with the id of ``request``.

    ``max_new_tokens`` is the number of output tokens that the model's context leaves; it applies
    where the parameters set no limit.
    """
    params = request.params
    beams = None
    if params.use_beam_search:
        beams = BeamSearch(
            width=params.num_seqs,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
    return Request(
        request_id=request.key,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=max_new_tokens if params.max_tokens is None else params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=eos_token_ids | frozenset(params.stop_token_ids),
        n=params.n,
        best_of=None if params.use_beam_search else params.best_of,
        beam_search=beams,
        priority=request.priority,
        extra_keys=() if request.cache_salt is None else (request.cache_salt,),
        client=request.client,
    )


def _split_samples(request: Request, max_group_size: int) -> list[Request]:
    """Split a request for n samples into groups of at most ``max_group_size`` samples."""
    if request.n <= max_group_size:
        return [request]
    starts = range(0, request.n, max_group_size)
    return [
        attrs.evolve(
            request,
            request_id=f"{request.request_id}#{start}",
            n=min(max_group_size, request.n - start),
            best_of=None,
        )
        for start in starts
    ]
