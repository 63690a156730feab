"""``engine-serve bench`` against a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from trencadis.server.cli import main
from trencadis.server.commands.bench import flag_parser, planned_requests
from trencadis.server.commands.bench_report import BenchReport, BenchResult, Targets

TRACE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.0000000,40,5
2023-11-16 18:17:04.0000000,80,7
2023-11-16 18:17:07.0000000,20,3
"""


async def bench(url: str, *flags: str) -> int:
    return await asyncio.to_thread(main, ["bench", "--url", f"{url}/v1", *flags])


@pytest.fixture
def engine(engine):
    engine.max_model_len = 8192
    return engine


@pytest.mark.asyncio
@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "200")])
async def test_latencies_throughput_and_goodput_are_reported(url, engine, tmp_path, capsys, load):
    engine.delay = 0.001
    file = tmp_path / "bench.json"
    lengths = ("--input-tokens", "50", "--output-tokens", "6", "--num-requests", "9")
    goodput = ("--ttft-target-ms", "60000", "--e2e-target-ms", "60000")
    assert await bench(url, *load, *lengths, *goodput, "--json", str(file)) == 0
    table = capsys.readouterr().out
    for name in ("TTFT", "ITL", "TPOT", "E2E", "p50", "p99", "9 of 9 requests", "goodput: "):
        assert name in table
    written = json.loads(file.read_text())
    report = written["report"]
    assert (report["requests"], report["failed"], report["output_tokens"]) == (9, 0, 54)
    assert report["goodput"] == pytest.approx(9 / report["seconds"])
    assert 0 < report["ttft_s"]["p50"] < report["e2e_s"]["p50"] <= report["e2e_s"]["p99"]
    assert all(len(request["gaps_s"]) == 5 for request in written["requests"])
    # a token of the stand-in is a byte, which the first request has measured
    assert abs(report["prompt_tokens"] / 9 - 50) < 15
    assert all(params.ignore_eos for _, params, *_ in engine.requests)
    assert "api_key" not in written["flags"]


@pytest.mark.asyncio
async def test_no_more_than_the_concurrency_run_at_once(url, engine):
    """The first ones are answered once three are there."""
    engine.delay = 0.002
    most = num_running = 0
    are_there = asyncio.Event()
    generate = engine.generate

    async def watched(request):
        nonlocal most, num_running
        num_running += 1
        most = max(most, num_running)
        if most == 3:
            are_there.set()
        try:
            if request.params.max_tokens > 1:  # not that which measures the tokens of a word
                await asyncio.wait_for(are_there.wait(), 60)
            async for delta in generate(request):
                yield delta
        finally:
            num_running -= 1

    engine.generate = watched
    flags = ("--concurrency", "3", "-n", "12", "--output-tokens", "5", "--no-ignore-eos")
    assert await bench(url, *flags) == 0
    assert most == 3
    assert not any(params.ignore_eos for _, params, *_ in engine.requests)


@pytest.mark.asyncio
async def test_a_trace_gives_arrivals_and_lengths(url, engine, tmp_path):
    trace, file = tmp_path / "trace.csv", tmp_path / "bench.json"
    trace.write_text(TRACE)
    flags = ("--trace", str(trace), "--rate-scale", "20", "--json", str(file))
    assert await bench(url, *flags) == 0
    requests = json.loads(file.read_text())["requests"]
    assert [request["output_tokens"] for request in requests] == [5, 7, 3]
    gaps = [request["arrival_s"] for request in requests]
    assert gaps[1] >= 0.05
    assert gaps[2] >= 0.2


def test_the_arrivals_of_a_rate_are_those_of_a_seed():
    parse = flag_parser().parse_args
    flags = ["--rate", "10", "-n", "1000"]
    first = [request.arrival_s for request in planned_requests(parse(flags))]
    assert first == [request.arrival_s for request in planned_requests(parse(flags))]
    other = planned_requests(parse([*flags, "--seed", "1"]))
    assert first != [request.arrival_s for request in other]
    assert first[-1] == pytest.approx(100, rel=0.15)
    assert {request.arrival_s for request in planned_requests(parse(["-n", "3"]))} == {0.0}


def test_a_request_is_good_only_within_every_target():
    result = BenchResult(0.0, 10, 5, ttft_s=0.1, e2e_s=0.5, gaps_s=(0.1,) * 4)
    assert result.tpot_s == pytest.approx(0.1)
    assert Targets(100, 100.1, 500).are_met(result)
    for targets in (Targets(99), Targets(None, 99), Targets(None, None, 499)):
        assert not targets.are_met(result)
    failed = BenchResult(0.0, error="refused")
    assert not Targets(100).are_met(failed)
    report = BenchReport.of([result, failed, failed], 2.0, Targets(100))
    assert (report.failed, report.goodput, report.errors) == (2, 0.5, {"refused": 2})
    assert BenchReport.of([result], 2.0, Targets()).goodput is None


@pytest.mark.asyncio
async def test_refused_requests_are_counted_by_message(engine, serving, capsys):
    engine.max_model_len = 1500
    async with serving() as url:
        assert await bench(url, "-n", "4", "--input-tokens", "4000") == 1
    out = capsys.readouterr().out
    assert "0 of 4 requests answered" in out
    assert "4 failed: " in out


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "other"), "does not exist"),
        (("--api-key", "wrong"), "needs a valid API key"),
        (("--trace", "/no/such.csv"), "/no/such.csv"),
    ],
)
async def test_what_cannot_be_measured_is_one_line(serving, capsys, flags, message):
    async with serving(api_keys=["right"]) as url:
        assert await bench(url, "--api-key", "right", *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine-serve bench: error: ")
    assert message in error


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert main(["bench", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert capsys.readouterr().err.startswith("engine-serve bench: error: no server answers at")


@pytest.mark.asyncio
async def test_the_plot_is_a_png(url, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert await bench(url, "-n", "4", "--output-tokens", "3", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [("--rate", "0"), ("--concurrency", "x"), ("-n", "-1")])
def test_a_bad_flag_is_refused(capsys, flags):
    with pytest.raises(SystemExit):
        main(["bench", *flags])
    assert flags[0] in capsys.readouterr().err


def test_the_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert flag_parser().parse_args([]).api_key == "secret"
