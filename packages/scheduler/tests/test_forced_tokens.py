"""Forced tokens: what can only follow a sampled token is output at once, and one chunk."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import STOP, Memory, Runner, alone, num_scheduled_tokens, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    BeamSearch,
    FinishReason,
    InvalidResults,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceUpdate,
    StepTiming,
)

MAX_LEN = 64


def make(*, num_blocks: int = 65, prefixes: bool = False, **fields: Any) -> Scheduler:
    blocks = BlockManager(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=4,
            num_host_blocks=fields.pop("num_host_blocks", 0),
            watermark=0.0,
            enable_prefix_caching=prefixes,
        )
    )
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": MAX_LEN, **fields}
    return Scheduler(SchedulerConfig(**values), blocks)


def request(name: str, length: int = 4, **fields: Any) -> Request:
    values = {"max_tokens": 20, **fields}
    return Request(request_id=name, prompt_token_ids=tuple(range(length)), **values)


def run(
    scheduler: Scheduler, token: int = 7, forced: tuple[int, ...] = (), **results: Any
) -> tuple[SchedulerOutput, tuple[SequenceUpdate, ...]]:
    output = scheduler.schedule()
    ids = [i for item in (*output.decodes, *output.prompts) for i in item.sample_ids]
    sampled = dict.fromkeys(ids, token)
    followed = dict.fromkeys(ids, forced) if forced else None
    return output, scheduler.update(output, sampled, forced=followed, **results)


def test_they_are_output_at_once_and_computed_as_one_chunk_with_the_sampled_token() -> None:
    scheduler = make()
    sequence = scheduler.add(request("a"))
    _, updates = run(scheduler, 7, forced=(8, 9))
    assert [(update.token_id, update.finish_reason) for update in updates] == [
        (7, None),
        (8, None),
        (9, None),
    ]
    assert sequence.output_token_ids == [7, 8, 9]
    output, updates = run(scheduler, 5)
    (chunk,) = output.prompts
    assert (chunk.start, list(chunk.token_ids), chunk.samples) == (4, [7, 8, 9], True)
    assert [update.token_id for update in updates] == [5]
    output, _ = run(scheduler)
    assert (output.prompts, output.decodes[0].start) == ((), 7)


@pytest.mark.parametrize(
    ("fields", "kept", "reason"),
    [
        ({"max_tokens": 3}, [7, 8, 9], FinishReason.LENGTH),
        ({"max_tokens": 1}, [7], FinishReason.LENGTH),
        ({"stop_token_ids": {9}}, [7, 8, 9], FinishReason.STOP),
        ({"stop_token_ids": {7}}, [7], FinishReason.STOP),
        ({"stop_token_ids": {8}, "min_tokens": 3}, [7, 8, 9, 8], FinishReason.STOP),
    ],
)
def test_a_limit_or_a_stop_token_ends_a_sequence_among_them(
    fields: dict[str, Any], kept: list[int], reason: FinishReason
) -> None:
    scheduler = make()
    sequence = scheduler.add(request("a", **fields))
    _, updates = run(scheduler, 7, forced=(8, 9, 8, 6))
    assert sequence.output_token_ids == kept
    assert [update.finish_reason for update in updates] == [None] * (len(kept) - 1) + [reason]
    assert not scheduler.has_work


def test_the_length_of_the_model_ends_a_sequence_among_them() -> None:
    scheduler = make(max_model_len=7)
    sequence = scheduler.add(request("a"))
    _, updates = run(scheduler, 7, forced=(8, 9, 8, 6))
    assert sequence.output_token_ids == [7, 8, 9]
    assert updates[-1].finish_reason is FinishReason.LENGTH


def test_every_decode_keeps_its_token_beside_a_long_forced_run() -> None:
    scheduler = make(max_num_batched_tokens=6)
    for name in "abc":
        scheduler.add(request(name, 2))
    output = scheduler.schedule()
    scheduler.update(output, {0: 7, 1: 7, 2: 7}, forced={0: (5,) * 9, 1: (6,) * 9})
    output, _ = run(scheduler)
    assert [item.seq_id for item in output.decodes] == [2, 1]
    assert [len(chunk.token_ids) for chunk in output.prompts] == [4]
    assert num_scheduled_tokens(output) == 6


def test_they_come_before_the_chunks_of_a_prompt_that_is_ahead() -> None:
    scheduler = make(policy="priority", max_num_batched_tokens=8)
    scheduler.add(request("late", 4, priority=5))
    run(scheduler)
    scheduler.add(request("urgent", 40, priority=0))
    run(scheduler, 7, forced=(8, 9))  # the prompt has begun
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [3, 5]


def test_without_prefill_budget_they_are_computed_one_a_step() -> None:
    """As fast as without being forced, however low a thermal policy sets the limit."""
    scheduler = make(max_prefill_tokens=1)
    scheduler.add(request("a", 1))
    scheduler.add(request("b", 1))
    run(scheduler, 7, forced=(8, 9))
    for position in (1, 2, 3):
        output, updates = run(scheduler)
        assert not output.prompts
        assert [decode.start for decode in output.decodes] == [position] * 2
        assert len(updates) == (2 if position == 3 else 0)


def test_their_chunks_share_the_prefill_limit() -> None:
    scheduler = make(max_prefill_tokens=4)
    for name in "abc":
        scheduler.add(request(name, 1))
    run(scheduler, 7, forced=(8, 9))
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [3]
    assert len(output.decodes) == 2


def test_a_chunk_of_them_is_no_longer_than_others() -> None:
    scheduler = make(max_chunk_tokens=3)
    scheduler.add(request("a", 1))
    run(scheduler, 7, forced=(5,) * 9)
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [3]


def test_single_ones_take_no_prefill_budget() -> None:
    scheduler = make(max_prefill_tokens=1)
    for name in "ab":
        scheduler.add(request(name, 1))
    run(scheduler, 7, forced=(8, 9))
    scheduler.add(request("prompt", 5))
    output, _ = run(scheduler)
    assert len(output.decodes) == 3, "a token of each, and the first one of the prompt"


@pytest.mark.parametrize("swapped", ["in a forced run", "decoding", "in a prompt"])
def test_a_swapped_request_waits_for_prefill_budget_with_a_prompt_alone(swapped: str) -> None:
    scheduler = make(max_prefill_tokens=4, num_host_blocks=64, force_evict_hold_s=0.0)
    scheduler.costs.prefill_s_per_token = 1.0  # so that it is swapped and not recomputed
    scheduler.add(request("swapped", 10 if swapped == "in a prompt" else 1))
    scheduler.add(request("other", 1, max_tokens=40))
    output = scheduler.schedule()
    sampled = {item.seq_id: 7 for item in output.decodes}
    forced = {1: (6,) * 30} | ({0: (5,) * 9} if swapped == "in a forced run" else {})
    scheduler.update(output, sampled, forced=forced)
    run(scheduler)
    scheduler.abort_and_swap(["swapped"])
    output, _ = run(scheduler)
    assert scheduler.num_preemptions - scheduler.num_recomputes == 1
    assert [(chunk.seq_id, len(chunk.token_ids)) for chunk in output.prompts] == [(1, 4)]
    assert [decode.seq_id for decode in output.decodes] == ([] if "prompt" in swapped else [0])
    assert scheduler.num_swapped == ("prompt" in swapped)


def test_they_do_not_tell_how_long_a_token_of_a_prompt_takes() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    before = scheduler.costs.prefill_s_per_token
    run(scheduler, 7, forced=(8, 9), timing=StepTiming(prompts_s=4.0))
    learned = scheduler.costs.prefill_s_per_token
    assert learned != before
    run(scheduler, timing=StepTiming(prompts_s=4.0))
    assert scheduler.costs.prefill_s_per_token == learned


def test_a_step_that_computes_them_beside_a_prompt_tells_nothing_either() -> None:
    scheduler = make(max_num_batched_tokens=16)
    scheduler.add(request("a"))
    run(scheduler, 7, forced=(8, 9, 8, 9), timing=StepTiming(prompts_s=4.0))
    scheduler.add(request("b", 9))
    learned = scheduler.costs.prefill_s_per_token
    output, _ = run(scheduler, timing=StepTiming(prompts_s=40.0))
    assert [len(chunk.token_ids) for chunk in output.prompts] == [5, 9]
    assert scheduler.costs.prefill_s_per_token == learned


@pytest.mark.parametrize("recomputed", ["one that has sampled since", "what two have in common"])
def test_a_last_chunk_without_them_is_that_of_a_prompt(recomputed: str) -> None:
    """Although it is no longer than they were."""
    scheduler = make(max_num_batched_tokens=8, force_evict_hold_s=0.0)
    if recomputed == "one that has sampled since":
        scheduler.add(request("a", 2))
        run(scheduler, 7, forced=(5,) * 9)
        run(scheduler)
        run(scheduler)  # 13 tokens, of which 12 are computed
    else:
        scheduler.add(request("a", 12, n=2))
        run(scheduler)
        output = scheduler.schedule()
        scheduler.update(output, {0: 7, 1: 8}, forced={0: (5,) * 5, 1: (6,) * 5})
    scheduler.abort_and_swap(["a"])
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [8]
    before = scheduler.costs.prefill_s_per_token
    output, _ = run(scheduler, timing=StepTiming(prompts_s=4.0))
    assert [len(chunk.token_ids) for chunk in output.prompts] == [5 if "one" in recomputed else 4]
    assert scheduler.costs.prefill_s_per_token != before


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ([(8,)], "forced must be a mapping"),
        ({1: (8,)}, "forced tokens for sequence 1 and no sampled one"),
        ({0: 8}, "forced of sequence 0 must be a sequence of token ids"),
        ({0: (8, -1)}, r"forced of sequence 0\[1\] must be an integer"),
        ({0: (8, "x")}, r"forced of sequence 0\[1\] must be an integer"),
    ],
)
def test_what_is_no_forced_token_changes_nothing(forced: Any, message: str) -> None:
    scheduler = make()
    sequence = scheduler.add(request("a"))
    output = scheduler.schedule()
    with pytest.raises(InvalidResults, match=message):
        scheduler.update(output, {0: 7}, forced=forced)
    assert not sequence.output_token_ids
    scheduler.update(output, {0: 7}, forced={0: (8,)})
    assert sequence.output_token_ids == [7, 8]


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"beam_search": BeamSearch(width=2)}])
def test_a_scored_request_has_no_forced_tokens(fields: dict[str, Any]) -> None:
    scheduler = make()
    scheduler.add(request("a", **fields))
    output = scheduler.schedule()
    with pytest.raises(InvalidResults, match="sequence 0, which is ranked by log-prob"):
        scheduler.update(output, {0: 7, 1: 7}, forced={0: (8,)})


@settings(max_examples=60, deadline=None)
@given(
    most_forced=st.integers(1, 9),
    num_blocks=st.integers(14, 40),
    num_host_blocks=st.sampled_from([0, 30]),
    budget=st.integers(4, 20),
    limit=st.none() | st.integers(1, 8),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_no_outcome_depends_on_what_was_forced(
    most_forced: int,
    num_blocks: int,
    num_host_blocks: int,
    budget: int,
    limit: int | None,
    counts: list[int],
    seed: int,
) -> None:
    """Forced tokens are those that the model would sample. Blocks run out, and orders preempt."""
    scheduler = make(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=budget,
        max_prefill_tokens=limit,
        max_model_len=24,
        force_evict_hold_s=0.0,
        prefixes=True,
    )
    rng = random.Random(seed)
    runner = Runner(scheduler, Memory(4), most_forced=most_forced)
    groups = [
        runner.add(request(str(i), 3 + i, n=count, max_tokens=12, stop_token_ids={STOP}))
        for i, count in enumerate(counts)
    ]
    for _ in range(600):
        if not scheduler.has_work:
            break
        if rng.random() < 0.1:
            scheduler.abort_and_swap([rng.choice("01234")])
        runner.step()
    else:
        raise AssertionError("requests are unfinished")
    for group in groups:
        assert outcome(group) == alone(group.request, 24)


def test_fewer_steps_give_the_same_tokens() -> None:
    num_steps, outcomes = [], []
    for most_forced in (0, 5):
        scheduler = make()
        runner = Runner(scheduler, Memory(4), most_forced=most_forced)
        group = runner.add(request("a", max_tokens=40))
        steps = 0
        while scheduler.has_work:
            runner.step()
            steps += 1
        num_steps.append(steps)
        outcomes.append(outcome(group))
    assert outcomes[0] == outcomes[1]
    assert num_steps[0] == 40
    assert num_steps[1] < 20
