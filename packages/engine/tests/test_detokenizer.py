"""Text grows by whole characters, and never shows a stop string or the start of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.engine.errors import ConfigError, InvalidRequest, ModelError
from trencadis.engine.front.detokenizer import IncrementalDetokenizer
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


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


def test_arguments_of_a_template_may_be_deep(tokenizer: Tokenizer) -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="chat template rejects"):
        tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template_kwargs={"a": deep})


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
