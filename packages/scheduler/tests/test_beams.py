"""Beam search: scores, stopping and ranks; equal to transformers on the same model."""

from __future__ import annotations

import math

import pytest
from harness import STOP, Memory, Runner, outcome

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    BeamSearch,
    Candidate,
    FinishReason,
    InvalidResults,
    Request,
    Scheduler,
    SchedulerConfig,
    UnservableRequest,
)
from trencadis.scheduler.beams import BeamSearchState


def request(**fields: object) -> Request:
    values = {"prompt_token_ids": (1, 2, 0, 1, 2), "max_tokens": 8, **fields}
    return Request(request_id="a", **values)


def short_request(name: str, **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=(1, 2), max_tokens=4, **fields)


def make(num_blocks: int = 65, **settings: int) -> tuple[Runner, BlockManager]:
    blocks = BlockManager(CacheConfig(num_blocks=num_blocks, block_size=4, num_host_blocks=64))
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    scheduler = Scheduler(SchedulerConfig(**{**defaults, **settings}), blocks)
    return Runner(scheduler, Memory(4)), blocks


def test_a_stop_token_finishes_one_hypothesis_and_the_other_beams_continue() -> None:
    wanted = request(beam_search=BeamSearch(width=2), stop_token_ids=frozenset({9}))
    beams = BeamSearchState(wanted, BeamSearch(width=2), max_output=8)
    offered = [Candidate(9, -0.1), Candidate(5, -0.5), Candidate(6, -1.0), Candidate(7, -2.0)]
    running = beams.advance([()], [0.0], [offered])
    assert [beam.token_id for beam in running] == [5, 6]
    assert [hypothesis.output_token_ids for hypothesis in beams.hypotheses] == [(9,)]
    assert beams.hypotheses[0].finish_reason is FinishReason.STOP


def test_a_stop_token_below_the_best_width_is_not_a_hypothesis() -> None:
    search = BeamSearch(width=1)
    beams = BeamSearchState(request(stop_token_ids=frozenset({9})), search, max_output=8)
    beams.advance([()], [0.0], [[Candidate(5, -0.1), Candidate(9, -0.2)]])
    assert beams.hypotheses == []


@pytest.mark.parametrize(("min_tokens", "ends"), [(1, True), (2, True), (3, False)])
def test_a_hypothesis_has_at_least_its_minimum_of_tokens(min_tokens: int, ends: bool) -> None:
    wanted = request(stop_token_ids=frozenset({9}), min_tokens=min_tokens)
    beams = BeamSearchState(wanted, BeamSearch(width=1), max_output=8)
    beams.advance([(5,)], [0.0], [[Candidate(9, -0.1), Candidate(6, -0.2)]])
    assert [hypothesis.output_token_ids for hypothesis in beams.hypotheses] == [(5, 9)] * ends


@pytest.mark.parametrize(("early", "ends"), [(False, True), ("never", False)])
def test_only_an_open_ended_search_waits_for_a_longer_hypothesis_that_may_score_higher(
    early: bool | str, ends: bool
) -> None:
    """-1.5 for one token is below the hypothesis' -1.0, but above it at eight tokens."""
    search = BeamSearch(width=1, length_penalty=1.0, early_stopping=early)
    beams = BeamSearchState(request(stop_token_ids=frozenset({9})), search, max_output=8)
    running = beams.advance([()], [0.0], [[Candidate(9, -1.0), Candidate(5, -1.5)]])
    assert (running == []) is ends


def test_width_one_follows_the_most_probable_token() -> None:
    runner, blocks = make()
    group = runner.add(request(beam_search=BeamSearch(width=1)))
    runner.run()
    assert len(outcome(group)[0][0]) == 8
    assert blocks.pool.num_free_blocks == blocks.pool.num_usable_blocks


def test_a_beam_search_reports_its_best_n_at_its_end() -> None:
    runner, _ = make()
    group = runner.add(
        request(n=2, beam_search=BeamSearch(width=3), stop_token_ids=frozenset({STOP}))
    )
    reported = []
    while runner.scheduler.has_work:
        reported.append(runner.step()[1])
    assert all(updates == () for updates in reported[:-1])
    assert [update.seq_id for update in reported[-1]] == [beam.seq_id for beam in group.results]
    scores = [
        sequence.cumulative_logprob / sequence.num_output_tokens for sequence in group.results
    ]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_a_beam_search_counts_its_width_from_its_prefill_on() -> None:
    runner, _ = make()
    runner.add(request(beam_search=BeamSearch(width=3)))
    runner.add(short_request("b", beam_search=BeamSearch(width=2)))
    runner.step()
    scheduler = runner.scheduler
    assert (scheduler.num_running, scheduler.num_running_seqs, scheduler.num_waiting) == (1, 3, 1)


def test_a_beam_without_candidates_is_an_error() -> None:
    runner, _ = make()
    runner.add(request(beam_search=BeamSearch(width=2)))
    output = runner.scheduler.schedule()
    assert output.prompts[0].num_candidates == 4
    with pytest.raises(InvalidResults, match="no candidates for sequence 0"):
        runner.scheduler.update(output, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": 3, "best_of": 2}, "n 3 is above the 2 sequences"),
        ({"n": 3, "beam_search": BeamSearch(width=2)}, "n 3 is above"),
        ({"best_of": 2, "beam_search": BeamSearch(width=2)}, "exclude each other"),
    ],
)
def test_contradictory_branching_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnservableRequest, match=message):
        request(**fields)


@pytest.mark.parametrize(
    ("early", "width", "penalty"),
    [(True, 3, 2.0), (True, 2, 1.0), (False, 4, 0.0), (False, 3, 1.0), ("never", 2, 1.0)],
)
def test_hypotheses_are_those_of_transformers(
    early: bool | str, width: int, penalty: float
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=STOP,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for prompt in ((5, 9, 2), (7,), (1, 1, 4, 8, 20)):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )
        wanted = request(
            prompt_token_ids=prompt,
            max_tokens=8,
            n=width,
            beam_search=BeamSearch(width=width, length_penalty=penalty, early_stopping=early),
            stop_token_ids=frozenset({STOP}),
        )
        actual = search_with(model, torch, wanted)
        cropped = [
            tuple(row[: len(prompt) + len(tokens)].tolist()[len(prompt) :])
            for row, tokens in zip(expected, actual, strict=True)
        ]
        assert actual == cropped


def search_with(model: object, torch: object, wanted: Request) -> list[tuple[int, ...]]:
    """Beam search through a scheduler; every forward pass computes the complete sequence."""
    runner, _ = make(max_num_seqs=wanted.num_seqs)
    scheduler = runner.scheduler
    group = scheduler.add(wanted).group
    while scheduler.has_work:
        output = scheduler.schedule()
        candidates = {}
        for scheduled in (*output.prompts, *output.decodes):
            tokens = next(
                s.token_ids for s in group.unfinished_seqs if s.seq_id == scheduled.seq_id
            )
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1].float()
            top = torch.log_softmax(logits, -1).topk(min(scheduled.num_candidates, 24))
            candidates[scheduled.seq_id] = tuple(
                Candidate(token, logprob)
                for logprob, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            )
        scheduler.update(output, {}, candidates=candidates)
    return [tuple(sequence.output_token_ids) for sequence in group.results]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [1e4, -1e4])
def test_an_extreme_length_penalty_ends_like_any_other(
    penalty: float, early_stopping: bool | str
) -> None:
    runner, blocks = make()
    search = BeamSearch(width=2, length_penalty=penalty, early_stopping=early_stopping)
    group = runner.add(request(beam_search=search, stop_token_ids={STOP}))
    runner.run()
    assert group.results[0].finish_reason is not None
    assert blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize(
    ("penalty", "logprob", "best"),
    [
        (1e4, -0.5, (5, 9)),
        (1e4, -math.inf, (9,)),
        (-1e4, -0.5, (9,)),
        (-1e4, 0.0, (5, 9)),
    ],
)
def test_an_extreme_length_penalty_prefers_long_or_short_outputs(
    penalty: float, logprob: float, best: tuple[int, ...]
) -> None:
    """A score beyond a float ranks by its limit; an impossible output is the worst of all."""
    search = BeamSearch(width=2, length_penalty=penalty)
    beams = BeamSearchState(request(stop_token_ids=frozenset({9})), search, max_output=8)
    beams.advance([()], [0.0], [[Candidate(9, -0.1), Candidate(5, 0.0)]])
    beams.advance([(5,)], [0.0], [[Candidate(9, logprob), Candidate(6, -math.inf)]])
    assert beams.hypotheses[0].output_token_ids == best
