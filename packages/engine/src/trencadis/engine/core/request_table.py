"""The requests that an engine core serves.

Translates between the two sides of the core: the front knows a request by its key and a sample by
its index; the scheduler knows sequence groups and sequence ids. Beam search creates new sequence
ids in every step, so only the table knows which request a sequence belongs to.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures

import attrs

from trencadis.engine.core.request_conversion import as_request, split_samples
from trencadis.engine.errors import BucketMiss, EngineOverloaded, InvalidRequest
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.matcher import CompiledGrammar, GrammarMatcher, StepMasks
from trencadis.engine.ipc.messages import NewToken, Rejected, RequestError
from trencadis.engine.outputs import FinishReason, RequestStatus
from trencadis.engine.runner.sampling_rows import (
    RowRequest,
    RowResult,
    SampledToken,
    SamplingRow,
)
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import (
    Candidate,
    QueueFull,
    Request,
    ScheduledSequence,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    SequenceUpdate,
    UnservableRequest,
)
from trencadis.scheduler import FinishReason as SchedulerFinishReason
from trencadis.scheduler import Sequence as ScheduledTokens

logger = logging.getLogger("trencadis.engine")

_FURTHEST_FIRST = (
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
    SequenceStatus.PREEMPTED,
    SequenceStatus.WAITING,
)


@attrs.define(eq=False)
class _Entry:
    """One request.

    ``sample_ids`` are sequence ids by sample index (empty for beam search). ``unfinished`` are the
    indices of samples that still generate. ``prompt_counted``: its prompt is in the total of
    prompt tokens. ``resumed``: the prompt and the tokens after which it goes on, if it was parked.
    ``was_parked``: also before its first token. How long it waited is not known then.
    """

    key: str
    params: SamplingParams
    num_prompt_tokens: int
    groups: list[SequenceGroup] = attrs.field(factory=list)
    sample_ids: list[int] = attrs.field(factory=list)
    unfinished: set[int] = attrs.field(factory=set)
    prompt_counted: bool = False
    status: RequestStatus = "normal"
    resumed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    was_parked: bool = False


@attrs.define(eq=False)
class _Sample:
    """One answer of a request. ``is_reported``: the front has its first token."""

    entry: _Entry
    index: int
    seed: int
    sequence: ScheduledTokens
    matcher: GrammarMatcher | None = None
    is_reported: bool = False

    @property
    def is_unfinished(self) -> bool:
        return self.index in self.entry.unfinished


@attrs.frozen(eq=False)
class _Compiling:
    """A request whose grammar is being compiled, with the arguments of `RequestTable.add`."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    client: str
    running_limit: int
    output_token_ids: tuple[int, ...]
    is_resumed: bool
    grammar: futures.Future[CompiledGrammar]


JumpPays = Callable[[int, int], bool]
"""Whether one chunk costs less than a step for each of its tokens: a sampled one, given by its
position, and as many forced ones as the second number."""


@attrs.frozen
class SampledStep:
    """The sampler's results of one step, by sequence id.

    ``logprobs`` has the log-probability of the sampled token where the request asked for it.
    ``candidates`` are the most probable next tokens of each beam. ``forced`` are the tokens that
    grammars force after the sampled ones.
    """

    tokens: Mapping[int, SampledToken]
    token_ids: Mapping[int, int]
    logprobs: Mapping[int, float]
    candidates: Mapping[int, Sequence[Candidate]]
    forced: Mapping[int, Sequence[int]]


class RequestTable:
    """Adds requests to the scheduler, samples for them, reports their tokens, ends them.

    ``rng`` gives a seed to each sample whose request has none. ``num_prompt_tokens`` counts the
    prompt tokens of all requests that have generated a token: each prompt once, cached and
    recomputed tokens not counted again; ``num_cached_tokens`` of them were prefix hits.
    ``num_generation_tokens`` counts reported tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        rng: random.Random,
        grammars: GrammarCompiler,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self._scheduler = scheduler
        self._max_num_seqs = scheduler.scheduler_config.max_num_seqs
        self._max_model_len = scheduler.scheduler_config.max_model_len
        self._has_priorities = scheduler.scheduler_config.policy == "priority"
        self._eos_token_ids = eos_token_ids
        self._rng = rng
        self._grammars = grammars
        self._compiling: dict[str, _Compiling] = {}
        self._entries: dict[str, _Entry] = {}
        self._samples: dict[int, _Sample] = {}
        self._beam_searches: dict[str, _Entry] = {}
        self._last_params = SamplingParams()
        self._failures: list[RequestError | Rejected] = []

    def count_by_state(self) -> Counter[SequenceStatus]:
        """The number of requests in each state.

        A request of several groups is in the state of the group that has got furthest, and runs
        if one of them has finished.
        """
        counts = Counter({SequenceStatus.WAITING: len(self._compiling)})
        for entry in self._entries.values():
            if len(entry.groups) == 1:  # most requests, and a full queue has thousands
                counts[entry.groups[0].status] += 1
                continue
            states = {group.status for group in entry.groups}
            if SequenceStatus.FINISHED in states:
                states = {SequenceStatus.RUNNING}
            counts[next(state for state in _FURTHEST_FIRST if state in states)] += 1
        return counts

    def add(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        client: str,
        running_limit: int,
        output_token_ids: tuple[int, ...] = (),
        is_resumed: bool = False,
    ) -> None:
        """Add a request to the waiting queue, whose length does not bind one that ``is_resumed``.

        It goes on after ``output_token_ids``, of which `check_output` says where there may be any.

        Samples are split into groups of at most ``running_limit`` sequences, the number that may
        run now. Raises `InvalidRequest`, naming the field, or `EngineOverloaded`. A request with a
        structured output waits until its grammar is compiled; `add_compiled` adds it, or refuses it
        with a failure.
        """
        self._check(key, params, priority)
        if params.structured_output is None:
            self._add(
                key,
                prompt_token_ids,
                params,
                priority,
                cache_salt,
                client,
                running_limit,
                output_token_ids,
                is_resumed,
                None,
            )
            return
        if not is_resumed:
            try:
                compiling = [request.client for request in self._compiling.values()]
                self._scheduler.check_queue(client, compiling)
            except QueueFull as error:
                raise EngineOverloaded(str(error)) from error
        grammar = self._grammars.compile(params.structured_output)
        # Matchers are made from the compiled grammar: its text, of up to 64 KiB, is not needed.
        params = attrs.evolve(params, structured_output=None)
        self._compiling[key] = _Compiling(
            prompt_token_ids,
            params,
            priority,
            cache_salt,
            client,
            running_limit,
            output_token_ids,
            is_resumed,
            grammar,
        )
        self.add_compiled()

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._compiling)

    def await_compiled(self, timeout_s: float) -> None:
        """Wait until a grammar is compiled, for at most ``timeout_s`` seconds."""
        grammars = [request.grammar for request in self._compiling.values()]
        futures.wait(grammars, timeout_s, futures.FIRST_COMPLETED)

    def add_compiled(self) -> None:
        """Add the requests whose grammars are compiled to the waiting queue."""
        for key, request in tuple(self._compiling.items()):
            if not request.grammar.done():
                continue
            del self._compiling[key]
            try:
                self._add(
                    key,
                    request.prompt_token_ids,
                    request.params,
                    request.priority,
                    request.cache_salt,
                    request.client,
                    request.running_limit,
                    request.output_token_ids,
                    request.is_resumed,
                    request.grammar.result(),
                )
            except EngineOverloaded as error:
                self._failures.append(Rejected(key, str(error), overloaded=True))
            except InvalidRequest as error:
                self._failures.append(Rejected(key, str(error), error.field))
            except ValueError as error:
                message = f"structured_output cannot be served: {error}"
                self._failures.append(Rejected(key, message, "structured_output"))

    def _add(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        client: str,
        running_limit: int,
        output_token_ids: tuple[int, ...],
        is_resumed: bool,
        grammar: CompiledGrammar | None,
    ) -> None:
        if params.needs_ranking and not params.use_beam_search and params.logprobs is None:
            params = attrs.evolve(params, logprobs=0)  # best_of ranks samples by logprobs
        # The prompts of one API request arrive one after another, each with its own copy.
        if params == self._last_params:
            params = self._last_params
        self._last_params = params
        entry = _Entry(key, params, len(prompt_token_ids), was_parked=is_resumed)
        if output_token_ids:
            entry.resumed = prompt_token_ids, output_token_ids
            entry.prompt_counted = True  # when it was first added
        self._entries[key] = entry
        try:
            for request in self._requests(
                key,
                prompt_token_ids,
                params,
                priority,
                cache_salt,
                client,
                running_limit,
                output_token_ids,
            ):
                added = self._scheduler.add(request, is_resumed=is_resumed)
                entry.groups.append(added.group)
        except QueueFull as error:
            self.abort(key)
            raise EngineOverloaded(str(error)) from error
        except UnservableRequest as error:
            self.abort(key)
            raise InvalidRequest(str(error), "prompt") from error
        except BaseException:
            self.abort(key)
            raise
        if params.use_beam_search:
            entry.unfinished.update(range(params.n))
            self._beam_searches[key] = entry
            return
        entry.unfinished.update(range(params.num_seqs))
        sequences = (sequence for group in entry.groups for sequence in group.unfinished_seqs)
        for index, sequence in enumerate(sequences):
            seed = self._rng.getrandbits(63) if params.seed is None else params.seed + index
            matcher = None if grammar is None else GrammarMatcher(grammar)
            if matcher is not None:
                for token_id in output_token_ids:
                    matcher.consume(token_id)
            self._samples[sequence.seq_id] = _Sample(entry, index, seed, sequence, matcher)
            entry.sample_ids.append(sequence.seq_id)

    def abort(self, key: str) -> None:
        """End a request and free its blocks. An unknown key is ignored: the request has ended."""
        self._compiling.pop(key, None)
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._beam_searches.pop(key, None)
        for group in entry.groups:
            self._scheduler.abort(group.request_id)
        for seq_id in entry.sample_ids:
            del self._samples[seq_id]

    def abort_all(self) -> int:
        """End every request; returns how many there were."""
        keys = [*self._compiling, *self._entries]
        for key in keys:
            self.abort(key)
        return len(keys)

    def fail(self, request_id: str, error: Exception) -> None:
        """End the request that a scheduler request belongs to, because of an internal error."""
        for entry in self._entries.values():
            if any(group.request_id == request_id for group in entry.groups):
                self._fail(entry, error)
                return

    def fail_sequence(self, seq_id: int, error: Exception) -> None:
        """End the request that a sequence belongs to, because of an internal error."""
        sample = self._samples.get(seq_id)
        if sample is not None:
            self._fail(sample.entry, error)
        else:
            _, entry = self._live_beams().get(seq_id, (None, None))
            if entry is not None:
                self._fail(entry, error)

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
        beams = self._live_beams() if seq_ids and self._beam_searches else {}
        for seq_id in seq_ids:
            sample = self._samples.get(seq_id)
            entry = beams.get(seq_id, (None, None))[1] if sample is None else sample.entry
            if entry is None:
                continue
            if any(group.status is SequenceStatus.SWAPPED for group in entry.groups):
                entry.status = "swapped"
            elif entry.status == "normal":
                entry.status = "preempted"

    def take_failures(self) -> list[RequestError | Rejected]:
        """The requests that errors have ended since the last call, or that were refused late."""
        failures, self._failures = self._failures, []
        return failures

    def finish(self, key: str, index: int) -> None:
        """End one sample, because the front found a stop string in its text."""
        entry = self._entries.get(key)
        if entry is not None and index in entry.unfinished:
            self._scheduler.finish(entry.sample_ids[index])
            self._end_sample(entry, index)

    def sampling_requests(self, output: SchedulerOutput) -> dict[int, RowRequest]:
        """What is sampled from each row of logits of a step, by the row's sequence id."""
        live = self._live_beams() if self._beam_searches else {}
        masks: StepMasks | None = None
        requests: dict[int, RowRequest] = {}
        for item in (*output.decodes, *output.prompts):
            if item.num_candidates:
                requests[item.seq_id] = self._beam_request(item, *live[item.seq_id])
            elif item.samples:
                samples = [self._samples[seq_id] for seq_id in item.sample_ids]
                rows = [self._sampling_row(sample) for sample in samples]
                # The samples of a row have the same tokens, and so the same mask.
                matcher = next((s.matcher for s in samples if s.is_unfinished), None)
                if matcher is not None:
                    masks = masks or self._grammars.masks()
                    mask = masks.add(matcher, rows[0].forbidden_token_ids)
                    rows = [attrs.evolve(row, mask=mask) for row in rows]
                requests[item.seq_id] = RowRequest(tuple(rows))
        if masks is not None:
            masks.start()
        return requests

    def sampled(
        self,
        output: SchedulerOutput,
        results: Mapping[int, RowResult],
        pays: JumpPays,
    ) -> SampledStep:
        """The results of a step by the sequences that they belong to.

        A sequence that failed has no result. Ends requests whose grammars fail on them. ``pays``
        says whether tokens that a grammar forces become output at once.
        """
        tokens: dict[int, SampledToken] = {}
        token_ids: dict[int, int] = {}
        logprobs: dict[int, float] = {}
        candidates: dict[int, Sequence[Candidate]] = {}
        forced: dict[int, Sequence[int]] = {}
        live = self._live_beams() if self._beam_searches else {}
        for item in (*output.decodes, *output.prompts):
            result = results.get(item.seq_id)
            if result is None:
                continue
            if item.num_candidates:
                beam, entry = live[item.seq_id]
                if not entry.prompt_counted:
                    self._count_prompt(entry, beam.num_cached_tokens)
                candidates[item.seq_id] = [Candidate(*token) for token in result.candidates]
            elif item.samples:
                for seq_id, token in zip(item.sample_ids, result.tokens, strict=True):
                    tokens[seq_id] = token
                    token_ids[seq_id] = token.token_id
                    if token.logprobs is not None:
                        logprobs[seq_id] = token.logprobs.chosen.logprob
                    following = self._follow(seq_id, token.token_id, pays)
                    if following:
                        forced[seq_id] = following
        return SampledStep(tokens, token_ids, logprobs, candidates, forced)

    def report(self, updates: Sequence[SequenceUpdate], step: SampledStep) -> list[NewToken]:
        """The messages to the front for a step. Tokens of ended samples are left out."""
        tokens: list[NewToken] = []
        number, of = 0, -1
        for update in updates:
            number, of = (number + 1 if update.seq_id == of else 0), update.seq_id
            sample = self._samples.get(update.seq_id)
            if sample is None:
                search = self._beam_searches.get(update.request_id)
                if search is not None:
                    tokens.extend(self._hypothesis(search, update.seq_id))
                continue
            entry, sequence = sample.entry, sample.sequence
            if not sample.is_unfinished:
                continue
            if not entry.prompt_counted:
                self._count_prompt(entry, sequence.num_cached_tokens)
            ended = update.finish_reason
            reason: FinishReason | None = None if ended is None else ended.value
            # The matcher is after the last of the tokens that were forced.
            is_last = number == len(step.forced.get(update.seq_id, ()))
            is_complete = is_last and sample.matcher is not None and sample.matcher.is_complete
            if is_complete and reason != "stop":
                reason = "stop"
                if ended is None:
                    self._scheduler.finish(update.seq_id)
            is_first, sample.is_reported = not sample.is_reported, True
            tokens.append(
                NewToken(
                    entry.key,
                    sample.index,
                    update.token_id,
                    reason,
                    sequence.num_cached_tokens,
                    step.tokens[update.seq_id].logprobs,
                    entry.status,
                    is_complete and update.token_id not in self._eos_token_ids,
                    sequence.group.queue_s if is_first and not entry.was_parked else None,
                    step.tokens[update.seq_id].embedding,
                )
            )
            if reason is not None:
                self._end_sample(entry, sample.index)
        self.num_generation_tokens += sum(token.embedding is None for token in tokens)
        return tokens

    def _check(self, key: str, params: SamplingParams, priority: int) -> None:
        if key in self._entries or key in self._compiling:
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

    def _requests(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        client: str,
        running_limit: int,
        output_token_ids: tuple[int, ...],
    ) -> list[Request]:
        max_new_tokens = self._max_model_len - len(prompt_token_ids)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        request = as_request(
            key, prompt_token_ids, params, priority, cache_salt, client, max_new_tokens, eos
        )
        if output_token_ids:  # computed as a prompt, and counted as output
            request = attrs.evolve(
                request,
                prompt_token_ids=(*prompt_token_ids, *output_token_ids),
                max_tokens=request.max_tokens - len(output_token_ids),
                min_tokens=max(0, request.min_tokens - len(output_token_ids)),
            )
        # A group above the running limit would wait until temperature or an order raise it.
        # Samples that are compared in the end (best_of, beams) must stay in one group.
        return [request] if params.needs_ranking else split_samples(request, max(1, running_limit))

    def _live_beams(self) -> dict[int, tuple[ScheduledTokens, _Entry]]:
        return {
            sequence.seq_id: (sequence, entry)
            for entry in self._beam_searches.values()
            for sequence in entry.groups[0].unfinished_seqs
        }

    def _beam_request(
        self, item: ScheduledSequence, sequence: ScheduledTokens, entry: _Entry
    ) -> RowRequest:
        beam = _Sample(entry, index=0, seed=0, sequence=sequence)
        return RowRequest(beam=self._sampling_row(beam), num_candidates=item.num_candidates)

    def _sampling_row(self, sample: _Sample) -> SamplingRow:
        sequence, resumed = sample.sequence, sample.entry.resumed
        prompt: Sequence[int] = sequence.request.prompt_token_ids
        output: Sequence[int] = sequence.output_token_ids
        if resumed is not None:  # penalties and draws go on where they were
            prompt, output = resumed[0], (*resumed[1], *output)
        return SamplingRow(sample.entry.params, sample.seed, prompt, output, self._eos_token_ids)

    def _follow(self, seq_id: int, token_id: int, pays: JumpPays) -> Sequence[int]:
        """Let the grammar of a sample follow its new token. An error ends its request alone.

        Returns the tokens that the grammar forces next, where they become output at once.
        """
        sample = self._samples.get(seq_id)  # None after the failure of another sample
        if sample is None or sample.matcher is None or not sample.is_unfinished:
            return ()
        matcher, params = sample.matcher, sample.entry.params
        matcher.consume(token_id)
        forced: Sequence[int] = ()
        if params.logprobs is None and not params.needs_ranking:
            # The log-probability of a token needs the logits before it.
            forced = matcher.forced_tokens()
        if forced and not self._ends_answer(sample, matcher, forced):
            forced = forced if pays(len(sample.sequence.token_ids), len(forced)) else ()
        matcher.consume_all(forced)
        if matcher.error:
            key = sample.entry.key
            self.abort(key)
            message = f"the grammar of structured_output cannot go on: {matcher.error}"
            logger.warning("Request %s ends: %s", key, message)
            self._failures.append(RequestError(key, message))
            return ()
        return forced

    def _ends_answer(self, sample: _Sample, matcher: GrammarMatcher, forced: Sequence[int]) -> bool:
        """Whether the forced tokens end the answer: then no forward pass computes them."""
        sequence = sample.sequence
        num_left = sequence.request.max_tokens - sequence.num_output_tokens - 1
        return len(forced) >= num_left or matcher.ends_with(forced)

    def _hypothesis(self, entry: _Entry, seq_id: int) -> Iterator[NewToken]:
        """All tokens of one result of a beam search that has just ended."""
        results = entry.groups[0].results
        index, result = next((i, s) for i, s in enumerate(results) if s.seq_id == seq_id)
        cached = result.num_cached_tokens
        *tokens, last = result.output_token_ids
        status = entry.status
        queue_s = None if entry.was_parked else entry.groups[0].queue_s
        for token_id in tokens:
            yield NewToken(entry.key, index, token_id, None, cached, None, status, False, queue_s)
            queue_s = None
        reason = _finish_reason(result.finish_reason)
        yield NewToken(entry.key, index, last, reason, cached, None, status, False, queue_s)
        self._end_sample(entry, index)

    def _fail(self, entry: _Entry, error: Exception) -> None:
        self.abort(entry.key)
        if isinstance(error, BucketMiss):
            self._failures.append(RequestError(entry.key, str(error), bucket_miss=True))
            return
        message = f"internal error: {type(error).__name__}: {error}"
        self._failures.append(RequestError(entry.key, message))

    def _count_prompt(self, entry: _Entry, num_cached_tokens: int) -> None:
        entry.prompt_counted = True
        self.num_prompt_tokens += entry.num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def _end_sample(self, entry: _Entry, index: int) -> None:
        """Mark a sample as ended. The last one removes the request."""
        entry.unfinished.discard(index)
        if not entry.unfinished:
            self.abort(entry.key)


def _finish_reason(reason: SchedulerFinishReason | None) -> FinishReason | None:
    return None if reason is None else reason.value
