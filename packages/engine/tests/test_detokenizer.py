"""Text grows by whole characters, and never shows a stop string or the start of one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from trencadis.engine import LLM
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    RequestFailed,
    SlowConversation,
)
from trencadis.engine.front.detokenizer import IncrementalDetokenizer
from trencadis.engine.front.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(str(tiny_model))
    yield tokenizer
    tokenizer.close()


BYTE = 5
"""The token of byte 0 in `byte_fallback`."""


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A vocabulary as that of Llama 2: a few pieces, and a token for each byte."""
    spellings = ["<unk>", "\u2581", "\u2581a", "a", "\u00e9", *(f"<0x{n:02X}>" for n in range(256))]
    vocabulary = {spelling: number for number, spelling in enumerate(spellings)}
    backend = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    replaced = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def feed(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = (), **params
) -> tuple[list[str], str | None]:
    """The deltas of a text's tokens, one token at a time, up to a stop string."""
    stream = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stop, **params), (65, 66))
    deltas = []
    for token in tokenizer.encode(text):
        delta, matched = stream.push(token)
        deltas.append(delta)
        if matched is not None:
            return deltas, matched
    return [*deltas, stream.finish()], None


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_deltas_join_to_the_text_and_hold_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    deltas, _ = feed(tokenizer, text)
    assert "".join(deltas) == tokenizer.decode(tokenizer.encode(text))
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(prompt=st.one_of(texts, texts.map(lambda text: text + "\ufffd")), answer=texts)
def test_the_end_of_a_prompt_is_no_part_of_the_answer(
    tokenizer: Tokenizer, prompt: str, answer: str
) -> None:
    stream = IncrementalDetokenizer(tokenizer, SamplingParams(), tokenizer.encode(prompt))
    deltas = [stream.push(token)[0] for token in tokenizer.encode(answer)]
    assert "".join([*deltas, stream.finish()]) == answer


@settings(max_examples=300, deadline=None)
@given(text=texts, split=st.integers(0, 40))
def test_with_byte_fallback_a_text_continues_anywhere(
    byte_fallback: Tokenizer, text: str, split: int
) -> None:
    ids = byte_fallback.encode(text)
    spelled = b"".join(map(byte_fallback.token_bytes, ids[:split]))
    whole = len(spelled.decode(errors="ignore"))
    stream = IncrementalDetokenizer(byte_fallback, SamplingParams(), ids[:split])
    answer = "".join([*(stream.push(token)[0] for token in ids[split:]), stream.finish()])
    assert answer == text[whole:]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from((2, 3, 4, *(BYTE + n for n in b"G\xc3\xa9\xe2\x82\xac\xff")))),
    split=st.integers(0, 9),
)
def test_no_sequence_of_bytes_ends_an_answer(
    byte_fallback: Tokenizer, tokens: list[int], split: int
) -> None:
    """The decoder of ``tokenizers`` raises where bytes make characters that it gave invalid."""
    stream = IncrementalDetokenizer(byte_fallback, SamplingParams(), tokens[:split])
    answer = "".join([*(stream.push(token)[0] for token in tokens[split:]), stream.finish()])
    spelled = {2: " a", 3: "a", 4: "\u00e9"}
    pieces = [spelled[token] for token in tokens[split:] if token in spelled]
    position = 0
    for piece in pieces:
        position = answer.index(piece, position) + len(piece)


def test_an_incomplete_character_before_a_letter_is_a_replacement(byte_fallback: Tokenizer) -> None:
    stream = IncrementalDetokenizer(byte_fallback, SamplingParams(), ())
    deltas = [stream.push(token)[0] for token in (BYTE + ord("G"), BYTE + 0xC3, 2, 3)]
    assert deltas == ["G", "", "\ufffd a", "a"]


def test_a_model_with_byte_fallback_may_answer_any_bytes(
    make_tiny_model, tmp_path: Path, byte_fallback: Tokenizer
) -> None:
    model = make_tiny_model(tmp_path, vocab_size=261, bos_token_id=0, eos_token_id=260)
    byte_fallback._tokenizer.save_pretrained(tmp_path)
    llm = LLM(model, dtype="float32", max_model_len=256, warmup="none")
    allowed = dict.fromkeys([3, *(BYTE + byte for byte in b"G\xc3\xa9\xe2\x82\xac")], 100.0)
    params = [
        SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, logit_bias=allowed)
        for seed in range(8)
    ]
    try:
        for answer in llm.generate(["a"] * len(params), params):
            completion = answer.completions[0]
            assert completion.text.count("a") == completion.token_ids.count(3)
            assert completion.finish_reason == "length"
    finally:
        llm.core.close()


def test_a_character_that_begins_in_the_prompt_is_given_whole(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("\u00e9!")
    stream = IncrementalDetokenizer(tokenizer, SamplingParams(), [*tokenizer.encode("ab"), first])
    assert "".join(stream.push(token)[0] for token in rest) == "\u00e9!"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_text_ends_where_a_stop_string_first_completes(
    tokenizer: Tokenizer, text: str, stop: list[str], keep: bool
) -> None:
    deltas, matched = feed(tokenizer, text, tuple(stop), include_stop_str_in_output=keep)
    shown = "".join(deltas)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert matched is None
        assert shown == text
        return
    assert matched is not None
    # Bytes arrive one by one, so the stop string that completes first ends the text.
    seen = text[: min(ends)]
    assert seen.endswith(matched)
    assert shown == (seen if keep else shown)
    assert not any(s in shown for s in stop) or keep
    assert seen.startswith(shown)


def test_stop_string_is_ignored_before_min_tokens(tokenizer: Tokenizer) -> None:
    deltas, matched = feed(tokenizer, "xxSTOPyySTOPzz", ("STOP",), min_tokens=8)
    assert matched == "STOP"
    assert "".join(deltas) == "xxSTOPyy"


def test_special_tokens_are_skipped_unless_wanted(tokenizer: Tokenizer) -> None:
    for skip, expected in ((True, "a"), (False, "<bos>a")):
        params = SamplingParams(skip_special_tokens=skip)
        stream = IncrementalDetokenizer(tokenizer, params, ())
        deltas = [stream.push(token)[0] for token in (256, *tokenizer.encode("a"))]
        assert "".join(deltas) + stream.finish() == expected


def test_incomplete_character_shows_as_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer, SamplingParams(), ())
    first_byte = tokenizer.encode("é")[0]
    assert stream.push(first_byte) == ("", None)
    assert stream.finish() == "\ufffd"


def test_chat_is_rendered_with_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user:hi\nassistant:"


@pytest.mark.parametrize(
    "content", ["a<eos>b", "<bos>", "<bo<bos>s>", "<eos><eos>", "<eos", "\ue000<eos>\ue001"]
)
def test_special_tokens_in_a_message_are_ordinary_text(tokenizer: Tokenizer, content: str) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": content}])
    assert max(ids) < 256
    assert tokenizer.decode(ids) == f"user:{content}\nassistant:"
    assert max(tokenizer.encode("<eos>")) >= 256, "in a prompt they are special tokens"


def test_special_tokens_in_a_tool_are_ordinary_text(tiny_model: Path) -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    tokenizer = Tokenizer.load(str(tiny_model), template)
    tool = {"function": {"name": "<eos>", "parameters": {"properties": {"<eos>": {}}}}}
    ids = tokenizer.render_chat([{"role": "user", "content": ""}], tools=[tool])
    assert max(ids) < 256
    assert json.loads(tokenizer.decode(ids)) == tool


def test_another_chat_template_is_a_file_or_its_text(tiny_model: Path, tmp_path: Path) -> None:
    text = "{{ messages[0].content }}!"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for template in (text, str(file)):
        tokenizer = Tokenizer.load(str(tiny_model), template)
        assert tokenizer.chat_template == text
        assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hi"}])) == "hi!"


@pytest.mark.parametrize("template", ["missing.jinja", "{% if %}", "{{ a", "a\0b"])
def test_a_chat_template_that_is_none_is_named(tiny_model: Path, template: str) -> None:
    with pytest.raises(ConfigError, match="chat_template") as refusal:
        Tokenizer.load(str(tiny_model), template)
    assert refusal.value.field == "chat_template"


def test_a_chat_template_may_refuse_the_first_conversation(tiny_model: Path) -> None:
    Tokenizer.load(str(tiny_model), "{{ raise_exception('needs a system message') }}")


@settings(max_examples=50, deadline=None)
@given(text=texts)
def test_the_bytes_of_tokens_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_the_bytes_of_special_tokens_are_their_spelling_or_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(256) == b"<bos>"
    assert tokenizer.token_bytes(256, skip_special_tokens=True) == b""


def test_the_bytes_of_a_vocabulary_with_byte_fallback(byte_fallback: Tokenizer) -> None:
    assert [byte_fallback.token_bytes(token) for token in (2, 4, BYTE + 0xC3)] == [
        b" a",
        "\u00e9".encode(),
        b"\xc3",
    ]


@pytest.mark.parametrize("depth", [500, 900, 5000])
def test_arguments_of_a_template_may_be_deep(tokenizer: Tokenizer, depth: int) -> None:
    deep: list[object] = []
    for _ in range(depth):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="chat template rejects"):
        tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template_kwargs={"a": deep})


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(s=messages[0]['content']) %}{% for i in range(99) %}"
HARMFUL = {
    "endless": (ENDLESS, "takes more than 2 s"),
    "number": ("{{ 7 ** (10 ** 9) }}", "takes more than 2 s"),
    "memory": (DOUBLING + "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}", "512 MiB"),
    "width": ("{{ 'x' | center(10 ** 12) }}", "512 MiB"),
    "overflow": ("{{ (10.0 ** 400) }}", "out of range"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
}
"""Templates, and what their users are told."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "number" else name for name in HARMFUL],
)
def test_a_harmful_chat_template_ends_its_request_alone(tokenizer: Tokenizer, name: str) -> None:
    template, message = HARMFUL[name]
    messages = [{"role": "user", "content": "hi"}]
    usual = tokenizer._tokenizer.chat_template
    tokenizer._tokenizer.chat_template = template
    try:
        with pytest.raises(InvalidRequest, match=message) as caught:
            tokenizer.render_chat(messages)
        assert caught.value.field == "messages"
    finally:
        tokenizer._tokenizer.chat_template = usual
    assert tokenizer.decode(tokenizer.render_chat(messages)) == "user:hi\nassistant:"


@pytest.mark.slow
def test_a_slow_conversation_delays_no_quick_one(tiny_model: Path) -> None:
    """It gets a tenth of a second before the others, and the rest beside them."""
    template = f"{{% if messages[0].content == 'slow' %}}{ENDLESS}{{% endif %}}ok"
    tokenizer = Tokenizer.load(str(tiny_model), template)
    slow, usual = ([{"role": "user", "content": text}] for text in ("slow", "usual"))
    try:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                with pytest.raises(SlowConversation):
                    tokenizer.render_chat(slow, quick=True)
            rest = pool.submit(tokenizer.render_chat, slow, quick=False)
            patient = tokenizer._renderer._patient
            for _ in range(6000):
                if patient._asked is not None:
                    break
                time.sleep(0.01)
            os.killpg(patient.started().pid, signal.SIGSTOP)  # it ends after the others
            try:
                for _ in range(3):
                    assert tokenizer.decode(tokenizer.render_chat(usual, quick=True)) == "ok"
                assert not rest.done()
            finally:
                os.killpg(patient.started().pid, signal.SIGCONT)
            with pytest.raises(InvalidRequest, match="takes more than 2 s"):
                rest.result(timeout=60)
        assert tokenizer.decode(tokenizer.render_chat(usual, quick=False)) == "ok"
    finally:
        tokenizer.close()
    for quick in (None, True, False):
        with pytest.raises(RequestFailed):
            tokenizer.render_chat(usual, quick=quick)


def test_a_conversation_is_rendered_as_by_transformers(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "h\u00e4"}, {"role": "assistant", "content": "and "}]
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        given = {"add_generation_prompt": False, "continue_final_message": False, **options}
        expected = tokenizer._tokenizer.apply_chat_template(messages, tokenize=False, **given)
        assert tokenizer.decode(tokenizer.render_chat(messages, **given)) == expected
    with pytest.raises(InvalidRequest, match="exclude each other"):
        tokenizer.render_chat(messages, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("name", ["chat_template", "conversations", "tools"])
def test_arguments_of_a_template_replace_neither_it_nor_the_messages(
    tokenizer: Tokenizer, name: str
) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template_kwargs={name: "y"})
    assert caught.value.field == "chat_template_kwargs"


def test_conversations_are_rendered_beside_thousands_of_connections(tiny_model: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2000:
        pytest.skip("the limit of open files is low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    tokenizer = Tokenizer.load(str(tiny_model))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(Path("/dev/null").open("rb"))
            assert tokenizer.render_chat([{"role": "user", "content": "hi"}])
    finally:
        tokenizer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_renderer_that_was_closed_for_good_says_so_when_it_is_started(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(str(tiny_model))
    tokenizer.close()
    with pytest.raises(RequestFailed, match="cannot be started: it was closed for good"):
        tokenizer.start_renderer()


def test_a_renderer_whose_process_was_killed_starts_another(tokenizer: Tokenizer) -> None:
    process = tokenizer._renderer._quick.started()
    process.kill()
    process.wait()
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}])


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_its_length_allows(tokenizer: Tokenizer, text: str) -> None:
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= tokenizer.min_num_tokens(
        len(text)
    )


def test_messages_that_the_template_rejects_are_the_clients_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no tools") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    assert caught.value.field == "messages"


def test_missing_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        Tokenizer.load(str(tmp_path))


def test_a_tokenizer_describes_itself_without_paths(tokenizer: Tokenizer, tiny_model: Path) -> None:
    told = json.dumps(tokenizer.configuration)
    described = json.loads(told)
    assert described["tokenizer_class"]
    assert set(map(type, described["added_tokens_decoder"].values())) == {str}
    assert str(tiny_model) not in told
