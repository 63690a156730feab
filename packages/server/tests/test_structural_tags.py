"""vLLM's structural tags: what follows a trigger is a tag, and other text is free."""

from __future__ import annotations

import openai
import pytest

from trencadis.engine import InvalidRequest
from trencadis.server.parsers.structural_tags import StructuralTag, tagged_text

SUM = StructuralTag(
    "<function=sum>", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "</function>"
)
ANY = StructuralTag("<function=any>", None, "</function>\n")
QUOTE = StructuralTag('"[*', {"enum": [1, 2]}, "*]")
TAGS, TRIGGERS = [SUM, ANY, QUOTE], ["<function=", '"[*']
FORMAT = {
    "type": "structural_tag",
    "structures": [{"begin": "<a=1>", "schema": {"type": "object"}, "end": "</a>"}],
    "triggers": ["<a="],
}


def accepts(text: str) -> bool:
    """Whether the grammar of `TAGS` has this text, token n being byte n."""
    llguidance = pytest.importorskip("llguidance", reason="needs the engine's extra `structured`")
    grammar = llguidance.grammar_from("grammar", tagged_text(TAGS, TRIGGERS))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "free text: <func </function> {}\n",
        '<function=sum>{"a": 7}</function>',
        'So: <function=sum>{"a": 7}</function> and <function=any>[null]</function>\n.',
        'a "[*2*] b "[*1*]',
    ],
)
def test_free_text_and_whole_tags_are_accepted(text):
    assert accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "<function=",
        "<function=other>{}</function>",
        '<function=sum>{"a": "7"}</function>',
        "<function=sum>{}</function>",
        '<function=sum>{"a": 7, "b": 1}</function>',
        '<function=sum>{"a": 7}</func>',
        '<function=sum>{"a": 7}</function><function=sum>7',
        'a "[*3*]',
    ],
)
def test_after_a_trigger_nothing_else_is(text):
    assert not accepts(text)


def test_triggers_and_tags_belong_together():
    for triggers in ([], ["<function="], [*TRIGGERS, "<tool"]):
        with pytest.raises(InvalidRequest):
            tagged_text(TAGS, triggers)


@pytest.mark.asyncio
async def test_a_client_asks_for_them(url, engine):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(
            model="stand-in", messages=messages, response_format=FORMAT
        )
        await client.completions.create(
            model="stand-in", prompt="a", extra_body={"response_format": FORMAT}
        )
        tag = StructuralTag("<a=1>", {"type": "object"}, "</a>")
        grammars = [params.structured_output.grammar for _, params, _, _ in engine.requests]
        assert grammars == [tagged_text([tag], ["<a="])] * 2
        for change in (
            {"triggers": ["<b="]},
            {"triggers": None},
            {"triggers": []},
            {"triggers": [""]},
            {"structures": None, "format": {"type": "const_string"}},
            {"structures": [{"begin": "<a=1>", "schema": [], "end": ""}]},
            {"structures": FORMAT["structures"] * 129},
        ):
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(
                    model="stand-in", messages=messages, response_format={**FORMAT, **change}
                )
            assert wrong.value.param.startswith("response_format"), change
    assert len(engine.requests) == 2
