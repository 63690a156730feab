"""A failure ends the requests that it concerns; all others get the tokens that they get alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from harness import Memory, Runner, next_token

from trencadis.kvcache import BlockManager, CacheConfig, StateSlots
from trencadis.scheduler import (
    BeamSearch,
    Candidate,
    InvalidResults,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    StepOrderError,
    StepTiming,
    UnservableRequest,
)
from trencadis.scheduler.admission import PendingPrefixes


class FaultyBlocks(BlockManager):
    """A block manager with a defect: ``method`` raises for the sequences in ``broken``."""

    method = ""
    broken: frozenset[int] = frozenset()

    def _break(self, method: str, seq_id: int) -> None:
        if method == self.method and seq_id in self.broken:
            raise RuntimeError(f"defect in {method}")

    def allocate(self, seq_id: int, *args: Any, **more: Any) -> Any:
        self._break("allocate", seq_id)
        return super().allocate(seq_id, *args, **more)

    def append(self, seq_id: int, token_ids: Any) -> Any:
        self._break("append", seq_id)
        return super().append(seq_id, token_ids)

    def block_table(self, seq_id: int) -> Any:
        self._break("block_table", seq_id)
        return super().block_table(seq_id)


def make(
    num_blocks: int = 65, state_slots: StateSlots | None = None, **settings: Any
) -> tuple[Runner, FaultyBlocks]:
    blocks = FaultyBlocks(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=4,
            num_host_blocks=16,
            watermark=0.0,
            enable_prefix_caching=state_slots is None,
        )
    )
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128}
    config = SchedulerConfig(**{**defaults, **settings})
    scheduler = Scheduler(config, blocks, state_slots=state_slots)
    return Runner(scheduler, Memory(4)), blocks


def request(name: str, length: int = 6, **fields: Any) -> Request:
    start = sum(map(ord, name)) % 11
    values = {"max_tokens": 12, **fields}
    return Request(request_id=name, prompt_token_ids=tuple(range(start, start + length)), **values)


def tokens_alone(request: Request) -> list[list[int]]:
    outputs = []
    for sample in range(request.num_seqs):
        tokens = list(request.prompt_token_ids)
        while len(tokens) < len(request.prompt_token_ids) + request.max_tokens:
            tokens.append(next_token(tokens, sample))
        outputs.append(tokens)
    return outputs


def assert_complete(group: SequenceGroup) -> None:
    assert [sequence.token_ids for sequence in group.results] == tokens_alone(group.request)


# schedule().


@pytest.mark.parametrize("method", ["append", "block_table"])
def test_a_defect_that_concerns_one_running_request_ends_that_request_alone(method: str) -> None:
    runner, blocks = make()
    groups = [runner.add(request(name)) for name in "abc"]
    for _ in range(3):
        runner.step()
    blocks.method, blocks.broken = method, frozenset({groups[1].unfinished_seqs[0].seq_id})
    if method == "block_table":
        with pytest.raises(RuntimeError):  # building the batch concerns all of it
            runner.scheduler.schedule()
        runner.scheduler.abort("b")
    else:
        output, _ = runner.step()
        assert [(failed.request_id, str(failed.error)) for failed in output.failed] == [
            ("b", "defect in append")
        ]
    runner.run()
    assert_complete(groups[0])
    assert_complete(groups[2])
    assert blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize("method", ["allocate", "block_table"])
def test_a_defect_that_concerns_one_waiting_request_ends_that_request_alone(method: str) -> None:
    runner, blocks = make()
    groups = [runner.add(request(name)) for name in "abc"]
    blocks.method, blocks.broken = method, frozenset({groups[1].unfinished_seqs[0].seq_id})
    output, _ = runner.step()
    assert [failed.request_id for failed in output.failed] == ["b"]
    assert {item.seq_id for item in output.prompts} == {
        group.unfinished_seqs[0].seq_id for group in (groups[0], groups[2])
    }
    runner.run()
    assert_complete(groups[0])
    assert_complete(groups[2])
    assert blocks.pool.num_used_blocks == 0


def test_copies_of_a_step_that_failed_belong_to_the_next_step() -> None:
    # Two samples share the last block of their prompt: the first new token of each needs a copy.
    runner, blocks = make()
    group = runner.add(request("a", n=2))
    runner.step()
    healthy = blocks.block_table
    blocks.method, blocks.broken = "block_table", frozenset({0, 1})
    with pytest.raises(RuntimeError):
        runner.scheduler.schedule()
    blocks.broken = frozenset()
    assert healthy(0)[1] != healthy(1)[1]
    output, _ = runner.step()
    assert output.moves
    runner.run()
    assert_complete(group)


# The forward pass.


def test_a_step_whose_forward_pass_failed_is_computed_again() -> None:
    runner, blocks = make()
    groups = [runner.add(request("a", 50)), runner.add(request("b", n=3)), runner.add(request("c"))]
    while runner.scheduler.has_work:
        output = runner.scheduler.schedule()
        runner.memory.carry_out(output)
        runner.scheduler.discard_step()
        with pytest.raises(StepOrderError, match="no step is in flight"):
            runner.scheduler.discard_step()
        with pytest.raises(StepOrderError, match="no step is in flight"):
            runner.scheduler.update(output, {})
        again, _ = runner.step()
        if not again.moves:
            ids = [[(item.seq_id, item.start) for item in step.decodes] for step in (output, again)]
            assert ids[0] == ids[1]
    for group in groups:
        assert_complete(group)
    assert blocks.pool.num_used_blocks == 0


def test_a_step_that_may_have_advanced_states_ends_the_admitted_requests() -> None:
    runner, blocks = make(state_slots=StateSlots(3), max_num_seqs=2)
    for name in "ab":
        runner.add(request(name))
    waiting = runner.add(request("c"))
    with pytest.raises(StepOrderError, match="no step is in flight"):
        runner.scheduler.discard_step()
    assert runner.scheduler.schedule().state_moves is not None
    with pytest.raises(StepOrderError, match="the states may have advanced: call abort_admitted"):
        runner.scheduler.discard_step()
    assert runner.scheduler.num_steps_in_flight == 1
    assert runner.scheduler.abort_admitted() == ("a", "b")
    assert runner.scheduler.num_steps_in_flight == 0
    runner.run()
    assert_complete(waiting)
    assert blocks.pool.num_used_blocks == 0


def test_a_model_without_states_has_no_plan_of_copies_for_them() -> None:
    runner, _ = make()
    runner.add(request("a"))
    assert runner.step()[0].state_moves is None


def test_after_failed_moves_every_admitted_request_ends_and_waiting_ones_are_served() -> None:
    runner, blocks = make(num_blocks=20, max_num_seqs=2)
    for name in "ab":
        runner.add(request(name, 20))
    waiting = runner.add(request("c", 20))
    for _ in range(3):
        runner.step()
    runner.scheduler.schedule()
    runner.memory.device.clear()  # the device has lost its content
    assert runner.scheduler.abort_admitted() == ("a", "b")
    assert blocks.pool.num_used_blocks == 0
    runner.run()
    assert_complete(waiting)


def test_a_prompt_is_not_read_from_a_prefix_cache_whose_content_is_lost() -> None:
    runner, _ = make()
    runner.add(request("a", 30))
    runner.run()
    runner.memory.device.clear()
    assert runner.scheduler.abort_admitted() == ()
    same = Request(
        request_id="b", prompt_token_ids=request("a", 30).prompt_token_ids, max_tokens=12
    )
    group = runner.add(same)
    runner.run()
    assert group.results[0].num_cached_tokens == 0
    assert_complete(group)


# update().


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"sampled": {0: 5}}, "no token for sequence 1"),
        ({"sampled": {0: 5, 1: None}}, "token of sequence 1 must be an integer.*got None"),
        ({"sampled": {0: 5, 1: 1.0}}, "token of sequence 1 must be an integer.*got 1.0"),
        ({"sampled": {0: 5, 1: "x"}}, "token of sequence 1 must be an integer.*got 'x'"),
        ({"sampled": {0: 5, 1: -1}}, "token of sequence 1 must be an integer.*got -1"),
        ({"sampled": {0: 5, 1: 2**31}}, "token of sequence 1 must be an integer"),
        ({"sampled": None}, "sampled must be a mapping"),
        ({"sampled": [5, 5]}, "sampled must be a mapping"),
        ({"sampled": {0: 5, 1: 5}, "logprobs": {0: math.nan}}, "log-probability of sequence 0"),
        ({"sampled": {0: 5, 1: 5}, "logprobs": {0: "x"}}, "log-probability of sequence 0"),
        ({"sampled": {0: 5, 1: 5}, "candidates": [1]}, "candidates must be a mapping"),
        ({"sampled": {0: 5, 1: 5}, "timing": 0.1}, "timing must be a StepTiming"),
    ],
)
def test_update_with_invalid_results_changes_nothing_and_can_be_repeated(
    results: dict[str, Any], message: str
) -> None:
    runner, _ = make()
    groups = [runner.add(request("a")), runner.add(request("b"))]
    output = runner.scheduler.schedule()
    with pytest.raises(InvalidResults, match=message):
        runner.scheduler.update(output, **results)
    assert all(len(group.unfinished_seqs[0].token_ids) == 6 for group in groups)
    runner.finish(output)
    runner.run()
    for group in groups:
        assert_complete(group)


def test_a_decode_without_a_token_is_an_error() -> None:
    runner, _ = make()
    groups = [runner.add(request("a")), runner.add(request("b"))]
    runner.step()
    output = runner.scheduler.schedule()
    assert len(output.decodes) == 2
    with pytest.raises(InvalidResults, match="sequence 1"):
        runner.scheduler.update(output, {0: 5})
    runner.finish(output)
    runner.run()
    for group in groups:
        assert_complete(group)


def test_a_numpy_integer_is_a_token() -> None:
    runner, _ = make()
    group = runner.add(request("a"))
    runner.scheduler.update(runner.scheduler.schedule(), {0: np.int64(5)})
    assert group.unfinished_seqs[0].token_ids[-1] == 5


def test_best_of_without_log_probabilities_is_an_error_and_not_an_arbitrary_ranking() -> None:
    runner, _ = make()
    group = runner.add(request("a", best_of=3))
    output = runner.scheduler.schedule()
    sampled = {0: 1, 1: 2, 2: 3}
    with pytest.raises(InvalidResults, match="no log-probability for sequence 1: best_of"):
        runner.scheduler.update(output, sampled, logprobs={0: -1.0, 2: -1.0})
    runner.finish(output)
    runner.run()
    assert len(group.results) == 1
    assert runner.scheduler.num_running == 0
    runner.add(request("b"))
    runner.scheduler.update(runner.scheduler.schedule(), {3: 5})  # not needed any more


@pytest.mark.parametrize(
    "offered",
    [(), None, 5, (5,), (("x", -1.0),), ((5, math.nan),), ((5, None),), ((-5, -1.0),), ("ab",)],
)
def test_beams_with_invalid_candidates_can_be_updated_again(offered: Any) -> None:
    runner, blocks = make()
    group = runner.add(request("a", beam_search=BeamSearch(width=2)))
    output = runner.scheduler.schedule()
    with pytest.raises(InvalidResults, match="sequence 0"):
        runner.scheduler.update(output, {}, candidates={0: offered})
    runner.finish(output)
    runner.run()
    assert len(group.results) == 1
    assert blocks.pool.num_used_blocks == 0


def test_a_token_for_a_decoding_beam_does_not_replace_its_candidates() -> None:
    runner, _ = make()
    group = runner.add(request("beams", beam_search=BeamSearch(width=2)))
    runner.step()
    output = runner.scheduler.schedule()
    assert len(output.decodes) == 2
    with pytest.raises(InvalidResults, match="no candidates for sequence"):
        runner.scheduler.update(output, {item.seq_id: 1 for item in output.decodes})
    runner.finish(output)
    runner.run()
    assert len(group.results) == 1


def test_a_masked_candidate_has_the_log_probability_minus_infinity() -> None:
    runner, _ = make()
    runner.add(request("a", beam_search=BeamSearch(width=2)))
    output = runner.scheduler.schedule()
    offered = (Candidate(1, -0.5), Candidate(2, -1.0), Candidate(3, -math.inf))
    runner.scheduler.update(output, {}, candidates={0: offered})


def test_results_of_an_aborted_request_may_be_missing() -> None:
    runner, _ = make()
    runner.add(request("a"))
    runner.add(request("b", best_of=2))
    output = runner.scheduler.schedule()
    runner.scheduler.abort("b")
    updates = runner.scheduler.update(output, {0: 4}, timing=StepTiming())
    assert [update.request_id for update in updates] == ["a"]


# add().


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": (1, 2**31)}, r"prompt_token_ids\[1\] must be an integer"),
        ({"prompt_token_ids": (1, -1)}, r"prompt_token_ids\[1\] must be an integer"),
        ({"prompt_token_ids": (1.5,)}, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": "ab"}, r"prompt_token_ids\[0\] must be an integer.*'a'"),
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a sequence"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a sequence"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids\[0\] must be an integer"),
        ({"stop_token_ids": "EOS"}, r"stop_token_ids\[0\] must be an integer"),
        ({"request_id": None}, "request_id must be of type str"),
        ({"priority": "x"}, "priority must be an integer"),
        ({"priority": None}, "priority must be an integer"),
        ({"priority": math.nan}, "priority must be an integer"),
        ({"beam_search": 4}, "beam_search must be of type BeamSearch"),
        ({"extra_keys": "adapter"}, "extra_keys must be of type tuple"),
    ],
)
def test_a_bad_field_is_refused_when_the_request_is_made(
    fields: dict[str, Any], message: str
) -> None:
    values = {"request_id": "a", "prompt_token_ids": (1,), "max_tokens": 1, **fields}
    with pytest.raises(UnservableRequest, match=message):
        Request(**values)


def test_token_ids_of_numpy_become_integers() -> None:
    made = Request(
        request_id="a", prompt_token_ids=np.arange(3), max_tokens=1, stop_token_ids=np.array([7])
    )
    assert [type(token) for token in (*made.prompt_token_ids, *made.stop_token_ids)] == [int] * 4


@pytest.mark.parametrize("wrong", [None, "a", {"request_id": "a"}])
def test_a_refused_request_leaves_no_trace(wrong: Any) -> None:
    runner, _ = make()
    with pytest.raises(UnservableRequest, match="needs a Request"):
        runner.scheduler.add(wrong)
    assert not runner.scheduler.has_work
    group = runner.add(request("a"))
    runner.run()
    assert_complete(group)


def test_a_request_that_fails_after_it_was_scheduled_is_in_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = PendingPrefixes.add

    def broken(pending: PendingPrefixes, group: SequenceGroup) -> None:
        if group.request_id == "b":
            raise RuntimeError("a defect")
        add(pending, group)

    monkeypatch.setattr(PendingPrefixes, "add", broken)
    runner, _ = make()
    for name in "abc":
        runner.add(request(name))
    output = runner.scheduler.schedule()
    assert [failure.request_id for failure in output.failed] == ["b"]
    assert len(output.prompts) == 2, "those of a and c"
