"""The requests that a core serves, between the front's terms and the scheduler's.

The front knows a request by its key and a sample by its number; the scheduler knows groups and
sequence ids, of which beams take new ones as they go.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from trencadis.engine.core.group_requests import as_request, in_parts
from trencadis.engine.errors import EngineOverloaded, InvalidRequest
from trencadis.engine.ipc.messages import NewToken
from trencadis.engine.outputs import FinishReason
from trencadis.engine.runner.model_runner import StepLogits
from trencadis.engine.runner.sampler import SampledToken, SamplingRow, rank_tokens, sample
from trencadis.engine.sampling_params import SamplingParams
from trencadis.scheduler import (
    Candidate,
    QueueFull,
    Request,
    ScheduledSequence,
    Scheduler,
    SchedulerOutput,
    SequenceGroup,
    SequenceUpdate,
    UnservableRequest,
)
from trencadis.scheduler import FinishReason as EndReason
from trencadis.scheduler import Sequence as ScheduledTokens


@attrs.define(eq=False)
class _Served:
    """One request. ``sample_ids`` are sequence ids by number of sample, none where beams are
    searched; ``open`` are the numbers of what has not ended."""

    key: str
    params: SamplingParams
    groups: list[SequenceGroup] = attrs.field(factory=list)
    sample_ids: list[int] = attrs.field(factory=list)
    open: set[int] = attrs.field(factory=set)


@attrs.frozen(eq=False)
class _Sample:
    request: _Served
    index: int
    seed: int
    sequence: ScheduledTokens


@attrs.frozen
class Chosen:
    """What follows each sequence of a step: a sampled token, or of a beam its candidates."""

    sampled: Mapping[int, SampledToken]
    candidates: Mapping[int, Sequence[Candidate]]

    @property
    def token_ids(self) -> dict[int, int]:
        """The sampled tokens alone."""
        return {seq_id: token.token_id for seq_id, token in self.sampled.items()}

    @property
    def logprobs(self) -> dict[int, float]:
        """Log-probabilities of the tokens, where they were asked for."""
        return {
            seq_id: token.logprobs.chosen.logprob
            for seq_id, token in self.sampled.items()
            if token.logprobs is not None
        }


class RequestTable:
    """Queues, samples, reports and ends the requests of one core.

    ``rng`` gives seeds to samples whose request brings none.
    """

    def __init__(
        self, scheduler: Scheduler, eos_token_ids: frozenset[int], rng: random.Random
    ) -> None:
        self._scheduler = scheduler
        self._most = scheduler.scheduler_config.max_num_seqs
        self._max_model_len = scheduler.scheduler_config.max_model_len
        self._has_priorities = scheduler.scheduler_config.policy == "priority"
        self._eos_token_ids = eos_token_ids
        self._rng = rng
        self._served: dict[str, _Served] = {}
        self._samples: dict[int, _Sample] = {}

    def add(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cap: int,
    ) -> None:
        """Queue a request, samples in groups that fit ``cap``, the sequences that may run now.

        Raises `InvalidRequest`, naming the field, or `EngineOverloaded`.
        """
        self._check(key, params, priority)
        if params.chooses and not params.use_beam_search and params.logprobs is None:
            params = attrs.evolve(params, logprobs=0)  # what samples are ranked by
        served = _Served(key, params)
        self._served[key] = served
        try:
            for request in self._parts(key, prompt_token_ids, params, priority, cap):
                served.groups.append(self._scheduler.add(request).group)
        except QueueFull as error:
            self.abort(key)
            raise EngineOverloaded(str(error)) from error
        except UnservableRequest as error:
            self.abort(key)
            raise InvalidRequest(str(error), "prompt") from error
        served.open.update(range(params.n if params.use_beam_search else params.num_seqs))
        if params.use_beam_search:
            return
        for index, one in enumerate(one for group in served.groups for one in group.live):
            seed = self._rng.getrandbits(63) if params.seed is None else params.seed + index
            self._samples[one.seq_id] = _Sample(served, index, seed, one)
            served.sample_ids.append(one.seq_id)

    def abort(self, key: str) -> None:
        """Stop serving a request and free its blocks; a key that is not known is ignored."""
        served = self._served.pop(key, None)
        if served is None:
            return
        for group in served.groups:
            self._scheduler.abort(group.request_id)
        for seq_id in served.sample_ids:
            del self._samples[seq_id]

    def finish(self, key: str, index: int) -> None:
        """A sample has all that its client wants; the others of its request go on."""
        served = self._served.get(key)
        if served is not None and index in served.open:
            self._scheduler.finish(served.sample_ids[index])
            self._end(served, index)

    def choose(self, output: SchedulerOutput, computed: StepLogits) -> Chosen:
        """A token for every sequence that samples in this step, and every beam's candidates."""
        scheduled = {one.seq_id: one for one in (*output.decodes, *output.prompts)}
        wanted = [scheduled[seq_id] for seq_id in computed.seq_ids]
        ids: list[int] = []
        rows: list[int] = []
        beams: list[int] = []
        for row, one in enumerate(wanted):
            if one.num_candidates:
                beams.append(row)
            else:
                ids.extend(one.sample_ids)
                rows.extend([row] * len(one.sample_ids))
        tokens = sample(_take(computed.logits, rows), [self._row(i) for i in ids]) if ids else []
        candidates = self._candidates([wanted[row] for row in beams], computed.logits, beams)
        return Chosen(dict(zip(ids, tokens, strict=True)), candidates)

    def report(self, updates: Sequence[SequenceUpdate], chosen: Chosen) -> list[NewToken]:
        """What the front is told of a step; samples that nobody waits for are left out."""
        tokens: list[NewToken] = []
        for update in updates:
            one = self._samples.get(update.seq_id)
            search = self._served.get(update.request_id)
            if one is None and search is not None:
                tokens.extend(self._hypothesis(search, update.seq_id))
            elif one is not None and one.index in one.request.open:
                reason = _reason(update.finish_reason)
                cached = one.sequence.num_cached_prompt_tokens
                logprobs = chosen.sampled[update.seq_id].logprobs
                key = one.request.key
                tokens.append(NewToken(key, one.index, update.token_id, reason, cached, logprobs))
                if reason is not None:
                    self._end(one.request, one.index)
        return tokens

    def _check(self, key: str, params: SamplingParams, priority: int) -> None:
        if key in self._served:
            raise InvalidRequest(f"request id {key!r} is being served already", "request_id")
        if params.chooses and params.num_seqs > self._most:
            raise InvalidRequest(
                f"{params.num_seqs} sequences at once are above max_num_seqs {self._most}: ask for "
                "fewer",
                "n" if params.best_of is None else "best_of",
            )
        if priority != 0 and not self._has_priorities:
            raise InvalidRequest(
                f"priority {priority} needs scheduling_policy 'priority'; here requests are "
                "served first come, first served",
                "priority",
            )

    def _parts(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        cap: int,
    ) -> list[Request]:
        room = self._max_model_len - len(prompt_token_ids)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        whole = as_request(key, prompt_token_ids, params, priority, room, eos)
        # A group that is larger would wait until heat or an order allow it.
        return [whole] if params.chooses else in_parts(whole, max(1, cap))

    def _row(self, seq_id: int) -> SamplingRow:
        one = self._samples[seq_id]
        return self._sampling_row(one.sequence, one.request.params, one.seed)

    def _sampling_row(
        self, sequence: ScheduledTokens, params: SamplingParams, seed: int
    ) -> SamplingRow:
        return SamplingRow(
            params,
            seed,
            sequence.request.prompt_token_ids,
            sequence.output_token_ids,
            self._eos_token_ids,
        )

    def _candidates(
        self, beams: Sequence[ScheduledSequence], logits: torch.Tensor, rows: list[int]
    ) -> dict[int, Sequence[Candidate]]:
        if not beams:
            return {}
        searches = [one for one in self._served.values() if one.params.use_beam_search]
        live = {one.seq_id: (one, s.params) for s in searches for one in s.groups[0].live}
        ranked = rank_tokens(
            _take(logits, rows),
            [self._sampling_row(*live[beam.seq_id], seed=0) for beam in beams],
            [beam.num_candidates for beam in beams],
        )
        return {
            beam.seq_id: [Candidate(*token) for token in tokens]
            for beam, tokens in zip(beams, ranked, strict=True)
        }

    def _hypothesis(self, served: _Served, seq_id: int) -> Iterator[NewToken]:
        """All tokens of an answer of a beam search that has just ended."""
        results = served.groups[0].results
        index, one = next((i, s) for i, s in enumerate(results) if s.seq_id == seq_id)
        *tokens, last = one.output_token_ids
        for token_id in tokens:
            yield NewToken(served.key, index, token_id, None, one.num_cached_prompt_tokens)
        reason = _reason(one.finish_reason)
        yield NewToken(served.key, index, last, reason, one.num_cached_prompt_tokens)
        self._end(served, index)

    def _end(self, served: _Served, index: int) -> None:
        """A sample has ended; with the last one, whatever the request still has goes."""
        served.open.discard(index)
        if not served.open:
            self.abort(served.key)


def _reason(ended: EndReason | None) -> FinishReason | None:
    return None if ended is None else ended.value


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if rows == list(range(len(logits))) else logits[rows]
