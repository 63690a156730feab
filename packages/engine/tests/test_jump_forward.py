"""Jump-forward: tokens that a grammar forces are output at once, and no answer depends on it."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_structured_output import (
    FEW_BUCKETS,
    PERSON,
    DeviceOnCPU,
    Served,
    check_schema,
    is_person,
    make_core,
)
from test_warm_up import Tracing
from tokenizers import decoders, models, pre_tokenizers, trainers

from trencadis.engine import (
    LLM,
    EngineCore,
    SamplingParams,
    StructuredOutput,
    Tokenizer,
)
from trencadis.engine.devices import HPUDevice
from trencadis.engine.grammars import grammar, matcher
from trencadis.engine.grammars.matcher import CompiledGrammar, GrammarMatcher, allowed_tokens
from trencadis.scheduler import BatchControl
from trencadis.warmup import WarmupConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="needs the extra `structured`"
)

TAGS = StructuredOutput(regex="<name>[a-z]</name><kind>[0-9]</kind>")
TAGS_LENGTH = len("<name>a</name><kind>1</kind>")
"""Tokens of the byte tokenizer. All but three are forced: the first one, a letter, a digit."""


# What a grammar forces.


@pytest.fixture(scope="module")
def merging() -> Any:
    """llguidance's tokenizer for one that merges bytes, as those of models do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.dumps({key: [WORDS[-1 - i], i]}) for i, key in enumerate(WORDS)]
    tokenizer.train_from_iterator(texts * 4, trainer)
    eos = tokenizer.token_to_id("<eos>")
    size = tokenizer.get_vocab_size()
    return grammar.load_tokenizer(tokenizer.to_str(), size, frozenset({eos}))


WORDS = [
    "id",
    "name",
    "order",
    "orderId",
    "orderName",
    "first",
    "first_name",
    "address",
    "zip",
    "é",
]

_leaves = st.one_of(
    st.sampled_from(WORDS).map(lambda word: {"const": word}),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True).map(
        lambda words: {"enum": words}
    ),
    st.just({"type": "integer", "minimum": 0, "maximum": 12}),
    st.just({"type": "string", "maxLength": 3}),
    st.just({"type": "null"}),
)
schemas = st.recursive(
    _leaves,
    lambda inner: st.dictionaries(st.sampled_from(WORDS), inner, max_size=4).flatmap(
        lambda properties: st.lists(st.sampled_from(sorted(properties) or ["id"]), unique=True).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                "additionalProperties": False,
            }
        )
    ),
    max_leaves=8,
)


def allowed(follower: GrammarMatcher) -> list[int]:
    """The tokens of a mask."""
    size = follower.grammar.tokenizer.vocab_size
    mask = np.zeros((size + 31) // 32, np.int32)
    follower.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return [int(token) for token in allowed_tokens(mask, size).nonzero()[0]]


@settings(max_examples=40, deadline=None)
@given(schema=schemas, seed=st.integers(0, 999))
def test_masks_allow_what_is_forced_and_nothing_else(merging: Any, schema: Any, seed: int) -> None:
    compiled = CompiledGrammar(
        grammar.new_matcher(merging, StructuredOutput(json_schema=schema)),
        merging,
        merging.vocab_size,
    )
    jumping, rng = GrammarMatcher(compiled), random.Random(seed)
    tokens: list[tuple[int, bool]] = []
    while not jumping.is_complete and len(tokens) < 100:
        drawn = rng.choice(allowed(jumping))
        jumping.consume(drawn)
        forced = jumping.forced_tokens()
        jumping.consume_all(forced)
        assert not jumping.error
        tokens += [(drawn, False), *((token, True) for token in forced)]
    stepping = GrammarMatcher(compiled)
    for token, is_forced in tokens:
        choice = allowed(stepping)
        assert choice == [token] if is_forced else token in choice
        stepping.consume(token)
    assert stepping.is_complete == jumping.is_complete


def test_a_key_is_not_forced_where_two_keys_begin_alike(merging: Any) -> None:
    """``order`` alone would make ``orderId`` improbable, which is a token where both are known."""
    schema = {
        "type": "object",
        "properties": {"orderId": {"const": 1}, "orderName": {"const": 1}},
        "additionalProperties": False,
    }
    state = grammar.new_matcher(merging, StructuredOutput(json_schema=schema))
    follower = GrammarMatcher(CompiledGrammar(state, merging, merging.vocab_size))
    for token in merging.tokenize_str('{"'):
        follower.consume(token)
    text = merging.decode_str(follower.forced_tokens())
    assert not follower.error
    assert "order".startswith(text)
    follower.consume_all(merging.tokenize_str("orderId"))
    assert not follower.error


def test_nothing_is_forced_where_an_answer_may_end(merging: Any) -> None:
    state = grammar.new_matcher(merging, StructuredOutput(regex="zip(-name)?"))
    follower = GrammarMatcher(CompiledGrammar(state, merging, merging.vocab_size))
    follower.consume_all(merging.tokenize_str("zip"))
    assert follower.forced_tokens() == []
    assert not follower.error


def test_a_token_that_the_model_does_not_have_is_not_forced(merging: Any) -> None:
    state = grammar.new_matcher(merging, StructuredOutput(regex="first_name"))
    tokens = GrammarMatcher(CompiledGrammar(state, merging, 10**6)).forced_tokens()
    assert tokens
    assert GrammarMatcher(CompiledGrammar(state, merging, tokens[0])).forced_tokens() == []


def test_a_matcher_that_takes_long_is_asked_once(merging: Any, monkeypatch) -> None:
    monkeypatch.setattr(matcher, "_SLOWEST_FORCED_SECONDS", -1.0)
    state = grammar.new_matcher(merging, StructuredOutput(regex="zip-[a-z]-name"))
    follower = GrammarMatcher(CompiledGrammar(state, merging, merging.vocab_size))
    first = follower.forced_tokens()
    assert first
    follower.consume_all(first)
    follower.consume(merging.tokenize_str("x")[0])
    assert follower.forced_tokens() == []
    assert not follower.error


# In the core, with random weights.


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


SHARED = {"bucketing": None, "use_buckets": True}
"""Chunks and decodes share a forward pass, as by default on the CPU."""

CORES: dict[str, Callable[[Path], EngineCore]] = {
    "shared pass": functools.partial(make_core, **SHARED),
    "buckets": make_core,
    "device": lambda model: make_core(model, DeviceOnCPU()),
}


@pytest.fixture(scope="module", params=CORES)
def core(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[EngineCore]:
    core = CORES[request.param](tiny_model)
    yield core
    core.close()


@pytest.fixture(scope="module")
def shared_core(tiny_model: Path) -> Iterator[EngineCore]:
    core = make_core(tiny_model, **SHARED)
    yield core
    core.close()


@pytest.fixture
def never_jumps(monkeypatch) -> Callable[[], None]:
    """Turns jump-forward off for the rest of the test."""
    return lambda: monkeypatch.setattr(GrammarMatcher, "forced_tokens", lambda _: [])


def serve(core: EngineCore, tokenizer: Tokenizer, **requests: SamplingParams) -> tuple[Served, int]:
    """The answers of requests, and the steps that they took."""
    served, before = Served(core, tokenizer), core.stats.num_steps
    for key, params in requests.items():
        served.add(key, params)
    served.run()
    return served, core.stats.num_steps - before


def bound(form: StructuredOutput = TAGS, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "seed": 3, "structured_output": form, **fields})


def test_an_answer_is_the_same_in_fewer_steps(core, tokenizer, never_jumps) -> None:
    jumped, few = serve(core, tokenizer, a=bound())
    never_jumps()
    stepped, many = serve(core, tokenizer, a=bound())
    assert jumped.answers == stepped.answers
    assert (few, many) == (3, TAGS_LENGTH)
    assert jumped.answers["a", 0].finish_reason == "stop"


def test_each_token_is_counted_and_streamed_once(shared_core, tokenizer) -> None:
    before = shared_core.stats.num_generation_tokens
    served, _ = serve(shared_core, tokenizer, a=bound())
    assert shared_core.stats.num_generation_tokens - before == TAGS_LENGTH
    answer = served.answers["a", 0]
    assert answer.text == tokenizer.decode(answer.token_ids)
    assert len(answer.token_ids) == TAGS_LENGTH


def test_max_tokens_cuts_a_forced_run_anywhere(shared_core, tokenizer) -> None:
    whole = serve(shared_core, tokenizer, a=bound())[0].answers["a", 0]
    for count in range(1, TAGS_LENGTH + 1):
        answer = serve(shared_core, tokenizer, a=bound(max_tokens=count))[0].answers["a", 0]
        assert answer.token_ids == whole.token_ids[:count]
        assert answer.finish_reason == ("length" if count < TAGS_LENGTH else "stop")
    assert shared_core.blocks.pool.num_used_blocks == 0


def test_a_stop_string_or_token_ends_an_answer_in_a_forced_run(shared_core, tokenizer) -> None:
    (slash,) = tokenizer.encode("/")
    served, _ = serve(
        shared_core,
        tokenizer,
        string=bound(stop="</na"),
        token=bound(stop_token_ids=[slash]),
        late=bound(stop_token_ids=[slash], min_tokens=12),
    )
    texts = {key: answer.text for (key, _), answer in served.answers.items()}
    assert texts["string"] == texts["token"][:-1] == texts["late"][:7]
    assert texts["token"][-1] == "<"
    assert len(texts["late"]) == TAGS_LENGTH - len("/kind>")
    assert {answer.finish_reason for answer in served.answers.values()} == {"stop"}
    assert not shared_core.has_work


def test_the_first_token_alone_tells_how_long_a_request_waited(shared_core) -> None:
    shared_core.add("a", (1, 2, 3), bound())
    tokens = []
    while shared_core.has_work:
        tokens += shared_core.step()
    assert len(tokens) == TAGS_LENGTH
    assert [token.queue_s is not None for token in tokens] == [True] + [False] * (len(tokens) - 1)
    assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + ["stop"]


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"n": 1, "best_of": 2}])
def test_log_probabilities_need_a_step_for_each_token(shared_core, tokenizer, fields) -> None:
    served, steps = serve(shared_core, tokenizer, a=bound(**fields))
    assert steps == TAGS_LENGTH
    assert len(served.answers["a", 0].token_ids) == TAGS_LENGTH


def test_nothing_else_in_the_batch_changes(core, tokenizer, never_jumps) -> None:
    requests = {
        "tags": bound(n=2, temperature=1.5),
        "person": bound(PERSON, repetition_penalty=1.3, seed=8),
        "free": SamplingParams(seed=5, max_tokens=40, ignore_eos=True),
    }
    jumped, _ = serve(core, tokenizer, **requests)
    never_jumps()
    stepped, _ = serve(core, tokenizer, **requests)
    assert jumped.answers == stepped.answers
    assert is_person(jumped.answers["person", 0].text)
    assert not jumped.failures


@pytest.mark.parametrize(
    ("regex", "max_tokens", "text"),
    [
        ("7abcdefghijklmnopqrstuvwxyz", 60, "7abcdefghijklmnopqrstuvwxyz"),
        ("7abcdefghijklmnopqrstuvwxyz[0-9]", 5, "7abcd"),
    ],
    ids=["completes", "max_tokens"],
)
def test_forced_tokens_that_end_an_answer_always_pay(
    tiny_model, tokenizer, regex: str, max_tokens: int, text: str
) -> None:
    """Nothing is computed after them, however many sequences run and whatever the buckets."""
    core = make_core(tiny_model)
    form = StructuredOutput(regex=regex)
    params = SamplingParams(structured_output=form, max_tokens=max_tokens)
    served, num_steps = serve(core, tokenizer, a=params, b=params, c=params)
    assert {answer.text for answer in served.answers.values()} == {text}
    assert num_steps == 1


def test_a_jump_that_the_scheduler_divides_misses_no_bucket(tiny_model, tokenizer) -> None:
    """Its last piece has a longer context than its first one."""
    core = make_core(tiny_model)
    core.executor.worker.runner.forward_runner.refuse_cold = True
    form = StructuredOutput(regex="[0-9]{60}abcdefghijklm[0-9]")
    params = SamplingParams(structured_output=form, max_tokens=99, seed=1)
    served = Served(core, tokenizer)
    for key in "ab":
        served.add(key, params, (2, 3, 4, 5))
    served.run()
    assert not served.failures
    assert core.stats.num_bucket_misses == 0
    assert {len(answer.token_ids) for answer in served.answers.values()} == {74}


def test_beside_as_many_sequences_as_tokens_a_pass_of_its_own_does_not_pay(tiny_model) -> None:
    core = make_core(tiny_model)
    pays = core.executor.worker.runner.pays_to_jump
    assert pays(20, 2, 1) and pays(20, 9, 8)
    assert not pays(20, 1, 1) and not pays(20, 8, 8)
    assert not pays(20, 16, 1), "no bucket has 17 tokens"
    assert not pays(72, 9, 1), "no bucket has 9 blocks of context"
    core.close()
    core = make_core(tiny_model, **SHARED)
    assert core.executor.worker.runner.pays_to_jump(20, 1, 64)
    core.close()


@pytest.mark.parametrize(("num_samples", "steps"), [(1, 2), (2, 4)])
def test_samples_of_one_request_count_one_by_one(
    tiny_model, tokenizer, num_samples: int, steps: int
) -> None:
    """Two tokens are forced: a pass of their own saves more than it takes beside one sequence."""
    core = make_core(tiny_model)
    params = bound(StructuredOutput(regex="[a-z]xy[0-9]"), n=num_samples)
    served, num_steps = serve(core, tokenizer, a=params)
    assert {len(answer.token_ids) for answer in served.answers.values()} == {4}
    assert num_steps == steps
    core.close()


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [
        pytest.param("none", TAGS_LENGTH - len("</kind>"), id="cold"),
        pytest.param("full", 3, id="warm", marks=pytest.mark.slow),
    ],
)
def test_where_shapes_are_compiled_a_jump_takes_a_bucket_that_was_warmed_up(
    tiny_model, tokenizer, warmup: str, steps: int
) -> None:
    """Only the end of the answer, which nothing computes, jumps beside a cold one."""
    core = make_core(tiny_model, Tracing(), warmup=warmup, compile=True, on_bucket_miss="eager")
    served, num_steps = serve(core, tokenizer, a=bound())
    assert len(served.answers["a", 0].token_ids) == TAGS_LENGTH
    assert num_steps == steps
    core.close()


def test_a_run_longer_than_a_chunk_takes_several(shared_core, tokenizer) -> None:
    text = "x".join("abcdefghijklmnopqrstuvwxyz")
    served, steps = serve(shared_core, tokenizer, a=bound(StructuredOutput(choice=[text])))
    assert served.texts() == [text]
    assert steps == 1, "all is forced after the first token, and nothing is sampled after it"
    form = StructuredOutput(regex=f"{text}[0-9]")
    served, steps = serve(shared_core, tokenizer, a=bound(form))
    assert served.texts()[0][:-1] == text
    assert steps == 1 + -(-len(text) // 16)


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_preempted_in_a_forced_run_it_goes_on(tiny_model, tokenizer, num_host_blocks) -> None:
    answers = []
    for evicted in (False, True):
        core = make_core(tiny_model, num_host_blocks=num_host_blocks, **SHARED)
        served = Served(core, tokenizer)
        served.add("tags", bound(n=2))
        served.add("person", bound(PERSON, seed=1))
        while core.has_work:
            if evicted and core.stats.num_steps % 5 == 1:
                core.control(BatchControl(force_evict=9))
                core.control(BatchControl(max_num_seqs=4))  # which lets them resume at once
            served.step()
        answers.append(served.answers)
        assert evicted == (core.stats.num_preemptions > 3)
        assert core.blocks.pool.num_used_blocks == 0
        core.close()
    assert answers[0] == answers[1]


def test_an_abort_in_a_forced_run_frees_all(shared_core, tokenizer) -> None:
    for further_steps in (0, 1):
        served = Served(shared_core, tokenizer)
        served.add("aborted", bound())
        served.add("other", bound(seed=4))
        while ("aborted", 0) not in served.answers:
            served.step()
        for _ in range(further_steps):
            served.step()
        shared_core.abort("aborted")
        served.run()
        assert len(served.answers["other", 0].token_ids) == TAGS_LENGTH
        assert served.answers["aborted", 0].finish_reason is None
        assert shared_core.blocks.pool.num_used_blocks == 0


def test_a_request_that_was_parked_in_a_forced_run_goes_on(shared_core, tokenizer) -> None:
    whole = serve(shared_core, tokenizer, a=bound())[0].answers["a", 0].token_ids
    for count in (1, 4, 7, 12, TAGS_LENGTH - 1):
        shared_core.add("a", (1, 2, 3), bound(), output_token_ids=whole[:count])
        tokens = []
        while shared_core.has_work:
            tokens += [token.token_id for token in shared_core.step()]
        assert whole[:count] + tokens == whole


@pytest.mark.slow
def test_on_a_gaudi_a_jump_takes_a_bucket_that_was_warmed_up(stand_in, tiny_model, tokenizer):
    with stand_in("lazy"):
        small = {"max_model_len": 64, "num_blocks": 24}
        core = make_core(tiny_model, HPUDevice(), warmup="full", **small)
        served, steps = serve(core, tokenizer, a=bound(max_tokens=40))
        assert served.texts()[0].startswith("<name>")
        assert steps == 3
        assert core.stats.num_compilations == 0
        core.close()


LIVE = {
    "dtype": "float32",
    "warmup": "none",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": 24,
    "bucketing": FEW_BUCKETS,
}
"""Without a warm-up, each bucket is compiled when it is first needed."""


@pytest.mark.parametrize(
    "graphs",
    [
        pytest.param(0.0, id="recipes"),
        pytest.param(0.1, id="graphs", marks=pytest.mark.slow),
    ],
)
def test_without_warm_up_a_jump_on_a_gaudi_takes_a_bucket_that_traffic_has_compiled(
    lazy_gaudi: object, tiny_model: Path, graphs: float
) -> None:
    captured = WarmupConfig(graph_reserved_mem=graphs)
    llm = LLM(tiny_model, device="hpu", graphs=captured, **LIVE)
    texts, steps = [], []
    for prompt in ("a", "a prompt of two chunks", "a"):
        before = llm.core.stats.num_steps
        (answer,) = llm.generate([prompt], bound(max_tokens=40))
        texts.append(answer.completions[0].text)
        steps.append(llm.core.stats.num_steps - before)
    assert texts[0] == texts[2]
    # The chunk that follows another one has the bucket of a jump.
    assert (steps[0], steps[2]) == (TAGS_LENGTH - len("</kind>"), 3)
    assert (llm.core.stats.num_graphs > 0) == (graphs > 0)
    llm.core.close()


def test_a_jump_takes_the_program_that_the_prompt_has_compiled(tiny_model: Path) -> None:
    """One program serves all numbers of tokens."""
    llm = LLM(tiny_model, device=Tracing(), compile=True, **LIVE)
    llm.generate(["abc"], bound(max_tokens=40))
    assert llm.core.stats.num_steps == 3
    llm.core.close()


def test_llm_gives_the_text_before_a_stop_string_in_a_forced_run(tiny_model: Path) -> None:
    llm = LLM(tiny_model, dtype="float32", max_model_len=256, warmup="none")
    (answer,) = llm.generate(["a"], bound(stop="</name>"))
    assert answer.completions[0].text.startswith("<name>")
    assert len(answer.completions[0].text) == 7
    assert answer.completions[0].stop_reason == "</name>"
    llm.core.close()


@settings(max_examples=15, deadline=None)
@given(schema=schemas, seed=st.integers(0, 99))
def test_answers_to_random_schemas_are_valid_and_the_same(
    shared_core: EngineCore, tokenizer: Tokenizer, schema: Any, seed: int
) -> None:
    form = StructuredOutput(json_schema=schema)
    spaces = dict.fromkeys(tokenizer.encode(" \n"), -100.0)
    params = bound(form, seed=seed, logit_bias=spaces)
    jumped, few = serve(shared_core, tokenizer, a=params)
    answer = jumped.answers["a", 0]
    if answer.finish_reason == "stop":
        check_schema(json.loads(answer.text), schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMatcher, "forced_tokens", lambda _: [])
        stepped, many = serve(shared_core, tokenizer, a=params)
    assert jumped.answers == stepped.answers
    assert few <= many == len(answer.token_ids)
