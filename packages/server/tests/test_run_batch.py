"""``engine-serve run-batch``: a file of requests, and the file of their answers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from server_process import save_tiny_model

from trencadis.engine import (
    BucketMiss,
    EngineDead,
    EngineOverloaded,
    EngineRestarting,
    EngineUnresponsive,
)
from trencadis.server import ServerSettings
from trencadis.server.cli import main
from trencadis.server.commands import run_batch as module
from trencadis.server.commands.run_batch import answer_lines

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if not body:
        body = {"messages": [{"role": "user", "content": f"hello {number}"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


async def run(engine, lines: list[Any], max_running: int = 4) -> dict[Any, dict[str, Any]]:
    """The answers by custom id."""
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    answers = io.BytesIO()
    source = io.BytesIO(b"\n".join(texts))
    counts = await answer_lines(engine, ServerSettings(), source, answers, max_running)
    results = [json.loads(each) for each in answers.getvalue().splitlines()]
    assert counts.answered == len(results)
    assert len({result["id"] for result in results}) == len(results)
    return {result["custom_id"]: result for result in results}


@pytest.mark.asyncio
async def test_each_request_is_answered_as_the_server_answers_it(engine):
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "b"},
        "/v1/responses": {"input": "c"},
        "/v1/messages": {"messages": [{"role": "user", "content": "d"}], "max_tokens": 9},
    }
    lines = [line(n, url, **body) for n, (url, body) in enumerate(bodies.items())]
    results = await run(engine, lines)
    assert [results[f"r{n}"]["response"]["status_code"] for n in range(4)] == [200] * 4
    chat, completion, response, message = (results[f"r{n}"]["response"]["body"] for n in range(4))
    assert chat["choices"][0]["message"]["content"] == "[user]a[assistant]"
    assert completion["choices"][0]["text"] == "b"
    assert response["output"][0]["content"][0]["text"] == "[user]c[assistant]"
    assert message["content"][0]["text"] == "[user]d[a"
    assert results["r0"]["response"]["request_id"] == chat["id"]
    assert results["r0"]["error"] is None


OTHER_PATHS = ("/score", "/rerank", "/v2/rerank")
"""Those of vLLM's and Cohere's clients."""


@pytest.mark.asyncio
async def test_embeddings_and_scores_are_answered_too(engine):
    engine.embedding_size = 4
    bodies = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/score": {"text_1": "a", "text_2": "a"},
        "/v1/rerank": {"query": "a", "documents": ["b", "a"]},
    }
    lines = [line(n, url, **body) for n, (url, body) in enumerate(bodies.items())]
    lines += [
        line(9 + n, url, **bodies[f"/v1{url.removeprefix('/v2')}"])
        for n, url in enumerate(OTHER_PATHS)
    ]
    results = await run(engine, lines)
    for n in range(len(OTHER_PATHS)):
        assert results[f"r{9 + n}"]["response"]["status_code"] == 200
    embeddings, scores, ranking = (results[f"r{n}"]["response"]["body"] for n in range(3))
    assert [len(each["embedding"]) for each in embeddings["data"]] == [4, 4]
    assert scores["data"][0]["score"] == pytest.approx(1)
    assert ranking["results"][0]["index"] == 1


@pytest.mark.asyncio
async def test_a_bad_line_gets_an_error_line_and_does_not_end_the_run(engine, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE", 400)
    bad = [
        b"{",
        b"[1]",
        b"[" * 300,
        b"\xff\xfe",
        {"method": "POST"},
        line(1) | {"method": "GET"},
        line(2) | {"url": "/v1/admin/batch"},
        line(3) | {"url": ["a"]},
        line(4) | {"body": "hello"},
        line(5, stream=True),
        line(6, messages="x" * 500),
        line(7, messages=[]),
        line(8),
    ]
    answers = io.BytesIO()
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in bad]
    source = io.BytesIO(b"\n\n".join(texts))
    counts = await answer_lines(engine, ServerSettings(), source, answers, 4)
    results = [json.loads(each) for each in answers.getvalue().splitlines()]
    assert (counts.answered, counts.failed) == (len(bad), len(bad) - 1)
    assert counts.unnamed == sum(result["custom_id"] is None for result in results) == 6
    by_id = {result["custom_id"]: result for result in results}
    assert by_id["r8"]["response"]["status_code"] == 200
    assert by_id["r7"]["response"]["status_code"] == 400
    assert by_id["r7"]["response"]["body"]["error"]["param"] == "messages"
    refused = [result for result in results if result["response"] is None]
    assert len(refused) == len(bad) - 2
    assert {result["error"]["code"] for result in refused} == {"invalid_line"}
    assert "stream must be false" in by_id["r5"]["error"]["message"]
    assert any("longer than 400 bytes" in result["error"]["message"] for result in refused)


@pytest.mark.asyncio
async def test_no_more_requests_run_at_once_than_allowed_and_lines_are_read_as_they_go(engine):
    engine.delay = 0.001
    most = 0
    ahead = 0
    generate = engine.generate

    def watched(*args: Any, **fields: Any) -> Any:
        nonlocal most
        most = max(most, len(engine.running) + 1)
        return generate(*args, **fields)

    class Source(io.BytesIO):
        read = 0

        def readline(self, size: int = -1) -> bytes:
            nonlocal ahead
            Source.read += 1
            ahead = max(ahead, Source.read - answers.getvalue().count(b"\n"))
            return super().readline(size)

    engine.generate = watched
    answers = io.BytesIO()
    source = Source(b"\n".join(json.dumps(line(n)).encode() for n in range(40)))
    counts = await answer_lines(engine, ServerSettings(), source, answers, 3)
    assert (counts.answered, counts.failed) == (40, 0)
    assert most <= 3
    assert ahead <= 3 + 2


@pytest.mark.asyncio
async def test_an_overloaded_engine_is_asked_again(engine):
    generate = engine.generate
    refusals = iter([True, False])

    async def full_at_first(*args: Any, **fields: Any) -> Any:
        if next(refusals):
            raise EngineOverloaded("try again later")
        async for delta in generate(*args, **fields):
            yield delta

    engine.generate = full_at_first
    results = await run(engine, [line(1)])
    assert results["r1"]["response"]["status_code"] == 200


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineRestarting("again", is_refusal=True), None),
        (EngineDead("for good"), "engine_dead"),
        (EngineUnresponsive("hangs"), "engine_unresponsive"),
        (BucketMiss("no program"), "bucket_miss"),
    ],
)
async def test_only_what_may_succeed_later_is_asked_again(engine, error, code):
    generate, errors = engine.generate, iter([error])

    async def failing_at_first(*args: Any, **fields: Any) -> Any:
        if (failure := next(errors, None)) is not None:
            raise failure
        async for delta in generate(*args, **fields):
            yield delta

    engine.generate = failing_at_first
    answer = (await run(engine, [line(1)]))["r1"]["response"]
    assert answer["status_code"] == (200 if code is None else 503)
    assert answer["body"].get("error", {}).get("code") == code


@pytest.mark.asyncio
async def test_an_output_that_cannot_be_written_ends_the_run(engine):
    class Full(io.BytesIO):
        def write(self, _: Any) -> int:
            raise OSError("no space left on device")

    source = io.BytesIO(b"\n".join(json.dumps(line(n)).encode() for n in range(40)))
    with pytest.raises(OSError, match="no space left"):
        await answer_lines(engine, ServerSettings(), source, Full(), 3)


def test_a_missing_input_is_one_line(capsys, tmp_path):
    target = tmp_path / "out.jsonl"
    missing = str(tmp_path / "none.jsonl")
    assert main(["run-batch", "-i", missing, "-o", str(target), "./model"]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    assert not target.exists()


def test_the_output_may_not_be_the_input(capsys, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n")
    assert main(["run-batch", "-i", str(file), "-o", str(file), "./model"]) == 1
    assert "is the input too" in capsys.readouterr().err
    assert file.read_text() == "{}\n"


def test_flags_of_tools_and_reasoning_reach_the_app(monkeypatch, tmp_path):
    found = []

    async def noted(config, settings, *files):
        found.append(settings)
        return module.BatchCounts()

    monkeypatch.setattr(module, "run_batch", noted)
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    flags += ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    assert main(["run-batch", *files, *flags, "--enable-auto-tool-choice", "./model"]) == 0
    assert main(["run-batch", *files, "./model"]) == 0
    given = ServerSettings(
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        default_chat_template_kwargs={"enable_thinking": False},
        enable_auto_tool_choice=True,
    )
    assert found == [given, ServerSettings()]


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ((0, 0, 0), 0),
        ((3, 0, 0), 0),
        ((3, 2, 0), 0),
        ((3, 3, 0), 1),
        ((1, 1, 0), 1),
        ((3, 1, 1), 1),
        ((3, 3, 3), 1),
    ],
)
def test_the_exit_code_is_1_where_all_lines_failed_or_one_has_no_name(
    monkeypatch, capsys, tmp_path, counts, code
):
    async def done(*_: Any) -> module.BatchCounts:
        return module.BatchCounts(*counts)

    monkeypatch.setattr(module, "run_batch", done)
    target = str(tmp_path / "out.jsonl")
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", target)
    assert main(["run-batch", *files, "./model"]) == code
    said = capsys.readouterr().out
    answered, failed, unnamed = counts
    assert f"{answered} requests answered in {target}, {failed} of them with an error" in said
    assert ("have no custom_id" in said) == bool(unnamed)


@pytest.mark.slow
def test_a_file_is_answered_by_a_real_model(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"hello {n}", "max_tokens": 5, "temperature": 0} for n in range(20)]
    lines = [line(n, "/v1/completions", **body) for n, body in enumerate(bodies)]
    source.write_text("\n".join([*map(json.dumps, lines), "{"]))
    flags = ("--num-gpu-blocks-override", "64", "--warmup", "none", "--max-num-seqs", "4")
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    command = [sys.executable, "-m", "trencadis.server", "run-batch", str(model), *flags]
    command += ["-i", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 lines have no custom_id" in done.stdout
    assert f"21 requests answered in {target}, 1 of them with an error" in done.stdout
    results = [json.loads(each) for each in target.read_text().splitlines()]
    answered = {result["custom_id"] for result in results if result["error"] is None}
    assert answered == {f"r{n}" for n in range(20)}
    usage = [r["response"]["body"]["usage"] for r in results if r["error"] is None]
    assert {each["completion_tokens"] for each in usage} <= set(range(1, 6))


def test_answers_of_yesterday_stay_where_the_engine_does_not_start(capsys, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n")
    target.write_text("yesterday\n")
    model = tmp_path / "no model"
    model.mkdir()
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # as in vLLM
    assert main(["run-batch", "-i", str(source), "-o", str(target), *flags, str(model)]) == 1
    assert "run-batch: error" in capsys.readouterr().err
    assert target.read_text() == "yesterday\n"
