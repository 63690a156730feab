"""The requests that an engine core serves.

Translates between the two sides of the core: the front knows a request by its key and a sample by
its index; the scheduler knows sequence groups and sequence ids. Beam search creates new sequence
ids in every step, so only the table knows which request a sequence belongs to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent import futures

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.engine.api.outputs import RequestStatus
from trencadis.engine.api.requests import EngineRequest
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.errors import EngineOverloaded, InvalidRequest
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.matcher import CompiledGrammar, GrammarMatcher
from trencadis.engine.ipc.messages import Rejected, RequestError
from trencadis.engine.models.quantized_cache import CACHE_DTYPES
from trencadis.engine.runner.step import ChunkScores, SampleSettings
from trencadis.scheduler import (
    BeamSearch,
    QueueFull,
    Request,
    Scheduler,
    SequenceGroup,
    SequenceStatus,
    UnservableRequest,
)
from trencadis.scheduler import Sequence as ScheduledTokens

_FURTHEST_FIRST = (
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
    SequenceStatus.PREEMPTED,
    SequenceStatus.WAITING,
)


@attrs.define(eq=False)
class Entry:
    """One request.

    ``sample_ids`` are sequence ids by sample index (empty for beam search). ``unfinished`` are the
    indices of samples that still generate. ``prompt_counted``: its prompt is in the total of
    prompt tokens. ``was_parked``: also before its first token. How long it waited is not known
    then. ``prompt_logprobs``: what is known of the prompt's, None where they are not asked for, or
    were reported. ``adapter_name``: that of its adapter, None without one.
    """

    key: str
    params: SamplingParams
    num_prompt_tokens: int
    groups: list[SequenceGroup] = attrs.field(factory=list)
    sample_ids: list[int] = attrs.field(factory=list)
    unfinished: set[int] = attrs.field(factory=set)
    prompt_counted: bool = False
    status: RequestStatus = "normal"
    was_parked: bool = False
    prompt_logprobs: PromptScores | None = None
    adapter_name: str | None = None


@attrs.define(eq=False)
class PromptScores:
    """Log-probabilities of the tokens of a prompt, from the second one on.

    ``values``: see `ChunkScores`. ``num_tokens``: how many tokens they are of.
    """

    values: list[npt.NDArray[np.float32]] = attrs.field(factory=list)
    num_tokens: int = 0

    def add(self, new: ChunkScores) -> None:
        """Add those of a chunk; what is known, as after a preemption, stays."""
        num_known = 1 + self.num_tokens - new.position
        if 0 <= num_known < len(new.values):
            self.values.append(new.values[num_known:])
            self.num_tokens += len(new.values) - num_known

    def to_bytes(self) -> bytes:
        return b"".join(values.astype("<f4").tobytes() for values in self.values)


@attrs.define(eq=False)
class Sample:
    """One answer of a request. ``is_reported``: the front has its first token.

    ``settings``: how its tokens are sampled, as the samples of a row that is of this one alone.
    """

    entry: Entry
    index: int
    settings: tuple[SampleSettings]
    sequence: ScheduledTokens
    matcher: GrammarMatcher | None = None
    is_reported: bool = False
    is_unfinished: bool = True


@attrs.frozen(eq=False)
class _Compiling:
    """A request whose grammar is being compiled, with the running limit of when it came, and the
    content of its adapter."""

    request: EngineRequest
    running_limit: int
    adapter: str
    grammar: futures.Future[CompiledGrammar]


class RequestTable:
    """Adds requests to the scheduler, and ends them. `StepSampling` samples for them.

    ``rng`` gives a seed to each sample whose request has none. ``samples``, by sequence id, and
    ``beam_searches``, by key, are those that have not ended, ``compiling``, by key, those that wait
    for their grammars, ``scored``, by key, those whose prompts are being scored; nothing but the
    table changes them. ``scored_token_cost``: see `ModelFacts`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        rng: random.Random,
        grammars: GrammarCompiler,
        kv_cache_dtype: str = "auto",
        *,
        scored_token_cost: float = 1.0,
    ) -> None:
        self.samples: dict[int, Sample] = {}
        self.beam_searches: dict[str, Entry] = {}
        self.scored: dict[str, Entry] = {}
        self._scheduler = scheduler
        self._max_num_seqs = scheduler.scheduler_config.max_num_seqs
        self._max_model_len = scheduler.scheduler_config.max_model_len
        self._has_priorities = scheduler.scheduler_config.policy == "priority"
        self._eos_token_ids = eos_token_ids
        self._rng = rng
        self._grammars = grammars
        self._kv_cache_dtype = kv_cache_dtype
        self._scored_token_cost = scored_token_cost
        self.compiling: dict[str, _Compiling] = {}
        self._entries: dict[str, Entry] = {}
        self._last_params = SamplingParams()
        self.failures: list[RequestError | Rejected] = []
        """The requests that errors have ended, or that were rejected late; the core takes them."""

    def count_by_state(self) -> Counter[SequenceStatus]:
        """The number of requests in each state.

        A request of several groups is in the state of the group that has got furthest, and runs
        if one of them has finished.
        """
        counts = Counter({SequenceStatus.WAITING: len(self.compiling)})
        for entry in self._entries.values():
            if len(entry.groups) == 1:  # most requests, and a full queue has thousands
                counts[entry.groups[0].status] += 1
                continue
            states = {group.status for group in entry.groups}
            if SequenceStatus.FINISHED in states:
                states = {SequenceStatus.RUNNING}
            counts[next(state for state in _FURTHEST_FIRST if state in states)] += 1
        return counts

    def add(self, key: str, request: EngineRequest, running_limit: int, adapter: str = "") -> None:
        """Add a request to the waiting queue, whose length does not bind one that ``is_resumed``.

        Its samples are split into groups of at most ``running_limit`` sequences. Raises
        `InvalidRequest`, naming the field, or `EngineOverloaded`. A request with a structured
        output waits until its grammar is compiled; `add_compiled` adds it, or rejects it with a
        failure. ``adapter``: the content of the adapter that it names.
        """
        self._check(key, request)
        structured_output = request.params.structured_output
        if structured_output is None:
            self._add(key, request, running_limit, adapter, None)
            return
        if not request.is_resumed:
            self._check_queue(request.client)
        grammar = self._grammars.compile(structured_output, request.client)
        self.compiling[key] = _Compiling(request, running_limit, adapter, grammar)
        self.add_compiled()

    def await_compiled(self, timeout_s: float) -> None:
        """Wait until a grammar is compiled, for at most ``timeout_s`` seconds."""
        grammars = [compiling.grammar for compiling in self.compiling.values()]
        futures.wait(grammars, timeout_s, futures.FIRST_COMPLETED)

    def add_compiled(self) -> None:
        """Add the requests whose grammars are compiled to the waiting queue."""
        for key, compiling in tuple(self.compiling.items()):
            if not compiling.grammar.done():
                continue
            del self.compiling[key]
            try:
                grammar = compiling.grammar.result()
                limit, adapter = compiling.running_limit, compiling.adapter
                self._add(key, compiling.request, limit, adapter, grammar)
            except EngineOverloaded as error:
                self.failures.append(Rejected(key, str(error), overloaded=True))
            except InvalidRequest as error:
                self.failures.append(Rejected(key, str(error), error.field))
            except ValueError as error:
                message = f"structured_output cannot be served: {error}"
                self.failures.append(Rejected(key, message, "structured_output"))

    def _add(
        self,
        key: str,
        request: EngineRequest,
        running_limit: int,
        adapter: str,
        grammar: CompiledGrammar | None,
    ) -> None:
        entry = self._entries[key] = self._new_entry(key, request)
        if entry.prompt_logprobs is not None:
            self.scored[key] = entry
        self._schedule(entry, request, running_limit, adapter)
        if entry.params.use_beam_search:
            entry.unfinished.update(range(entry.params.n))
            self.beam_searches[key] = entry
        else:
            self._add_samples(entry, grammar, request.output_token_ids)

    def _new_entry(self, key: str, request: EngineRequest) -> Entry:
        params = request.params
        if params.structured_output is not None:
            # Matchers have the compiled grammar: its text, of up to 64 KiB, is not needed.
            params = attrs.evolve(params, structured_output=None)
        if params.needs_ranking and not params.use_beam_search and params.logprobs is None:
            params = attrs.evolve(params, logprobs=0)  # best_of ranks samples by logprobs
        # The prompts of one API request arrive one after another, each with its own copy.
        if params == self._last_params:
            params = self._last_params
        self._last_params = params
        return Entry(
            key,
            params,
            len(request.prompt_token_ids),
            was_parked=request.is_resumed,
            # A request with output was added before, and its first token was reported.
            prompt_counted=bool(request.output_token_ids),
            prompt_logprobs=PromptScores() if _scores_prompt(request) else None,
            adapter_name=request.lora,
        )

    def _schedule(
        self, entry: Entry, request: EngineRequest, running_limit: int, adapter: str
    ) -> None:
        """Add the groups of a request to the scheduler. A request with an error leaves none."""
        eos, max_model_len = self._eos_token_ids, self._max_model_len
        try:
            for group in _scheduler_requests(
                *(entry.key, request, eos, max_model_len, running_limit),
                *(adapter, self._kv_cache_dtype, self._scored_token_cost),
            ):
                added = self._scheduler.add(group, is_resumed=request.is_resumed)
                entry.groups.append(added.group)
        except BaseException as error:
            self.abort(entry.key)
            if isinstance(error, QueueFull):
                raise EngineOverloaded(str(error)) from error
            if isinstance(error, UnservableRequest):
                raise InvalidRequest(str(error), "prompt") from error
            raise

    def _add_samples(
        self, entry: Entry, grammar: CompiledGrammar | None, output_token_ids: Sequence[int]
    ) -> None:
        params, num_prompt = entry.params, entry.num_prompt_tokens
        entry.unfinished.update(range(params.num_seqs))
        sequences = (sequence for group in entry.groups for sequence in group.unfinished_seqs)
        for index, sequence in enumerate(sequences):
            seed = self._rng.getrandbits(63) if params.seed is None else params.seed + index
            matcher = None if grammar is None else GrammarMatcher(grammar)
            if matcher is not None:
                for token_id in output_token_ids:
                    matcher.consume(token_id)
            # A parked request goes on after its prompt: penalties and draws count what follows.
            settings = SampleSettings.of(
                params, seed, sequence.token_ids, num_prompt, self._eos_token_ids
            )
            sample = Sample(entry, index, (settings,), sequence, matcher)
            self.samples[sequence.seq_id] = sample
            entry.sample_ids.append(sequence.seq_id)

    def abort(self, key: str) -> None:
        """End a request and free its blocks. An unknown key is ignored: the request has ended."""
        self.compiling.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.beam_searches.pop(key, None)
        self.scored.pop(key, None)
        for group in entry.groups:
            self._scheduler.abort(group.request_id)
        for seq_id in entry.sample_ids:
            del self.samples[seq_id]

    def take_prompt_logprobs(self, entry: Entry) -> bytes | None:
        """The log-probabilities of a prompt, once, as soon as all are known."""
        known = entry.prompt_logprobs
        if known is None or known.num_tokens < entry.num_prompt_tokens - 1:
            return None
        entry.prompt_logprobs = None
        del self.scored[entry.key]
        return known.to_bytes()

    def adapter_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the adapters of requests that were admitted, and of those that were not."""
        admitted: set[str] = set()
        waiting = {c.request.lora for c in self.compiling.values() if c.request.lora}
        for entry in self._entries.values():
            if entry.adapter_name is not None:
                states = {group.status for group in entry.groups}
                of_state = waiting if states == {SequenceStatus.WAITING} else admitted
                of_state.add(entry.adapter_name)
        return tuple(sorted(admitted)), tuple(sorted(waiting))

    def adapters(self) -> set[str]:
        """The contents of the adapters of all requests."""
        groups = (group for entry in self._entries.values() for group in entry.groups)
        scheduled = {group.request.adapter for group in groups}
        return scheduled.union(compiling.adapter for compiling in self.compiling.values())

    def abort_all(self) -> None:
        """End every request."""
        for key in (*self.compiling, *self._entries):
            self.abort(key)

    def fail(self, request_id: str, error: Exception) -> None:
        """End the request that a scheduler request belongs to, because of an internal error."""
        for entry in self._entries.values():
            if any(group.request_id == request_id for group in entry.groups):
                self.end_with(RequestError.of(entry.key, error))
                return

    def fail_sequence(self, seq_id: int, error: Exception) -> None:
        """End the request that a sequence belongs to, because of an internal error."""
        sample = self.samples.get(seq_id)
        if sample is not None:
            # The row after the stop token of a sample was computed in vain: the others go on.
            if sample.sequence.finish_reason is None:
                self.end_with(RequestError.of(sample.entry.key, error))
        else:
            _, entry = self.live_beams().get(seq_id, (None, None))
            if entry is not None:
                self.end_with(RequestError.of(entry.key, error))

    def end_with(self, failure: RequestError) -> None:
        """End the request that ``failure`` names; `failures` has it."""
        self.abort(failure.key)
        self.failures.append(failure)

    def preempt(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Preempt the groups of requests that run; returns the keys of those requests."""
        entries = [self._entries[key] for key in dict.fromkeys(keys) if key in self._entries]
        group_ids = [group.request_id for entry in entries for group in entry.groups]
        running = set(self._scheduler.abort_and_swap(group_ids))
        return tuple(
            entry.key
            for entry in entries
            if any(group.request_id in running for group in entry.groups)
        )

    def note_preempted(self, seq_ids: Sequence[int]) -> None:
        """Remember which requests were preempted, and how, for the status of their tokens."""
        beams = self.live_beams() if seq_ids and self.beam_searches else {}
        for seq_id in seq_ids:
            sample = self.samples.get(seq_id)
            entry = beams.get(seq_id, (None, None))[1] if sample is None else sample.entry
            if entry is None:
                continue
            if any(group.status is SequenceStatus.SWAPPED for group in entry.groups):
                entry.status = "swapped"
            elif entry.status == "normal":
                entry.status = "preempted"

    def live_beams(self) -> dict[int, tuple[ScheduledTokens, Entry]]:
        """The beams that go on, by sequence id."""
        return {
            sequence.seq_id: (sequence, entry)
            for entry in self.beam_searches.values()
            for sequence in entry.groups[0].unfinished_seqs
        }

    def finish(self, key: str, index: int) -> None:
        """End one sample, because the front found a stop string in its text."""
        entry = self._entries.get(key)
        if entry is not None and index in entry.unfinished:
            self._scheduler.finish(entry.sample_ids[index])
            self.end_sample(entry, index)

    def end_sample(self, entry: Entry, index: int) -> None:
        """Mark a sample as ended. The last one removes the request."""
        entry.unfinished.discard(index)
        if entry.sample_ids:
            self.samples[entry.sample_ids[index]].is_unfinished = False
        if not entry.unfinished:
            self.abort(entry.key)

    def _check(self, key: str, request: EngineRequest) -> None:
        params, priority = request.params, request.priority
        if key in self._entries or key in self.compiling:
            raise InvalidRequest(f"request id {key!r} is being served already", "request_id")
        if params.needs_ranking and params.num_seqs > self._max_num_seqs:
            raise InvalidRequest(
                f"{params.num_seqs} sequences at once are above max_num_seqs {self._max_num_seqs}: "
                "ask for fewer",
                "n" if params.best_of is None else "best_of",
            )
        if priority != 0 and not self._has_priorities:
            raise InvalidRequest(
                f"priority {priority} needs scheduling_policy 'priority'; this engine serves "
                "requests first come, first served",
                "priority",
            )

    def _check_queue(self, client: str) -> None:
        clients = [compiling.request.client for compiling in self.compiling.values()]
        try:
            self._scheduler.check_queue(client, clients)
        except QueueFull as error:
            raise EngineOverloaded(str(error)) from error


def _scores_prompt(request: EngineRequest) -> bool:
    return request.params.prompt_logprobs is not None and not request.output_token_ids


def _scheduler_requests(
    key: str,
    request: EngineRequest,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    running_limit: int,
    adapter: str,
    kv_cache_dtype: str,
    scored_token_cost: float,
) -> list[Request]:
    """The scheduler's requests, each of which becomes a group; the first one's id is ``key``.

    ``eos_token_ids`` end an answer unless the request ignores them. Samples are split into groups
    of at most ``running_limit`` sequences.
    """
    params, output = request.params, request.output_token_ids
    beams = None
    if params.use_beam_search:
        beams = BeamSearch(
            width=params.num_seqs,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max_model_len - len(request.prompt_token_ids)
    eos = frozenset() if params.ignore_eos else eos_token_ids
    group = Request(
        request_id=key,
        # Earlier output is computed as a prompt, and counted as output.
        prompt_token_ids=request.prompt_token_ids + output,
        max_tokens=max_tokens - len(output),
        min_tokens=max(0, params.min_tokens - len(output)),
        stop_token_ids=eos | frozenset(params.stop_token_ids),
        n=params.n,
        best_of=None if params.use_beam_search else params.best_of,
        beam_search=beams,
        priority=request.priority,
        extra_keys=_extra_keys(request, adapter, kv_cache_dtype),
        reads_prefix_cache=not _scores_prompt(request),
        prompt_token_cost=scored_token_cost if _scores_prompt(request) else 1.0,
        client=request.client,
        adapter=adapter,
    )
    # A group above the running limit would wait until temperature or an order raise it.
    # Samples that are compared in the end (best_of, beams) must stay in one group.
    return [group] if params.needs_ranking else _split_samples(group, max(1, running_limit))


def _extra_keys(
    request: EngineRequest, adapter: str, kv_cache_dtype: str
) -> tuple[str | None, ...]:
    """What requests that share prefixes have in common. No salt can look like an adapter's.

    A cache of fewer bits has other content, which KV events must not mix with that of the model's
    dtype.
    """
    salt = request.cache_salt
    if kv_cache_dtype != "auto":
        return (
            salt,
            adapter or None,
            str(CACHE_DTYPES[kv_cache_dtype]),
        )  # a type has several names
    if adapter:
        return (salt, adapter)
    return () if salt is None else (salt,)


def _split_samples(request: Request, max_group_size: int) -> list[Request]:
    """Split a request for n samples into groups of at most ``max_group_size`` samples.

    The first group scores the prompt, if that is asked for.
    """
    if request.n <= max_group_size:
        return [request]
    starts = range(0, request.n, max_group_size)
    return [
        attrs.evolve(
            request,
            request_id=f"{request.request_id}#{start}",
            n=min(max_group_size, request.n - start),
            best_of=None,
            reads_prefix_cache=request.reads_prefix_cache or start > 0,
            prompt_token_cost=1.0 if start else request.prompt_token_cost,
        )
        for start in starts
    ]
