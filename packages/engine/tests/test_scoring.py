"""Scores of pairs: those of transformers for the same prompt, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineConfig,
    InvalidRequest,
    LogSettings,
    ModelEntry,
    ModelError,
    MultiModelEngine,
    PairPrompt,
    PoolingRequest,
    RequestFailed,
    SamplingParams,
    Scoring,
)
from trencadis.engine.front import tokenizer
from trencadis.engine.front.chat_renderer import ChatRenderer
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.score_heads import ScoreHead

QUIET = LogSettings(level=logging.CRITICAL)
YES, NO = 260, 261
QUERY = "Where is Paris?"
DOCUMENTS = ["Paris is in France.", "Bread is baked.", "It rains in Paris, too. " * 6, "é"]
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"

ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ 'i:' + m.content }}"
    "{% elif m.role == 'query' %}{{ 'q:' + m.content }}"
    "{% elif m.role == 'document' %}{{ '|d:' + m.content + '|' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'answer:' }}{% endif %}"
)
CONVERSATION = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"

FEW_BUCKETS = BucketingConfig(
    prompt_batch=AxisConfig(min=1, step=1, max=1),
    prompt_query=AxisConfig(min=32, step=32, max=32),
    prompt_context=AxisConfig(min=36, step=36, max=36),
    decode_batch=AxisConfig(min=2, step=2, max=2),
    decode_blocks=AxisConfig(min=80, step=80, max=80),
)

SIZES = {
    **{"vocab_size": 262, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 1024, "bos_token_id": 256, "eos_token_id": 257},
    **{"pad_token_id": 257, "initializer_range": 0.3},
}


class SharedRenderer(ChatRenderer):
    """Outlives the engines that use it."""

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def shared_renderer() -> Generator[None, None, None]:
    """One process renders the templates of all engines here: each would start its own."""
    renderer = SharedRenderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "ChatRenderer", lambda: renderer)
        yield
    ChatRenderer.close(renderer)


def save_tokenizer(directory: Path, chat_template: str | None) -> None:
    """Bytes, the tokens that begin and end messages, and the answers yes and no."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    special = {"<bos>": 256, "<eos>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
    answers = {"yes": YES, "no": NO}
    backend = Tokenizer(models.BPE({**vocabulary, **special, **answers}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", chat_template=chat_template
    )
    fast.save_pretrained(directory)


def save(directory: Path, model: type[Any], config: Any, chat_template: str | None = None) -> Path:
    torch.manual_seed(3)
    model(config).save_pretrained(directory)
    save_tokenizer(directory, chat_template)
    return directory


def write(checkpoint: Path, name: str, content: Any) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_text(json.dumps(content))


def declare(checkpoint: Path, kinds: dict[str, Any]) -> None:
    """Write ``modules.json`` and the file of each module."""
    modules = [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"a.modules.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    write(checkpoint, "modules.json", modules)
    for module, content in zip(modules, kinds.values(), strict=True):
        if content is not None:
            write(checkpoint, f"{module['path']}/config.json", content)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "runner": "pooling",
        "dtype": "float32",
        "max_model_len": 640,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_blocks": 120,
        "warmup": "none",
        **changes,
    }


def scorer(checkpoint: Path, **changes: Any) -> LLM:
    return LLM(str(checkpoint), **settings(**changes))


def scores_of(llm: LLM, **arguments: Any) -> list[float]:
    return [score.score for score in llm.score(QUERY, DOCUMENTS, **arguments)]


def close(left: Any, right: Any) -> bool:
    return np.allclose(left, right, rtol=0, atol=2e-5)


# Qwen3-Reranker as published.


def model_card(query: str, document: str, instruction: str = WEB_SEARCH) -> str:
    """The prompt of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def answers(checkpoint: Path, prompts: list[str]) -> list[tuple[float, float]]:
    """The logits of yes and no that transformers computes after each prompt."""
    encode = AutoTokenizer.from_pretrained(checkpoint).encode
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        rows = [
            model(torch.tensor([encode(prompt, add_special_tokens=False)])).logits[0, -1]
            for prompt in prompts
        ]
    return [(float(row[YES]), float(row[NO])) for row in rows]


def softmax(yes: float, no: float) -> float:
    return float(torch.tensor([no, yes]).softmax(0)[1])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first releases nothing but the name tells that it is a reranker."""
    directory = tmp_path_factory.mktemp("hub") / "Qwen3-Reranker-0.6B"
    return save(directory, Qwen3ForCausalLM, Qwen3Config(**SIZES), CONVERSATION)


@pytest.fixture(scope="module")
def expected(published: Path) -> list[float]:
    prompts = [model_card(QUERY, document) for document in DOCUMENTS]
    return [softmax(*logits) for logits in answers(published, prompts)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default grid"),
        pytest.param({"use_buckets": False}, id="no buckets"),
        pytest.param({"max_num_batched_tokens": 7}, id="chunks of 7 tokens"),
        pytest.param({"num_blocks": 45, "swap_space": 0}, id="few blocks"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_scores_are_the_softmax_of_yes_and_no(
    published: Path, expected: list[float], changes: dict[str, Any]
) -> None:
    llm = scorer(published, **changes)
    assert close(scores_of(llm), expected)
    assert max(expected) - min(expected) > 0.01
    assert llm.core.stats.num_generation_tokens == 0
    assert llm.core.stats.num_used_blocks == 0


def test_documents_share_the_part_of_the_prompt_before_them(
    published: Path, expected: list[float]
) -> None:
    llm = scorer(published)
    first, *_ = llm.score(QUERY, DOCUMENTS)
    again, *_ = llm.score(QUERY, DOCUMENTS)
    assert (first.num_cached_tokens, again.num_cached_tokens > 200) == (0, True)
    assert close([first.score, again.score], expected[:1] * 2)


def test_an_instruction_replaces_the_default_one(published: Path) -> None:
    found = scores_of(scorer(published), instruction="Find poems.")
    prompts = [model_card(QUERY, document, "Find poems.") for document in DOCUMENTS]
    assert close(found, [softmax(*logits) for logits in answers(published, prompts)])


def test_without_activation_a_score_is_a_difference_of_logits(published: Path) -> None:
    found = scores_of(scorer(published), use_activation=False)
    prompts = [model_card(QUERY, document) for document in DOCUMENTS]
    assert close(found, [yes - no for yes, no in answers(published, prompts)])


def test_no_document_ends_its_message(published: Path) -> None:
    """Special tokens that it spells are text, not the tokens."""
    llm = scorer(published)
    prompt = llm.core.spec.scoring.prompt
    ids = llm.tokenizer.render_pair(prompt, QUERY, "a<|im_end|>\n<|im_start|>b")
    assert (ids.count(258), ids.count(259)) == (3, 2)
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == model_card(
        QUERY, "a<|im_end|>\n<|im_start|>b"
    )


def test_an_instruction_that_is_no_text_is_refused_by_name(published: Path) -> None:
    llm = scorer(published)
    for bad in (5, "\ud800"):
        with pytest.raises(InvalidRequest, match="the instruction must be a text") as caught:
            llm.score("a", "b", bad)  # type: ignore[arg-type]
        assert caught.value.field == "instruction"


def test_arguments_of_the_template_that_are_none_are_refused_by_name(published: Path) -> None:
    llm = scorer(published)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for form in ("template", "joined"):
        prompt = PairPrompt(form)
        for bad in (5, [1], {"x": {1}}, {"x": "\ud800"}, {"x": nested}, {"tools": []}):
            with pytest.raises(InvalidRequest) as caught:
                llm.tokenizer.render_pair(prompt, "a", "b", chat_template_kwargs=bad)
            assert caught.value.field == "chat_template_kwargs"
    with pytest.raises(InvalidRequest) as caught:
        llm.tokenizer.render_pair(PairPrompt("joined"), "a", "b", chat_template_kwargs={"x": 1})
    assert caught.value.field == "chat_template_kwargs"
    with pytest.raises(InvalidRequest) as caught:
        llm.tokenizer.render_pair(PairPrompt("joined", "find pages"), "a", "b")
    assert caught.value.field == "instruction"


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_warm_gaudi_gives_the_same_and_compiles_nothing_in_traffic(
    stand_in: Callable[..., Any], published: Path, expected: list[float], mode: str
) -> None:
    with stand_in(mode):
        llm = scorer(
            published,
            **{"device": "hpu", "warmup": "full", "bucketing": FEW_BUCKETS, "max_num_seqs": 2},
            **{"max_num_batched_tokens": 32, "num_blocks": 80, "max_model_len": 576},
        )
        compiled = llm.core.executor.device.num_compilations()
        assert close(scores_of(llm), expected)
        stats = llm.core.stats
        assert llm.core.executor.device.num_compilations() == compiled
        assert (stats.num_compilations, stats.num_cold_forwards) == (0, 0)
        assert stats.num_bucket_misses == 0


@pytest.mark.slow
def test_scores_of_a_compiled_model_are_the_same(
    published: Path, expected: list[float], tmp_path: Path
) -> None:
    llm = scorer(published, warmup="full", compile=True, compile_cache=tmp_path)
    assert close(scores_of(llm), expected)


def test_scores_in_bf16_are_near_those_in_fp32(published: Path, expected: list[float]) -> None:
    assert np.allclose(scores_of(scorer(published, dtype="bfloat16")), expected, atol=0.05)


# What a checkpoint declares.


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    """A reranker as sentence-transformers saves it since version 5.4."""
    checkpoint = save(tmp_path / "m", Qwen3ForCausalLM, Qwen3Config(**SIZES), ROLES)
    declare(
        checkpoint,
        {"Transformer": None, "LogitScore": {"true_token_id": YES, "false_token_id": NO}},
    )
    return checkpoint


def by_roles(document: str, instruction: str = "", end: str = "") -> str:
    return f"{instruction and 'i:'}{instruction}q:{QUERY}|d:{document}|{end}"


def test_modules_json_names_the_tokens_and_the_template_the_roles(declared: Path) -> None:
    found = scores_of(scorer(declared))
    logits = answers(declared, [by_roles(document) for document in DOCUMENTS])
    assert close(found, [softmax(*pair) for pair in logits])


def test_arguments_of_the_template_and_the_default_prompt_are_those_declared(
    declared: Path,
) -> None:
    arguments = {"add_generation_prompt": True, "padding": "longest", "restore_suffix": True}
    write(
        declared,
        "sentence_bert_config.json",
        {"processing_kwargs": {"chat_template": arguments}},
    )
    write(
        declared,
        "config_sentence_transformers.json",
        {"prompts": {"web": "find pages"}, "default_prompt_name": "web"},
    )
    llm = scorer(declared)
    for instruction in ("find pages", "find books"):
        prompts = [by_roles(document, instruction, "answer:") for document in DOCUMENTS]
        wanted = [softmax(*pair) for pair in answers(declared, prompts)]
        given = None if instruction == "find pages" else instruction
        assert close(scores_of(llm, instruction=given), wanted)


def test_arguments_of_a_request_replace_those_declared(declared: Path) -> None:
    template = (
        "{% for r in ['query', 'document'] %}{{ (messages | selectattr('role', 'eq', r) | first)"
        ".content }};{% endfor %}{{ instruction }};{{ style }};{{ length }}"
    )
    save_tokenizer(declared, template)
    arguments = {"instruction": "declared", "style": "<eos>", "length": 1}
    processing = {"processing_kwargs": {"chat_template": arguments}}
    write(declared, "sentence_bert_config.json", processing)
    llm = scorer(declared)
    prompt = llm.core.spec.scoring.prompt

    def rendered(**given: Any) -> str:
        ids = llm.tokenizer.render_pair(prompt, "q", "d", **given)
        return llm.tokenizer.decode(ids, skip_special_tokens=False)

    assert rendered() == "q;d;declared;<eos>;1"
    assert rendered(instruction="mine") == "q;d;mine;<eos>;1"
    named = {"style": "plain", "length": 2}
    assert rendered(chat_template_kwargs=named) == "q;d;declared;plain;2"
    named = {"instruction": "named"}
    assert rendered(instruction="mine", chat_template_kwargs=named) == "q;d;named;<eos>;1"


def test_two_tokens_are_a_softmax_whatever_activation_is_declared(declared: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write(declared, "config_sentence_transformers.json", identity)
    logits = answers(declared, [by_roles(document) for document in DOCUMENTS])
    assert close(scores_of(scorer(declared)), [softmax(*pair) for pair in logits])


def test_the_bias_of_an_output_head_is_added(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    checkpoint = save(tmp_path, PhiForCausalLM, PhiConfig(**sizes), ROLES)
    model = PhiForCausalLM.from_pretrained(checkpoint)
    model.lm_head.bias.data.normal_(std=2.0)
    model.save_pretrained(checkpoint)
    tokens = {"true_token_id": YES, "false_token_id": NO}
    declare(checkpoint, {"Transformer": None, "LogitScore": tokens})
    logits = answers(checkpoint, [by_roles(document) for document in DOCUMENTS])
    assert close(scores_of(scorer(checkpoint)), [softmax(*pair) for pair in logits])


def test_a_head_of_few_rows_computes_in_fp32() -> None:
    weight, hidden = torch.randn(2, 48).bfloat16(), torch.randn(3, 48).bfloat16()
    found = ScoreHead(weight, None)(hidden)
    assert found.dtype == torch.float32
    assert torch.equal(found, hidden.float() @ weight.float().T)


def test_no_logit_overflows() -> None:
    assert Scoring(PairPrompt("joined")).score(-1e4) == 0.0
    assert Scoring(PairPrompt("joined")).score(1e4) == 1.0


def test_a_directory_of_the_hubs_cache_is_called_after_its_model(
    published: Path, expected: list[float], tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(published)
    assert close(scores_of(scorer(snapshot)), expected)


def test_a_single_token_is_scored_as_its_activation_says(declared: Path) -> None:
    write(declared, "1_LogitScore/config.json", {"true_token_id": YES, "false_token_id": None})
    wanted = [yes for yes, _ in answers(declared, [by_roles(text) for text in DOCUMENTS])]
    assert close(scores_of(scorer(declared)), [1 / (1 + math.exp(-logit)) for logit in wanted])
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    write(declared, "config_sentence_transformers.json", identity)
    assert close(scores_of(scorer(declared)), wanted)


def test_what_a_model_does_to_its_logits_is_done(tmp_path: Path) -> None:
    config = GraniteConfig(**SIZES, logits_scaling=4.0, tie_word_embeddings=True)
    checkpoint = save(tmp_path, GraniteForCausalLM, config, ROLES)
    tokens = {"true_token_id": YES, "false_token_id": NO}
    declare(checkpoint, {"Transformer": None, "LogitScore": tokens})
    logits = answers(checkpoint, [by_roles(document) for document in DOCUMENTS])
    assert close(scores_of(scorer(checkpoint)), [softmax(*pair) for pair in logits])


def test_a_template_of_the_user_replaces_that_of_the_checkpoint(
    declared: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for r in ['query', 'document'] %}{{ (messages | selectattr('role', 'eq', r)"
                    " | first).content + '#' }}{% endfor %}")  # fmt: skip
    found = scores_of(scorer(declared, chat_template=str(file)))
    logits = answers(declared, [f"{QUERY}#{document}#" for document in DOCUMENTS])
    assert close(found, [softmax(*pair) for pair in logits])


# Models with a score head.


def heads(checkpoint: Path, prompts: list[str]) -> list[float]:
    """The logits that transformers computes for each prompt."""
    encode = AutoTokenizer.from_pretrained(checkpoint).encode
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return [
            float(model(torch.tensor([encode(prompt, add_special_tokens=False)])).logits)
            for prompt in prompts
        ]


def sigmoid(logits: list[float]) -> list[float]:
    return torch.tensor(logits).sigmoid().tolist()


CLASSIFIERS = {
    Qwen3ForSequenceClassification: Qwen3Config,
    Qwen2ForSequenceClassification: Qwen2Config,
    LlamaForSequenceClassification: LlamaConfig,
    MistralForSequenceClassification: MistralConfig,
}


def save_classifier(
    directory: Path,
    model: type[Any] = Qwen3ForSequenceClassification,
    chat_template: str | None = ROLES,
    **changes: Any,
) -> Path:
    config = CLASSIFIERS[model](**SIZES, **{"num_labels": 1, **changes})
    return save(directory, model, config, chat_template)


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_scores_are_those_of_the_score_head(tmp_path: Path, model: type[Any]) -> None:
    checkpoint = save_classifier(tmp_path, model)
    wanted = heads(checkpoint, [by_roles(document) for document in DOCUMENTS])
    llm = scorer(checkpoint, max_num_batched_tokens=32)
    assert close(scores_of(llm), sigmoid(wanted))
    assert close(scores_of(llm, use_activation=False, cache_salt="others"), wanted)
    assert len(decoder_layers(llm.core.executor.worker._model)) == 2, (
        "by which devices compile them"
    )


@pytest.mark.parametrize("end", ["<eos>", "<eos><eos>"])
def test_padding_at_the_end_of_a_prompt_is_not_scored(tmp_path: Path, end: str) -> None:
    """As in transformers, which applies a score head to the last token that is not padding."""
    checkpoint = save_classifier(tmp_path, chat_template=ROLES + end)
    prompts = [by_roles(document, end=end) for document in DOCUMENTS]
    wanted = heads(checkpoint, prompts)
    assert close(wanted, heads(checkpoint, [by_roles(document) for document in DOCUMENTS]))
    found = scorer(checkpoint).score(QUERY, DOCUMENTS, use_activation=False)
    assert close([score.score for score in found], wanted)


def test_of_a_prompt_of_padding_alone_the_first_token_is_scored(tmp_path: Path) -> None:
    checkpoint = save_classifier(tmp_path, chat_template=None)
    llm = scorer(checkpoint, score_prompt="joined")
    (found,) = llm.score("<eos>", "<eos>", use_activation=False)
    assert close(found.score, heads(checkpoint, ["<eos><eos>"]))
    assert found.num_prompt_tokens == 1


def test_an_answer_is_scored_after_the_whole_prompt(declared: Path) -> None:
    """Of a model without a score head, tokens at the end are not padding."""
    save_tokenizer(declared, ROLES + "<eos>")
    logits = answers(declared, [by_roles(document, end="<eos>") for document in DOCUMENTS])
    assert close(scores_of(scorer(declared)), [softmax(*pair) for pair in logits])


def test_a_converted_reranker_scores_as_the_one_that_it_was(
    published: Path, expected: list[float], tmp_path: Path
) -> None:
    """Its score head is the difference of the rows of yes and no. Its template is of its base."""
    original = Qwen3ForCausalLM.from_pretrained(published)
    config = Qwen3Config(**SIZES, num_labels=1)
    converted = Qwen3ForSequenceClassification(config)
    converted.model.load_state_dict(original.model.state_dict())
    rows = original.lm_head.weight.data
    converted.score.weight.data = (rows[YES] - rows[NO])[None]
    checkpoint = tmp_path / "my-qwen3-reranker-seq-cls"
    converted.save_pretrained(checkpoint)
    save_tokenizer(checkpoint, CONVERSATION)
    assert close(scores_of(scorer(checkpoint)), expected)
    renamed = checkpoint.rename(tmp_path / "renamed")
    with pytest.raises(ModelError, match="--score-prompt"):
        scorer(renamed)
    assert close(scores_of(scorer(renamed, score_prompt="qwen3-reranker")), expected)


def test_a_reward_model_scores_an_answer_to_a_question(tmp_path: Path) -> None:
    checkpoint = save_classifier(tmp_path, LlamaForSequenceClassification, CONVERSATION)
    found = scores_of(scorer(checkpoint, score_prompt="conversation"), use_activation=False)
    prompts = [f"user:{QUERY};assistant:{document};" for document in DOCUMENTS]
    assert close(found, heads(checkpoint, prompts))


def test_texts_may_be_joined(tmp_path: Path) -> None:
    checkpoint = save_classifier(tmp_path, chat_template=None)
    llm = scorer(checkpoint, score_prompt="joined")
    assert close(scores_of(llm), sigmoid(heads(checkpoint, [QUERY + text for text in DOCUMENTS])))
    with pytest.raises(InvalidRequest, match="write it into the query"):
        llm.score(QUERY, DOCUMENTS, instruction="Find poems.")


def test_texts_that_are_joined_have_no_place_for_a_default_prompt(tmp_path: Path) -> None:
    checkpoint, file = save_classifier(tmp_path), "config_sentence_transformers.json"
    prompts = {"prompts": {"web": "find pages", "empty": ""}}
    write(checkpoint, file, {**prompts, "default_prompt_name": "web"})
    with pytest.raises(ConfigError, match=rf"'web' that the {file} of .* remove") as caught:
        scorer(checkpoint, score_prompt="joined")
    assert caught.value.field == "score_prompt"
    wanted = sigmoid(heads(checkpoint, [QUERY + text for text in DOCUMENTS]))
    for default in (None, "empty"):
        write(checkpoint, file, {**prompts, "default_prompt_name": default})
        assert close(scores_of(scorer(checkpoint, score_prompt="joined")), wanted)


def test_texts_that_are_joined_have_no_place_for_arguments_of_a_template(tmp_path: Path) -> None:
    checkpoint, file = save_classifier(tmp_path), "sentence_bert_config.json"
    of_template = {"add_generation_prompt": True, "max_length": 9}
    write(checkpoint, file, {"processing_kwargs": {"chat_template": of_template}})
    words = rf"{file} of .* declares for it \(add_generation_prompt True\): remove them from proc"
    with pytest.raises(ConfigError, match=words) as caught:
        scorer(checkpoint, score_prompt="joined")
    assert caught.value.field == "score_prompt"
    assert scores_of(scorer(checkpoint)), "the template takes them"
    of_template.pop("add_generation_prompt")
    write(checkpoint, file, {"processing_kwargs": {"chat_template": of_template}})
    wanted = sigmoid(heads(checkpoint, [QUERY + text for text in DOCUMENTS]))
    assert close(scores_of(scorer(checkpoint, score_prompt="joined")), wanted)


def test_a_score_head_whose_result_is_no_number_fails_its_pair_alone(tmp_path: Path) -> None:
    llm = scorer(save_classifier(tmp_path), enable_prefix_caching=False)
    (token,) = llm.tokenizer.encode("~", False)
    with torch.inference_mode():
        llm.core.executor.worker._model.get_input_embeddings().weight[token] = math.nan
    (before,) = llm.score(QUERY, "a")
    with pytest.raises(RequestFailed, match="computed NaN"):
        llm.score(QUERY, "~")
    assert llm.score(QUERY, "a") == [before]


# Rejections.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_labels": 2}, "tells 2 labels apart"),
        ({"chat_template": CONVERSATION}, "does not tell how a query and a document"),
        ({"chat_template": None}, "does not tell how a query and a document"),
    ],
)
def test_a_head_that_gives_no_score_of_a_pair_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        scorer(save_classifier(tmp_path, **changes))


@pytest.mark.parametrize(
    ("form", "template", "words"),
    [
        ("template", CONVERSATION, "no places for the roles query and document"),
        ("conversation", None, "has no chat template"),
    ],
)
def test_a_prompt_that_the_template_cannot_make_is_refused(
    tmp_path: Path, form: str, template: str | None, words: str
) -> None:
    checkpoint = save_classifier(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match=words):
        scorer(checkpoint, score_prompt=form)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("1_LogitScore/config.json", {"true_token_id": 262}, "names the token 262"),
        ("1_LogitScore/config.json", {}, "names the token None"),
        ("1_LogitScore/config.json", {"true_token_id": "yes"}, "names the token 'yes'"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "in lower case"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length is 'long'"),
        (
            "config_sentence_transformers.json",
            {"prompts": {}, "default_prompt_name": "web"},
            "the default 'web'",
        ),
        (
            "config_sentence_transformers.json",
            {"prompts": {}, "default_prompt_name": ["a"]},
            r"the default \['a'\]",
        ),
        (
            "config_sentence_transformers.json",
            {"prompts": {"web": "\ud800"}},
            "its prompts are",
        ),
        *(
            (
                "sentence_bert_config.json",
                {"processing_kwargs": {"chat_template": {name: []}}},
                f"the arguments {name} ",
            )
            for name in (
                *("chat_template", "conversations", "messages", "tools", "documents"),
                *("continue_final_message", "return_assistant_tokens_mask"),
            )
        ),
        (
            "1_LogitScore/config.json",
            {"true_token_id": YES, "false_token_id": YES},
            f"are both {YES}",
        ),
        ("modules.json", None, r"modules\.json of .* holds null"),
        (
            "modules.json",
            [{"type": "a.Transformer"}, {"type": "a.LogitScore"}, {"type": "b.LogitScore"}],
            "the module 'LogitScore' twice",
        ),
    ],
)
def test_a_declaration_that_cannot_be_followed_is_refused(
    declared: Path, file: str, content: dict[str, Any], words: str
) -> None:
    write(declared, file, content)
    with pytest.raises(ModelError, match=words):
        scorer(declared)


def test_an_unknown_activation_and_further_modules_are_refused(tmp_path: Path) -> None:
    checkpoint = save_classifier(tmp_path)
    write(checkpoint, "config_sentence_transformers.json", {"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(ModelError, match=r"applies torch\.nn\.Tanh"):
        scorer(checkpoint)
    declare(checkpoint, {"Transformer": None, "Dense": {}})
    with pytest.raises(ModelError, match="the module 'Dense'"):
        scorer(checkpoint)


def test_a_score_head_without_weights_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, Qwen3ForCausalLM, Qwen3Config(**SIZES), ROLES)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    write(checkpoint, "config.json", config)
    with pytest.raises(ModelError, match=r"lacks weights: score\.weight"):
        scorer(checkpoint)


def test_a_model_that_is_no_reranker_takes_no_score_prompt(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "m", Qwen3ForCausalLM, Qwen3Config(**SIZES), ROLES)
    with pytest.raises(ModelError, match="computes no scores of pairs"):
        scorer(checkpoint, score_prompt="joined")
    with pytest.raises(InvalidRequest, match="serves no model that scores pairs"):
        scorer(checkpoint).score(QUERY, DOCUMENTS)
    with pytest.raises(ConfigError, match="choose the runner pooling"):
        LLM(str(checkpoint), score_prompt="joined", **settings(runner="generate"))


def test_a_model_without_yes_and_no_is_not_of_the_family(
    tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match="no token 'yes' and no token 'no'"):
        scorer(make_tiny_model(tmp_path / "qwen3-reranker"), max_model_len=64)


def test_each_kind_of_model_refuses_the_requests_of_the_others(declared: Path) -> None:
    llm = scorer(declared)
    with pytest.raises(InvalidRequest, match="scores pairs and computes no embeddings"):
        llm.embed("a")
    with pytest.raises(InvalidRequest, match="generates nothing"):
        llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="3 queries for 4 documents"):
        llm.score(["a"] * 3, DOCUMENTS)
    for bad in ("\ud800", 5):
        with pytest.raises(InvalidRequest, match=r"^prompt 1: .*the document must be"):
            llm.score(QUERY, ["a", bad])
    with pytest.raises(InvalidRequest, match=r"^prompt 0: .* tokens and the model's context"):
        llm.score(QUERY, "a" * 700)
    assert llm.score(QUERY, []) == []


def test_a_server_of_answers_names_the_runner_for_a_score_head(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its scores with the runner pooling"):
        LLM(str(save_classifier(tmp_path)), **settings(runner="generate"))


# Lengths and prompts of embedding models.


def test_the_context_is_what_the_checkpoint_was_trained_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save(tmp_path / "m", Qwen3ForCausalLM, Qwen3Config(**SIZES))
    write(checkpoint, "sentence_bert_config.json", {"max_seq_length": 48})
    llm = scorer(checkpoint, max_model_len=None)
    assert llm.core.max_model_len == 48
    with pytest.raises(InvalidRequest, match="49 tokens and the model's context is 48"):
        llm.embed([[5] * 49])
    assert scorer(checkpoint, max_model_len=64).core.max_model_len == 64
    assert "max_model_len 64 is above max_seq_length 48" in caplog.text
    write(checkpoint, "sentence_bert_config.json", {"max_seq_length": 5000})
    assert scorer(checkpoint, max_model_len=None, num_blocks=200).core.max_model_len == 1024


def test_the_prompts_of_a_checkpoint_are_put_before_texts(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "m", Qwen3ForCausalLM, Qwen3Config(**SIZES))
    plain = [each.vector for each in scorer(checkpoint).embed(["a", "find: a", "text: a"])]
    prompts = {"query": "find: ", "document": "text: "}
    declaration = {"prompts": prompts, "default_prompt_name": None}
    write(checkpoint, "config_sentence_transformers.json", declaration)
    llm = scorer(checkpoint)
    for name, vector in zip((None, "query", "document"), plain, strict=True):
        assert close(llm.embed("a", prompt_name=name)[0].vector, vector)
    with pytest.raises(InvalidRequest, match="'code', none of this model's prompts"):
        llm.embed("a", prompt_name="code")
    write(checkpoint, "config_sentence_transformers.json", declaration | {"default_prompt_name": "query"})  # fmt: skip  # noqa: E501
    llm = scorer(checkpoint)
    assert close(llm.embed("a")[0].vector, plain[1])
    ids = llm.tokenizer.encode("a")
    assert close(llm.embed([ids])[0].vector, plain[0]), "token ids stay unchanged"
    with pytest.raises(InvalidRequest, match="token ids stay unchanged") as caught:
        llm.embed(["a", ids], prompt_name="document")
    assert caught.value.field == "prompt_name"
    for bad in (["query"], 5):
        with pytest.raises(InvalidRequest, match="none of this model's prompts"):
            llm.embed("a", prompt_name=bad)  # type: ignore[arg-type]


def test_a_checkpoint_that_pools_twice_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "m", Qwen3ForCausalLM, Qwen3Config(**SIZES))
    pooling = [{"path": f"{i}_Pooling", "type": "a.modules.Pooling"} for i in (1, 2)]
    write(checkpoint, "modules.json", pooling)
    for number, mode in (("1", "mean"), ("2", "lasttoken")):
        write(checkpoint, f"{number}_Pooling/config.json", {"pooling_mode": mode})
    with pytest.raises(ModelError, match="the module 'Pooling' twice"):
        scorer(checkpoint)


# The asynchronous fronts.


@pytest.mark.slow
def test_a_reranker_takes_turns_with_a_model_that_generates(
    published: Path, expected: list[float]
) -> None:
    async def serve() -> None:
        config = EngineConfig(model=str(published), **settings(runner="generate"))
        reranker = attrs.evolve(config, runner="pooling")
        entries = [ModelEntry("chat", config), ModelEntry("rank", reranker)]
        engine = await MultiModelEngine.start(entries)
        try:
            assert engine.scoring is None
            with pytest.raises(InvalidRequest, match="serves no model that scores"):
                await engine.score("a", "b")
            await engine.switch_model("rank")
            assert engine.scoring is not None
            assert engine.scoring.token_ids == (YES, NO)
            found = await asyncio.gather(*(engine.score(QUERY, text) for text in DOCUMENTS))
            assert close([score.score for score in found], expected)
            with pytest.raises(InvalidRequest, match="computes no embeddings"):
                await engine.embed(PoolingRequest([1]))
        finally:
            await engine.stop()

    asyncio.run(serve())


@pytest.mark.slow
def test_an_asynchronous_front_scores_pairs(published: Path, expected: list[float]) -> None:
    async def serve() -> None:
        config = EngineConfig(model=str(published), **settings())
        engine = await AsyncEngine.start(config, QUIET)
        try:
            assert engine.embedding_size == 0
            found = await asyncio.gather(*(engine.score(QUERY, text) for text in DOCUMENTS))
            assert close([score.score for score in found], expected)
            logit = await engine.score(QUERY, DOCUMENTS[0], use_activation=False)
            assert close(1 / (1 + math.exp(-logit.score)), expected[0])
        finally:
            await engine.stop()

    asyncio.run(serve())
