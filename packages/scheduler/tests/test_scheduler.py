"""What a step decides: budgets, order, chunks, preemption, finished and rejected requests."""

from __future__ import annotations

import pytest
from harness import num_scheduled_tokens

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    ConfigError,
    DuplicateRequest,
    FinishReason,
    QueueFull,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceUpdate,
    StepOrderError,
    UnservableRequest,
)


def make(
    *, num_blocks: int = 65, block_size: int = 4, **settings: int
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(
        CacheConfig(
            num_blocks=num_blocks, block_size=block_size, watermark=0.0, enable_prefix_caching=False
        )
    )
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return Scheduler(SchedulerConfig(**{**defaults, **settings}), blocks), blocks


def request(name: str, length: int = 4, **fields: object) -> Request:
    values = {"max_tokens": 4, **fields}
    return Request(request_id=name, prompt_token_ids=tuple(range(length)), **values)


def run(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, tuple[SequenceUpdate, ...]]:
    output = scheduler.schedule()
    sampled = {
        scheduled.seq_id: token
        for scheduled in (*output.prompts, *output.decodes)
        if scheduled.samples
    }
    return output, scheduler.update(output, sampled)


def test_a_host_that_sets_nothing_gets_these_rules_of_the_queues() -> None:
    config = SchedulerConfig()
    assert (config.policy, config.lookahead, config.max_bypasses) == ("fcfs", 8, 16)
    assert request("a").priority == 0, "below it goes first, above it later"


def test_prompt_is_computed_then_decoded_until_max_tokens() -> None:
    scheduler, blocks = make()
    scheduler.add(request("a", 5, max_tokens=3))
    first, updates = run(scheduler)
    assert [list(scheduled.token_ids) for scheduled in first.prompts] == [[0, 1, 2, 3, 4]]
    assert updates[0].token_id == 7
    second, _ = run(scheduler)
    assert (second.decodes[0].start, list(second.decodes[0].token_ids)) == (5, [7])
    _, last = run(scheduler)
    assert last[0].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks


def test_long_prompt_is_computed_in_chunks_and_samples_after_the_last() -> None:
    scheduler, _ = make(max_num_batched_tokens=6)
    scheduler.add(request("a", 14))
    chunks = []
    for _ in range(3):
        output, updates = run(scheduler)
        (chunk,) = output.prompts
        chunks.append((chunk.start, len(chunk.token_ids), chunk.samples, len(updates)))
    assert chunks == [(0, 6, False, 0), (6, 6, False, 0), (12, 2, True, 1)]


def test_no_chunk_is_longer_than_allowed() -> None:
    scheduler, _ = make(max_chunk_tokens=3)
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 2))
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [3, 2]


def test_a_chunk_is_short_beside_a_decode_and_long_without() -> None:
    scheduler, _ = make(max_num_batched_tokens=32, max_mixed_prefill_tokens=3)
    scheduler.add(request("a", 20, max_tokens=2))
    first, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in first.prompts] == [20]
    scheduler.add(request("b", 30))
    second, _ = run(scheduler)
    assert len(second.decodes) == 1
    assert [len(chunk.token_ids) for chunk in second.prompts] == [3]
    third, _ = run(scheduler)
    assert not third.decodes
    assert [len(chunk.token_ids) for chunk in third.prompts] == [27]
    assert third.max_prefill_tokens == 32


def test_prompts_that_come_together_are_computed_together_where_nothing_decodes() -> None:
    scheduler, _ = make(max_num_batched_tokens=64, max_mixed_prefill_tokens=8)
    for name in "abc":
        scheduler.add(request(name, 20))
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [20, 20, 20]


def test_a_decode_that_starts_late_lets_no_further_chunk_join_its_step() -> None:
    scheduler, _ = make(max_num_batched_tokens=64, max_mixed_prefill_tokens=8)
    for name, length in (("a", 20), ("b", 1), ("c", 20)):
        scheduler.add(request(name, length))
    output, _ = run(scheduler)
    assert [len(chunk.token_ids) for chunk in output.prompts] == [20]
    assert len(output.decodes) == 1


def test_decodes_come_before_prompts_in_the_token_budget() -> None:
    scheduler, _ = make(max_num_batched_tokens=6)
    scheduler.add(request("a", 4))
    run(scheduler)
    scheduler.add(request("b", 12))
    output, _ = run(scheduler)
    assert len(output.decodes) == 1
    assert len(output.prompts[0].token_ids) == 5
    assert num_scheduled_tokens(output) == 6


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler, _ = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 2))
    run(scheduler)
    assert (scheduler.num_running_seqs, scheduler.num_waiting) == (2, 1)


def test_running_requests_get_their_tokens_before_waiting_ones() -> None:
    scheduler, _ = make(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(request("a", 2, max_tokens=9))
    run(scheduler)
    for name in "bc":
        scheduler.add(request(name, 20))
    output, _ = run(scheduler)
    assert ([len(chunk.token_ids) for chunk in output.prompts], len(output.decodes)) == ([7], 1)
    for _ in range(3):
        run(scheduler)
    assert (scheduler.num_running_seqs, scheduler.num_waiting) == (2, 1), "max_num_seqs is 2"


def test_first_come_is_first_served() -> None:
    scheduler, _ = make(max_num_seqs=1)
    for name in "abc":
        scheduler.add(request(name, 2, max_tokens=1))
    order = [run(scheduler)[1][0].request_id for _ in range(3)]
    assert order == ["a", "b", "c"]


def test_the_latest_group_is_preempted_when_blocks_run_out_and_recomputed_with_its_tokens() -> None:
    scheduler, blocks = make(num_blocks=5, block_size=2, max_model_len=8)
    scheduler.add(request("old", 4, max_tokens=4))
    young = scheduler.add(request("young", 3, max_tokens=4))
    run(scheduler)
    output, _ = run(scheduler)
    assert output.preempted_seq_ids == (young.seq_id,)
    assert (scheduler.num_running_seqs, scheduler.num_preempted) == (1, 1)
    assert scheduler.num_preemptions == scheduler.num_recomputes == 1
    assert young.token_ids == [0, 1, 2, 7]
    while scheduler.num_preempted:
        resumed, _ = run(scheduler)
    assert list(resumed.prompts[0].token_ids) == [0, 1, 2, 7]
    while scheduler.has_work:
        run(scheduler)
    assert len(young.output_token_ids) == 4
    assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks


def test_stop_token_ends_only_after_min_tokens() -> None:
    scheduler, _ = make()
    scheduler.add(request("a", max_tokens=9, min_tokens=3, stop_token_ids=frozenset({7})))
    reasons = [run(scheduler)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]


def test_model_length_ends_a_sequence() -> None:
    scheduler, _ = make(max_model_len=6)
    scheduler.add(request("a", 5, max_tokens=100))
    _, updates = run(scheduler)
    assert updates[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_frees_everything_in_any_state(steps: int) -> None:
    scheduler, blocks = make(max_num_batched_tokens=8)
    sequence = scheduler.add(request("a", 12))
    for _ in range(steps):
        run(scheduler)
    assert scheduler.abort("a")
    assert sequence.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work
    assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks
    assert not scheduler.abort("a")


def test_abort_while_a_step_runs_drops_its_token() -> None:
    scheduler, blocks = make()
    sequence = scheduler.add(request("a"))
    output = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.update(output, {sequence.seq_id: 7}) == ()
    assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks


def test_request_id_may_be_used_again_once_it_is_finished() -> None:
    scheduler, _ = make()
    scheduler.add(request("a"))
    with pytest.raises(DuplicateRequest, match="'a'"):
        scheduler.add(request("a"))
    scheduler.abort("a")
    scheduler.add(request("a"))
    assert scheduler.num_waiting == 1


def test_queue_is_bounded() -> None:
    scheduler, _ = make(max_waiting=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(QueueFull, match="max_waiting"):
        scheduler.add(request("c"))


@pytest.mark.parametrize(
    ("length", "num_blocks", "reason"),
    [(0, 65, "empty"), (64, 65, "max_model_len"), (40, 5, "KV cache")],
)
def test_request_that_could_never_run_is_refused(length: int, num_blocks: int, reason: str) -> None:
    scheduler, _ = make(num_blocks=num_blocks)
    with pytest.raises(UnservableRequest, match=reason):
        scheduler.add(request("a", length))
    assert not scheduler.has_work


def test_steps_alternate_with_updates() -> None:
    scheduler, _ = make()
    scheduler.add(request("a"))
    output = scheduler.schedule()
    with pytest.raises(StepOrderError, match="update"):
        scheduler.schedule()
    with pytest.raises(StepOrderError, match="another output than that of step 1"):
        scheduler.update(SchedulerOutput(99), {})
    scheduler.update(output, {0: 7})
    with pytest.raises(StepOrderError, match="no step is in flight"):
        scheduler.update(output, {0: 7})


@pytest.mark.parametrize("setting", ["max_num_seqs", "max_model_len", "max_waiting"])
def test_bad_setting_is_named_with_its_value(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}.*-3"):
        SchedulerConfig(**{setting: -3})


def test_token_budget_below_a_full_decode_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 4 is below max_num_seqs 8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)
