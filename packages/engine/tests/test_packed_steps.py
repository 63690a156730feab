"""A step that was packed for the ranks is the same step when a rank has unpacked it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import SamplingParams
from trencadis.engine.runner.ranks import packed_steps
from trencadis.engine.runner.ranks.packed_steps import StepPacker, StepUnpacker
from trencadis.engine.runner.step import PromptTargets, RowRequest, SampleSettings, StepInput
from trencadis.kvcache import BlockCopy, CopyPlan, Direction
from trencadis.scheduler import ScheduledSequence

PENALTY = SamplingParams(repetition_penalty=1.2)


def samples_of(number: int) -> tuple[SampleSettings, ...]:
    """Those of a sequence: every third has a history, every fifth several samples."""
    params = PENALTY if number % 3 == 0 else SamplingParams(temperature=0.5, top_k=1 + number)
    count = 2 if number % 5 == 0 else 1
    tokens = [1, 2, 3]
    return tuple(
        SampleSettings.of(params, seed, tokens, 3, frozenset({9})) for seed in range(count)
    )


@st.composite
def steps(draw: st.DrawFn) -> list[StepInput]:
    """Steps of sequences that come and go."""
    known = {number: samples_of(number) for number in range(12)}
    made = []
    for number in range(draw(st.integers(1, 8))):
        seq_ids = draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=6))
        scheduled = [
            ScheduledSequence(
                seq_id,
                draw(st.integers(0, 9)),
                draw(st.lists(st.integers(-1, 300), min_size=1, max_size=3)),
                np.array(draw(st.lists(st.integers(0, 99), max_size=4)), np.int32),
                draw(st.booleans()),
                forks=draw(st.sampled_from([(), (7,)])),
                num_candidates=draw(st.sampled_from([0, 4])),
                adapter=draw(st.sampled_from(["", "a"])),
                state_slot=draw(st.integers(0, 3)),
            )
            for seq_id in seq_ids
        ]
        rows = {
            each.seq_id: RowRequest(
                4 + number, known[each.seq_id], num_candidates=each.num_candidates
            )
            for each in scheduled
            if each.samples
        }
        moves = CopyPlan()
        if draw(st.booleans()):
            moves.add(Direction.OUT, [BlockCopy(1, 2)])
        cut = draw(st.integers(0, len(scheduled)))
        targets = {seq_id: PromptTargets(1, 0, (3,), 2) for seq_id in seq_ids[:1]}
        slots = {"a": 1} if draw(st.booleans()) else {}
        given = (tuple(scheduled[:cut]), tuple(scheduled[cut:]), moves, rows, targets, slots)
        made.append(StepInput(number, *given, draw(st.sampled_from([None, CopyPlan()]))))
    return made


def plain(step: StepInput) -> tuple[Any, ...]:
    """A step as values that can be compared."""

    def settings(each: SampleSettings) -> tuple[Any, ...]:
        return (each.params, each.seed, each.num_prompt_tokens, each.eos_token_ids, *each.history)

    sequences = [
        [each._replace(block_table=tuple(each.block_table.tolist())) for each in part]
        for part in (step.prompts, step.decodes)
    ]
    rows = {
        seq_id: (row.num_tokens, *map(settings, row.samples), row.mask, row.num_candidates)
        for seq_id, row in step.rows.items()
    }
    states = None if step.state_moves is None else tuple(step.state_moves)
    return (
        *(step.number, *sequences, tuple(step.moves), rows),
        *(dict(step.targets), dict(step.adapter_slots), states),
    )


@given(steps(), st.sampled_from([2, 1024]))
def test_a_rank_unpacks_the_step_that_was_packed(made: list[StepInput], most: int) -> None:
    held, packed_steps._MOST_HELD = packed_steps._MOST_HELD, most
    try:
        packer, unpacker = StepPacker(), StepUnpacker()
        for step in made:
            for row in step.rows.values():
                if row.samples[0].history:  # of a token that the step before has sampled
                    row.samples[0].history.append(step.number)  # type: ignore[attr-defined]
            expected = plain(step)
            packed = pickle.loads(pickle.dumps(packer.packed(step)))  # noqa: S301
            assert plain(unpacker.step(packed)) == expected
    finally:
        packed_steps._MOST_HELD = held


@given(steps(), steps())
def test_a_packer_that_follows_another_is_understood(
    lost: list[StepInput], made: list[StepInput]
) -> None:
    """As after a message that was not sent."""
    unpacker, before = StepUnpacker(), StepPacker()
    for step in lost:
        unpacker.step(before.packed(step))
    packer = StepPacker()
    for step in made:
        expected = plain(step)
        assert plain(unpacker.step(packer.packed(step))) == expected


def test_how_a_sequence_is_sampled_is_sent_once() -> None:
    settings = {number: samples_of(1) for number in range(32)}
    table = np.arange(8, dtype=np.int32)

    def step(number: int) -> StepInput:
        decodes = tuple(ScheduledSequence(each, number, [7], table, True) for each in settings)
        rows = {each: RowRequest(1 + number, samples) for each, samples in settings.items()}
        return StepInput(number, (), decodes, CopyPlan(), rows)

    packer = StepPacker()
    first, second = (len(pickle.dumps(packer.packed(step(number)))) for number in (1, 2))
    assert second < first / 2
    assert second < 32 * 75
