"""Snapshots of states: where chunks end for them, and who begins with one.

The memory of the harness has the tokens that each state has taken in; it fails where these are not
those before a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from harness import Memory, Runner, outcome

from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    StateSlots,
    StateSnapshots,
)
from trencadis.scheduler import ConfigError, Request, Scheduler, SchedulerConfig, SequenceGroup
from trencadis.scheduler.snapshot_points import LEAST_BLOCKS

SIZE = 4
LEAST = LEAST_BLOCKS * SIZE


def make(num_snapshots: int = 8, **settings: int) -> Runner:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 200, "max_model_len": 256, **settings}
    slots = StateSlots(1 + given["max_num_seqs"], 4)
    blocks = BlockManager(
        CacheConfig(num_blocks=400, block_size=SIZE, num_host_blocks=100, watermark=0.0),
        snapshots=StateSnapshots(slots.num_slots, num_snapshots),
    )
    scheduler = Scheduler(SchedulerConfig(**given), blocks, state_slots=slots)
    return Runner(scheduler, Memory(SIZE))


def request(name: str, tokens: Sequence[int], **fields: int) -> Request:
    values = {"max_tokens": 3, **fields}
    return Request(request_id=name, prompt_token_ids=tuple(tokens), **values)


def chunks(runner: Runner, *requests: Request) -> dict[str, list[range]]:
    """Serve requests that come together; returns the positions of each chunk of their prompts."""
    groups = {each.request_id: runner.add(each) for each in requests}
    lengths = {each.request_id: each.num_prompt_tokens for each in requests}
    found: dict[str, list[range]] = {name: [] for name in groups}
    while runner.scheduler.has_work:
        names = {
            sequence.seq_id: name
            for name, group in groups.items()
            for sequence in group.unfinished_seqs
        }
        output, _ = runner.step()
        for item in (*output.prompts, *output.decodes):
            name = names[item.seq_id]
            if item.start < lengths[name]:
                found[name].append(range(item.start, item.start + len(item.token_ids)))
    return found


def cached(group: SequenceGroup) -> int:
    return group.results[0].num_cached_tokens


def test_the_last_full_block_of_a_prompt_ends_a_chunk() -> None:
    runner = make()
    prompt = range(LEAST + 2)
    assert chunks(runner, request("a", prompt))["a"] == [range(LEAST), range(LEAST, LEAST + 2)]
    assert chunks(runner, request("b", prompt))["b"] == [range(LEAST, LEAST + 2)]
    longer = chunks(runner, request("c", range(LEAST + 9)))["c"]
    assert longer == [range(LEAST, LEAST + 9)], "what is new is too short"


def test_a_prompt_that_ends_with_a_block_leaves_one_to_compute() -> None:
    runner = make()
    prompt = range(LEAST + SIZE)
    assert len(chunks(runner, request("a", prompt))["a"]) == 2
    assert chunks(runner, request("b", prompt))["b"] == [range(LEAST, LEAST + SIZE)]


def test_a_short_prompt_takes_one_chunk() -> None:
    runner = make()
    for name in "ab":
        prompt = range(LEAST)
        assert chunks(runner, request(name, prompt))[name] == [range(LEAST)]


def test_the_token_budget_divides_a_prompt_at_blocks() -> None:
    runner = make(max_num_batched_tokens=LEAST + 3)
    found = chunks(runner, request("a", range(3 * LEAST + 1)))["a"]
    assert [len(each) for each in found] == [LEAST, LEAST, LEAST, 1]
    other = [*range(2 * LEAST), *[7] * 9]
    assert chunks(runner, request("b", other))["b"][0].start == 2 * LEAST
    scarce = make(max_num_batched_tokens=SIZE - 1, max_num_seqs=2)
    found = chunks(scarce, request("a", range(2 * LEAST)))["a"]
    assert {len(each) for each in found} <= {1, SIZE - 1}, "a budget below a block is used up"


def test_ends_that_are_near_the_last_snapshot_have_none() -> None:
    runner = make(max_num_batched_tokens=LEAST // 2, max_num_seqs=2)
    assert len(chunks(runner, request("a", range(3 * LEAST + 1)))["a"]) == 7
    snapshots = runner.scheduler._blocks.snapshots
    assert snapshots is not None
    assert len(snapshots) == 3


def test_a_snapshot_that_there_is_takes_no_other_slot() -> None:
    runner = make(2)
    for name in "ba":
        runner.add(request(name, [ord(name)] * (LEAST + 2)))
        runner.run()
    scored = request("scored", [ord("a")] * (LEAST + 2), reads_prefix_cache=False)
    assert len(chunks(runner, scored)["scored"]) == 2
    for name in "ba":
        group = runner.add(request(name, [ord(name)] * (LEAST + 2)))
        runner.run()
        assert cached(group) == LEAST, name


def test_where_prompts_diverge_the_third_one_begins() -> None:
    runner = make()
    common = list(range(2 * LEAST))
    found = [
        chunks(runner, request(name, [*common, *[ord(name)] * (LEAST + 3)]))[name] for name in "abc"
    ]
    end = 3 * LEAST + 3
    assert found[0] == [range(end - 3), range(end - 3, end)]
    assert found[1] == [range(2 * LEAST), range(2 * LEAST, end - 3), range(end - 3, end)]
    assert found[2] == [range(2 * LEAST, end - 3), range(end - 3, end)]


def test_requests_that_come_together_wait_for_the_snapshot_where_they_diverge() -> None:
    runner = make()
    common = list(range(2 * LEAST))
    asked = [request(name, [*common, *[ord(name)] * 7]) for name in "abcd"]
    found = chunks(runner, *asked)
    end = 2 * LEAST + 7
    assert found["a"] == [range(2 * LEAST), range(2 * LEAST, end)]
    assert all(found[name] == [range(2 * LEAST, end)] for name in "bcd")


def test_a_request_that_reads_no_prefix_divides_no_other_prompt() -> None:
    runner = make()
    common = list(range(2 * LEAST))
    asked = [request("a", [*common, *[1] * 7]), request("b", [*common, *[2] * 7])]
    asked[1] = attrs.evolve(asked[1], reads_prefix_cache=False)
    assert chunks(runner, *asked)["a"][0] == range(2 * LEAST + SIZE)


def test_nobody_waits_for_a_prefix_that_the_present_step_passes() -> None:
    runner = make(lookahead=1)
    common = list(range(2 * LEAST))
    runner.add(request("a", [*common, *[1] * 7]))
    runner.add(request("b", [3] * 9))
    runner.add(request("c", [*common, *[2] * 7]))
    output, _ = runner.step()
    assert len(output.prompts) == 3


def test_nobody_waits_for_a_prefix_that_is_too_short_or_that_was_passed() -> None:
    runner = make()
    asked = [request(name, [1] * SIZE + [ord(name)] * 9) for name in "ab"]
    assert runner.add(asked[0])
    assert runner.add(asked[1])
    output, _ = runner.step()
    assert len(output.prompts) == 2

    runner = make(max_num_batched_tokens=3 * LEAST)
    first = runner.add(request("a", range(6 * LEAST)))
    runner.step()
    assert first.allocated_seqs[0].num_computed_tokens == 3 * LEAST
    runner.add(request("b", [*range(2 * LEAST + SIZE), *[7] * 9]))
    output, _ = runner.step()
    assert [(item.start, len(item.token_ids)) for item in output.prompts] == [
        (3 * LEAST, 3 * LEAST - SIZE),
        (0, SIZE),
    ]


def test_the_states_of_a_request_that_ends_meanwhile_are_not_kept() -> None:
    for is_ahead in (False, True):
        runner = make(1, max_steps_in_flight=1 + is_ahead)
        runner.add(request("a", range(LEAST + 2)))
        output = runner.scheduler.schedule()
        runner.launch(output)
        runner.scheduler.abort("a")
        if is_ahead:
            runner.add(request("b", [1] * (LEAST + 2)))
            runner.launch(runner.scheduler.schedule())
        while runner.in_flight:
            runner.finish_oldest()
        other = runner.add(request("c", range(LEAST + 2)))
        runner.run()
        assert cached(other) == 0
        again = runner.add(request("d", range(LEAST + 2)))
        runner.run()
        assert cached(again) == LEAST


def test_a_request_that_fails_while_it_is_scheduled_has_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(1)
    scheduler = runner.scheduler
    start = scheduler._states.start
    failing = runner.add(request("a", range(LEAST + 2)))

    def fail(group: SequenceGroup, now: float) -> None:
        start(group, now)
        if group is failing:
            scheduler._group_blocks.snapshots.note(group.allocated_seqs[0], LEAST)
            raise RuntimeError("a defect")

    monkeypatch.setattr(scheduler._states, "start", fail)
    runner.add(request("b", [5] * 3))  # has the slot of the first
    other = runner.add(request("c", [1] * (LEAST + 2)))
    output, _ = runner.step()
    assert [failed.request_id for failed in output.failed] == ["a"]
    runner.run()
    assert outcome(other)
    again = runner.add(request("d", [1] * (LEAST + 2)))
    runner.run()
    assert cached(again) == LEAST


def test_a_group_that_is_recomputed_begins_with_its_last_snapshot() -> None:
    runner = make(max_num_batched_tokens=2 * LEAST)
    group = runner.add(request("a", range(5 * LEAST)))
    for _ in range(2):
        runner.step()
    runner.scheduler._group_blocks.free(group)
    assert runner.scheduler._blocks.pool.num_used_blocks == 0
    runner.scheduler._group_blocks.allocate(group)
    assert group.allocated_seqs[0].num_computed_tokens == 4 * LEAST


def test_slots_and_snapshots_must_fit_together() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    cache = CacheConfig(num_blocks=16, block_size=SIZE)
    with pytest.raises(ConfigError, match="make it with StateSnapshots, or set enable_prefix"):
        Scheduler(config, BlockManager(cache), state_slots=StateSlots(3))
    blocks = BlockManager(cache, snapshots=StateSnapshots(4, 1))
    with pytest.raises(ConfigError, match=r"begin with slot 4, .* has 3: make StateSnapshots\(3"):
        Scheduler(config, blocks, state_slots=StateSlots(3))


def test_a_long_prompt_leaves_the_snapshots_of_others() -> None:
    runner = make(num_snapshots=8, max_num_batched_tokens=LEAST + 4)
    prompts = {name: [ord(name)] * (LEAST + 2) for name in "abcd"}

    def hits(number: int) -> list[int]:
        groups = []
        for name, prompt in prompts.items():
            groups.append(runner.add(request(f"{name}{number}", prompt)))
            runner.run()
        return [cached(group) for group in groups]

    assert [hits(number) for number in range(2)] == [[0] * 4, [LEAST] * 4]
    runner.add(request("long", [99] * (9 * LEAST + 1)))
    runner.run()
    assert hits(2) == [LEAST] * 4
