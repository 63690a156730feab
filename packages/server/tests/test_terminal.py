"""``engine-serve complete`` and ``engine-serve chat`` against a server."""

from __future__ import annotations

import asyncio
import io

import pytest

from trencadis.server.cli import main
from trencadis.server.commands.connection import first_of

pytestmark = pytest.mark.asyncio


async def run(url: str, *arguments: str) -> int:
    command, *rest = arguments
    return await asyncio.to_thread(main, [command, "--url", f"{url}/v1", *rest])


@pytest.fixture
def typed(monkeypatch):
    """``typed("a", "b")``: what the user types, and then Ctrl-D."""

    def type_lines(*lines: str) -> None:
        left = iter(lines)

        def read(_: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return type_lines


async def test_a_text_is_continued(url, engine, capsys):
    assert await run(url, "complete", "once upon", "--max-tokens", "4", "--temperature", "0") == 0
    assert capsys.readouterr().out == "once\n"
    _, params, *_ = engine.requests[0]
    assert (params.max_tokens, params.temperature) == (4, 0)


async def test_the_text_may_come_from_a_pipe(url, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert await run(url, "complete", "-") == 0
    assert capsys.readouterr().out == "piped\n"


async def test_a_conversation_keeps_its_turns_until_exit(url, engine, capsys, typed):
    typed("hello", "", "again", "/exit", "never")
    assert await run(url, "chat", "--system", "be brief") == 0
    out = capsys.readouterr().out
    assert "stand-in at http" in out
    assert out.count("[user]hello[assistant]\n") == 1
    assert out.endswith("[user]again[assistant]\n")
    turns = [[m["content"] for m in messages] for messages, _ in engine.tokenizer.rendered]
    first = "[system]be brief[user]hello[assistant]"
    assert turns == [["be brief", "hello"], ["be brief", "hello", first, "again"]]


async def test_an_end_of_input_ends_the_conversation(url, capsys, typed):
    typed()
    assert await run(url, "chat") == 0


async def test_a_question_that_is_refused_is_told_and_forgotten(url, engine, capsys, typed):
    typed("REJECT", "hello")
    assert await run(url, "chat") == 0
    assert "the template rejects these messages" in capsys.readouterr().err
    messages, _ = engine.tokenizer.rendered[-1]
    assert [message["content"] for message in messages] == ["hello"]


async def test_reasoning_is_shown_and_not_sent_back(engine, serving, capsys, typed):
    engine.tokenizer.chat_template = "<think>"
    engine.script = ["<think>", "hm", "</think>", "yes"]
    typed("a", "b")
    async with serving() as url:
        assert await run(url, "chat") == 0
    assert "hm" in capsys.readouterr().out
    messages, _ = engine.tokenizer.rendered[-1]
    assert [message["content"] for message in messages] == ["a", "yes", "b"]


@pytest.mark.parametrize("command", [("complete", "x"), ("chat",)])
async def test_a_server_that_is_not_there_is_one_line(capsys, command):
    assert await run("http://127.0.0.1:9", *command) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine-serve: error: no server answers at http://127.0.0.1:9/v1 (")
    assert error.endswith("start engine-serve, or name its address with --url\n")
    assert error.count("\n") == 1


async def test_a_server_without_a_model_is_told():
    with pytest.raises(ValueError, match="at http://x/v1 lists no model: name one with --model"):
        first_of([], "http://x/v1")


@pytest.mark.parametrize("command", [("complete", "x"), ("chat",), ("bench",)])
async def test_an_address_without_v1_is_told(url, capsys, command):
    assert await asyncio.to_thread(main, [*command, "--url", url]) == 1
    assert (
        f"{url} is not the address of an API: name {url}/v1 with --url" in capsys.readouterr().err
    )
