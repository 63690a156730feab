"""The command: what it prints and writes, and its errors."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.bucketing import (
    BucketingConfig,
    TrafficRecorder,
    prompt_grid,
    read_bucket_file,
)
from trencadis.bucketing.cli import main
from trencadis.bucketing.cli.command_line import _parser
from trencadis.bucketing.config import describe_axis_settings, describe_variables
from trencadis.bucketing.strategies import STRATEGIES
from trencadis.bucketing.strategy_comparison import StrategyResult


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_BUCKETING_STRATEGY", "VLLM_BUCKETING_FROM_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "trace.csv"
    rows = zip(np.sort(random.uniform(0, 60, 400)), random.integers(1, 2000, 400), strict=True)
    path.write_text("arrival,length\n" + "".join(f"{time},{length}\n" for time, length in rows))
    return path


def test_show_prints_the_log_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PROMPT_BS_BUCKET_MAX", "2")
    settings = ["--strategy", "lin", "--max-num-seqs", "4", "--max-model-len", "512"]
    assert main(["show", "--axes", "sequence", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 2], seq:[128, 128, 512]"
    )
    assert lines[1].startswith("Generated 8 prompt buckets: [(1, 128), (1, 256)")
    assert lines[2].startswith("Decode bucket config (min, step, max_warmup) bs:[1, 128, 4]")
    assert main(["show", "--phase", "decode", *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("bs:[1, 32, 4], blocks:[1, 128, 16]")
    assert main(["show", "--phase", "prompt", *settings, "--max-num-batched-tokens", "256"]) == 0
    assert "query:[128, 128, 256], blocks:[0, 1, 4]" in capsys.readouterr().out


def test_fit_prints_a_table_and_writes_a_bucket_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "buckets.txt"
    arguments = ["fit", str(trace), "--limit", "5", "--holdout", "0.5", "--output", str(output)]
    assert main([*arguments, "--context-blocks", "0", "8"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["strategy", "graphs", "padding", "p99", "worst", "batch"]
    assert [line[:10].strip() for line in table[1:7]] == [
        "lin",
        "exp",
        "pad",
        "fit as exp",
        "fit as pad",
        "fit to 5",
    ]
    shapes = read_bucket_file(output).prompt
    # The longest context of 2,048 tokens is added: 16 blocks. No room for more than the smallest
    # query is left behind it.
    assert {shape[2] for shape in shapes} == {0, 8, 16}
    assert len([shape for shape in shapes if shape[2] == 0]) == 5
    assert shapes[-1] == (1, 2048, 8)
    assert table[7] == (
        f"{len(shapes)} prompt buckets written to {output}, for max_model_len 2048, "
        "max_num_batched_tokens 2048, max_num_seqs 16, block_size 128"
    )


SERVERS = [
    {},
    {"max_model_len": 4096},
    {"max_num_batched_tokens": 256, "block_size": 32},
    {"max_model_len": 5000, "max_num_batched_tokens": 8192, "max_num_seqs": 32},
    {"max_num_seqs": 1, "block_size": 16},
]


@pytest.mark.parametrize("window", [[], ["--window", "1"]], ids=["alone", "batched"])
@pytest.mark.parametrize("given", SERVERS, ids=str)
def test_a_fitted_file_holds_every_prompt_alone_within_the_servers_limits(
    trace: Path,
    tmp_path: Path,
    given: dict[str, int],
    window: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = str(tmp_path / "buckets.txt")
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in given.items()]
    assert main(["fit", str(trace), *window, *flags, "--output", output]) == 0
    limits = {"max_num_seqs": 16, "block_size": 128, **given}
    lengths = [int(line.split(",")[1]) for line in trace.read_text().splitlines()[1:]]
    whole_blocks = math.ceil(max(lengths) / limits["block_size"]) * limits["block_size"]
    limits = {"max_model_len": whole_blocks, **limits}
    limits = {"max_num_batched_tokens": limits["max_model_len"], **limits}
    grid = prompt_grid(BucketingConfig.from_env({"VLLM_BUCKETING_FROM_FILE": output}), **limits)
    assert not caplog.records, "no bucket of the file is lowered to the limits or left out"
    assert grid.coverage_gaps() == ()
    longest = min(limits["max_num_batched_tokens"], limits["max_model_len"])
    for length in range(1, limits["max_model_len"] + 1):
        # As the engine prefills it: chunks of the longest query, then the rest.
        for start in range(0, length, longest):
            query = min(longest, length - start)
            context = math.ceil(start / limits["block_size"])
            assert grid.find((1, query, context)) is not None
    assert grid.values("batch")[0] == 1


def test_a_file_fitted_to_other_limits_says_what_the_server_cannot_use(
    trace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = str(tmp_path / "buckets.txt")
    assert main(["fit", str(trace), "--window", "1", "--output", output]) == 0
    listed = len(read_bucket_file(output).prompt)
    config = BucketingConfig(bucket_file=output)
    small = prompt_grid(
        config, max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=4, block_size=128
    )
    # This server exited with "no shape for the prompt grid".
    assert small.coverage_gaps() == ()
    (record,) = caplog.records
    assert f"of the {listed} prompt buckets in {output} are above the limits" in record.getMessage()
    assert "(batch 4, query 256, context_blocks 8) and lowered" in record.getMessage()
    assert "are left out" in record.getMessage()
    assert "or fit the file to them" in record.getMessage()
    large = prompt_grid(
        config, max_model_len=16_384, max_num_batched_tokens=16_384, max_num_seqs=4, block_size=128
    )
    # 9,600 of 16,384 prompt lengths had no bucket, and `cover` found none missing.
    missing = [size for size in range(1, 16_385) if large.find((1, size, 0)) is None]
    assert missing == list(range(2049, 16_385))
    gaps = [gap for gap in large.coverage_gaps() if gap.low[0] == gap.low[2] == 0]
    assert {(gap.low[1], gap.high[1]) for gap in gaps} == {(2049, 16_384)}


def test_fit_collects_batches_or_reads_recorded_ones(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(trace), "--window", "1", "--max-num-seqs", "4"]) == 0
    gathered = capsys.readouterr().out
    recorder = TrafficRecorder(("batch", "query", "context_blocks"))
    for shape in ((1, 100, 0), (1, 100, 4), (3, 500, 0)):
        recorder.record(shape, 7)
    saved = tmp_path / "traffic.json"
    recorder.save(saved)
    assert main(["fit", str(saved), "--max-model-len", "4096"]) == 0
    assert capsys.readouterr().out != gathered
    assert main(["fit", str(saved), "--holdout", "0.5"]) == 2
    assert "no end to hold out: omit --holdout" in capsys.readouterr().err


def test_the_step_of_a_fit_is_the_block_size_of_the_server(tmp_path: Path) -> None:
    """With blocks of 16 tokens, a prompt of 20 was padded to 128."""
    recorder = TrafficRecorder(("context_blocks", "query", "batch"))
    for query in (20, 40, 200):
        recorder.record((0, query, 1), 100)
    recorder.save(tmp_path / "traffic.json")
    output = str(tmp_path / "b.txt")
    arguments = ["fit", str(tmp_path / "traffic.json"), "--block-size", "16", "--output", output]
    for step, longest in ([], 208), (["--step", "64"], 256):
        assert main([*arguments, *step]) == 0
        queries = {query for _, query, _ in read_bucket_file(output).prompt}
        assert max(queries) == longest
        assert (32 in queries) == (not step)


def test_plot_writes_a_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for extra in ([], ["--window", "1"], ["--limit", "6"]):
        output = tmp_path / "picture.png"
        assert main(["plot", str(trace), *extra, "--output", str(output)]) == 0
        assert output.read_bytes().startswith(b"\x89PNG")
        output.unlink()


def test_the_picture_has_every_batch_in_its_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    from trencadis.bucketing.cli.plot import plot_traffic

    shown: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: shown.append(self))
    rows, counts = np.array([(1, 40), (2, 40), (2, 100)]), np.array([5, 3, 2])
    rule = StrategyResult("rule", (1, 2), (64, 128), 0.5, 28, 28)
    fit = StrategyResult("fit", (1, 2), (40, 80, 100), 0.0, 0, 0)
    plot_traffic(rows, counts, rule, fit, tmp_path / "picture.png")
    lengths, hits, _ = shown[0].axes
    sequences = sum(bar.get_height() for bar in lengths.patches)
    assert sequences == 5 * 1 + 3 * 2 + 2 * 2
    tallest = max(bar.get_height() for bar in lengths.patches)
    assert lengths.get_ylim() == pytest.approx((0, 1.22 * 1.05 * tallest))
    edges = [line.get_segments() for line in lengths.collections]
    assert [[int(x) for (x, _), _ in lines] for lines in edges] == [[64, 128], [40, 80, 100]]
    assert all(top > tallest for lines in edges for _, (_, top) in lines)
    assert [label.get_text() for label in lengths.get_legend().get_texts()] == [
        "rule: 4 graphs, 50.0% padding",
        "fit: 6 graphs, 0.0% padding",
    ]
    drawn = hits.images[0].get_array()
    assert drawn.filled(0).tolist() == [[5, 0, 0], [3, 0, 2]]
    assert drawn.mask.tolist() == [[False, True, True], [False, True, False]], "0 has no colour"
    assert [label.get_text() for label in hits.get_xticklabels()] == ["40", "80", "100"]
    assert [label.get_text() for label in hits.get_yticklabels()] == ["1", "2"]


@pytest.mark.parametrize("command", ["show", "fit", "plot"])
def test_help_shows_the_default_of_every_option(command: str) -> None:
    parsers = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in parsers.choices[command]._actions:
        if action.option_strings and not action.required and action.dest != "help":
            assert "default: " in (action.help or ""), action.option_strings
            if action.default is not None:
                assert f"default: {action.default:{'g' * (type(action.default) is float)}}" in (
                    action.help or ""
                )


@pytest.mark.parametrize("arguments", [[], ["plot", "t.csv"], ["fit"]])
def test_what_a_command_needs_is_asked_for(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "the following arguments are required: " in capsys.readouterr().err


def test_show_has_the_cache_and_the_tokens_that_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limits = ["--strategy", "lin", "--max-num-seqs", "4", "--max-model-len", "512"]
    for given, blocks, query in (
        ([], 16, 512),
        (["--num-blocks", "7", "--max-num-batched-tokens", "256"], 7, 256),
    ):
        assert main(["show", *limits, *given]) == 0
        prompt, _, decode, _ = capsys.readouterr().out.splitlines()
        assert decode.endswith(f"blocks:[1, 128, {blocks}]")
        assert f"query:[128, 128, {query}]" in prompt


def test_shapes_that_never_came_are_not_fitted_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "traffic.json")
    recorder = TrafficRecorder(("batch", "query"))
    recorder.record((0, 0), 0)
    recorder.save(path)
    assert main(["fit", path]) == 2
    assert "has no batches, or batches of 0: record batch and length" in capsys.readouterr().err
    recorder.record((1, 100), 3)
    recorder.save(path)
    assert main(["fit", path]) == 0
    recorder.record((1, 0), 1)
    recorder.save(path)
    assert main(["fit", path]) == 2


def test_the_smallest_options_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("length\n1\n1\n")
    sizes = ("--step", "--limit", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")
    for option in (*(f"{name}=1" for name in sizes), "--tail=1000000", "--context-blocks=0"):
        assert main(["fit", str(path), option]) == 0
    with pytest.raises(SystemExit):
        main(["fit", str(path), "--tail=1000001"])


@pytest.mark.parametrize("option", ["--phase", "--axes", "--strategy"])
def test_a_word_that_is_no_choice_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", option, "lunar"])
    assert f"argument {option}: invalid choice: 'lunar'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "fit t.csv", "plot t.csv --output a.png"])
def test_a_flag_is_not_abbreviated(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--max-model" if command == "show" else "--colum"
    with pytest.raises(SystemExit):
        main([*command.split(), flag, "7"])
    assert f"unrecognized arguments: {flag} 7" in capsys.readouterr().err


def test_a_tail_lowers_the_worst_batch(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("a") as file:
        file.write("61,5000\n")
    worst = []
    for tail in ("0", "100"):
        assert (
            main(["fit", str(trace), "--tail", tail, "--limit", "4", "--max-model-len", "16384"])
            == 0
        )
        row = next(line for line in capsys.readouterr().out.splitlines() if "fit to 4" in line)
        worst.append(int(row.split()[-2].replace(",", "")))
    assert worst[1] < worst[0] / 2


def test_help_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    text = capsys.readouterr().out
    assert f"--strategy {{{','.join(STRATEGIES)}}}" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert describe_variables()["VLLM_CONTIGUOUS_PA"].endswith("; default: true")
    for name, meaning in {**describe_variables(), **describe_axis_settings()}.items():
        assert f"{name} {meaning}" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "missing.csv"], "missing.csv"),
        (["show", "--strategy", "fit"], "set VLLM_PROMPT_BUCKETING_TRAFFIC"),
        (
            ["show", "--block-size", "0"],
            "block_size must be an integer from 1 to 1099511627776, got 0",
        ),
        (["fit", "{trace}", "--max-model-len", "100"], "above --max-model-len 100: raise it"),
        (
            ["fit", "{trace}", "--window", "-1"],
            "window must be a finite number above 0 and at most 1099511627776, got -1.0",
        ),
        (["fit", "{decodes}"], "t.decode.json has no prompts, but batches by batch, blocks: name"),
        (["plot", "{decodes}", "--output", "p.png"], "has no prompts, but batches by batch,"),
    ],
)
def test_an_error_is_a_single_line(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "plot" in arguments:
        pytest.importorskip("matplotlib")
    decodes = trace.with_name("t.decode.json")
    recorder = TrafficRecorder(("batch", "blocks"))
    recorder.record((4, 300), 100)
    recorder.save(decodes)  # `fit` made prompt buckets of 300 tokens of them
    assert main([argument.format(trace=trace, decodes=decodes) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trencadis-buckets: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--step", "0"),
        ("--max-model-len", "-1"),
        ("--tail", "x"),
        ("--context-blocks", "-1"),
        ("--limit", "x"),
        ("--holdout", "1"),
        ("--holdout", "nan"),
    ],
)
def test_an_option_out_of_range_is_named(
    trace: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", str(trace), f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: {value!r} is not" in capsys.readouterr().err


def test_a_prompt_alone_has_its_own_buckets_although_only_batches_were_recorded(
    tmp_path: Path,
) -> None:
    recorder = TrafficRecorder(("batch", "query"))
    recorder.record((4, 100), 50)
    recorder.record((7, 300), 9)
    recorder.save(tmp_path / "traffic.json")
    output = str(tmp_path / "buckets.txt")
    limits = ["--max-num-batched-tokens", "4096", "--output", output]
    assert main(["fit", str(tmp_path / "traffic.json"), *limits]) == 0
    batches = {batch for batch, _, _ in read_bucket_file(output).prompt}
    assert batches == {1, 4, 7}
