"""``engine-serve bench``: measures a running server of the OpenAI API.

Requests are streamed text completions of random words. They arrive at a rate (Poisson), as a trace
recorded them, or as earlier ones finish (a fixed concurrency).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import openai

from trencadis.engine import EngineError
from trencadis.engine.settings import CommandParser
from trencadis.engine.simulated import read_workload
from trencadis.server.commands.bench_report import BenchReport, BenchResult, Targets
from trencadis.server.commands.connection import (
    add_connection_flags,
    client_options,
    first_of,
    reason_of,
)

WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an"),
    *("they", "which", "one", "you", "were", "all", "her", "she", "there", "would", "their", "we"),
)
"""Words that are a token each in most vocabularies, with the space before them."""

CALIBRATION_WORDS = 256
"""Words of the first request, which measures how many tokens a word has."""


@attrs.frozen
class BenchRequest:
    """A request to send: its arrival in seconds since the start, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code: 1 if nothing was answered."""
    args = flag_parser().parse_args(argv)
    try:
        if args.plot is not None:
            import matplotlib  # noqa: F401, PLC0415  before the run, not after it
        report, results = asyncio.run(_bench(args))
    except ImportError:
        message = "--plot needs matplotlib: install trencadis-server[plot]"
        print(f"engine-serve bench: error: {message}", file=sys.stderr)
        return 1
    except (EngineError, OSError, ValueError, openai.OpenAIError) as error:
        print(f"engine-serve bench: error: {reason_of(error, args.url)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report.table())
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(args, report, results), indent=1) + "\n")
    if args.plot is not None:
        from trencadis.server.commands.bench_plot import plot_bench  # noqa: PLC0415

        plot_bench(report, results, args.plot)
    return 0 if report.failed < report.requests else 1


def flag_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = CommandParser(
        prog="engine-serve bench",
        description="Measure a running server of the OpenAI API with streamed completions.",
    )
    add_connection_flags(parser)
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument(
        *("--rate", "--request-rate"),
        metavar="N",
        type=_above_zero(float),
        help="requests per second, with random times between them (Poisson)",
    )
    arrivals.add_argument(
        *("--concurrency", "--max-concurrency"),
        metavar="N",
        type=_above_zero(int),
        help="requests that run at any time (default: 8, without --rate and --trace)",
    )
    arrivals.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="arrivals and lengths of a CSV with the columns TIMESTAMP, ContextTokens and "
        "GeneratedTokens, as Azure publishes them",
    )
    load.add_argument(
        "--rate-scale",
        metavar="N",
        type=_above_zero(float),
        default=1.0,
        help="multiplies the rate of a trace (default: 1)",
    )
    for flags, default, about in (
        (("-n", "--num-requests", "--num-prompts"), 100, "requests to send, of a trace the first"),
        (("--input-tokens", "--random-input-len"), 128, "tokens of a prompt, without --trace"),
        (("--output-tokens", "--random-output-len"), 64, "tokens of an answer, without --trace"),
    ):
        text, kind = f"{about} (default: {default})", _above_zero(int)
        load.add_argument(*flags, metavar="N", type=kind, default=default, help=text)
    load.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let answers end earlier: do not send ignore_eos, which OpenAI's API does not have",
    )
    load.add_argument("--seed", metavar="N", type=int, default=0, help="of words and arrivals")
    goodput = parser.add_argument_group("goodput", "targets of a request that counts as good")
    for name, about in (
        ("ttft", "time to first token"),
        ("tpot", "mean time per output token"),
        ("e2e", "time to the last token"),
    ):
        flag = f"--{name}-target-ms"
        goodput.add_argument(flag, metavar="MS", type=_above_zero(float), help=f"most {about}")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", type=Path, help="write figures and all requests")
    output.add_argument("--plot", metavar="FILE", type=Path, help="write a PNG (needs matplotlib)")
    return parser


def _above_zero(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    return parse


async def _bench(args: argparse.Namespace) -> tuple[BenchReport, list[BenchResult]]:
    requests = planned_requests(args)
    targets = Targets(args.ttft_target_ms, args.tpot_target_ms, args.e2e_target_ms)
    async with openai.AsyncOpenAI(**client_options(args)) as client:
        model = args.model
        if model is None:
            model = first_of([each.id async for each in client.models.list()], args.url)
        generator = LoadGenerator(client, model, random.Random(args.seed), not args.no_ignore_eos)
        await generator.calibrate()
        if args.rate is None and args.trace is None:
            results, seconds = await generator.closed_loop(requests, args.concurrency or 8)
        else:
            results, seconds = await generator.open_loop(requests)
    return BenchReport.of(results, seconds, targets), results


def planned_requests(args: argparse.Namespace) -> list[BenchRequest]:
    """The requests to send. Raises `ConfigError`, `BucketingError` or `OSError` for a trace."""
    if args.trace is not None:
        trace = read_workload(
            args.trace, rate_scale=args.rate_scale, num_requests=args.num_requests
        )
        columns = (trace.arrivals_s, trace.prompt_tokens, trace.output_tokens)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [BenchRequest(*row) for row in rows]
    gaps = random.Random(args.seed)
    arrival_s = 0.0
    requests = []
    for _ in range(args.num_requests):
        requests.append(BenchRequest(arrival_s, args.input_tokens, args.output_tokens))
        arrival_s += gaps.expovariate(args.rate) if args.rate is not None else 0.0
    return requests


class LoadGenerator:
    """Sends requests and takes their times."""

    def __init__(
        self, client: openai.AsyncOpenAI, model: str, words: random.Random, ignore_eos: bool
    ) -> None:
        self._client = client
        self._model = model
        self._words = words
        self._extra = {"ignore_eos": True} if ignore_eos else {}
        self._tokens_per_word = 1.0
        self._start_s = 0.0

    async def calibrate(self) -> None:
        """Measure how many tokens a word has. Raises the client's error if the request fails."""
        result = await self._send(BenchRequest(0.0, CALIBRATION_WORDS, 1))
        self._tokens_per_word = max(result.prompt_tokens, 1) / CALIBRATION_WORDS

    async def open_loop(self, requests: Sequence[BenchRequest]) -> tuple[list[BenchResult], float]:
        """Send each request at its arrival; returns the results and the seconds they took."""
        self._start_s = time.perf_counter()

        async def send(request: BenchRequest) -> BenchResult:
            await asyncio.sleep(self._start_s + request.arrival_s - time.perf_counter())
            return await self._result_of(request)

        results = await asyncio.gather(*map(send, requests))
        return list(results), time.perf_counter() - self._start_s

    async def closed_loop(
        self, requests: Sequence[BenchRequest], concurrency: int
    ) -> tuple[list[BenchResult], float]:
        """Send a request whenever one of ``concurrency`` has ended; returns as `open_loop`."""
        self._start_s = time.perf_counter()
        left = iter(requests)

        async def work() -> list[BenchResult]:
            return [await self._result_of(request) for request in left]

        workers = await asyncio.gather(*(work() for _ in range(concurrency)))
        seconds = time.perf_counter() - self._start_s
        return [result for results in workers for result in results], seconds

    async def _result_of(self, request: BenchRequest) -> BenchResult:
        """The result of a request; its error is part of it."""
        arrival_s = time.perf_counter() - self._start_s
        try:
            return attrs.evolve(await self._send(request), arrival_s=arrival_s)
        except openai.OpenAIError as error:
            reason = reason_of(error, str(self._client.base_url))
            return BenchResult(arrival_s, error=reason[:200])

    async def _send(self, request: BenchRequest) -> BenchResult:
        num_words = max(1, round(request.prompt_tokens / self._tokens_per_word))
        prompt = " ".join(self._words.choices(WORDS, k=num_words))
        sent_s = time.perf_counter()
        stream = await self._client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=request.output_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._extra,
        )
        times: list[float] = []
        usage = None
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                times.append(time.perf_counter())
            usage = chunk.usage or usage
        end_s = time.perf_counter()
        first_s = times[0] if times else end_s
        return BenchResult(
            arrival_s=0.0,
            prompt_tokens=request.prompt_tokens if usage is None else usage.prompt_tokens,
            output_tokens=len(times) if usage is None else usage.completion_tokens,
            ttft_s=first_s - sent_s,
            e2e_s=(times[-1] if times else end_s) - sent_s,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
        )


def _as_json(
    args: argparse.Namespace, report: BenchReport, results: Sequence[BenchResult]
) -> dict[str, Any]:
    """The report, the flags that made it, and each request. Never the key."""
    flags = {name: value for name, value in vars(args).items() if name != "api_key"}
    return {
        "flags": {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()},
        "report": attrs.asdict(report),
        "requests": [attrs.asdict(result) for result in results],
    }
